"""What the agent demo tells at its end: a table for people and the same numbers as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from learner.study import measure
from learner.study.agent_loop import Episode
from learner.study.measure import Update

ENDS = 50


@dataclass(frozen=True, slots=True)
class Summary:
    """A stretch of sessions: `success` is the share that ended well, the others are counts."""

    success: float
    calls: int
    bad_calls: int
    faults: dict[str, int]


def summary(episodes: Sequence[Episode]) -> Summary:
    faults = Counter(fault for episode in episodes for fault in episode.faults)
    return Summary(
        success=measure.mean([episode.success for episode in episodes]),
        calls=sum(episode.calls for episode in episodes),
        bad_calls=faults.total(),
        faults=dict(sorted(faults.items())),
    )


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the agent demo.

    Attributes:
        updates: what the learner did with the sessions, oldest first.
        wall_s: from the command's start until the learner was done, the service's start included.
    """

    seed: int
    episodes: list[Episode]
    updates: Sequence[Update]
    wall_s: float

    @property
    def first(self) -> Summary:
        return summary(self.episodes[:ENDS])

    @property
    def last(self) -> Summary:
        return summary(self.episodes[-ENDS:])

    def as_json(self) -> dict[str, Any]:
        """The report of `--json`; the keys after `wall_s` may grow."""
        first, last = self.first, self.last
        return {
            "seed": self.seed,
            "success_first50": first.success,
            "success_last50": last.success,
            "bad_calls_first50": first.bad_calls,
            "bad_calls_last50": last.bad_calls,
            "updates": len(self.updates),
            "wall_s": self.wall_s,
            "sessions": len(self.episodes),
            "calls_first50": first.calls,
            "calls_last50": last.calls,
            "faults_first50": first.faults,
            "faults_last50": last.faults,
            "masked_fraction": measure.masked_fraction(self.updates),
            "alarms": measure.alarms([episode.session for episode in self.episodes], self.updates),
        }


def show(run: Run, console: Console) -> None:
    """Print the summary."""
    table = Table(title=f"What the agent learned in {len(run.episodes)} sessions (seed {run.seed})")
    table.add_column("sessions", no_wrap=True)
    for column in ("success", "calls", "bad calls", "of which"):
        table.add_column(column, justify="right")
    for name, part in ((f"first {ENDS}", run.first), (f"last {ENDS}", run.last)):
        kinds = ", ".join(f"{count} {kind}" for kind, count in part.faults.items()) or "-"
        table.add_row(name, f"{part.success:.2f}", str(part.calls), str(part.bad_calls), kinds)
    console.print(table)
    console.print(
        f"{len(run.updates)} updates, masked fraction {measure.masked_fraction(run.updates):.2%}, {run.wall_s:.0f} s"
    )
