"""What the demos' commands share: their options, a home of their own and the service under them."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM, signal
from tempfile import TemporaryDirectory
from typing import Any

import click
import httpx
import openai
from rich.console import Console

from learner.study.engine import engine
from learner.study.pace import NotLearning
from learner.study.server import Service


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; where the service keeps its state, and what it runs on."""

    seed: int
    json_path: Path | None
    out: Path
    engine_name: str
    vllm_python: Path
    log_url: str
    database_url: str
    home: Path | None

    @property
    def settings(self) -> dict[str, str]:
        """RIACHO_* variables of the service."""
        return {
            "RIACHO_LEARNER_SEED": str(self.seed),
            "RIACHO_LOG_URL": self.log_url,
            "RIACHO_DATABASE_URL": self.database_url,
        }

    def write(self, report: Mapping[str, Any]) -> None:
        """The run's numbers, where `--json` asks for them."""
        if self.json_path:
            self.json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


OPTIONS = (
    click.option("--seed", default=1, show_default=True, help="For clients, sampling and initial weights."),
    click.option(
        "--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the numbers there."
    ),
    click.option("--out", type=click.Path(path_type=Path, file_okay=False), default="demo-out", show_default=True),
    click.option(
        "--engine",
        "engine_name",
        default="local",
        show_default=True,
        metavar="local|vllm|URL,…",
        help="`vllm` starts a server on the CPU; or the addresses of running ones.",
    ),
    click.option(
        "--vllm-python",
        type=click.Path(path_type=Path),
        default=".venv-vllm/bin/python",
        show_default=True,
        envvar="RIACHO_TEST_VLLM_PYTHON",
        show_envvar=True,
        help="The interpreter that `--engine vllm` uses.",
    ),
    click.option("--log-url", default="", help="The event log: kafka://HOST:PORT,…; embedded by default."),
    click.option("--database-url", default="", help="The registry: an empty PostgreSQL database; embedded by default."),
    click.option("--home", type=click.Path(path_type=Path, file_okay=False), help="Keep the service's state there."),
)


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the shared options to a command, which reads them with `Options(**given)`."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@contextmanager
def running(chosen: Options, console: Console, settings: Mapping[str, str] | None = None) -> Iterator[Service]:
    """The service, for as long as the block runs; a call to it that fails there ends the command with its log.

    Args:
        settings: RIACHO_* variables of the demo's own.
    """
    variables = {**chosen.settings, **(settings or {})}
    signal(SIGTERM, lambda number, _: sys.exit(128 + number))
    chosen.out.mkdir(parents=True, exist_ok=True)
    with (
        _fresh(chosen.home) as directory,
        engine(chosen.engine_name, chosen.vllm_python, chosen.out / "vllm.log") as urls,
        Service(directory, chosen.out / "server.log", variables | {"RIACHO_ENGINE_URLS": urls}) as service,
    ):
        console.print(f"The service is up at {service.url}; its output goes to {chosen.out / 'server.log'}.")
        try:
            yield service
        except (httpx.HTTPError, openai.OpenAIError, NotLearning) as error:
            raise service.failed(error) from error


@contextmanager
def _fresh(home: Path | None) -> Iterator[Path]:
    """An empty home: the given one, or one that is removed at the end."""
    if home is None:
        with TemporaryDirectory(prefix="riacho-demo-") as directory:
            yield Path(directory)
        return
    home.mkdir(parents=True, exist_ok=True)
    if any(home.iterdir()):
        raise click.BadParameter(f"{home} is not empty; the demo wants a home of its own", param_hint="--home")
    yield home.absolute()
