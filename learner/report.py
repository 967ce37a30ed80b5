"""The metrics of one update."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from app.events.schema import CompletionEvent
from learner import sao


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """What the policy step saw. Fractions are of the update's action tokens; norms are before clipping."""

    masked_low: float
    masked_high: float
    effective_sample_size: float
    logprob_gap: float
    ratio_mean: float
    advantage_mean: float
    advantage_rms: float
    policy_grad_norm: float
    entropy: float
    kl_to_base: float
    policy_stepped: bool

    @staticmethod
    def collector(band: sao.Band) -> "PolicyCollector":
        return PolicyCollector(band)


@dataclass
class PolicyCollector:
    """Gathers per-token numbers sequence by sequence."""

    band: sao.Band
    _rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, logprobs: Tensor, behaviour: Tensor, entropy: Tensor, kl: Tensor) -> None:
        self._rows.append((logprobs, behaviour, entropy, kl))

    @property
    def _ratio(self) -> Tensor:
        return torch.cat([sao.importance_ratio(logprobs, behaviour) for logprobs, behaviour, *_ in self._rows])

    @property
    def accepted(self) -> int:
        return int((sao.dis_weight(self._ratio, self.band) > 0).sum())

    def finish(self, advantages: Tensor, grad_norm: float, stepped: bool) -> PolicyStats:
        ratio = self._ratio
        logprobs, behaviour, entropy, kl = (torch.cat(column) for column in zip(*self._rows, strict=True))
        return PolicyStats(
            masked_low=float((ratio <= self.band.lower).float().mean()),
            masked_high=float((ratio >= self.band.upper).float().mean()),
            effective_sample_size=sao.effective_sample_size(ratio),
            logprob_gap=float((logprobs - behaviour).abs().mean()),
            ratio_mean=float(ratio.mean()),
            advantage_mean=float(advantages.mean()),
            advantage_rms=float(advantages.square().mean().sqrt()),
            policy_grad_norm=grad_norm,
            entropy=float(entropy.mean()),
            kl_to_base=float(kl.mean()),
            policy_stepped=stepped,
        )


@dataclass(frozen=True, slots=True)
class UpdateReport(PolicyStats):
    """One update in numbers.

    `kl_to_base` is of the policy that the update started from, `kl_after` of the one that it made. `seconds` is
    by phase. The loop fills in `number` and what follows `version_lag`: action tokens a rollout and a turn, with the
    means over the newest rollouts, tool calls by kind, and what scorers have said so far.
    """

    number: int
    session_ids: list[str]
    reward: float
    reward_mean: float
    action_tokens: int
    observation_tokens: int
    value_losses: list[float]
    critic_grad_norm: float
    explained_variance: float | None
    kl_after: float
    shifted: bool
    truncated: int
    seconds: dict[str, float]
    version_lag: int = 0
    rollout_tokens: float = 0.0
    turn_tokens: float = 0.0
    rollout_tokens_mean: float = 0.0
    turn_tokens_mean: float = 0.0
    tool_calls: dict[str, int] = field(default_factory=dict)
    scores: dict[str, int] = field(default_factory=dict)

    def metrics(self) -> dict[str, Any]:
        """Everything but the session ids, which have a column of their own."""
        return {name: value for name, value in asdict(self).items() if name != "session_ids"}


def count_kinds(completions: Iterable[CompletionEvent]) -> dict[str, int]:
    """How many tool calls of each kind, by name of the kind."""
    kinds = Counter(kind for event in completions for kind in event.tool_call_kinds)
    return dict(sorted(kinds.items()))


def explained_variance(pairs: Sequence[tuple[float, float]]) -> float | None:
    """1 - Var(return - value) / Var(return) over (value, return) pairs; None where the returns do not vary.

    A single rollout's is meaningless, so the caller keeps a window.
    """
    if len(pairs) < 2:
        return None
    values, returns = torch.tensor(pairs, dtype=torch.float64).T
    spread = returns.var(correction=0)
    return None if spread == 0 else float(1 - (returns - values).var(correction=0) / spread)
