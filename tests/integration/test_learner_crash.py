"""The learner is a fold: killed at any moment, it ends with the bytes of the undisturbed run."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from app.events.schema import RollbackEvent
from app.fingerprint import fingerprint
from app.registry import Registry, upgrade
from app.settings import TINY_MODEL
from learner import checkpoint
from tests.builders import START
from tests.fixed_log import events, write

ROLLOUTS = 64
ROLLBACK_TO = 20
KILLS = 10
DEADLINE_S = 240


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.db"
    write(path, events(ROLLOUTS, rollback_to=ROLLBACK_TO))
    return path


def make_home(folder: Path, log_file: Path) -> Path:
    """A home with a copy of the log, and a registry in which the operator's rollback has happened."""
    folder.mkdir()
    shutil.copy(log_file, folder / "log.db")
    url = f"sqlite:///{folder / 'registry.db'}"
    upgrade(url)
    registry = Registry.open(url)
    registry.policies.ensure("riacho", str(TINY_MODEL), fingerprint(str(TINY_MODEL)), 0.0, 1.0)

    def event(epoch: int) -> RollbackEvent:
        return RollbackEvent(
            event_id=uuid.uuid4().hex, policy="riacho", session_id="r", at=START, to=0, epoch=epoch, reason="test"
        )

    registry.versions.rollback("riacho", 0, "test", "the log holds the event", event)
    registry.close()
    return folder


def start(home: Path) -> subprocess.Popen[bytes]:
    env = os.environ | {"RIACHO_HOME": str(home), "RIACHO_LEARNER_LEASE_S": "0.5"}
    with (home / "learner.log").open("ab") as output:
        return subprocess.Popen([sys.executable, "-m", "learner", "run", "--until-end"], env=env, stderr=output)


def newest(home: Path) -> int:
    """The newest version on disk; 0 before the first."""
    return max((int(p.name) for p in (home / "adapters" / "riacho").glob("[0-9]*")), default=0)


def finish(home: Path) -> None:
    assert start(home).wait(DEADLINE_S) == 0, (home / "learner.log").read_text()


def kill_at_version(home: Path, version: int, rng: random.Random) -> None:
    """Let the learner reach a version, wait a random moment more, and kill it as nothing can be caught."""
    process = start(home)
    deadline = time.monotonic() + DEADLINE_S
    while newest(home) < version and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 0.25))
    process.send_signal(signal.SIGKILL)
    process.wait()


def files(home: Path) -> dict[str, bytes]:
    folder = home / "adapters" / "riacho" / str(newest(home))
    return {name: (folder / name).read_bytes() for name in checkpoint.FILES}


@pytest.mark.timeout(900)  # 12 starts
def test_killed_learner_ends_with_the_same_bytes(tmp_path: Path, log_file: Path) -> None:
    """SIGKILL at 10 random moments: every file of the final checkpoint equals the undisturbed run's."""
    rng = random.Random(20260729)
    calm, killed = make_home(tmp_path / "calm", log_file), make_home(tmp_path / "killed", log_file)
    finish(calm)
    last = newest(calm)
    assert last == ROLLOUTS
    for version in sorted(rng.sample(range(last), KILLS)):
        kill_at_version(killed, version, rng)
    finish(killed)
    assert newest(killed) == last
    assert files(killed) == files(calm)
