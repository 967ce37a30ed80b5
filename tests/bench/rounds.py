"""Measure things in turn, compare each with what was measured beside it, and show or save the outcome.

A shared machine is slow at one minute and fast at the next. So each round measures everything once, in an order that
moves on from round to round; a ratio is taken within its round; and what is shown is the median, with the lowest and
the highest in brackets.
"""

import json
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")


async def interleaved(rounds: int, measures: Mapping[str, Callable[[], Awaitable[T]]]) -> dict[str, list[T]]:
    """What each measure gave, round by round."""
    names = list(measures)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            found[name].append(await measures[name]())
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of them do not exceed (nearest rank)."""
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


@dataclass(frozen=True, slots=True)
class Line:
    """One number, round by round, beside what it is compared with.

    Attributes:
        values, base: of the same rounds, in `unit`.
        against: what `base` is.
    """

    name: str
    unit: str
    values: Sequence[float]
    base: Sequence[float]
    against: str

    @property
    def ratios(self) -> list[float]:
        return [value / base for value, base in zip(self.values, self.base, strict=True)]

    def cells(self) -> tuple[str, ...]:
        return (self.name, f"{_spread(self.values)} {self.unit}", f"{_spread(self.ratios)} x", self.against)

    def record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "values": list(self.values),
            "against": self.against,
            "base": list(self.base),
            "ratio": statistics.median(self.ratios),
        }


def report(title: str, lines: Sequence[Line], target: Path | None) -> None:
    """Print a table, and add it to a JSON file of tables."""
    table = Table("", "median (lowest – highest)", "ratio", "to", title=title, title_justify="left")
    for line in lines:
        table.add_row(*line.cells())
    Console(width=160).print(table)
    if target is not None:
        tables = json.loads(target.read_text()) if target.exists() else {}
        target.write_text(json.dumps(tables | {title: [line.record() for line in lines]}, indent=1))


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} – {max(values):.3g})"
