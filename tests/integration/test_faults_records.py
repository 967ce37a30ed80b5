"""Records as a faulty producer leaves them on Kafka, folded by a real learner into PostgreSQL."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from app.events import kafka_topics
from app.events.kafka import KafkaLog
from app.events.kafka_client import Cluster
from app.events.kafka_settings import KafkaSettings
from app.events.log import DeadLetter
from app.events.schema import CompletionEvent, Event, FeedbackEvent, RollbackEvent, encode
from app.registry import Registry
from app.registry.records import CompletionRow
from app.settings import SharedSettings
from tests.broker import new_policy
from tests.builders import START, moment
from tests.fixed_log import events
from tests.service import environment

SESSIONS = 6
HOUR_S = 3600
DEADLINE_S = 240

Rollout = tuple[CompletionEvent, FeedbackEvent]


class Fold:
    """A policy of its own on the tests' broker and database: records go in, a learner folds them, tables come out."""

    def __init__(self, home: Path, server: str, database_url: str) -> None:
        self.home = home
        self.policy = new_policy()
        kafka = KafkaSettings(replication=1)
        settings = SharedSettings(log_url=f"kafka://{server}", policy=self.policy, partitions=3, kafka=kafka)
        self.cluster = Cluster.of(settings)
        kafka_topics.create(self.cluster)
        self.log = KafkaLog(self.cluster)
        self.registry = Registry.open(database_url)
        self._producer = KafkaProducer(bootstrap_servers=[server])
        self._variables = {
            "RIACHO_LOG_URL": f"kafka://{server}",
            "RIACHO_DATABASE_URL": database_url,
            "RIACHO_POLICY": self.policy,
            "RIACHO_KAFKA_REPLICATION": "1",
        }

    def rollouts(self) -> list[Rollout]:
        """Answers that the base gave, each with its final judgement."""
        found = {(event.type, event.event_id): event for event in events(SESSIONS)}
        pairs = []
        for n in range(SESSIONS):
            completion, judgement = found["completion", f"c{n}"], found["feedback", f"f{n}"]
            assert isinstance(completion, CompletionEvent)
            assert isinstance(judgement, FeedbackEvent)
            final = {"policy": self.policy, "final": True}
            pairs.append((completion.model_copy(update={"policy": self.policy}), judgement.model_copy(update=final)))
        return pairs

    def put(self, payload: bytes | None, key: bytes | None = b"k", partition: int | None = None) -> None:
        """A record as it is, in any producer's way."""
        self._producer.send(self.cluster.events_topic, payload, key, partition=partition).get(10)

    def append(self, *stream: Event) -> None:
        for event in stream:
            self.put(encode(event), event.session_id.encode())

    def learn(self, **settings: str) -> None:
        """Let a learner fold to the end of the log."""
        output = self.home / "learner.log"
        with output.open("ab") as file:
            learner = subprocess.run(
                [sys.executable, "-m", "learner", "run", "--until-end"],
                env=environment(self.home, self._variables | settings),
                cwd=self.home,
                stderr=file,
                timeout=DEADLINE_S,
                check=False,
            )
        assert learner.returncode == 0, output.read_text()[-3000:]

    def trained(self) -> list[str]:
        """The sessions of all updates, in their order."""
        updates = self.registry.projections.updates(self.policy)[::-1]
        return [session for update in updates for session in update.session_ids]

    def completion(self, id: str) -> CompletionRow:
        row = self.registry.projections.completion(id)
        assert row is not None
        return row

    def dead_letters(self) -> Sequence[DeadLetter]:
        """As a reader sees them that was not there before."""
        with closing(KafkaLog(self.cluster)) as log:
            return log.dead_letters()

    def close(self) -> None:
        self._producer.close()
        self.log.close()
        self.registry.close()


@pytest.fixture
def fold(tmp_path: Path, kafka_server: str, postgres_url: str) -> Iterator[Fold]:
    with closing(Fold(tmp_path, kafka_server, postgres_url)) as made:
        yield made


def changed(event: Event, **fields: Any) -> bytes:
    """The event's record with other fields, of whatever types and values."""
    return encode(event.model_construct(**dict(event) | fields))


def poison(completion: CompletionEvent, judgement: FeedbackEvent) -> list[tuple[bytes | None, str]]:
    """Payloads that are no events of the policy, with a word of the reason for each."""
    rollback = RollbackEvent(policy=completion.policy, session_id="r", at=START, to=0, epoch=1, reason="forged")
    usage = completion.usage
    return [
        (b"\x00\xff not JSON", "JSON"),
        (b"", "JSON"),
        (None, "JSON"),
        (b"[]", "event"),
        (changed(completion, type="surprise"), "surprise"),
        (changed(completion, schema_version=2), "schema_version"),
        (changed(completion, logprobs=completion.logprobs[1:]), "one logprob per sampled token"),
        (changed(completion, policy="other"), "'other' on the log of"),
        (changed(completion, completion_ids=(99_999, *completion.completion_ids[1:])), "vocabulary"),
        (changed(completion, completion_ids=(-1, *completion.completion_ids[1:])), "vocabulary"),
        (changed(completion, event_id="e" * 513), "512"),
        (changed(completion, session_id="s" * 129), "128"),
        (changed(completion, completion_id="c" * 301), "300"),
        (changed(completion, key_id="k" * 65), "64"),
        (changed(completion, session_id="s\x00"), "U+0000"),
        (changed(completion, completion_id="c\x00"), "U+0000"),
        (changed(completion, key_id="k\x00"), "U+0000"),
        (changed(completion, trainable=False, not_trainable_reason="\x00"), "U+0000"),
        (changed(completion, version=2**31), "version"),
        (changed(completion, usage=usage.model_construct(prompt_tokens=2**31, completion_tokens=1)), "prompt_tokens"),
        (changed(judgement, reward=1e300), "range from 0 to 1"),
        (changed(rollback, to=7), "no version 7"),
        (changed(rollback), "epoch: 1, but the registry is in epoch 0"),
        (changed(rollback, to=10**30), "to"),
    ]


