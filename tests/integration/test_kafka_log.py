"""What the Kafka log does beyond the log's contract: topics, brokers that hang, go away or forget, and monitoring."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType

from app.errors import SetupError
from app.events import kafka_topics
from app.events.kafka import KafkaLog
from app.events.kafka_client import Cluster
from app.events.kafka_settings import KafkaSettings
from app.events.log import EventTooLarge, LogUnavailable, LostRange, Position, PositionAhead
from app.events.schema import decode
from app.settings import SharedSettings
from learner.patience import Patience
from tests.broker import Broker, Proxy, new_policy
from tests.builders import feedback
from tests.service import environment, eventually, riacho


def cluster_at(address: str, partitions: int = 1, **table: Any) -> Cluster:
    """A fresh policy's cluster, without topics."""
    kafka = KafkaSettings(**{"replication": 1, "delivery_timeout_s": 2, **table})
    return Cluster.of(
        SharedSettings(log_url=f"kafka://{address}", policy=new_policy(), partitions=partitions, kafka=kafka)
    )


@contextmanager
def opened(cluster: Cluster) -> Iterator[KafkaLog]:
    """A log whose topics are there."""
    kafka_topics.create(cluster)
    with closing(KafkaLog(cluster)) as log:
        yield log


def append(log: KafkaLog, *names: str, session: str = "s") -> list[Position]:
    async def one_by_one() -> list[Position]:
        return [await log.append(feedback(session, name)) for name in names]

    return asyncio.run(one_by_one())


def appended(log: KafkaLog, name: str) -> bool:
    """Whether an append works now."""
    try:
        append(log, name)
    except LogUnavailable:
        return False
    return True


def ids(log: KafkaLog, after: dict[int, int] | None = None) -> list[str]:
    return [decode(record.payload).event_id for record in log.read(after or {}, 100)]


@pytest.fixture
def broker() -> Iterator[Broker]:
    """A broker that a test may stop or freeze."""
    with Broker() as running:
        yield running


def variables(cluster: Cluster, **extra: str) -> dict[str, str]:
    return {
        "RIACHO_LOG_URL": str(cluster),
        "RIACHO_POLICY": cluster.policy,
        "RIACHO_KAFKA_REPLICATION": "1",
        "RIACHO_PORT": "0",
        **extra,
    }


def test_topics_are_made_once_and_are_right(kafka_server: str, tmp_path: Path) -> None:
    """`log create` makes both, a second time it finds them, and `log check` has nothing to say."""
    cluster = cluster_at(kafka_server, 3)
    env = variables(cluster, RIACHO_PARTITIONS="3")
    for told in ("made", "is there already"):
        result = riacho(tmp_path, "log", "create", extra=env)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines() == [f"{cluster.events_topic}: {told}", f"{cluster.dead_topic}: {told}"]
    assert riacho(tmp_path, "log", "check", extra=env).returncode == 0
    with closing(KafkaAdminClient(bootstrap_servers=[kafka_server])) as admin:
        [events] = admin.describe_topics([cluster.events_topic])
        resource = ConfigResource(ConfigResourceType.TOPIC, cluster.events_topic)
        configs = admin.describe_configs([resource], config_filter="all")["topic"][cluster.events_topic]
    assert len(events["partitions"]) == 3
    assert configs["retention.ms"]["value"] == str(30 * 24 * 3600 * 1000)
    assert configs["max.message.bytes"]["value"] == str(16 * 2**20)
    assert configs["cleanup.policy"]["value"] == "delete"


def test_check_names_each_difference_and_what_to_do(kafka_server: str, tmp_path: Path) -> None:
    """Missing topics, then other partitions, retention and size; the exit status is not 0."""
    cluster = cluster_at(kafka_server)
    missing = riacho(tmp_path, "log", "check", extra=variables(cluster))
    assert missing.returncode != 0
    assert missing.stdout.count("riacho log create") == 2
    kafka_topics.create(cluster)
    other = variables(
        cluster,
        RIACHO_PARTITIONS="4",
        RIACHO_KAFKA_RETENTION_S="90000",
        RIACHO_KAFKA_MAX_MESSAGE_BYTES="1000000",
    )
    result = riacho(tmp_path, "log", "check", extra=other)
    assert result.returncode != 0
    lines = [line for line in result.stdout.splitlines() if line.startswith(f"{cluster.events_topic} ")]
    assert len(lines) == 3
    assert "RIACHO_PARTITIONS=1" in lines[0]
    assert any("retention.ms=90000000" in line and "kafka-configs" in line for line in lines)
    assert any("max.message.bytes=1000000" in line for line in lines)


