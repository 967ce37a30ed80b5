"""The production event log: a Kafka topic a policy, keyed by session."""

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime

from kafka import KafkaAdminClient, TopicPartition
from kafka.errors import KafkaError, NoError
from kafka.structs import OffsetAndMetadata

from app.events import kafka_topics
from app.events.kafka_client import Cluster
from app.events.kafka_dead import DeadLetters
from app.events.kafka_reader import Fetched, Reader
from app.events.kafka_writer import RECORD_OVERHEAD, Message, Writer
from app.events.log import (
    DeadLetter,
    EventLog,
    EventTooLarge,
    LogUnavailable,
    LostRange,
    Position,
    PositionAhead,
    Record,
)
from app.events.schema import Event, encode

log = logging.getLogger(__name__)


class KafkaLog(EventLog):
    """A policy's events and dead letters on a Kafka cluster.

    The topic says how many partitions there are. Events of one partition are read in the order of their appends;
    between partitions there is no order, so a rollback holds from where its reader meets it, and events that were
    appended before it on other partitions may still come after it (rollbacks share a session, and so keep their order).

    Raises SetupError where the topics are missing. No broker has to answer yet.
    """

    def __init__(self, cluster: Cluster) -> None:
        try:
            kafka_topics.require(cluster)
        except LogUnavailable as error:
            log.warning("the topics are not checked: %s", error)
        self._cluster = cluster
        self._topic = cluster.events_topic
        self._writer = Writer(cluster)
        self._stream = Reader(cluster, self._topic)
        self._lookup = Reader(cluster, self._topic)  # of its own, so that a look back does not move the stream
        self._dead = DeadLetters(cluster, self._writer)
        self._settling = threading.Lock()
        self._admin: KafkaAdminClient | None = None

    async def append(self, event: Event) -> Position:
        payload, key = encode(event), event.session_id.encode()
        limit = self._cluster.table.max_message_bytes
        if len(payload) + len(key) + RECORD_OVERHEAD > limit:
            raise EventTooLarge(len(payload), limit)
        return await self._writer.append(Message(self._topic, key, payload))

    def read(self, after: Mapping[int, int], limit: int) -> Sequence[Record]:
        wanted = {partition: after.get(partition, 0) for partition in self._stream.partitions()}
        return [_record(fetched) for fetched in self._stream.read(wanted, limit)]

    def read_at(self, position: Position) -> Record:
        partition, offset = position
        gone = LostRange(partition, offset, offset + 1)
        if partition not in self._lookup.partitions():
            raise gone
        try:
            found = self._lookup.read({partition: offset}, 1)
        except PositionAhead:
            raise gone from None
        if not found:
            raise gone
        return _record(found[0])

    def end_positions(self) -> dict[int, int]:
        return self._lookup.ends()

    def bury(self, record: Record, reason: str, at: datetime) -> None:
        self._dead.bury(record, reason, at)

    def dead_letters(self) -> Sequence[DeadLetter]:
        return self._dead.all()

    async def replay_dead_letter(self, id: int) -> Position:
        """As EventLog's, and one caller of this process at a time.

        Two processes that replay the same letter at once both append it, as a crash between the append and the
        removal does; the same event again counts once.
        """
        return await asyncio.to_thread(self._replay, id)

    def _replay(self, id: int) -> Position:
        with self._settling:
            letter = self._dead.get(id)
            key = str(letter.position).encode()
            position = self._writer.append_now(Message(self._topic, key, letter.payload, letter.position.partition))
            self._dead.take_out(letter)
        return position

    def drop_dead_letter(self, id: int) -> None:
        with self._settling:
            self._dead.take_out(self._dead.get(id))

    def mark_read(self, positions: Mapping[int, int]) -> None:
        offsets = {
            TopicPartition(self._topic, partition): OffsetAndMetadata(offset, "", -1)
            for partition, offset in positions.items()
        }
        try:
            self._commit(offsets)
        except KafkaError as error:
            log.warning("the learner's progress does not show in Kafka's tools: %s", error)
            self._close_admin()

    def append_raw(self, key: str, payload: bytes) -> Position:
        """Append bytes as they are, as a producer outside Riacho might."""
        return self._writer.append_now(Message(self._topic, key.encode(), payload))

    def close(self) -> None:
        self._writer.close()
        for reader in (self._stream, self._lookup, self._dead):
            reader.close()
        self._close_admin()

    def _commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """As an administrator, so that the learner is never a member of the group that shows its progress."""
        if self._admin is None:
            self._admin = self._cluster.admin()
        for error in self._admin.alter_group_offsets(self._cluster.group, offsets).values():
            if error is not NoError:
                raise error()

    def _close_admin(self) -> None:
        if self._admin is not None:
            self._admin.close()
        self._admin = None


def _record(fetched: Fetched) -> Record:
    return Record(Position(fetched.partition, fetched.offset), fetched.value or b"")
