"""The learner is killed amid scoring: nothing counts twice, nothing is lost, and the log alone gives the same bytes."""

import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from app.events.schema import Event, FeedbackEvent, ScoreEvent, decode
from app.events.sqlite import SqliteLog
from app.fingerprint import fingerprint
from app.registry import Registry, upgrade
from app.registry.records import UpdateRow
from app.settings import TINY_MODEL
from learner import checkpoint
from tests.fixed_log import events, write
from tests.judges import Steered
from tests.learning import LearnerProcess
from tests.service import environment, eventually

ROLLOUTS = 16
KILLS = 5
SLOW_S = 0.5
REPLAY_S = 240


class Killed:
    """A home with a log, a learner whose judge is slow, and how it ended."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self.judge = Steered(folder / "judge", "slow")
        # The scores lie at the present, the fixed log in the past.
        self.extra = self.judge.variables("train") | {
            "RIACHO_LEARNER_LEASE_S": "0.5",
            "RIACHO_LEARNER_SCORE_WORKERS": "1",
            "RIACHO_FEEDBACK_TTL_S": "1e9",
        }
        write(self.home / "log.db", events(ROLLOUTS))
        url = f"sqlite:///{self.home / 'registry.db'}"
        upgrade(url)
        self.registry = Registry.open(url)
        self.registry.policies.ensure("riacho", str(TINY_MODEL), fingerprint(str(TINY_MODEL)), 0.0, 1.0)

    def updates(self) -> list[UpdateRow]:
        return self.registry.projections.updates("riacho")

    def log(self) -> list[Event]:
        with closing(SqliteLog(self.home / "log.db")) as log:
            return [decode(record.payload) for record in log.read({}, 10_000)]

    def learn(self, rng: random.Random) -> None:
        """Kill the learner while its judge is at work, KILLS times, and let it come to the end of its sessions."""
        with LearnerProcess(self.home, self.extra) as learner:
            for _ in range(KILLS):
                asked = len(self.judge.calls())
                eventually(lambda asked=asked: len(self.judge.calls()) > asked, "the judge is asked")  # type: ignore[misc]
                time.sleep(rng.uniform(0, 1.2 * SLOW_S))
                learner.restart()
            eventually(lambda: len(self.updates()) == ROLLOUTS, "all sessions are trained", 240)
            assert learner.stop() == 0, learner.log_text


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    made = Killed(tmp_path_factory.mktemp("killed"))
    made.learn(random.Random(20261129))
    yield made
    made.registry.close()


def replay(log: Path, out: Path, extra: dict[str, str]) -> Path:
    """Fold a log into a fresh learner, which scores nothing; its newest checkpoint."""
    command = [sys.executable, "-m", "learner", "replay", "--log", f"sqlite:///{log}", "--out", str(out)]
    subprocess.run(command, env=environment(out, extra), timeout=REPLAY_S, check=True)
    return newest(out)


def newest(home: Path) -> Path:
    folder = home / "adapters" / "riacho"
    return folder / str(max(int(path.name) for path in folder.glob("[0-9]*")))


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in checkpoint.FILES}


@pytest.mark.timeout(900)  # 6 starts of the learner
def test_every_session_is_trained_once_with_its_first_score(killed: Killed) -> None:
    """Its reward is the client's plus half of the first score on the log, whatever else a killed learner left there."""
    rows = killed.updates()
    assert Counter(session for row in rows for session in row.session_ids) == {f"s{i}": 1 for i in range(ROLLOUTS)}
    log = killed.log()
    first: dict[str, float] = {}
    for event in log:
        if isinstance(event, ScoreEvent) and event.session is not None:
            first.setdefault(event.session_id, event.session)
    client = {event.session_id: event.reward for event in log if isinstance(event, FeedbackEvent)}
    for row in rows:
        [session] = row.session_ids
        assert row.metrics["reward"] == pytest.approx(client[session] + 0.5 * first[session])


@pytest.mark.timeout(900)
def test_killed_run_ends_with_the_bytes_that_its_log_gives(killed: Killed, tmp_path: Path) -> None:
    """An undisturbed fold of the final log, without any judge, has the same final checkpoint."""
    shutil.copy(killed.home / "log.db", tmp_path / "log.db")
    asked = len(killed.judge.calls())
    end = replay(tmp_path / "log.db", tmp_path / "out", killed.extra)
    assert int(end.name) == ROLLOUTS
    assert len(killed.judge.calls()) == asked
    assert files(end) == files(newest(killed.home))


@pytest.mark.timeout(900)
def test_sessions_scored_before_a_kill_are_not_scored_again(killed: Killed) -> None:
    """A resumed learner reads what is on the log before it asks the judge: only the call under way is repeated."""
    again = Counter(killed.judge.calls())
    repeated = sum(count - 1 for count in again.values())
    assert repeated <= KILLS
