"""The learner over a real log and a real registry: what it trains, drops, publishes, restores and shows."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from app.events.schema import CompletionEvent, Event, FeedbackEvent, RollbackEvent
from app.events.sqlite import SqliteLog
from app.fingerprint import fingerprint
from app.registry import Registry, upgrade
from app.registry.errors import LeaseLost
from app.registry.records import Lease
from app.settings import TINY_MODEL
from learner import checkpoint
from learner.critic import make_policy_and_critic
from learner.joins import Joins, OnFailure
from learner.loop import Learner, stop_at_end
from learner.models import load_base
from learner.publisher import Publisher
from learner.settings import TrainingSettings
from learner.signals import Signals
from learner.stream import StreamState
from learner.trainer import Trainer
from tests.builders import START, moment
from tests.fixed_log import events, sample, write
from tests.switchable import away_at_first

ROLLOUTS = 8
MIXED_KL = 8e-4  # nats a token: of the rewarded stream's versions the seventh lies above, the first six below


@pytest.fixture(scope="module")
def stream() -> list[Event]:
    return events(ROLLOUTS)


@pytest.fixture(scope="module")
def rewarded(stream: list[Event]) -> list[Event]:
    """The same with a reward of 1 everywhere, so that every update moves the policy."""
    return [e.model_copy(update={"reward": 1.0}) if isinstance(e, FeedbackEvent) else e for e in stream]


class Home:
    """A learner with its own log, registry and adapter store."""

    def __init__(
        self,
        folder: Path,
        partitions: int = 1,
        signals: Signals | None = None,
        scorers: Mapping[str, OnFailure] | None = None,
        scoring: Any = None,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.signals, self.scorers, self.scoring = signals, scorers, scoring
        url = f"sqlite:///{folder / 'registry.db'}"
        upgrade(url)
        self.registry = Registry.open(url)
        self.registry.policies.ensure("riacho", str(TINY_MODEL), fingerprint(str(TINY_MODEL)), 0.0, 1.0)
        self.log = SqliteLog(folder / "log.db", partitions)
        self.settings = TrainingSettings(**settings)
        self.lease = self.take_lease("one")
        self.learner = self.new_learner()
        self.learner.resume(self.lease)

    def take_lease(self, holder: str) -> Lease:
        lease = self.registry.leases.acquire("learner:riacho", holder, 600)
        assert lease is not None
        return lease

    def new_learner(self) -> Learner:
        policy, critic = make_policy_and_critic(load_base(str(TINY_MODEL)), self.settings)
        self.trainer = Trainer(policy, critic, self.settings, (0.0, 1.0), time.perf_counter)
        store = self.folder / "adapters"
        self.publisher = Publisher(self.registry, "riacho", str(TINY_MODEL), store)
        stream = StreamState(Joins(timedelta(hours=1), self.scorers))
        return Learner(
            *("riacho", self.log, self.registry, self.trainer, self.publisher, stream, 3072),
            signals=self.signals,
            scoring=self.scoring,
        )

    def append(self, *stream: Event) -> None:
        for event in stream:
            asyncio.run(self.log.append(event))

    def learn(self) -> None:
        self.learner.run(lambda: True, stop_at_end)

    def crash(self) -> None:
        """Let another learner go on from the newest checkpoint."""
        self.learner = self.new_learner()
        self.learner.resume(self.lease)

    def bytes_now(self) -> dict[str, bytes]:
        """Policy, critic, optimizers and running numbers as they stand."""
        return checkpoint.serialize(self.trainer, str(TINY_MODEL), {})

    def close(self) -> None:
        self.log.close()
        self.registry.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    home.close()


def rollback(to: int, epoch: int) -> RollbackEvent:
    return RollbackEvent(
        event_id=f"r{epoch}", policy="riacho", session_id="r", at=START, to=to, epoch=epoch, reason="test"
    )


def states(home: Home) -> dict[int, str]:
    return {record.number: record.state for record in home.registry.versions.list("riacho")}


def test_each_rollout_becomes_one_update_and_one_version(home: Home, stream: list[Event]) -> None:
    """Whatever the order and number of its events; and the tables say which update and version a completion is in."""
    home.append(*stream)
    home.learn()
    assert sorted(states(home)) == list(range(1, ROLLOUTS + 1))
    updates = home.registry.projections.updates("riacho")
    assert sorted(row.session_ids for row in updates) == sorted([[f"s{i}"] for i in range(ROLLOUTS)])
    row = home.registry.projections.completion("c3")
    assert row is not None
    assert (row.state, row.trained_version) == ("trained", row.rollout_update)
    assert updates[-row.rollout_update].session_ids == ["s3"]  # type: ignore[operator]  # newest first
    unjudged = home.registry.projections.completion("u0")
    assert unjudged is not None
    assert unjudged.state == "waiting"
    assert updates[0].metrics["not_trained"]["waiting"] == 1


def test_lineage_and_position_are_registered(home: Home, stream: list[Event]) -> None:
    """A version names its parent and the first offset after what it has seen."""
    home.append(*stream[:2])
    home.learn()
    home.append(*stream[2:])
    home.learn()
    first, second = home.registry.versions.get("riacho", 1), home.registry.versions.get("riacho", 2)
    assert (first.parent, second.parent) == (0, 1)
    assert first.position == {"0": 2}
    assert (home.folder / "adapters" / "riacho" / "2" / "adapter_model.safetensors").is_file()


def test_progress_is_shown_after_each_version(
    home: Home, rewarded: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log's monitoring hears the positions of each published checkpoint, and nothing else."""
    shown: list[dict[str, int]] = []
    monkeypatch.setattr(home.log, "mark_read", lambda at: shown.append({str(part): end for part, end in at.items()}))
    home.append(*rewarded)
    home.learn()
    published = sorted(home.registry.versions.list("riacho"), key=lambda record: record.number)
    assert shown == [record.position for record in published if record.state == "candidate"]
    assert len(shown) > 1


