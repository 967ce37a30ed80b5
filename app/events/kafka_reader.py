"""Reads a topic from explicit positions: nothing is skipped, and no partition waits behind a busy one."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError, OffsetOutOfRangeError

from app.events.kafka_client import Cluster, as_log_error
from app.events.log import LogUnavailable, LostRange, PositionAhead
from app.events.turns import take_turns

POLL_MS = 100
CONFIRM_S = 1.0
POLL_RECORDS = 1000
HELD_BYTES = 2**26
RECORD_OVERHEAD = 512  # bytes of a fetched record besides its value

Fetched = Any  # kafka-python's ConsumerRecord


@dataclass(slots=True)
class _Place:
    """Where the consumer stands on one partition.

    Attributes:
        next: the offset that it fetches next.
        kept: what was fetched and not yet passed by the caller.
        held_bytes: the memory that `kept` takes, about.
    """

    next: int | None = None
    kept: deque[Fetched] = field(default_factory=deque)
    held_bytes: int = 0

    def pass_to(self, offset: int) -> bool:
        """Forget what lies before an offset; whether the place now continues there."""
        while self.kept and self.kept[0].offset < offset:
            self.held_bytes -= _size(self.kept.popleft())
        return offset == (self.kept[0].offset if self.kept else self.next)

    def keep(self, partition: int, records: Iterable[Fetched]) -> None:
        """Raises LostRange where the brokers left out an offset."""
        for record in records:
            if record.offset != self.next:
                raise LostRange(partition, self.next or 0, record.offset)
            self.kept.append(record)
            self.held_bytes += _size(record)
            self.next = record.offset + 1


def _size(record: Fetched) -> int:
    return RECORD_OVERHEAD + len(record.value or b"")


class Reader:
    """A consumer of one topic without a group: it reads where it is told to, however long the pauses between.

    A consumer that failed is closed, and the next call builds another. Calls from several threads take turns.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._lock = threading.Lock()
        self._consumer: KafkaConsumer | None = None
        self._places: dict[int, _Place] = {}

    def partitions(self) -> list[int]:
        """The topic's partitions, those that were added later among them; raises LogUnavailable."""
        with self._using() as consumer:
            return self._partitions(consumer)

    def ends(self) -> dict[int, int]:
        """For each partition the offset that the next record will get; raises LogUnavailable."""
        with self._using() as consumer:
            return self._ends(consumer, self._partitions(consumer))

    def begins(self) -> dict[int, int]:
        """For each partition the offset of the oldest record that is still there; raises LogUnavailable."""
        with self._using() as consumer:
            return self._begins(consumer, self._partitions(consumer))

    def read(self, wanted: Mapping[int, int], limit: int) -> Sequence[Fetched]:
        """Up to `limit` records at or past `wanted[partition]`, in order within a partition.

        Of each partition that has records some are taken, in turn. Which one comes first follows from the positions
        alone, so that reading a log at rest a second time gives the same order.

        Raises LostRange, PositionAhead, LogUnavailable.
        """
        with self._using() as consumer:
            ends = self._ends(consumer, wanted)
            self._aim(consumer, wanted)
            for partition, offset in wanted.items():
                if offset > ends[partition] and not self._places[partition].kept:
                    self._confirm(consumer, partition, offset, ends[partition])
            self._fill(consumer, {p: min(limit, ends[p] - offset) for p, offset in wanted.items()})
            if not any(place.kept for place in self._places.values()):
                self._poll(consumer)
            kept = [self._places[partition].kept for partition in sorted(wanted)]
            return list(islice(take_turns(kept, sum(wanted.values())), limit))

    def close(self) -> None:
        with self._lock:
            self._drop()

    @contextmanager
    def _using(self) -> Iterator[KafkaConsumer]:
        with self._lock:
            try:
                if self._consumer is None:
                    self._consumer = self._cluster.consumer()
                yield self._consumer
            except KafkaError as error:
                self._drop()
                raise as_log_error(self._cluster, error) from error

    def _drop(self) -> None:
        if self._consumer is not None:
            self._consumer.close(autocommit=False)
        self._consumer, self._places = None, {}

    def _partitions(self, consumer: KafkaConsumer) -> list[int]:
        found = consumer.partitions_for_topic(self._topic)
        if not found:
            raise LogUnavailable(f"{self._cluster} has no topic {self._topic} now; `riacho log check` says more")
        return sorted(found)

    def _ends(self, consumer: KafkaConsumer, partitions: Iterable[int]) -> dict[int, int]:
        return {tp.partition: end for tp, end in consumer.end_offsets(self._tps(partitions)).items()}

    def _begins(self, consumer: KafkaConsumer, partitions: Iterable[int]) -> dict[int, int]:
        return {tp.partition: begin for tp, begin in consumer.beginning_offsets(self._tps(partitions)).items()}

    def _tps(self, partitions: Iterable[int]) -> list[TopicPartition]:
        return [TopicPartition(self._topic, partition) for partition in partitions]

    def _aim(self, consumer: KafkaConsumer, wanted: Mapping[int, int]) -> None:
        """Stand at the wanted offsets; raises LostRange for one that is before the beginning."""
        if self._places.keys() != wanted.keys():
            consumer.assign(self._tps(wanted))
            self._places = {partition: _Place() for partition in wanted}
        astray = [p for p, offset in wanted.items() if not self._places[p].pass_to(offset)]
        if not astray:
            return
        begins = self._begins(consumer, astray)
        for partition in astray:
            if wanted[partition] < begins[partition]:
                raise LostRange(partition, wanted[partition], begins[partition])
            consumer.seek(TopicPartition(self._topic, partition), wanted[partition])
            self._places[partition] = _Place(wanted[partition])

    def _fill(self, consumer: KafkaConsumer, counts: Mapping[int, int]) -> None:
        """Fetch until so many records of each partition are kept, or as much as memory and the timeout allow.

        Whole fetches are taken over, since the consumer would give those of one partition to the end before the next.
        """
        deadline = time.monotonic() + self._cluster.table.delivery_timeout_s
        while any(len(self._places[p].kept) < count for p, count in counts.items()):
            held = sum(place.held_bytes for place in self._places.values())
            if held > HELD_BYTES or (held and time.monotonic() > deadline):
                return
            if time.monotonic() > deadline:
                raise LogUnavailable(f"{self._cluster} gave none of the records of {self._topic} in time")
            self._poll(consumer)

    def _confirm(self, consumer: KafkaConsumer, partition: int, offset: int, end: int) -> None:
        """The record before a position proves that the log reaches it, whatever a broker says of the log's end.

        Raises PositionAhead where there is none.
        """
        place = self._places[partition] = _Place(offset - 1)
        consumer.seek(TopicPartition(self._topic, partition), offset - 1)
        deadline = time.monotonic() + CONFIRM_S
        with suppress(OffsetOutOfRangeError):
            while not place.kept and time.monotonic() < deadline:
                self._poll(consumer)
        if not place.pass_to(offset):
            raise PositionAhead(partition, offset, end)

    def _poll(self, consumer: KafkaConsumer) -> None:
        for tp, records in consumer.poll(POLL_MS, max_records=POLL_RECORDS).items():
            self._places[tp.partition].keep(tp.partition, records)
