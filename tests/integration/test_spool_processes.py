"""Real processes over one spool, killed at random moments, and two at once: nothing acknowledged is lost."""

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from app.events.spool import Spool
from app.serving.forwarder import Forwarder
from app.telemetry.metrics import Metrics
from tests.service import eventually
from tests.switchable import SwitchableLog

KILLS = 12
EVENTS = 200

APP = """
import asyncio, sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from app.events.schema import FeedbackEvent
from app.events.spool import Spool
from app.serving.forwarder import Forwarder
from app.telemetry.metrics import Metrics
from tests.switchable import SwitchableLog

folder, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

class Log(SwitchableLog):
    @property
    def mode(self):
        return "away" if (folder / "away").exists() else "up"

    @mode.setter
    def mode(self, _):
        pass

async def session(spool, number):
    for i in range(count):
        id = f"{name}-{number}-{i}"
        at = datetime(2026, 1, 1, tzinfo=UTC)
        await spool.append(FeedbackEvent(
            event_id=id, policy="riacho", session_id=f"{name}-{number}", at=at, reward=1.0, key_id="k"
        ))
        print(id, flush=True)

async def main():
    log = Log(folder / "log.db")
    spool = Spool(log, folder / "spool.db", 2**30)
    job = asyncio.create_task(Forwarder(spool, log, Metrics()).run(lambda _: asyncio.sleep(0.005)))
    await asyncio.gather(*(session(spool, number) for number in range(3)))
    job.cancel()
    with suppress(asyncio.CancelledError):
        await job

asyncio.run(main())
"""


def app(folder: Path, name: str, count: int) -> "subprocess.Popen[str]":
    """Appends `count` events to each of three sessions through the spool, forwards, prints what is acknowledged."""
    return subprocess.Popen(
        [sys.executable, "-c", APP, str(folder), name, str(count)],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )


async def drained(folder: Path) -> list[str]:
    """Forward what is left; all ids on the log, in order."""
    with closing(SwitchableLog(folder / "log.db")) as log, closing(Spool(log, folder / "spool.db", 2**30)) as spool:
        await Forwarder(spool, log, Metrics()).drain()
        assert spool.size() == (0, 0)
        return log.event_ids()


def of_sessions(ids: Sequence[str]) -> dict[str, list[int]]:
    """For each session the numbers of its events, in order and each once, as the learner counts them."""
    found: dict[str, list[int]] = {}
    for id in dict.fromkeys(ids):
        session, _, number = id.rpartition("-")
        found.setdefault(session, []).append(int(number))
    return found


def whole_lines(text: str) -> list[str]:
    return text[: text.rfind("\n") + 1].split()


def flicker(folder: Path, rng: random.Random, rounds: int) -> None:
    """Take the log away and give it back, at random moments."""
    for _ in range(rounds):
        (folder / "away").touch()
        time.sleep(rng.uniform(0.02, 0.15))
        (folder / "away").unlink()
        time.sleep(rng.uniform(0.02, 0.1))


async def test_killed_while_spooling_and_forwarding(tmp_path: Path) -> None:
    """Killed at random moments of outages and recoveries: all acknowledged events reach the log, in order.

    A kill repeats at most the one event that was being forwarded.
    """
    rng = random.Random(5)
    acknowledged: list[str] = []
    for life in range(KILLS):
        process = app(tmp_path, f"life{life}", 100_000)
        assert process.stdout is not None
        acknowledged.append(process.stdout.readline().strip())
        flicker(tmp_path, rng, rng.randrange(1, 4))
        if rng.random() < 0.7:
            (tmp_path / "away").touch()
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        acknowledged += whole_lines(process.stdout.read())
        assert process.wait() == -9
    (tmp_path / "away").unlink(missing_ok=True)
    ids = await drained(tmp_path)
    assert len(acknowledged) > KILLS
    assert set(acknowledged) <= set(ids)
    for numbers in of_sessions(ids).values():
        assert numbers == list(range(len(numbers)))
    assert sum(Counter(ids).values()) - len(set(ids)) <= KILLS


async def test_two_processes_on_one_spool(tmp_path: Path) -> None:
    """Both append and forward through outages: every event is on the log once, each session in order."""
    rng = random.Random(6)
    processes = [app(tmp_path, name, EVENTS) for name in ("a", "b")]
    while any(process.poll() is None for process in processes):
        flicker(tmp_path, rng, 1)
    printed = [line for process in processes for line in process.communicate()[0].split()]
    assert [process.returncode for process in processes] == [0, 0]
    ids = await drained(tmp_path)
    assert len(printed) == 2 * 3 * EVENTS
    assert sorted(ids) == sorted(printed)
    assert all(numbers == list(range(EVENTS)) for numbers in of_sessions(ids).values())


async def test_survivor_forwards_what_a_killed_process_left(tmp_path: Path) -> None:
    """The turn of a process that dies is free at once: another one brings its events to the log."""
    (tmp_path / "away").touch()
    dead = app(tmp_path, "dead", 100_000)
    assert dead.stdout is not None
    acknowledged = [dead.stdout.readline().strip() for _ in range(5)]
    survivor = app(tmp_path, "alive", 100_000)
    try:
        dead.kill()
        acknowledged += whole_lines(dead.stdout.read())
        (tmp_path / "away").unlink()
        with closing(SwitchableLog(tmp_path / "log.db")) as log:
            eventually(lambda: set(acknowledged) <= set(log.event_ids()), "the dead one's events are on the log")
    finally:
        for process in (dead, survivor):
            process.kill()
            process.communicate()
