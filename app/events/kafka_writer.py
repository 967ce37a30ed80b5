"""Writes to topics with one idempotent producer, which belongs to one thread."""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kafka import KafkaProducer
from kafka.errors import KafkaError, KafkaTimeoutError, MessageSizeTooLargeError, RecordListTooLargeError

from app.events.kafka_client import Cluster, as_log_error
from app.events.log import EventTooLarge, LogUnavailable, Position

RECORD_OVERHEAD = 512  # bytes of a batch's and a record's own fields
TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)

Headers = Sequence[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class Message:
    """What goes to a topic; without a partition the key chooses it (murmur2, as in Kafka's own clients)."""

    topic: str
    key: bytes
    value: bytes | None
    partition: int | None = None
    headers: Headers = ()


@dataclass(slots=True)
class _Line:
    """A producer, and whether a delivery has failed on it: then no later send may rely on its sequence numbers."""

    producer: KafkaProducer
    failed: bool = False


@dataclass(slots=True)
class _Delivery:
    """One message on its way."""

    message: Message
    deadline: float
    outcome: "Future[Position]" = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.outcome.set_running_or_notify_cancel()  # so that a waiter that gives up cannot cancel it


class Writer:
    """Sends messages and says where they came to lie.

    The producer is built, used and replaced in a thread of its own, since all three can block: no caller's event loop
    ever waits for metadata. At most `max_in_flight` messages are unacknowledged; further ones wait in line, and fail
    when their time is over.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._timeout_s = cluster.table.delivery_timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kafka-producer")
        self._slots = threading.BoundedSemaphore(cluster.table.max_in_flight)
        self._line: _Line | None = None

    async def append(self, message: Message) -> Position:
        """The position, once the brokers have acknowledged it.

        Raises EventTooLarge for a message that no retry helps, LogUnavailable for one that was not acknowledged in
        time; that one may still come to lie on the topic.
        """
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._submit(message)), self._timeout_s)
        except TimeoutError:
            raise self._not_acknowledged() from None

    def append_now(self, message: Message) -> Position:
        """The same for callers without an event loop."""
        try:
            return self._submit(message).result(self._timeout_s)
        except TimeoutError:
            raise self._not_acknowledged() from None

    def _submit(self, message: Message) -> "Future[Position]":
        delivery = _Delivery(message, time.monotonic() + self._timeout_s)
        self._thread.submit(self._send, delivery)
        return delivery.outcome

    def close(self) -> None:
        """Wait for what is in flight, within the delivery timeout."""
        self._thread.submit(self._drop_line).result()
        self._thread.shutdown()

    def _send(self, delivery: _Delivery) -> None:
        left = delivery.deadline - time.monotonic()
        if left <= 0 or not self._slots.acquire(timeout=left):
            delivery.outcome.set_exception(self._not_acknowledged())
            return
        message = delivery.message
        try:
            line = self._live_line()
            sent = line.producer.send(
                message.topic, message.value, message.key, list(message.headers), message.partition
            )
        except (KafkaError, ValueError) as error:  # ValueError: the topic has no such partition, or is gone
            self._fail(delivery, None, error)
            return
        sent.add_callback(self._acknowledged, delivery, line)
        sent.add_errback(lambda error: self._fail(delivery, line, error))

    def _acknowledged(self, delivery: _Delivery, line: _Line, metadata: Any) -> None:
        """Called by the producer's I/O thread."""
        if metadata.offset < 0:
            self._fail(delivery, line, KafkaTimeoutError("the broker gave no offset"))
            return
        self._slots.release()
        delivery.outcome.set_result(Position(metadata.partition, metadata.offset))

    def _fail(self, delivery: _Delivery, line: _Line | None, error: Exception) -> None:
        self._slots.release()
        if isinstance(error, TOO_LARGE):
            delivery.outcome.set_exception(self._too_large(delivery.message))
            return
        if line is not None:
            line.failed = True
        # Rights that are taken away while events come are an outage, too: nobody's setup is read again for it.
        delivery.outcome.set_exception(LogUnavailable(as_log_error(self._cluster, error).message))

    def _live_line(self) -> _Line:
        if self._line is not None and self._line.failed:
            line, self._line = self._line, None
            threading.Thread(target=_close, args=(line.producer, self._timeout_s), daemon=True).start()
        if self._line is None:
            self._line = _Line(self._cluster.producer())
        return self._line

    def _drop_line(self) -> None:
        if self._line is not None:
            _close(self._line.producer, self._timeout_s)
            self._line = None

    def _not_acknowledged(self) -> LogUnavailable:
        return LogUnavailable(
            f"{self._cluster} acknowledged nothing within kafka.delivery_timeout_s = {self._timeout_s:g}; "
            "see that its brokers run"
        )

    def _too_large(self, message: Message) -> EventTooLarge:
        return EventTooLarge(len(message.value or b""), self._cluster.table.max_message_bytes)


def _close(producer: KafkaProducer, timeout_s: float) -> None:
    """Close a producer; what it cannot deliver has expired by then, or ends with its daemon thread."""
    with suppress(KafkaTimeoutError):
        producer.close(timeout=2 * timeout_s)
