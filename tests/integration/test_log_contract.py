"""The event log's contract. Every log that the service can use is put through the same tests."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.errors import SetupError
from app.events import kafka_topics
from app.events.kafka_settings import KafkaSettings
from app.events.log import EventLog, LostRange, Position, PositionAhead, Record
from app.events.open import kafka_cluster, open_log
from app.events.schema import Event, FeedbackEvent, decode, encode
from app.settings import SharedSettings
from tests.broker import new_policy
from tests.builders import completion, feedback, moment

APPENDER = """
import asyncio, sys
from datetime import UTC, datetime
from app.events.open import open_log
from app.events.schema import FeedbackEvent
from app.settings import SharedSettings

settings, name, count, sessions = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
log = open_log(SharedSettings.model_validate_json(settings))

async def main():
    for i in range(count):
        event = FeedbackEvent(
            event_id=f"{name}-{i}", policy="riacho", session_id=f"s{i % sessions}", at=datetime.now(UTC),
            reward=float(i), key_id="k",
        )
        print(await log.append(event), event.event_id, flush=True)

asyncio.run(main())
"""


@dataclass(frozen=True)
class Backend:
    """A place for one fresh log, which several processes can open by its settings."""

    url: str
    policy: str = "riacho"

    def settings(self, partitions: int) -> SharedSettings:
        """What opens the log, once what has to be made for it is there."""
        settings = SharedSettings(
            log_url=self.url, policy=self.policy, partitions=partitions, kafka=KafkaSettings(replication=1)
        )
        cluster = kafka_cluster(settings)
        if cluster is not None:
            kafka_topics.create(cluster)
        return settings

    @contextmanager
    def open(self, partitions: int = 1) -> Iterator[EventLog]:
        log = open_log(self.settings(partitions))
        try:
            yield log
        finally:
            log.close()


@pytest.fixture(params=["sqlite", "kafka"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "sqlite":
        return Backend(f"sqlite:///{tmp_path / 'folder' / 'log.db'}")
    return Backend(f"kafka://{request.getfixturevalue('kafka_server')}", new_policy())


@pytest.fixture
def log(backend: Backend) -> Iterator[EventLog]:
    """A fresh log with one partition."""
    with backend.open() as opened:
        yield opened


def _append(log: EventLog, events: Sequence[Event]) -> list[Position]:
    async def all_of_them() -> list[Position]:
        return [await log.append(event) for event in events]

    return asyncio.run(all_of_them())


def _replay(log: EventLog, id: int) -> Position:
    return asyncio.run(log.replay_dead_letter(id))


def _numbered(count: int, session: str = "s") -> list[Event]:
    return [feedback(session, f"{session}-{i}") for i in range(count)]


def _ids(records: Sequence[Record]) -> list[str]:
    return [decode(record.payload).event_id for record in records]


def _everything(log: EventLog) -> list[Record]:
    """All records, read in small pieces as the learner does."""
    after: dict[int, int] = {}
    records: list[Record] = []
    while piece := log.read(after, 7):
        records += piece
        for record in piece:
            after[record.position.partition] = record.position.offset + 1
    return records


def _appender(backend: Backend, name: str, count: int, sessions: int = 4) -> "subprocess.Popen[str]":
    settings = backend.settings(3)
    return subprocess.Popen(
        [sys.executable, "-c", APPENDER, settings.model_dump_json(), name, str(count), str(sessions)],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )


def _printed(output: str) -> dict[Position, str]:
    pairs = (line.split() for line in output.splitlines())
    return {Position.parse(position): event_id for position, event_id in pairs}


def test_empty_log_has_nothing_to_read(log: EventLog) -> None:
    """A fresh log ends at its beginning."""
    assert list(log.read({}, 10)) == []
    assert log.end_positions() == {0: 0}
    assert list(log.dead_letters()) == []


def test_appended_events_are_read_as_they_were(log: EventLog) -> None:
    """Payloads are the encoded events, bytes for bytes, in the order of their append."""
    events: list[Event] = [completion("s", "a"), feedback("s", "f"), completion("t", "b")]
    positions = _append(log, events)
    records = log.read({}, 10)
    assert [r.position for r in records] == positions
    assert [r.payload for r in records] == [encode(event) for event in events]


def test_positions_rise_by_one(log: EventLog) -> None:
    """Offsets of a partition have no gaps, and the end is the offset that the next record gets."""
    assert _append(log, _numbered(5)) == [Position(0, i) for i in range(5)]
    assert log.end_positions() == {0: 5}
    assert _append(log, _numbered(1)) == [Position(0, 5)]


def test_reading_starts_at_the_position_given(log: EventLog) -> None:
    """`after` names the first offset that is wanted; at the end there is nothing."""
    _append(log, _numbered(5))
    assert _ids(log.read({0: 3}, 10)) == ["s-3", "s-4"]
    assert list(log.read({0: 5}, 10)) == []


def test_reading_twice_gives_the_same(log: EventLog) -> None:
    """A read takes nothing away and remembers nothing."""
    _append(log, _numbered(3))
    assert list(log.read({}, 10)) == list(log.read({}, 10))


def test_limit_is_kept(log: EventLog) -> None:
    """At most `limit` records come, from the front."""
    _append(log, _numbered(5))
    assert _ids(log.read({}, 2)) == ["s-0", "s-1"]
    assert _ids(log.read({0: 2}, 2)) == ["s-2", "s-3"]


def test_new_records_are_seen_by_an_open_reader(backend: Backend, log: EventLog) -> None:
    """A reader that was open before the append reads it, though another connection wrote it."""
    with backend.open() as reader:
        assert list(reader.read({}, 10)) == []
        _append(log, _numbered(1))
        assert _ids(reader.read({}, 10)) == ["s-0"]
        assert reader.end_positions() == {0: 1}


def test_read_at_gives_the_record_at_a_position(log: EventLog) -> None:
    """One record by its position, as the joins keep it."""
    positions = _append(log, _numbered(4))
    record = log.read_at(positions[2])
    assert (record.position, _ids([record])) == (positions[2], ["s-2"])


def test_read_at_a_position_that_is_not_there_is_an_error_that_names_it(log: EventLog) -> None:
    """What the log does not hold is never a different record."""
    _append(log, _numbered(1))
    with pytest.raises(LostRange, match="9"):
        log.read_at(Position(0, 9))


def test_partitions_keep_the_order_of_each_session(backend: Backend) -> None:
    """A session lies on one partition in the order of its appends; sessions spread over several."""
    sessions = [f"session-{i}" for i in range(12)]
    with backend.open(4) as log:
        positions = _append(log, [feedback(s, f"{s}/{i}") for i in range(5) for s in sessions])
        records = _everything(log)
        ends = log.end_positions()
    used = {position.partition for position in positions}
    assert len(used) > 1
    assert ends.keys() == {0, 1, 2, 3}
    for session in sessions:
        mine = [r for r in records if decode(r.payload).session_id == session]
        assert len({r.position.partition for r in mine}) == 1
        assert _ids(mine) == [f"{session}/{i}" for i in range(5)]
    for partition, end in ends.items():
        assert [r.position.offset for r in records if r.position.partition == partition] == list(range(end))
    assert len(records) == 60


def test_limit_and_positions_hold_over_several_partitions(backend: Backend) -> None:
    """The limit is on all partitions together, and each has its own position."""
    with backend.open(3) as log:
        positions = _append(log, [feedback(f"s{i}", f"e{i}") for i in range(30)])
        assert len(log.read({}, 8)) == 8
        ends = log.end_positions()
        assert min(ends.values()) > 1
        last_ones = log.read({partition: end - 1 for partition, end in ends.items()}, 100)
    assert {r.position for r in last_ones} == {Position(p, end - 1) for p, end in ends.items()}
    assert len(set(positions)) == 30


def test_busy_partition_does_not_hold_up_another(backend: Backend) -> None:
    """Every read has records of each partition that has some, and a second reader sees the same order."""
    with backend.open(3) as log:
        _append(log, [feedback("busy", f"busy-{i}") for i in range(100)])
        quiet = _append(log, [feedback(f"s{i}", f"e{i}") for i in range(20)])
        assert len({position.partition for position in quiet}) == 3
        ends = log.end_positions()
        orders = []
        for _ in range(2):
            after, order = dict.fromkeys(ends, 0), list[Position]()
            while waiting := {partition for partition in ends if after[partition] < ends[partition]}:
                records = log.read(after, 7)
                assert {record.position.partition for record in records} == waiting
                for record in records:
                    assert record.position.offset == after[record.position.partition]
                    after[record.position.partition] += 1
                order += [record.position for record in records]
            orders.append(order)
        assert len(orders[0]) == sum(ends.values())
        assert orders[0] == orders[1]


def test_log_keeps_its_partitions(backend: Backend) -> None:
    """An existing log is opened with its own number of partitions, so that sessions stay where they are."""
    with backend.open(3) as log:
        before = _append(log, [feedback(f"s{i}", "e") for i in range(9)])
    with backend.open(8) as log:
        assert log.end_positions().keys() == {0, 1, 2}
        after = _append(log, [feedback(f"s{i}", "e2") for i in range(9)])
    assert [p.partition for p in after] == [p.partition for p in before]


def test_log_is_there_after_it_was_closed(backend: Backend) -> None:
    """Records, positions and dead letters survive a close."""
    with backend.open() as log:
        _append(log, _numbered(2))
        log.bury(log.read_at(Position(0, 1)), "why", moment(1))
    with backend.open() as log:
        assert _ids(log.read({}, 10)) == ["s-0", "s-1"]
        assert [letter.reason for letter in log.dead_letters()] == ["why"]
        assert _append(log, _numbered(1)) == [Position(0, 2)]


def test_buried_record_is_kept_with_its_reason(log: EventLog) -> None:
    """A dead letter has the position, reason, event time and payload as it came; the log keeps the record."""
    payload = b"\x00 not an event \xff"
    _append(log, _numbered(1))
    log.bury(Record(Position(0, 0), payload), "event: Invalid JSON", moment(5))
    [letter] = log.dead_letters()
    assert (letter.position, letter.reason, letter.attempts) == (Position(0, 0), "event: Invalid JSON", 1)
    assert (letter.payload, letter.at) == (payload, moment(5))
    assert _ids(log.read({}, 10)) == ["s-0"]


def test_burying_again_raises_the_attempts(log: EventLog) -> None:
    """The same position again, after a restart, is one dead letter with one more attempt and the latest reason."""
    record = Record(Position(0, 0), b"x")
    log.bury(record, "first", moment(1))
    log.bury(record, "second", moment(2))
    log.bury(Record(Position(0, 1), b"x"), "other", moment(3))
    letters = log.dead_letters()
    assert [(letter.position.offset, letter.reason, letter.attempts) for letter in letters] == [
        (0, "second", 2),
        (1, "other", 1),
    ]


def test_dead_letters_come_oldest_first(log: EventLog) -> None:
    """In the order in which they were first buried."""
    for offset in (4, 2, 7):
        log.bury(Record(Position(0, offset), b"x"), str(offset), moment(offset))
    assert [letter.reason for letter in log.dead_letters()] == ["4", "2", "7"]


def test_replayed_dead_letter_is_appended_as_it_came(log: EventLog) -> None:
    """Its payload is the newest record, it is no longer a dead letter, and the others stay."""
    _append(log, _numbered(2))
    for offset, payload in enumerate((b"one", b"two")):
        log.bury(Record(Position(0, offset), payload), "why", moment(1))
    first, second = log.dead_letters()
    position = _replay(log, first.id)
    assert position == Position(0, 2)
    assert log.read_at(position).payload == b"one"
    assert list(log.dead_letters()) == [second]


def test_replay_keeps_the_partition(backend: Backend) -> None:
    """A replayed event stays on the partition of its session."""
    with backend.open(4) as log:
        positions = _append(log, [feedback(f"s{i}", f"e{i}") for i in range(12)])
        for position in positions:
            log.bury(log.read_at(position), "why", moment(1))
        for letter in log.dead_letters():
            again = _replay(log, letter.id)
            assert again.partition == letter.position.partition
            assert log.read_at(again).payload == letter.payload


def test_replay_of_an_unknown_dead_letter_is_a_key_error(log: EventLog) -> None:
    """Also the second replay of the same one; nothing is appended."""
    log.bury(Record(Position(0, 0), b"x"), "why", moment(1))
    [letter] = log.dead_letters()
    _replay(log, letter.id)
    for unknown in (letter.id, 12345):
        with pytest.raises(KeyError):
            _replay(log, unknown)
    assert log.end_positions() == {0: 1}


def test_of_replays_and_drops_at_once_one_takes_the_dead_letter(log: EventLog) -> None:
    """Ten callers of one process: the first has it and all others are told that it is gone."""
    log.bury(Record(Position(0, 0), b"x"), "why", moment(1))
    [letter] = log.dead_letters()

    async def at_once() -> list[object]:
        replays = [log.replay_dead_letter(letter.id) for _ in range(5)]
        drops = [asyncio.to_thread(log.drop_dead_letter, letter.id) for _ in range(5)]
        return list(await asyncio.gather(*replays, *drops, return_exceptions=True))

    outcomes = asyncio.run(at_once())
    assert sum(isinstance(outcome, KeyError) for outcome in outcomes) == 9
    replayed = sum(isinstance(outcome, Position) for outcome in outcomes)
    assert log.end_positions() == {0: replayed}
    assert list(log.dead_letters()) == []


def test_replayed_record_that_fails_again_is_a_new_dead_letter(log: EventLog) -> None:
    """It has a new position and an id of its own, so that the old id never replays something else."""
    log.bury(Record(Position(0, 0), b"x"), "why", moment(1))
    [letter] = log.dead_letters()
    log.bury(log.read_at(_replay(log, letter.id)), "again", moment(2))
    [second] = log.dead_letters()
    assert second.id != letter.id
    assert (second.reason, second.payload) == ("again", b"x")


def test_concurrent_appends_of_one_process_lose_nothing(log: EventLog) -> None:
    """Requests append at the same time: every one has its own position and all are read."""

    async def at_once() -> list[Position]:
        return list(await asyncio.gather(*(log.append(event) for event in _numbered(40))))

    positions = asyncio.run(at_once())
    assert sorted(positions) == [Position(0, i) for i in range(40)]
    by_position = {r.position: decode(r.payload).event_id for r in log.read({}, 100)}
    assert [by_position[p] for p in positions] == [f"s-{i}" for i in range(40)]


def test_two_processes_that_append_at_once_lose_nothing(backend: Backend) -> None:
    """Both open the new log and append at the same time: every printed position holds that event, none twice."""
    processes = [_appender(backend, name, 60) for name in ("a", "b")]
    printed = [_printed(process.communicate()[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    first, second = printed
    assert len(first) == len(second) == 60
    assert not first.keys() & second.keys()
    with backend.open(3) as log:
        records = _everything(log)
        ends = log.end_positions()
    assert {r.position: decode(r.payload).event_id for r in records} == first | second
    assert sum(ends.values()) == 120
    for name in "ab":
        mine = [decode(r.payload) for r in records]
        for session in {event.session_id for event in mine}:
            rewards = [
                e.reward
                for e in mine
                if isinstance(e, FeedbackEvent) and e.session_id == session and e.event_id.startswith(name)
            ]
            assert rewards == sorted(rewards)


def test_acknowledged_appends_survive_a_kill(backend: Backend) -> None:
    """A process is killed while it appends: every position that it printed is there with its event."""
    process = _appender(backend, "a", 100_000)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(25)]
    process.kill()
    printed = _printed("".join(lines) + _whole_lines(process.stdout.read()))
    assert process.wait() == -9
    assert len(printed) >= 25
    with backend.open(3) as log:
        for position, event_id in printed.items():
            assert decode(log.read_at(position).payload).event_id == event_id
        records = _everything(log)
        assert {r.position for r in records} >= printed.keys()
        assert len(records) <= len(printed) + 1
        assert _append(log, [feedback("after", "the kill")])[0] not in printed


def _whole_lines(text: str) -> str:
    return text[: text.rfind("\n") + 1]


def test_dropped_dead_letter_is_gone(log: EventLog) -> None:
    """It leaves the list for good, the log keeps its record, and a second drop is a KeyError."""
    _append(log, _numbered(1))
    for offset in (0, 1):
        log.bury(Record(Position(0, offset), b"x"), "why", moment(1))
    first, second = log.dead_letters()
    log.drop_dead_letter(first.id)
    assert list(log.dead_letters()) == [second]
    assert log.end_positions() == {0: 1}
    with pytest.raises(KeyError):
        log.drop_dead_letter(first.id)


def test_reader_beyond_the_end_is_an_error_that_names_both(log: EventLog) -> None:
    """A log that is shorter than what was read of it is another log."""
    _append(log, _numbered(2))
    with pytest.raises(PositionAhead, match=r"ends at offset 2.* up to 9"):
        log.read({0: 9}, 10)


@pytest.mark.parametrize("url", ["sqlite", "sqlite:///", "mongo:///x", "/tmp/log.db", "kafka:/h:1"])
def test_unknown_address_is_an_error_that_names_the_setting(url: str) -> None:
    """The message says which addresses there are."""
    with pytest.raises(SetupError, match="sqlite:///PATH") as caught:
        open_log(SharedSettings(log_url=url))
    assert caught.value.param == "log_url"


def test_file_that_is_no_log_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Another file in the log's place is not overwritten."""
    path = tmp_path / "log.db"
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(SetupError, match=r"log\.db"):
        open_log(SharedSettings(log_url=f"sqlite:///{path}"))
    assert path.read_bytes() == b"something else entirely" * 100


def test_dropped_dead_letter_is_gone_for_good(log: EventLog) -> None:
    """It is neither listed nor replayed any more, and nothing else changes."""
    for offset in range(2):
        log.bury(Record(Position(0, offset), b"x"), "why", moment(1))
    first, second = log.dead_letters()
    log.drop_dead_letter(first.id)
    assert list(log.dead_letters()) == [second]
    with pytest.raises(KeyError):
        _replay(log, first.id)
    assert log.end_positions() == {0: 0}


def test_drop_of_an_unknown_dead_letter_is_a_key_error(log: EventLog) -> None:
    """Also the second drop of the same one."""
    log.bury(Record(Position(0, 0), b"x"), "why", moment(1))
    [letter] = log.dead_letters()
    log.drop_dead_letter(letter.id)
    for unknown in (letter.id, 12345):
        with pytest.raises(KeyError):
            log.drop_dead_letter(unknown)
