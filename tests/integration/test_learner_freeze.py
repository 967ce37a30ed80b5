"""Two learners on one policy: whoever sleeps past the lease is fenced, and nothing is lost or written over."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from app.fingerprint import fingerprint
from app.registry import Registry, upgrade
from app.settings import TINY_MODEL
from learner import checkpoint
from tests.builders import START
from tests.fixed_log import events, write
from tests.service import environment, eventually

ROLLOUTS = 40
FREEZES = 6
LEASE_S = 1.0
DEADLINE_S = 240
POLICY = "riacho"


@dataclass
class Home:
    """A log, an adapter store and a registry, which any number of learners may share."""

    folder: Path
    url: str

    def __post_init__(self) -> None:
        self.registry = Registry.open(self.url)
        self.registry.policies.ensure(POLICY, str(TINY_MODEL), fingerprint(str(TINY_MODEL)), 0.0, 1.0)
        self.store = self.folder / "adapters" / POLICY

    @contextmanager
    def learner(self, log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A learner that ends at the end of the log."""
        extra = {
            "RIACHO_DATABASE_URL": self.url,
            "RIACHO_LOG_URL": f"sqlite:///{log_file}",
            "RIACHO_LEARNER_LEASE_S": str(LEASE_S),
        }
        with (self.folder / "learner.log").open("ab") as output:
            command = [sys.executable, "-m", "learner", "run", "--until-end"]
            process = subprocess.Popen(command, env=environment(self.folder, extra), stderr=output)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def holder(self) -> int:
        """The process id of the learner that holds the lease; 0 if none does now."""
        lease = self.registry.leases.holder(f"learner:{POLICY}")
        return int(lease.holder.split(":")[1]) if lease else 0

    def newest(self) -> int:
        return self.registry.versions.latest_number(POLICY)

    def outcome(self) -> dict[str, Any]:
        """Versions with their files, updates and completions, without what differs from run to run by nature."""
        versions = self.registry.versions.list(POLICY)[::-1]
        updates = self.registry.projections.updates(POLICY)[::-1]
        return {
            "versions": [replace(v, path="", metrics={}, created_at=START) for v in versions],
            "files": [self.files(v.directory) for v in versions],
            "updates": [(u.number, u.epoch, u.version, u.at, u.session_ids, u.metrics["reward"]) for u in updates],
            "completions": [self.registry.projections.session(POLICY, f"s{n}") for n in range(ROLLOUTS)],
        }

    def files(self, directory: str) -> dict[str, bytes]:
        return {name: (self.store / directory / name).read_bytes() for name in checkpoint.FILES}


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.db"
    write(path, events(ROLLOUTS))
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, log_file: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("calm")
    url = f"sqlite:///{folder / 'registry.db'}"
    upgrade(url)
    home = Home(folder, url)
    with closing(home.registry), home.learner(log_file) as learner:
        assert learner.wait(DEADLINE_S) == 0, (folder / "learner.log").read_text()
        assert home.newest() == ROLLOUTS
        return home.outcome()


def frozen_moment(home: Home, version: int, writing: bool, rng: random.Random) -> None:
    """Wait for a version and a random moment more, or for the next checkpoint that is half-written."""
    eventually(lambda: home.newest() >= version, f"version {version}", DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while writing and not list(home.store.glob(".*.part")) and home.newest() < ROLLOUTS and time.monotonic() < deadline:
        time.sleep(0.001)
    if not writing:
        time.sleep(rng.uniform(0, 0.4))


def freeze_past_the_lease(home: Home, learners: list[subprocess.Popen[bytes]]) -> bool:
    """Freeze the learner at work until the other has worked in its place, and wake it while the other works on.

    False where neither works any more. On SQLite a process that is frozen inside a transaction keeps the
    whole database locked, so that nobody can take over: then it is woken without.
    """
    working = next((learner for learner in learners if learner.pid == home.holder()), None)
    if working is None:
        return False
    [other] = [learner for learner in learners if learner is not working]
    working.send_signal(signal.SIGSTOP)
    before = home.newest()
    sqlite = make_url(home.url).get_backend_name() == "sqlite"
    deadline = time.monotonic() + (LEASE_S + 10 if sqlite else DEADLINE_S)

    def taken_over() -> bool:
        return other.poll() is not None or (home.holder() == other.pid and home.newest() > before)

    while not (done := taken_over()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done or sqlite, (home.folder / "learner.log").read_text()
    working.send_signal(signal.SIGCONT)
    return True


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_learner_that_slept_past_its_lease_changes_nothing(
    seed: int, tmp_path: Path, database_url: str, log_file: Path, undisturbed: dict[str, Any]
) -> None:
    """Frozen at random moments and amid checkpoints: versions, files, lineage and tables are the undisturbed run's."""
    rng = random.Random(seed)
    home = Home(tmp_path, database_url)
    moments = sorted(rng.sample(range(ROLLOUTS - 3), FREEZES))
    with closing(home.registry), home.learner(log_file) as one, home.learner(log_file) as two:
        frozen = 0
        for version in moments:
            frozen_moment(home, version, rng.random() < 0.5, rng)
            frozen += freeze_past_the_lease(home, [one, two])
        assert [one.wait(DEADLINE_S), two.wait(DEADLINE_S)] == [0, 0], (tmp_path / "learner.log").read_text()
        assert frozen >= FREEZES / 2
        assert home.outcome() == undisturbed
        for version in home.registry.versions.list(POLICY):
            assert checkpoint.digest(home.files(version.directory)) == version.sha256


def test_a_learner_that_stands_by_ends_when_told(tmp_path: Path, database_url: str, log_file: Path) -> None:
    """SIGTERM while another holds the lease: an orderly end, and nothing was done."""
    home = Home(tmp_path, database_url)
    with closing(home.registry):
        assert home.registry.leases.acquire(f"learner:{POLICY}", "other:0:0", 600)
        with home.learner(log_file) as learner:
            output = tmp_path / "learner.log"
            eventually(lambda: "waiting: other:0:0 holds" in output.read_text(), "it stands by")
            learner.terminate()
            assert learner.wait(DEADLINE_S) == 0, output.read_text()
        assert home.newest() == 0
