"""A policy's signals, as the learner reads its settings: what each weighs, and how far a reward may go."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from app.events.schema import BadEvent, FeedbackEvent, ScoreEvent
from learner.rollouts import CLIENTS_REWARD

Judgement = FeedbackEvent | ScoreEvent


@dataclass(frozen=True, slots=True)
class Signals:
    """Every reward lies in [`low`, `high`]; a turn's or a session's is the sum of weight * value over the signals."""

    weights: Mapping[str, float] = field(default_factory=lambda: CLIENTS_REWARD)
    low: float = 0.0
    high: float = 1.0

    @property
    def combined_range(self) -> tuple[float, float]:
        """The lowest and the highest sum."""
        ends = [sorted((weight * self.low, weight * self.high)) for weight in self.weights.values()]
        return sum(low for low, _ in ends), sum(high for _, high in ends)

    def rewarded(self, judgements: Iterable[Judgement]) -> bool:
        """Whether any of them is a reward that weighs something: the absence of rewards is no reward of 0."""
        return any(self.weights.get(event.signal) and event.rewards for event in judgements)

    def check(self, event: Judgement) -> None:
        """Raises BadEvent for an unknown signal, or a reward outside the range."""
        if event.signal not in self.weights:
            raise BadEvent(f"signal: {event.signal!r} is not known; the settings name {', '.join(self.weights)}")
        for reward in event.rewards.values():
            if not self.low <= reward <= self.high:
                raise BadEvent(f"reward: {reward:g} is outside the policy's range from {self.low:g} to {self.high:g}")
