"""The demo: users' taste moves, the service follows, and an operator takes it back.

Run with `riacho demo` or `python -m learner.study.demo`. The users like one writing style, then another, then a
third; each answer is rewarded by its score in the style they like at the time. Everything goes through the HTTP
API of a service that the demo starts for itself. At the end the operator rolls back to what the users liked second.
"""

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from random import Random

import click
import httpx
import openai
from rich.console import Console

from learner.study import measure, plot, report
from learner.study.engine import engine
from learner.study.live import Progress, make_view
from learner.study.measure import Rollout
from learner.study.pace import NotLearning
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
LOOK_S = 0.5
LOOK_AT = 20
ROLLBACK_LIMIT_S = 30.0


class Demo:
    """One run against a service that is up; all chance comes from the seed."""

    def __init__(self, service: Service, users: Users, operator: Operator, seed: int, per_phase: int) -> None:
        self._service, self._users, self._operator = service, users, operator
        self._rng = Random(seed)
        self._progress = Progress(TASTES, per_phase)
        self._looked = 0.0
        self._pinned: dict[str, int] = {}

    def follow(self, console: Console) -> list[Rollout]:
        """Live through the three tastes, and pin what was live at the end of each."""
        with make_view(console) as view:
            for taste in TASTES:
                wanted = islice(requests(self._rng, taste), self._progress.rollouts_per_phase)
                for rollout in self._users.phase(wanted, taste):
                    self._progress.rollouts.append(rollout)
                    self._look()
                    view.show(self._progress)
                self._pinned[taste] = self._pin()
        self._users.settle()
        return self._progress.rollouts

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

    def _look(self) -> None:
        """Now and then, what the learner did lately."""
        if time.monotonic() - self._looked > LOOK_S:
            self._service.check()
            self._progress.newest_updates = self._operator.newest_updates(LOOK_AT)
            self._looked = time.monotonic()

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
        closing(Users(service.url, service.policy, service.client_key, time.monotonic)) as users,
        closing(Operator(service)) as operator,
    ):
        demo = Demo(service, users, operator, seed, per_phase)
        rollouts = demo.follow(console)
        updates, versions = operator.updates(), operator.versions()
        rollback = demo.take_back()
        return Run(seed, rollouts, updates, versions, rollback, time.monotonic() - started)


@contextmanager
def fresh(home: Path | None) -> Iterator[Path]:
    """An empty home: the given one, or one that is removed at the end."""
    if home is None:
        with tempfile.TemporaryDirectory(prefix="riacho-demo-") as directory:
            yield Path(directory)
        return
    home.mkdir(parents=True, exist_ok=True)
    if any(home.iterdir()):
        raise click.BadParameter(f"{home} is not empty; the demo wants a home of its own", param_hint="--home")
    yield home.absolute()


@click.command()
@click.option("--seed", default=1, show_default=True, help="For users, sampling and initial weights.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the numbers there.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default="demo-out", show_default=True)
@click.option("--rollouts", type=click.IntRange(min=FEWEST), default=ROLLOUTS, show_default=True, help="A phase.")
@click.option(
    "--engine",
    "engine_name",
    default="local",
    show_default=True,
    metavar="local|vllm|URL,…",
    help="`vllm` starts a server on the CPU; or the addresses of running ones.",
)
@click.option(
    "--vllm-python",
    type=click.Path(path_type=Path),
    default=".venv-vllm/bin/python",
    show_default=True,
    envvar="RIACHO_TEST_VLLM_PYTHON",
    show_envvar=True,
    help="The interpreter that `--engine vllm` uses.",
)
@click.option("--log-url", default="", help="The event log: kafka://HOST:PORT,…; embedded by default.")
@click.option("--database-url", default="", help="The registry: an empty PostgreSQL database; embedded by default.")
@click.option("--home", type=click.Path(path_type=Path, file_okay=False), help="Keep the service's state there.")
def main(
    seed: int, json_path: Path | None, out: Path, rollouts: int, engine_name: str, vllm_python: Path, log_url: str,
    database_url: str, home: Path | None,
) -> None:  # fmt: skip
    """Users teach a running service a style, change their minds twice, and the last change is rolled back."""
    started = time.monotonic()
    console = Console()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    out.mkdir(parents=True, exist_ok=True)
    settings = {"RIACHO_LEARNER_SEED": str(seed), "RIACHO_LOG_URL": log_url, "RIACHO_DATABASE_URL": database_url}
    with fresh(home) as directory, engine(engine_name, vllm_python, out / "vllm.log") as urls:
        with Service(directory, out / "server.log", settings | {"RIACHO_ENGINE_URLS": urls}) as service:
            console.print(f"The service is up at {service.url}; its output goes to {out / 'server.log'}.")
            try:
                run = play(service, seed, rollouts, console, started)
            except (httpx.HTTPError, openai.OpenAIError, NotLearning) as error:
                raise service.failed(error) from error
    plot.draw(run.rollouts, run.updates, out / "demo.png")
    report.show(run, console)
    console.print(f"Plot: {out / 'demo.png'}")
    if json_path:
        json_path.write_text(json.dumps(run.as_json(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
