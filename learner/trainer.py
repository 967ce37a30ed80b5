"""One update: finished rollouts in, an UpdateReport out.

Order within an update [ours]: old values, targets, GAE from the old values, K critic steps, one policy step.
Values taken after the critic steps have already seen the reward, and the advantage shrinks with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from learner import sao
from learner.critic import Critic
from learner.models import Policy
from learner.report import PolicyCollector, PolicyStats, UpdateReport, explained_variance
from learner.rollouts import PackedSequence, Rollout, pack
from learner.settings import TrainingSettings
from learner.shift import ShiftDetector

VARIANCE_WINDOW = 128
REWARD_WINDOW = 128
RMS_DECAY = 0.95
RMS_FLOOR = 0.05
# With no advantage anywhere the KL term's gradient is float32 noise near 4e-8, which Adam would scale to full steps.
ROUNDING_NORM = 1e-6
# Logits in memory at a time, 64 MiB in float32 for each of some ten copies: long episodes are taken in chunks.
CHUNK_LOGITS = 2**24


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
    """A rollout ready for the update.

    values, targets, advantages: [A] in time order. base: the base's last hidden states, [A, H] for each sequence.
    """

    rollout: Rollout
    sequences: list[PackedSequence]
    base: list[Tensor]
    values: Tensor
    targets: Tensor
    advantages: Tensor

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """A tensor over the rollout's action tokens in time order, one piece a sequence."""
        return [tensor[s.times] for s in self.sequences]


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
        rewards = rollout.token_rewards()
        values = torch.empty_like(rewards)
        with torch.no_grad():
            for sequence in sequences:
                values[sequence.times] = self.critic.values(sequence.ids, sequence.positions)
        lam = sao.policy_lambda(len(rewards), self.settings.lambda_alpha)
        return Prepared(
            rollout,
            sequences,
            base=[self.policy.base_hidden(s.ids, s.positions) for s in sequences],
            values=values,
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
            pieces = prepared.split(shaped)
            for sequence, base, piece in zip(prepared.sequences, prepared.base, pieces, strict=True):
                self._policy_gradient(sequence, base, piece, total, stats)
        norm = self._clip(self.policy.parameters(), self.settings.policy_clip)
        stepped = self.stats.updates >= self.settings.critic_warmup and stats.accepted > 0 and norm > ROUNDING_NORM
        if stepped:
            self.policy_optimizer.step()
        raw = torch.cat([p.advantages for p in batch])
        return stats.finish(raw, norm, stepped)

    def _policy_gradient(
        self, sequence: PackedSequence, base: Tensor, advantages: Tensor, total: int, stats: PolicyCollector
    ) -> None:
        """Add a sequence's gradient: chunk by chunk down to the last hidden states, then once through the model."""
        hidden = self.policy.hidden(sequence.ids, sequence.positions)
        gradient = torch.zeros_like(hidden)
        for chunk in self._chunks(sequence):
            states = hidden[chunk].detach().requires_grad_()
            states.grad = gradient[chunk]
            logits, logprobs, kl = self._score(sequence, chunk, states, base[chunk])
            behaviour = sequence.behaviour[chunk]
            loss = sao.policy_loss(logprobs, behaviour, advantages[chunk], self.settings.band, total)
            if self.settings.kl_coef:
                loss = loss + self.settings.kl_coef * kl.sum() / total
            loss.backward()
            stats.add(logprobs.detach(), behaviour, sao.entropy(logits.detach()), kl.detach())
        hidden.backward(gradient)

    @torch.no_grad()
    def _mean_kl(self, batch: Sequence[Prepared]) -> float:
        """KL to the base of the policy as it is now, in nats a token, on the tokens of this update."""
        rows = []
        for sequence, base in (pair for p in batch for pair in zip(p.sequences, p.base, strict=True)):
            hidden = self.policy.hidden(sequence.ids, sequence.positions)
            for chunk in self._chunks(sequence):
                _, _, kl = self._score(sequence, chunk, hidden[chunk], base[chunk])
                rows.append(kl)
        return float(torch.cat(rows).mean())

    def _chunks(self, sequence: PackedSequence) -> list[slice]:
        """The action tokens of a sequence in runs whose logits fit into CHUNK_LOGITS."""
        size = max(1, CHUNK_LOGITS // self.policy.vocabulary)
        return [slice(start, start + size) for start in range(0, len(sequence.positions), size)]

    def _score(
        self, sequence: PackedSequence, chunk: slice, hidden: Tensor, base: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [C, V], and logprob and KL to the base [C] of a chunk's tokens, from last hidden states [C, H]."""
        actions, temperature = sequence.actions[chunk], sequence.temperature[chunk]
        logits, base_logits = self.policy.head(hidden), self.policy.base_head(base)
        logprobs = sao.token_logprobs(logits, actions, temperature)
        if self.settings.kl_estimator == "full":
            return logits, logprobs, sao.full_kl(logits, base_logits)
        base_logprobs = sao.token_logprobs(base_logits, actions, temperature)
        return logits, logprobs, sao.sampled_kl(logprobs, base_logprobs)

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