def test_create_and_check_have_nothing_to_do_for_the_embedded_log(tmp_path: Path) -> None:
    """They say so, and are no error."""
    for command in ("create", "check"):
        result = riacho(tmp_path, "log", command)
        assert result.returncode == 0
        assert "embedded" in result.stdout


def test_app_does_not_start_without_topics(kafka_server: str, tmp_path: Path) -> None:
    """The message names the topics and the command that makes them."""
    cluster = cluster_at(kafka_server)
    assert riacho(tmp_path, "db", "upgrade").returncode == 0
    result = riacho(tmp_path, "serve", extra=variables(cluster))
    assert result.returncode == 1
    assert cluster.events_topic in result.stderr
    assert "riacho log create" in result.stderr
    assert "Traceback" not in result.stderr


def test_learner_does_not_start_without_topics(kafka_server: str, tmp_path: Path) -> None:
    """It ends as for any wrong setting, so that `riacho up` does not start it again and again."""
    cluster = cluster_at(kafka_server)
    assert riacho(tmp_path, "db", "upgrade").returncode == 0
    result = subprocess.run(
        [sys.executable, "-m", "learner", "run"],
        env=environment(tmp_path, variables(cluster)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == os.EX_CONFIG
    assert "riacho log create" in result.stderr


def test_brokers_that_are_not_there_are_named(tmp_path: Path) -> None:
    """The log opens, since a spool may stand before it; the first use says which address did not answer."""
    with Broker() as gone:
        pass
    with closing(KafkaLog(cluster_at(gone.address))) as log:
        with pytest.raises(LogUnavailable, match=gone.address):
            log.end_positions()


def test_frozen_broker_is_an_unavailable_log_and_thaws(broker: Broker) -> None:
    """Appends and reads say so while it hangs; what is appended after the thaw is acknowledged and read."""
    with opened(cluster_at(broker.address)) as log:
        append(log, "before")
        broker.freeze()
        for attempt in (
            lambda: append(log, "frozen"),
            lambda: log.read({}, 10),
            lambda: log.read_at(Position(0, 0)),
            log.end_positions,
            log.dead_letters,
        ):
            with pytest.raises(LogUnavailable, match=broker.address):
                attempt()
        broker.thaw()
        eventually(lambda: appended(log, "after"), "an append after the thaw")
        found = ids(log)
        assert (found[0], found[-1]) == ("before", "after")
        assert set(found) <= {"before", "frozen", "after"}


def test_frozen_broker_does_not_hold_up_the_event_loop(broker: Broker) -> None:
    """Other work goes on while an append waits, also while a new producer looks for the broker."""
    with opened(cluster_at(broker.address)) as log:
        append(log, "before")
        broker.freeze()
        assert not appended(log, "expires")

        async def count_while_waiting() -> int:
            turns, waiting = 0, asyncio.ensure_future(log.append(feedback("s", "waits")))
            while not waiting.done():
                await asyncio.sleep(0)
                turns += 1
            with pytest.raises(LogUnavailable):
                waiting.result()
            return turns

        assert asyncio.run(count_while_waiting()) > 100


def test_producer_outlives_a_broker_that_forgot_it(broker: Broker) -> None:
    """The restarted broker knows neither topics nor producer; with topics, appends are acknowledged again."""
    cluster = cluster_at(broker.address)
    with opened(cluster) as log:
        append(log, "a", "b", "c")
        broker.restart()
        kafka_topics.create(cluster)
        eventually(lambda: appended(log, "again"), "an append after the restart")
        assert ids(log)[-1] == "again"


def test_log_that_was_cut_off_goes_on() -> None:
    """Broken connections and a broker that cannot be reached: afterwards reads go on where they stood."""
    with Proxy() as proxy, Broker(advertised=proxy.address) as behind:
        proxy.target = behind.port
        with opened(cluster_at(proxy.address)) as log:
            append(log, "a", "b")
            assert ids(log, {0: 1}) == ["b"]
            proxy.cut()
            with pytest.raises(LogUnavailable):
                log.read({0: 2}, 10)
            assert not appended(log, "lost")
            proxy.join()
            eventually(lambda: appended(log, "c"), "an append after the cut")
            assert ids(log, {0: 1}) == ["b", "c"]


def test_connections_that_break_in_a_long_update_are_made_again() -> None:
    """Nobody polled meanwhile: the learner's next read goes on, with nothing lost or twice."""
    with Proxy() as proxy, Broker(advertised=proxy.address) as behind:
        proxy.target = behind.port
        with opened(cluster_at(proxy.address)) as log:
            append(log, "a")
            assert ids(log) == ["a"]
            proxy.cut()
            proxy.join()
            assert Patience(lambda: True)(ids, log, {0: 1}) == []
            eventually(lambda: appended(log, "b"), "an append")
            assert Patience(lambda: True)(ids, log, {0: 1}) == ["b"]


def test_outage_leaves_no_threads(broker: Broker) -> None:
    """However often the log is asked while the broker is away."""
    with opened(cluster_at(broker.address)) as log:
        append(log, "a")
        log.read({}, 1)
        broker.stop()
        for _ in range(3):
            with pytest.raises(LogUnavailable):
                log.read({}, 1)
        few = threading.active_count()
        for _ in range(4):
            with pytest.raises(LogUnavailable):
                log.read({}, 1)
        assert threading.active_count() <= few


def test_too_large_an_event_is_refused_before_it_is_sent(kafka_server: str) -> None:
    """The error names size and limit, is no unavailable log, and nothing is appended."""
    with opened(cluster_at(kafka_server, max_message_bytes=2**16)) as log:
        large = feedback("s", "large", comment="x" * 2**16)
        with pytest.raises(EventTooLarge, match=r"65536 \(kafka\.max_message_bytes\)"):
            asyncio.run(log.append(large))
        assert log.end_positions() == {0: 0}
        append(log, "small")


def test_event_at_the_limit_can_become_a_dead_letter(kafka_server: str) -> None:
    """With the longest reason, as it came."""
    with opened(cluster_at(kafka_server, max_message_bytes=2**16, compression="none")) as log:
        [position] = [asyncio.run(log.append(feedback("s", "large", comment="x" * (2**16 - 1000))))]
        record = log.read_at(position)
        log.bury(record, "y" * 10_000, decode(record.payload).at)
        [letter] = log.dead_letters()
        assert letter.payload == record.payload


def test_progress_shows_in_kafkas_tools(kafka_server: str) -> None:
    """The checkpoint's positions are committed offsets of the learner's group, which has no members."""
    cluster = cluster_at(kafka_server, 2)
    with opened(cluster) as log, closing(KafkaAdminClient(bootstrap_servers=[kafka_server])) as admin:
        for positions in ({0: 3, 1: 0}, {0: 5, 1: 2}):
            log.mark_read(positions)
            found = admin.list_group_offsets({cluster.group: None})[cluster.group]
            assert {tp.partition: committed.offset for tp, committed in found.items()} == positions
            assert {tp.topic for tp in found} == {cluster.events_topic}


def test_progress_that_cannot_be_shown_is_only_a_warning(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """And it shows again when the broker is back."""
    with opened(cluster_at(broker.address)) as log:
        log.mark_read({0: 1})
        broker.freeze()
        with caplog.at_level(logging.WARNING, "app"):
            log.mark_read({0: 2})
            assert [r.levelname for r in caplog.records if r.name == "app.events.kafka"] == ["WARNING"]
            broker.thaw()
            caplog.clear()
            eventually(lambda: _marked(log, caplog), "a commit after the thaw")


def _marked(log: KafkaLog, caplog: pytest.LogCaptureFixture) -> bool:
    caplog.clear()
    log.mark_read({0: 3})
    return not [r for r in caplog.records if r.name == "app.events.kafka"]


def test_committed_offsets_are_never_read_back(kafka_server: str) -> None:
    """A reader begins where it is told to, whatever the group has committed."""
    cluster = cluster_at(kafka_server)
    with opened(cluster) as log:
        append(log, "a", "b", "c")
        log.mark_read({0: 2})
    with closing(KafkaLog(cluster)) as log:
        assert ids(log) == ["a", "b", "c"]


def test_busy_partition_does_not_hold_up_another(kafka_server: str) -> None:
    """Every read has records of each partition that has some, in order, and a second reader sees the same order."""
    cluster = cluster_at(kafka_server, 3)
    with opened(cluster) as log:
        with closing(KafkaProducer(bootstrap_servers=[kafka_server])) as other:
            for partition, count in ((0, 3000), (1, 20), (2, 20)):
                for i in range(count):
                    other.send(cluster.events_topic, b"%d" % i, partition=partition)
            other.flush()
        orders = []
        for reader in (log, KafkaLog(cluster)):
            after, order = {0: 0, 1: 0, 2: 0}, []
            while min(after[1], after[2]) < 20:
                records = reader.read(after, 16)
                left = {p for p in (0, 1, 2) if after[p] < (3000, 20, 20)[p]}
                assert {record.position.partition for record in records} == left
                for record in records:
                    partition, offset = record.position
                    assert (offset, record.payload) == (after[partition], b"%d" % offset)
                    after[partition] = offset + 1
                order += [record.position for record in records]
            orders.append(order)
            if reader is not log:
                reader.close()
        assert orders[0] == orders[1]


def test_read_survives_jumps_back_and_forth(kafka_server: str) -> None:
    """What was fetched ahead never answers for another position."""
    with opened(cluster_at(kafka_server)) as log:
        append(log, *(f"e{i}" for i in range(10)))
        for at in (0, 7, 3, 3, 9, 10, 0, 5):
            assert ids(log, {0: at}) == [f"e{i}" for i in range(at, 10)]
            assert decode(log.read_at(Position(0, 1)).payload).event_id == "e1"


@pytest.mark.kafka_only
def test_partition_that_is_added_later_is_read(kafka_server: str) -> None:
    """Nothing that lies on it is overlooked: its positions begin at 0."""
    cluster = cluster_at(kafka_server)
    with opened(cluster) as log, closing(KafkaAdminClient(bootstrap_servers=[kafka_server])) as admin:
        append(log, "a")
        admin.create_partitions({cluster.events_topic: 2})
        with closing(KafkaLog(cluster)) as later:
            eventually(lambda: later.end_positions().keys() == {0, 1}, "both partitions")


@pytest.mark.kafka_only
def test_records_that_retention_took_are_named(kafka_server: str) -> None:
    """A position before the beginning is an error that says which offsets are gone, never a silent jump."""
    cluster = cluster_at(kafka_server)
    with opened(cluster) as log, closing(KafkaAdminClient(bootstrap_servers=[kafka_server])) as admin:
        append(log, "a", "b", "c", "d")
        admin.delete_records({TopicPartition(cluster.events_topic, 0): 3})
        with pytest.raises(LostRange, match="offsets 1 to 2 are gone"):
            log.read({0: 1}, 10)
        with pytest.raises(LostRange):
            log.read_at(Position(0, 0))
        assert ids(log, {0: 3}) == ["d"]


@pytest.mark.kafka_only
def test_size_limit_of_the_topic_holds(kafka_server: str) -> None:
    """An event that fits the settings and not the topic is too large, not an unavailable log."""
    cluster = cluster_at(kafka_server, max_message_bytes=2**16, compression="none")
    with opened(cluster), closing(KafkaLog(replace(cluster, table=KafkaSettings(replication=1)))) as log:
        with pytest.raises(EventTooLarge):
            asyncio.run(log.append(feedback("s", "large", comment=os.urandom(2**17).hex())))
        append(log, "small")


def test_brokers_that_leave_out_an_offset_are_not_believed(kafka_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap in what a consumer gives, as retention leaves it, is a lost range."""
    with opened(cluster_at(kafka_server)) as log:
        append(log, "a", "b", "c")
        poll = KafkaConsumer.poll

        def without_the_first(self: KafkaConsumer, *args: Any, **kwargs: Any) -> dict[Any, list[Any]]:
            return {tp: records[1:] for tp, records in poll(self, *args, **kwargs).items()}

        monkeypatch.setattr(KafkaConsumer, "poll", without_the_first)
        with pytest.raises(LostRange, match="offsets 0 to 0 are gone"):
            log.read({}, 10)


def test_another_log_in_the_logs_place_is_noticed(broker: Broker) -> None:
    """A broker that lost everything has a shorter log than the reader's positions."""
    cluster = cluster_at(broker.address)
    with opened(cluster) as log:
        append(log, "a", "b")
        assert ids(log) == ["a", "b"]
        broker.restart()
        kafka_topics.create(cluster)

        def ahead() -> bool:
            try:
                log.read({0: 2}, 10)
            except LogUnavailable:
                return False
            except PositionAhead:
                return True
            return False

        eventually(ahead, "an error that the reader is ahead")


def test_wrong_replication_says_what_a_single_broker_takes(kafka_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal of Kafka's is a setup error with its reason."""
    answer = {"name": "t", "error_code": 38, "error_message": "Replication factor: 3 larger than available brokers: 1."}
    monkeypatch.setattr(KafkaAdminClient, "create_topics", lambda *_, **__: {"topics": [answer]})
    with pytest.raises(SetupError, match=r"larger than available brokers.*RIACHO_KAFKA_REPLICATION=1"):
        kafka_topics.create(cluster_at(kafka_server))