@pytest.mark.timeout(600)
def test_poison_is_kept_as_it_came_and_stops_nobody(fold: Fold) -> None:
    """Each in the dead letters with reason, position, attempts and payload, on all partitions; the rest is trained."""
    rollouts = fold.rollouts()
    bad = poison(*rollouts[0])
    fold.append(*rollouts[0])
    for n, (payload, _) in enumerate(bad):
        fold.put(payload, b"" if n % 2 == 0 else None, partition=n % 3)
    fold.append(*(event for rollout in rollouts[1:] for event in rollout))
    fold.learn()
    letters = fold.dead_letters()
    assert sorted(letter.payload for letter in letters) == sorted(payload or b"" for payload, _ in bad)
    for letter in letters:
        assert any(payload == letter.payload and word in letter.reason for payload, word in _kept(bad)), letter
        assert fold.log.read_at(letter.position).payload == letter.payload
        assert letter.attempts == 1
    assert sorted(fold.trained()) == sorted(completion.session_id for completion, _ in rollouts)


def _kept(bad: Sequence[tuple[bytes | None, str]]) -> list[tuple[bytes, str]]:
    return [(payload or b"", word) for payload, word in bad]


@pytest.mark.timeout(600)
def test_poison_that_is_read_again_or_replayed_has_no_effect(fold: Fold) -> None:
    """Attempts count the readings; a replay of what is still bad is a new dead letter; nothing is trained twice."""
    rollouts = fold.rollouts()[:2]
    outside = changed(rollouts[0][0], completion_ids=(99_999, *rollouts[0][0].completion_ids[1:]))
    fold.append(*rollouts[0], *rollouts[1])
    fold.learn()
    fold.put(outside)
    fold.put(None)
    for attempts in (1, 2):
        fold.learn()
        assert [letter.attempts for letter in fold.dead_letters()] == [attempts] * 2
    for letter in fold.dead_letters():
        asyncio.run(fold.log.replay_dead_letter(letter.id))
    fold.learn()
    again = fold.dead_letters()  # the first records too, since no checkpoint lies behind them yet
    assert sorted(letter.payload for letter in again) == [b"", b"", outside, outside]
    assert {fold.log.read_at(letter.position).payload for letter in again} == {b"", outside}
    assert len(fold.trained()) == 2


@pytest.mark.timeout(600)
def test_two_replays_at_once_train_once(fold: Fold) -> None:
    """Two processes replay the same dead letters: a completion and a judgement may lie there twice, and count once."""
    [(completion, judgement), *_] = fold.rollouts()
    fold.append(completion, judgement)
    end = fold.log.end_positions()
    [record, other] = fold.log.read({}, sum(end.values()))
    for buried in (record, other):
        fold.log.bury(buried, "a mistake", START)

    async def replay_at_once() -> None:
        with closing(KafkaLog(fold.cluster)) as one, closing(KafkaLog(fold.cluster)) as two:
            ids = [letter.id for letter in one.dead_letters()]
            replays = [log.replay_dead_letter(id) for id in ids for log in (one, two)]
            for outcome in await asyncio.gather(*replays, return_exceptions=True):
                assert not isinstance(outcome, BaseException) or isinstance(outcome, KeyError)

    asyncio.run(replay_at_once())
    fold.learn()
    assert list(fold.dead_letters()) == []
    assert fold.trained() == [completion.session_id]
    assert fold.completion(completion.completion_id).rollout_update == 1


@pytest.mark.timeout(600)
def test_duplicates_in_any_order_train_once(fold: Fold) -> None:
    """Every record three times, shuffled, and once more after the training: one update a rollout."""
    rollouts = fold.rollouts()
    stream: list[Event] = [event for rollout in rollouts for event in rollout]
    shuffled = stream * 3
    random.Random(5).shuffle(shuffled)
    fold.append(*shuffled)
    fold.learn()
    fold.append(*reversed(stream))
    fold.learn()
    assert sorted(fold.trained()) == sorted(completion.session_id for completion, _ in rollouts)
    assert list(fold.dead_letters()) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ttl_s", "outcome"), [(HOUR_S + 60, "trained"), (HOUR_S - 60, "expired")])
def test_feedback_an_hour_later(fold: Fold, ttl_s: int, outcome: str) -> None:
    """In event time, and whatever the clock says: within feedback_ttl_s it is trained on, later it has expired."""
    [(completion, judgement), (_, _), *_] = fold.rollouts()
    fold.append(completion.model_copy(update={"at": moment(0)}), judgement.model_copy(update={"at": moment(HOUR_S)}))
    fold.learn(RIACHO_FEEDBACK_TTL_S=str(ttl_s))
    assert fold.completion(completion.completion_id).state == outcome
    assert fold.trained() == ([completion.session_id] if outcome == "trained" else [])
