"""The stream's part of the learner's state: all that is not model, optimizer or running number."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from learner.joins import Joined, Joins
from learner.rollouts import Rollout

LENGTH_WINDOW = 128


class Length(NamedTuple):
    """A rollout's action tokens, and its turns that have any."""

    tokens: int
    turns: int

    @classmethod
    def of(cls, rollout: Rollout) -> "Length":
        return cls(rollout.action_tokens, sum(turn.action_tokens > 0 for turn in rollout.turns))


def tokens_a_rollout(lengths: Sequence[Length]) -> float:
    """Mean action tokens of a rollout."""
    return sum(length.tokens for length in lengths) / len(lengths)


def tokens_a_turn(lengths: Sequence[Length]) -> float:
    """Mean action tokens of a turn that has any."""
    return sum(length.tokens for length in lengths) / sum(length.turns for length in lengths)


@dataclass
class StreamState:
    """Where the fold stands. A rollback restores the trainer and leaves this as it is, but for the lineage.

    Attributes:
        positions: for each partition the next offset to read.
        now: the newest event time seen; the learner has no other clock.
        version: the newest version number ever given out; numbers are never reused.
        lineage: the versions that led to the present one, oldest first; the last is the parent of the next.
        ready: finished rollouts that wait for the next update.
        counters: rollouts and events not trained on, by reason.
        scores: what scorers have said, by `SIGNAL.scored` and `SIGNAL.failed`.
        lengths: action tokens and turns of the newest rollouts, oldest first.
    """

    joins: Joins
    positions: dict[int, int] = field(default_factory=dict)
    now: datetime = datetime.fromtimestamp(0, UTC)  # noqa: RUF009 - a constant
    epoch: int = 0
    version: int = 0
    updates: int = 0
    lineage: list[int] = field(default_factory=list)
    unpublished: list[int] = field(default_factory=list)
    ready: list[Joined] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    scores: Counter[str] = field(default_factory=Counter)
    lengths: list[Length] = field(default_factory=list)

    @property
    def parent(self) -> int:
        return self.lineage[-1] if self.lineage else 0

    def lag(self, version: int) -> int:
        """How many versions of the present lineage are newer than the one that sampled."""
        return sum(number > version for number in self.lineage)

    def not_trained(self) -> dict[str, int]:
        """Rollouts and events that no update used, by reason; `waiting` may still be used."""
        return {**self.counters, "late": self.joins.late, "waiting": len(self.joins)}

    def scored(self) -> dict[str, int]:
        """What scorers have said so far, and `SIGNAL.parked`, how many sessions are parked for a signal now."""
        now = Counter(f"{signal}.parked" for signal in self.joins.parked_signals())
        parked = {f"{signal}.parked": now[f"{signal}.parked"] for signal in self.joins.scorers}
        return dict(sorted({**self.scores, **parked}.items()))

    def add_lengths(self, lengths: Sequence[Length]) -> None:
        self.lengths = [*self.lengths, *lengths][-LENGTH_WINDOW:]

    def extend_lineage(self, version: int, keep: int) -> None:
        self.lineage = [*self.lineage, version][-(keep + 2) :]

    def state(self) -> dict[str, Any]:
        return {
            "positions": {str(part): offset for part, offset in self.positions.items()},
            "now": self.now.isoformat(),
            "epoch": self.epoch,
            "version": self.version,
            "updates": self.updates,
            "lineage": list(self.lineage),
            "unpublished": list(self.unpublished),
            "ready": [joined.state() for joined in self.ready],
            "counters": dict(self.counters),
            "scores": dict(self.scores),
            "lengths": [list(length) for length in self.lengths],
            "joins": self.joins.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.joins.load_state(state["joins"])
        self.positions = {int(part): offset for part, offset in state["positions"].items()}
        self.now = datetime.fromisoformat(state["now"])
        self.epoch, self.version, self.updates = state["epoch"], state["version"], state["updates"]
        self.lineage, self.unpublished = list(state["lineage"]), list(state["unpublished"])
        self.ready = [Joined.from_state(joined) for joined in state["ready"]]
        self.counters = Counter(state["counters"])
        self.scores = Counter(state.get("scores", {}))
        self.lengths = [Length(*length) for length in state.get("lengths", [])]
