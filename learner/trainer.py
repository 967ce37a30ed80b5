"""One update: finished rollouts in, an UpdateReport out.

Order within an update [ours]: old values, targets, GAE from the old values, K critic steps, one policy step.
Values taken after the critic steps have already seen the reward, and the advantage shrinks with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from learner import sao
from learner.critic import Critic
from learner.models import Policy
from learner.report import PolicyStats, UpdateReport, explained_variance
from learner.rollouts import PackedSequence, Rollout, pack
from learner.settings import TrainingSettings
from learner.shift import ShiftDetector

VARIANCE_WINDOW = 128
REWARD_WINDOW = 128
RMS_DECAY = 0.95
RMS_FLOOR = 0.05
# With no advantage anywhere the KL term's gradient is float32 noise near 4e-8, which Adam would scale to full steps.
ROUNDING_NORM = 1e-6


@dataclass
class TrainerStats:
    """Running numbers that the next update depends on, or that a metric is computed over."""

    updates: int = 0
    rewards: list[float] = field(default_factory=list)
    value_pairs: list[tuple[float, float]] = field(default_factory=list)
    mean_square_advantage: float = 0.0
    mean_square_weight: float = 0.0
    shifts: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rollout ready for the update; all tensors are [A] in time order."""

    rollout: Rollout
    sequences: list[PackedSequence]
    values: Tensor
    targets: Tensor
    advantages: Tensor

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """A tensor over the rollout's action tokens, one piece a sequence."""
        return tensor.split([len(s.positions) for s in self.sequences])


