"""Single-rollout asynchronous optimization as pure functions, to be read beside the paper (arXiv 2607.07508).

All tensors are 1-D over the action tokens (the tokens that the model sampled) of a rollout or of one update, in
time order; observation tokens never appear here. [A] is the number of action tokens, [V] the vocabulary.
Choices marked [ours] are not in the paper.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class Band:
    """The open interval of accepted importance ratios."""

    lower: float
    upper: float

    @classmethod
    def from_offsets(cls, eps_low: float, eps_high: float) -> "Band":
        """The paper's (1 - eps_low, 1 + eps_high); its values are offsets, not bounds."""
        return cls(1.0 - eps_low, 1.0 + eps_high)


def importance_ratio(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """r_t = pi_theta(a_t|s_t) / pi_rollout(a_t|s_t), [A].

    The log-ratio is clamped before exp, so that an out-of-band token gives a finite ratio and, masked, a true 0.
    """
    return (logprobs - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def dis_weight(ratio: Tensor, band: Band) -> Tensor:
    """f(r) = r inside the band, 0 outside, whatever the sign of the advantage (direct double-sided IS), [A]."""
    inside = (ratio > band.lower) & (ratio < band.upper)
    return torch.where(inside, ratio, torch.zeros_like(ratio))


def policy_loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, band: Band, total: int) -> Tensor:
    """L = -(1/N) sum_t stopgrad[f(r_t) A_t] log pi_theta(a_t|s_t).

    Args:
        logprobs: log pi_theta of the sampled tokens at the request's temperature, with gradient, [A].
        behaviour: the logprobs that the engine recorded, [A].
        advantages: [A].
        total: N, the action tokens of the whole update, rejected ones included [ours].
    """
    weight = dis_weight(importance_ratio(logprobs.detach(), behaviour), band) * advantages
    kept = torch.where(weight == 0, torch.zeros_like(logprobs), logprobs)
    return -(weight * kept).sum() / total


def policy_lambda(action_tokens: int, alpha: float) -> float:
    """lambda_policy = 1 - 1/(alpha l) in float64, clamped to [0, 1]; l = action tokens of the trajectory."""
    return min(1.0, max(0.0, 1.0 - 1.0 / (alpha * action_tokens)))


def skip_observation_gae(values: Tensor, rewards: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimation over the action tokens of the whole trajectory, [A].

    delta_t = u_t + gamma V(next action token) - V(a_t); A_t = delta_t + gamma lambda A(next action token).
    "Next" crosses turns: an observation costs one step whatever its length, and is never bootstrapped from.

    Args:
        values: V(a_t), the value of the prefix before a_t, [A].
        rewards: u_t, zero but on the last action token of a judged turn, [A].
    """
    advantages = torch.zeros_like(values)
    next_value = torch.zeros((), dtype=values.dtype)
    running = torch.zeros((), dtype=values.dtype)
    for t in range(len(values) - 1, -1, -1):
        delta = rewards[t] + gamma * next_value - values[t]
        running = delta + gamma * lam * running
        advantages[t] = running
        next_value = values[t]
    return advantages


def value_targets(rewards: Tensor, gamma: float) -> Tensor:
    """lambda_critic = 1: the discounted sum of the rewards at or after each action token, [A]."""
    targets = torch.zeros_like(rewards)
    running = torch.zeros((), dtype=rewards.dtype)
    for t in range(len(rewards) - 1, -1, -1):
        running = rewards[t] + gamma * running
        targets[t] = running
    return targets


def critic_loss(values: Tensor, targets: Tensor, total: int) -> Tensor:
    """Squared error summed over these action tokens and divided by `total`, those of the whole update."""
    return (values - targets).square().sum() / total


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """log pi(a_t|s_t) of the distribution that was sampled: logits [A, V] divided by the temperature [A]."""
    scaled = logits.float() / temperature[:, None]
    return scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def full_kl(logits: Tensor, base_logits: Tensor) -> Tensor:
    """KL(pi_theta || base) over the whole vocabulary, at temperature 1, [A] [ours]."""
    log_p, log_q = logits.float().log_softmax(-1), base_logits.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def sampled_kl(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """The k3 estimate of KL(pi_theta || base) on the sampled tokens, clamped against overflow, [A] [ours]."""
    log_ratio = (base_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp() - log_ratio - 1


def entropy(logits: Tensor) -> Tensor:
    """The entropy of each next-token distribution at temperature 1, in nats, [A]."""
    log_p = logits.float().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def effective_sample_size(ratio: Tensor) -> float:
    """(sum r)^2 / sum r^2, between 1 and A; A on on-policy data."""
    return float(ratio.sum().square() / ratio.square().sum())
