"""The demo: users' taste moves, the service follows, and an operator takes it back.

Run with `riacho demo` or `python -m learner.study.demo`. The users like one writing style, then another, then a
third; each answer is rewarded by its score in the style they like at the time. Everything goes through the HTTP
API of a service that the demo starts for itself. At the end the operator rolls back to what the users liked second.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from random import Random
from typing import Any

import click
from rich.console import Console

from learner.study import measure, plot, report
from learner.study.client import Client
from learner.study.command import Options, options, running
from learner.study.live import Progress, Watch, make_view
from learner.study.measure import Rollout
from learner.study.report import Rollback, Run
from learner.study.server import Operator, Service
from learner.study.users import Answer, Users, requests, scores
from learner.tiny.styles import STYLE_NAMES

TASTES = ("cute", "chuunibyou", "classical")
TAKEN_BACK_TO = TASTES[1]
# Measured: in 48 phases of 16 seeds the mean of rollouts 101 to 130 was .93, its lowest .81.
ROLLOUTS = 130
# With fewer there may be no version yet to roll back to.
FEWEST = 5
ANSWERS_COMPARED = 10
ROLLBACK_LIMIT_S = 30.0


class Demo:
    """One run against a service that is up; all chance comes from the seed."""

    def __init__(self, service: Service, users: Users, operator: Operator, seed: int, per_phase: int) -> None:
        self._users, self._operator = users, operator
        self._rng = Random(seed)
        self._progress = Progress(TASTES, per_phase)
        self._watch = Watch(service, operator, self._progress)
        self._pinned: dict[str, int] = {}

    def follow(self, console: Console) -> list[Rollout]:
        """Live through the three tastes, and pin what was live at the end of each."""
        rollouts: list[Rollout] = []
        with make_view(console) as view:
            for taste in TASTES:
                wanted = islice(requests(self._rng, taste), self._progress.rollouts_per_phase)
                for rollout in self._users.phase(wanted, taste):
                    rollouts.append(rollout)
                    self._progress.rollouts.append(rollout)
                    self._watch.look()
                    view.show(self._progress)
                self._pinned[taste] = self._pin()
        return rollouts

    def take_back(self) -> Rollback:
        """Roll back and see it take effect.

        `seconds` run from sending the order until the first answer of the old version arrives; meanwhile answers
        of one token are asked for, one after the other.
        """
        version = self._pinned[TAKEN_BACK_TO]
        before = self._mean_scores("before")
        ordered = time.monotonic()
        self._operator.roll_back(version, "the demo takes back what was learned last")
        first = next((answer for answer in self._glances(ordered) if answer.version == version), None)
        if first is None:
            raise click.ClickException(
                f"No answer came from version {version} within {ROLLBACK_LIMIT_S:.0f} seconds of the rollback to it."
            )
        return Rollback(version, first.ended - ordered, before, self._mean_scores("after"))

    def _pin(self) -> int:
        version = self._operator.live_version()
        if version:
            self._operator.pin(version)
        return version

    def _glances(self, since: float) -> Iterator[Answer]:
        for request in requests(self._rng, "glance", max_tokens=1):
            if time.monotonic() - since > ROLLBACK_LIMIT_S:
                return
            yield self._users.ask(request)

    def _mean_scores(self, name: str) -> dict[str, float]:
        wanted = islice(requests(self._rng, name), ANSWERS_COMPARED)
        judged = [scores(self._users.ask(request)) for request in wanted]
        return {style: measure.mean([score[style] for score in judged]) for style in STYLE_NAMES}


def play(service: Service, seed: int, per_phase: int, console: Console, started: float) -> Run:
    """The whole story against a service that is up."""
    with (
        closing(Client(service, time.monotonic)) as client,
        closing(Operator(service)) as operator,
    ):
        demo = Demo(service, Users(client), operator, seed, per_phase)
        rollouts = demo.follow(console)
        client.settle()
        updates, versions = operator.updates(), operator.versions()
        rollback = demo.take_back()
        return Run(seed, rollouts, updates, versions, rollback, time.monotonic() - started)


@click.command()
@options
@click.option("--rollouts", type=click.IntRange(min=FEWEST), default=ROLLOUTS, show_default=True, help="A phase.")
def main(rollouts: int, **given: Any) -> None:
    """Users teach a running service a style, change their minds twice, and the last change is rolled back."""
    started = time.monotonic()
    console = Console()
    chosen = Options(**given)
    with running(chosen, console) as service:
        run = play(service, chosen.seed, rollouts, console, started)
    plot.draw(run.rollouts, run.updates, chosen.out / "demo.png")
    report.show(run, console)
    console.print(f"Plot: {chosen.out / 'demo.png'}")
    chosen.write(run.as_json())


if __name__ == "__main__":
    main()