class Trainer:
    """Holds the models, the optimizers and the running numbers.

    Args:
        timer: seconds of a monotonic clock, for the phases' durations only.
        reward_range: the policy's lowest and highest reward; the shift test works on rewards scaled to it.
    """

    def __init__(
        self,
        policy: Policy,
        critic: Critic,
        settings: TrainingSettings,
        reward_range: tuple[float, float],
        timer: Callable[[], float],
    ) -> None:
        self.policy, self.critic, self.settings = policy, critic, settings
        self.reward_range = reward_range
        self._timer = timer
        betas = (settings.beta1, settings.beta2)
        width = policy.hidden_size
        adapter = policy.parameters().values()
        eps = settings.resolved_policy_eps(sum(p.numel() for p in adapter))
        self.policy_optimizer = torch.optim.AdamW(
            adapter, settings.resolved_policy_lr(width), betas, eps, weight_decay=0.0
        )
        self.critic_optimizer = torch.optim.AdamW(
            critic.parameters().values(), settings.resolved_critic_lr(width), betas, weight_decay=0.0
        )
        self.stats = TrainerStats()
        self.detector = ShiftDetector()

    def update(self, rollouts: Sequence[Rollout]) -> UpdateReport:
        """One SAO update on rollouts that each have at least one action token.

        Each rollout is used for exactly this one policy update.
        """
        start = self._timer()
        batch = [self._prepare(rollout) for rollout in rollouts]
        values_done = self._timer()
        value_losses, critic_norm = self._train_critic(batch)
        critic_done = self._timer()
        policy = self._train_policy(batch)
        policy_done = self._timer()
        shifted = self._observe_rewards(rollouts)
        kl_after = self._mean_kl(batch)
        self.stats.updates += 1
        self.stats.value_pairs += [(float(p.values[0]), float(p.targets[0])) for p in batch]
        del self.stats.value_pairs[:-VARIANCE_WINDOW]
        return UpdateReport(
            number=self.stats.updates,
            session_ids=[r.session_id for r in rollouts],
            reward=sum(r.total_reward for r in rollouts) / len(rollouts),
            reward_mean=sum(self.stats.rewards) / len(self.stats.rewards),
            action_tokens=sum(len(p.values) for p in batch),
            observation_tokens=sum(len(s.ids) - len(s.positions) for p in batch for s in p.sequences),
            value_losses=value_losses,
            critic_grad_norm=critic_norm,
            explained_variance=explained_variance(self.stats.value_pairs),
            shifted=shifted,
            kl_after=kl_after,
            truncated=sum(t.finish_reason == "length" for r in rollouts for t in r.turns),
            seconds={
                "values": values_done - start,
                "critic": critic_done - values_done,
                "policy": policy_done - critic_done,
                "check": self._timer() - policy_done,
            },
            **asdict(policy),
        )

    def _prepare(self, rollout: Rollout) -> Prepared:
        sequences = pack(rollout.turns)
        with torch.no_grad():
            values = torch.cat([self.critic.values(s.ids, s.positions) for s in sequences])
        rewards = rollout.token_rewards()
        lam = sao.policy_lambda(len(rewards), self.settings.lambda_alpha)
        return Prepared(
            rollout,
            sequences,
            values,
            targets=sao.value_targets(rewards, self.settings.gamma),
            advantages=sao.skip_observation_gae(values, rewards, self.settings.gamma, lam),
        )

    def _train_critic(self, batch: Sequence[Prepared]) -> tuple[list[float], float]:
        """K steps on fixed targets; the loss before each step, and the last gradient norm before clipping."""
        total = sum(len(p.targets) for p in batch)
        losses: list[float] = []
        norm = 0.0
        for _ in range(self.settings.critic_steps):
            self.critic_optimizer.zero_grad()
            loss = 0.0
            for prepared in batch:
                for sequence, targets in zip(prepared.sequences, prepared.split(prepared.targets), strict=True):
                    values = self.critic.values(sequence.ids, sequence.positions)
                    part = sao.critic_loss(values, targets, total)
                    part.backward()
                    loss += float(part.detach())
            norm = self._clip(self.critic.parameters(), self.settings.critic_clip)
            self.critic_optimizer.step()
            losses.append(loss)
        return losses, norm

    def _train_policy(self, batch: Sequence[Prepared]) -> PolicyStats:
        """One policy step; none in the warm-up, where all tokens are masked, or on a gradient of rounding noise."""
        total = sum(len(p.advantages) for p in batch)
        advantages = [self._shape(p.advantages) for p in batch]
        self.policy_optimizer.zero_grad()
        stats = PolicyStats.collector(self.settings.band)
        for prepared, shaped in zip(batch, advantages, strict=True):
            for sequence, piece in zip(prepared.sequences, prepared.split(shaped), strict=True):
                self._policy_gradient(sequence, piece, total, stats)
        norm = self._clip(self.policy.parameters(), self.settings.policy_clip)
        stepped = self.stats.updates >= self.settings.critic_warmup and stats.accepted > 0 and norm > ROUNDING_NORM
        if stepped:
            self.policy_optimizer.step()
        raw = torch.cat([p.advantages for p in batch])
        return stats.finish(raw, norm, stepped)

    def _policy_gradient(self, sequence: PackedSequence, advantages: Tensor, total: int, stats: Any) -> None:
        logits = self.policy.logits(sequence.ids, sequence.positions)
        logprobs = sao.token_logprobs(logits, sequence.actions, sequence.temperature)
        base_logits = self.policy.base_logits(sequence.ids, sequence.positions)
        kl = self._kl(logits, logprobs, base_logits, sequence)
        loss = sao.policy_loss(logprobs, sequence.behaviour, advantages, self.settings.band, total)
        if self.settings.kl_coef:
            loss = loss + self.settings.kl_coef * kl.sum() / total
        loss.backward()
        stats.add(logprobs.detach(), sequence.behaviour, sao.entropy(logits.detach()), kl.detach())

    def _kl(self, logits: Tensor, logprobs: Tensor, base_logits: Tensor, sequence: PackedSequence) -> Tensor:
        if self.settings.kl_estimator == "full":
            return sao.full_kl(logits, base_logits)
        return sao.sampled_kl(logprobs, sao.token_logprobs(base_logits, sequence.actions, sequence.temperature))

    @torch.no_grad()
    def _mean_kl(self, batch: Sequence[Prepared]) -> float:
        """KL to the base of the policy as it is now, in nats a token, on the tokens of this update."""
        rows = []
        for sequence in (s for prepared in batch for s in prepared.sequences):
            logits = self.policy.logits(sequence.ids, sequence.positions)
            logprobs = sao.token_logprobs(logits, sequence.actions, sequence.temperature)
            rows.append(self._kl(logits, logprobs, self.policy.base_logits(sequence.ids, sequence.positions), sequence))
        return float(torch.cat(rows).mean())

    def _shape(self, advantages: Tensor) -> Tensor:
        """The restraints on advantages: a running scale (never a centre) and damped negatives [ours]."""
        if self.settings.advantage_scale == "rms":
            stats = self.stats
            stats.mean_square_advantage = RMS_DECAY * stats.mean_square_advantage + (1 - RMS_DECAY) * float(
                advantages.square().mean()
            )
            stats.mean_square_weight = RMS_DECAY * stats.mean_square_weight + (1 - RMS_DECAY)
            rms = (stats.mean_square_advantage / stats.mean_square_weight) ** 0.5
            advantages = advantages / max(rms, RMS_FLOOR)
        return torch.where(advantages < 0, advantages * self.settings.negative_scale, advantages)

    def _observe_rewards(self, rollouts: Sequence[Rollout]) -> bool:
        """Feed the shift test; on an alarm pull the adapter towards the base and clear Adam's state."""
        shifted = False
        low, high = self.reward_range
        for rollout in rollouts:
            self.stats.rewards = [*self.stats.rewards, rollout.total_reward][-REWARD_WINDOW:]
            scaled = (rollout.total_reward - low) / (high - low)
            shifted |= self.detector.observe(min(1.0, max(0.0, scaled)), self.settings)
        shifted = shifted and self.settings.on_shift == "pull"
        if shifted:
            self.stats.shifts += 1
            self.policy.pull_to_base(self.settings.shift_pull)
            self.policy_optimizer.state.clear()
        return shifted

    @staticmethod
    def _clip(parameters: dict[str, nn.Parameter], limit: float) -> float:
        return float(nn.utils.clip_grad_norm_(parameters.values(), limit))
