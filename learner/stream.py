"""The stream's part of the learner's state: all that is not model, optimizer or running number."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from learner.joins import Joined, Joins


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

    @property
    def parent(self) -> int:
        return self.lineage[-1] if self.lineage else 0

    def lag(self, version: int) -> int:
        """How many versions of the present lineage are newer than the one that sampled."""
        return sum(number > version for number in self.lineage)

    def not_trained(self) -> dict[str, int]:
        """Rollouts and events that no update used, by reason; `waiting` may still be used."""
        return {**self.counters, "late": self.joins.late, "waiting": len(self.joins)}

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