def test_log_that_is_away_is_waited_for(
    home: Home, stream: list[Event], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reads, looks back and buryings fail once each; the learner goes on as if nothing had been."""
    home.append(*stream[:1])
    home.log.append_raw("x", b"{not json")
    home.append(*stream[1:2])
    for name in ("read", "read_at", "bury"):
        monkeypatch.setattr(home.log, name, away_at_first(getattr(home.log, name)))
    home.learn()
    assert states(home) == {1: "candidate"}
    assert [letter.attempts for letter in home.log.dead_letters()] == [1]
    assert caplog.text.count("the log is away") == 3


def test_poison_goes_to_the_dead_letters_and_the_learner_goes_on(home: Home, stream: list[Event]) -> None:
    """Broken JSON, an unknown type, a foreign policy and tokens outside the vocabulary are kept with the reason."""
    completion = stream[0]
    assert isinstance(completion, CompletionEvent)
    home.log.append_raw("x", b"{not json")
    home.log.append_raw("x", b'{"type": "surprise"}')
    home.append(completion.model_copy(update={"policy": "other"}))
    home.append(completion.model_copy(update={"completion_ids": (99_999,) * len(completion.completion_ids)}))
    home.append(*stream[:2])
    home.learn()
    letters = home.log.dead_letters()
    assert [letter.position.offset for letter in letters] == [0, 1, 2, 3]
    for letter, word in zip(letters, ("JSON", "surprise", "other", "vocabulary"), strict=True):
        assert word in letter.reason
    assert sorted(states(home)) == [1]


def test_a_replayed_dead_letter_that_is_good_now_trains_once(home: Home, stream: list[Event]) -> None:
    """A completion that was refused, replayed after the cause is gone, joins its waiting feedback."""
    home.learner._vocabulary = 1
    home.append(stream[0], stream[1])
    home.learn()
    assert states(home) == {}
    home.learner._vocabulary = 3072
    [letter] = home.log.dead_letters()
    asyncio.run(home.log.replay_dead_letter(letter.id))
    home.learn()
    assert sorted(states(home)) == [1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"trainable": False, "not_trainable_reason": "temperature is 0"}, "no_action_tokens"),
        ({"trainable": False, "not_trainable_reason": "x", "finish_reason": "abort"}, "aborted"),
    ],
)
def test_what_cannot_be_trained_on_is_dropped_and_counted(
    home: Home, stream: list[Event], change: dict[str, Any], reason: str
) -> None:
    """No update is made of it, and the completion's record says that it was not used."""
    home.append(stream[0].model_copy(update=change), stream[1])
    home.learn()
    assert states(home) == {}
    assert home.learner.stream.counters[reason] == 1


def test_a_client_that_asks_again_after_an_abort_is_learned_from(home: Home, stream: list[Event]) -> None:
    """Half an answer in the middle of a session does not spoil the rest."""
    answer = stream[0]
    assert isinstance(answer, CompletionEvent)
    half = {"trainable": False, "not_trainable_reason": "the answer did not end", "finish_reason": "abort"}
    broken = answer.model_copy(update=half | {"event_id": "half", "completion_id": "half"})
    home.append(broken, *stream[:2])
    home.learn()
    assert sorted(states(home)) == [1]
    assert home.learner.stream.counters["aborted"] == 0


def test_a_stale_rollout_is_dropped(tmp_path: Path, stream: list[Event]) -> None:
    """More versions of the lineage than max_version_lag lie between it and the policy."""
    home = Home(tmp_path, max_version_lag=2)
    home.append(*stream)
    home.learn()
    assert len(states(home)) == 3
    assert home.learner.stream.counters["stale"] == ROLLOUTS - 3
    home.close()


def test_a_session_without_feedback_expires_in_event_time(home: Home, stream: list[Event]) -> None:
    """It is counted and never taken for a reward of 0."""
    late = stream[1].model_copy(update={"at": moment(7200), "session_id": "other", "event_id": "late"})
    home.append(stream[0], late)
    home.learn()
    row = home.registry.projections.completion("c0")
    assert row is not None
    assert row.state == "expired"
    assert home.learner.stream.counters["expired"] == 1
    assert states(home) == {}


def test_rollback_restores_policy_critic_and_optimizers(home: Home, stream: list[Event]) -> None:
    """Learning goes on from that version in the new epoch; numbers are not reused and later events still join."""
    half = len(stream) // 2
    home.append(*stream[:half])
    home.learn()
    made = max(states(home))
    home.registry.versions.rollback("riacho", 2, "test", "test", lambda epoch: rollback(2, epoch))
    home.append(rollback(2, 1), rollback(2, 1))
    home.learn()
    folder = home.folder / "adapters" / "riacho" / "2"
    now = home.bytes_now()
    for name in (checkpoint.ADAPTER, checkpoint.CRITIC, checkpoint.OPTIMIZER):
        assert now[name] == (folder / name).read_bytes()
    home.append(*stream[half:])
    home.learn()
    after = home.registry.versions.get("riacho", made + 1)
    assert (after.parent, after.epoch, after.state) == (2, 1, "candidate")
    assert max(states(home)) == ROLLOUTS


def test_rollback_to_the_base_restores_the_untrained_state(home: Home, stream: list[Event]) -> None:
    """Version 0 is the base with fresh optimizers."""
    untrained = home.bytes_now()
    home.append(*stream[:4])
    home.learn()
    assert home.bytes_now() != untrained
    home.registry.versions.rollback("riacho", 0, "test", "test", lambda epoch: rollback(0, epoch))
    home.append(rollback(0, 1))
    home.learn()
    assert home.bytes_now() == untrained


def test_a_version_too_far_from_the_base_is_rejected(tmp_path: Path, rewarded: list[Event]) -> None:
    """It never serves, the reason has the numbers, and learning goes on from the parent under a new number."""
    home = Home(tmp_path, max_kl=1e-9)
    untrained = home.bytes_now()
    home.append(*rewarded)
    home.learn()
    assert states(home) == dict.fromkeys(range(1, ROLLOUTS + 1), "rejected")
    assert home.bytes_now() == untrained
    for record in home.registry.versions.list("riacho"):
        assert (record.parent, record.rejected_by) == (0, "learner")
        assert "max_kl = 1e-09" in (record.reason or "")
    home.close()


def test_a_rejection_restores_the_parent_and_a_resume_repeats_it(tmp_path: Path, rewarded: list[Event]) -> None:
    """With some versions accepted and some not, the state is that of the newest accepted one, also after a restart."""
    home = Home(tmp_path, max_kl=MIXED_KL)
    home.append(*(event for event in rewarded if event.session_id[1:] < "7"))
    home.learn()
    numbers = states(home)
    assert set(numbers.values()) == {"candidate", "rejected"}
    assert numbers[7] == "rejected"
    accepted = max(number for number, state in numbers.items() if state == "candidate")
    before = home.bytes_now()
    for name in (checkpoint.ADAPTER, checkpoint.CRITIC, checkpoint.OPTIMIZER):
        assert before[name] == (home.publisher.path(accepted) / name).read_bytes()
    home.crash()
    home.learn()
    assert home.bytes_now() == before
    assert states(home) == numbers
    home.close()


def rollouts_on(partitions: Sequence[int], rewarded: list[Event]) -> list[tuple[Event, Event]]:
    """Completions and their final feedback, each in a session that lies on that one of two partitions."""
    pairs = []
    for n, partition in enumerate(partitions):
        session = next(s for i in range(64) if crc32((s := f"s{n}-{i}").encode()) % 2 == partition)
        changes = {"session_id": session, "completion_id": f"c{n}"}
        completion = rewarded[0].model_copy(update=changes | {"event_id": f"c{n}"})
        pairs.append((completion, rewarded[1].model_copy(update=changes | {"event_id": f"f{n}"})))
    return pairs


def test_tables_follow_the_fold_when_a_crash_changes_the_order(tmp_path: Path, rewarded: list[Event]) -> None:
    """Lost updates are not shown, and each completion names the update and version that learned from it at last."""
    home = Home(tmp_path, partitions=2, publish_every=2)
    (a, judged_a), c, d, (b, judged_b), (unjudged, _) = rollouts_on([0, 0, 0, 1, 1], rewarded)
    home.append(a, *c, *d, b, unjudged)
    home.learn()
    home.append(judged_a)
    home.learn()
    projections = home.registry.projections
    assert next(row.session_ids for row in projections.updates("riacho")) == [a.session_id]
    home.crash()
    assert [row.number for row in projections.updates("riacho")] == [2, 1]
    assert {row.state for row in projections.session("riacho", a.session_id)} == {"waiting"}
    home.append(judged_b)  # on the partition whose turn is first at the checkpoint's positions
    home.learn()
    assert [row.session_ids for row in projections.updates("riacho")][:2] == [[a.session_id], [b.session_id]]
    for session, update in ((a.session_id, 4), (b.session_id, 3)):
        [row] = projections.session("riacho", session)
        assert (row.state, row.rollout_update, row.trained_version) == ("trained", update, 2)
    home.close()


def test_a_rejected_number_is_not_used_again_when_a_crash_changes_the_order(
    tmp_path: Path, rewarded: list[Event]
) -> None:
    """What the resumed learner makes of other events is another version, with the next number."""
    home = Home(tmp_path, partitions=2, max_kl=1e-9)
    first, second = rollouts_on([0, 1], rewarded)
    home.append(*first)
    home.learn()
    assert states(home) == {1: "rejected"}
    home.crash()
    home.append(*second)
    home.learn()
    assert states(home) == {1: "rejected", 2: "rejected", 3: "rejected"}
    assert home.learner.stream.lineage == []
    home.close()


def test_a_fenced_learner_publishes_nothing(home: Home, stream: list[Event]) -> None:
    """Another learner took over while this one was paused."""
    home.registry.leases.release(home.lease)
    home.take_lease("two")
    home.append(*stream[:2])
    with pytest.raises(LeaseLost):
        home.learn()
    assert states(home) == {}


def test_paused_learning_reads_nothing_and_loses_nothing(home: Home, stream: list[Event]) -> None:
    """Resumed, it trains on what came meanwhile."""
    home.append(*stream)
    home.registry.policies.set_paused("riacho", True, "test")
    home.learn()
    assert home.learner.stream.positions == {}
    home.registry.policies.set_paused("riacho", False, "test")
    home.learn()
    assert len(states(home)) == ROLLOUTS


def test_batches_and_publish_interval(tmp_path: Path, stream: list[Event]) -> None:
    """Two rollouts an update and two updates a version: 8 rollouts give 4 updates and 2 versions."""
    home = Home(tmp_path, rollouts_per_update=2, publish_every=2)
    home.append(*stream)
    home.learn()
    updates = home.registry.projections.updates("riacho")
    assert [len(row.session_ids) for row in updates] == [2, 2, 2, 2]
    assert sorted((row.number, row.version) for row in updates) == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert sorted(states(home)) == [1, 2]
    home.close()


def test_replay_gives_the_same_versions(tmp_path: Path, stream: list[Event]) -> None:
    """`replay` folds a log, rollback included, offline: twice the same hashes."""
    write(tmp_path / "log.db", [*stream[:8], rollback(1, 1), *stream[8:]])
    hashes = []
    for name in ("a", "b"):
        command = [
            "-m",
            "learner",
            "replay",
            "--log",
            f"sqlite:///{tmp_path / 'log.db'}",
            "--out",
            str(tmp_path / name),
        ]
        subprocess.run([sys.executable, *command], env=dict(os.environ), check=True, capture_output=True)
        registry = Registry.open(f"sqlite:///{tmp_path / name / 'registry.db'}")
        hashes.append({record.number: record.sha256 for record in registry.versions.list("riacho")})
        assert registry.policies.get("riacho").epoch == 1
        registry.close()
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == ROLLOUTS


def test_a_session_of_two_turns_is_one_rollout(home: Home) -> None:
    """The second turn extends the first; a reward on each turn and one update over both."""
    [(prompt, ids, logprobs, _), (tail, ids2, logprobs2, _)] = sample(2, seed=3)
    shared: dict[str, Any] = {"session_id": "k:chat"}
    base = events(1)[0]
    assert isinstance(base, CompletionEvent)
    first = base.model_copy(
        update=shared
        | {
            "completion_id": "t1",
            "prompt_ids": tuple(prompt),
            "completion_ids": tuple(ids),
            "logprobs": tuple(logprobs),
        }
    )
    second = base.model_copy(
        update=shared
        | {
            "completion_id": "t2",
            "event_id": "t2",
            "prompt_ids": (*prompt, *ids, *tail),
            "completion_ids": tuple(ids2),
            "logprobs": tuple(logprobs2),
        }
    )

    def judge(completion_id: str, final: bool) -> FeedbackEvent:
        return FeedbackEvent(
            event_id=f"f-{completion_id}", policy="riacho", session_id="k:chat", at=START,
            completion_id=completion_id, reward=0.5, final=final, key_id="k",
        )  # fmt: skip

    home.append(first, judge("t1", False), second, judge("t2", True))
    home.learn()
    [update] = home.registry.projections.updates("riacho")
    assert update.metrics["reward"] == 1.0
    assert update.metrics["action_tokens"] == len(ids) + len(ids2)
    assert update.metrics["observation_tokens"] == len(prompt) + len(tail)
