"""What the demo tells at its end: a summary for people and the same numbers as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from learner.study import measure
from learner.study.measure import Phase, Rollout, Update
from learner.tiny.grammar import parses


@dataclass(frozen=True, slots=True)
class Rollback:
    """The rollback in numbers: `before` and `after` are mean scores by style, of answers nobody judged."""

    to: int
    seconds: float
    before: dict[str, float]
    after: dict[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the demo.

    Attributes:
        updates: what the learner did with the rollouts, oldest first.
        versions: all that it made of them, oldest first.
        wall_s: from the command's start to the last answer, the service's start included.
    """

    seed: int
    rollouts: list[Rollout]
    updates: Sequence[Update]
    versions: list[dict[str, Any]]
    rollback: Rollback
    wall_s: float

    @property
    def phases(self) -> list[Phase]:
        return measure.phase_summaries(self.rollouts)

    @property
    def reaction(self) -> measure.Quantiles:
        return measure.quantiles(measure.reaction_times(self.rollouts, measure.learned_versions(self.updates)))

    @property
    def explained_variance(self) -> list[float | None]:
        """The critic's, at the end of each phase."""
        return [measure.explained_variance(self._of(phase), self.updates) for phase in self.phases]

    @property
    def language(self) -> list[float]:
        """The share of each phase's last answers that are whole sentences of the model's grammar."""
        return [
            measure.mean([parses(rollout.text) for rollout in self._of(phase)[-measure.LAST :]])
            for phase in self.phases
        ]

    @property
    def alarms(self) -> list[int]:
        return measure.alarms([rollout.session for rollout in self.rollouts], self.updates)

    def _of(self, phase: Phase) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.style == phase.style]

    def as_json(self) -> dict[str, Any]:
        """The report of `--json`; the keys after `wall_s` may grow."""
        return {
            "seed": self.seed,
            "phases": [asdict(phase) for phase in self.phases],
            "updates": len(self.updates),
            "versions": len(self.versions),
            "masked_fraction": measure.masked_fraction(self.updates),
            "reaction_s": asdict(self.reaction),
            "rollback_s": self.rollback.seconds,
            "wall_s": self.wall_s,
            "explained_variance": self.explained_variance,
            "language": self.language,
            "alarms": self.alarms,
            "rollback": asdict(self.rollback),
            "settings": self.versions[-1]["settings"] if self.versions else {},
        }


def show(run: Run, console: Console) -> None:
    """Print the summary."""
    console.print(_phases(run))
    console.print(_totals(run))


def _phases(run: Run) -> Table:
    table = Table(
        title=f"What users liked, and how the answers followed (seed {run.seed})",
        caption="explained: share of the rewards' variance that the critic foresees; "
        "language: answers in whole sentences of the model's grammar",
    )
    table.add_column("users want", no_wrap=True)
    for column in (
        "rollouts", f"first {measure.FIRST}", f"last {measure.LAST}", f"to {measure.GOOD}", "explained", "language",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for phase, variance, language in zip(run.phases, run.explained_variance, run.language, strict=True):
        table.add_row(
            phase.style, str(phase.rollouts), _number(phase.first15), _number(phase.last30),
            "never" if phase.rollouts_to_0_7 is None else str(phase.rollouts_to_0_7), _number(variance),
            f"{language:.0%}",
        )  # fmt: skip
    return table


def _totals(run: Run) -> Table:
    reaction, rollback = run.reaction, run.rollback
    styles: Sequence[str] = [phase.style for phase in run.phases[1:]]
    change = ", ".join(f"{style} {rollback.before[style]:.2f} → {rollback.after[style]:.2f}" for style in styles)
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("updates, versions", f"{len(run.updates)}, {len(run.versions)}"),
        ("masked fraction", f"{measure.masked_fraction(run.updates):.2%}"),
        ("shift alarms", ", ".join(map(str, run.alarms)) or "none"),
        ("reaction time", f"{_number(reaction.p50)} s median, {_number(reaction.p95)} s for 95 %"),
        (f"rollback to version {rollback.to}", f"{rollback.seconds:.2f} s; mean scores {change}"),
        ("wall time", f"{run.wall_s:.0f} s"),
    ):
        table.add_row(name, value)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
