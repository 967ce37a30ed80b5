"""What the demo shows while it runs: a live view in a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from learner.study.measure import WINDOW, masked_fraction, moving_mean
from learner.study.server import Operator, Service

BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 60
LINE_EVERY = 10
LOOK_S = 0.5
LOOK_AT = 20


class Judged(Protocol):
    """What is shown of a rollout: the version that answered, the reward, the last answer's text."""

    @property
    def version(self) -> int: ...

    @property
    def reward(self) -> float: ...

    @property
    def text(self) -> str: ...


@dataclass
class Progress:
    """All that the view needs to know."""

    phases: Sequence[str]
    rollouts_per_phase: int
    rollouts: list[Judged] = field(default_factory=list)
    newest_updates: Sequence[Mapping[str, Any]] = ()

    @property
    def number(self) -> int:
        """The phase of the last rollout, counted from 0."""
        return max(0, len(self.rollouts) - 1) // self.rollouts_per_phase

    @property
    def done(self) -> int:
        """Rollouts of this phase."""
        return len(self.rollouts) - self.number * self.rollouts_per_phase

    @property
    def version(self) -> int:
        return self.rollouts[-1].version if self.rollouts else 0

    @property
    def updates(self) -> int:
        return int(self.newest_updates[0]["number"]) if self.newest_updates else 0

    @property
    def masked(self) -> float:
        """The masked fraction of the newest updates."""
        return masked_fraction(self.newest_updates)

    @property
    def means(self) -> list[float]:
        """The moving mean of the reward, which knows nothing of the phases."""
        return moving_mean([rollout.reward for rollout in self.rollouts])


class Watch:
    """Looks now and then at what the learner did lately, and whether the service is still there."""

    def __init__(self, service: Service, operator: Operator, progress: Progress) -> None:
        self._service, self._operator, self._progress = service, operator, progress
        self._looked = 0.0

    def look(self) -> None:
        if time.monotonic() - self._looked > LOOK_S:
            self._service.check()
            self._progress.newest_updates = self._operator.newest_updates(LOOK_AT)
            self._looked = time.monotonic()


class View(Protocol):
    """Shows progress between `__enter__` and `__exit__`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def show(self, progress: Progress) -> None: ...


def make_view(console: Console) -> View:
    return LiveView(console) if console.is_terminal else PlainView(console)


class PlainView:
    """One line every ten rollouts."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, progress: Progress) -> None:
        if progress.rollouts and len(progress.rollouts) % LINE_EVERY == 0:
            self._console.out(
                f"{progress.phases[progress.number]:<10} {progress.done:>4}/{progress.rollouts_per_phase}"
                f"  reward {progress.means[-1]:.2f}  version {progress.version:>4}"
                f"  updates {progress.updates:>4}  masked {progress.masked:.1%}",
                highlight=False,
            )


class LiveView:
    """A panel that is drawn over itself."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self, progress: Progress) -> None:
        self._live.update(panel(progress))


def panel(progress: Progress) -> RenderableType:
    """The whole view: where the run stands, how the reward moved, the last answer."""
    means = progress.means
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        Text(f"users want {progress.phases[progress.number]}", style="bold"),
        ProgressBar(progress.rollouts_per_phase, progress.done, width=30),
        f"{progress.done}/{progress.rollouts_per_phase}",
    )
    numbers = Table.grid(padding=(0, 3))
    numbers.add_row(
        f"reward {means[-1]:.2f}" if means else "reward -",
        f"version {progress.version}",
        f"updates {progress.updates}",
        f"masked {progress.masked:.1%}",
    )
    spark = Text(sparkline(means, SPARKLINE_WIDTH), style="green")
    last = Text(progress.rollouts[-1].text if progress.rollouts else "", style="italic", overflow="ellipsis")
    last.no_wrap = True
    return Panel(Group(facts, numbers, spark, last), title=f"Riacho learns (mean of the last {WINDOW} rewards)")


def sparkline(values: Sequence[float], width: int) -> str:
    """Values in [0, 1] as `width` blocks at most, each the mean of an equal stretch."""
    columns = min(width, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)] if columns else []
    stretches = (values[start:end] for start, end in pairwise(edges))
    return "".join(_block(sum(stretch) / len(stretch)) for stretch in stretches)


def _block(value: float) -> str:
    return BLOCKS[min(len(BLOCKS) - 1, max(0, int(value * len(BLOCKS))))]
