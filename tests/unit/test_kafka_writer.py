"""The Kafka writer against a scripted producer: the bound on sends in flight, and what becomes of a failed one."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.errors import KafkaTimeoutError, MessageSizeTooLargeError, TopicAuthorizationFailedError
from kafka.future import Future

from app.events.kafka_client import Cluster
from app.events.kafka_settings import KafkaSettings
from app.events.kafka_writer import Message, Writer
from app.events.log import EventTooLarge, LogUnavailable, Position

MESSAGE = Message("t", b"k", b"v")


@dataclass
class Scripted:
    """A producer whose deliveries the test decides."""

    sent: list[Future] = field(default_factory=list)
    refuse: Exception | None = None
    closed: bool = False

    def send(self, *_: object) -> Future:
        if self.refuse is not None:
            raise self.refuse
        self.sent.append(Future())
        return self.sent[-1]

    def close(self, timeout: float) -> None:
        self.closed = True


class Line(Cluster):
    """A cluster that hands out scripted producers."""

    made: list[Scripted]

    def producer(self) -> Any:
        self.made.append(Scripted())
        return self.made[-1]


@pytest.fixture
def made() -> list[Scripted]:
    return []


@pytest.fixture
def writer(made: list[Scripted]) -> Iterator[Writer]:
    """Two in flight, and a delivery timeout of two seconds."""
    line = Line(("h:1",), KafkaSettings(max_in_flight=2, delivery_timeout_s=2), "p", 1)
    object.__setattr__(line, "made", made)
    opened = Writer(line)
    yield opened
    for producer in made:
        for future in producer.sent:
            if not future.is_done:
                future.failure(KafkaTimeoutError("the test is over"))
    opened.close()


def acknowledge(future: Future, offset: int) -> None:
    future.success(SimpleNamespace(partition=0, offset=offset))


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_no_more_than_the_bound_is_in_flight(writer: Writer, made: list[Scripted]) -> None:
    """Of five appends two are handed to the producer; each acknowledgement lets one more go."""
    appends = [asyncio.ensure_future(writer.append(MESSAGE)) for _ in range(5)]
    for done in range(3):
        await until(lambda: len(made) == 1 and len(made[0].sent) == 2 + done)  # noqa: B023 - awaited at once
        await asyncio.sleep(0.05)
        assert len(made[0].sent) == 2 + done
        acknowledge(made[0].sent[done], done)
    await until(lambda: len(made[0].sent) == 5)
    for late in (3, 4):
        acknowledge(made[0].sent[late], late)
    assert await asyncio.gather(*appends) == [Position(0, offset) for offset in range(5)]


async def test_append_that_waits_too_long_for_its_turn_is_unavailable(writer: Writer, made: list[Scripted]) -> None:
    """It is never sent, and its error names the setting."""
    first = [asyncio.ensure_future(writer.append(MESSAGE)) for _ in range(2)]
    with pytest.raises(LogUnavailable, match=r"kafka\.delivery_timeout_s = 2"):
        await writer.append(MESSAGE)
    assert len(made[0].sent) == 2
    await asyncio.gather(*first, return_exceptions=True)


async def test_negative_offset_is_not_acknowledged(writer: Writer, made: list[Scripted]) -> None:
    """Whatever the producer calls it."""
    append = asyncio.ensure_future(writer.append(MESSAGE))
    await until(lambda: bool(made and made[0].sent))
    acknowledge(made[0].sent[0], -1)
    with pytest.raises(LogUnavailable):
        await append


async def test_producer_that_failed_is_replaced(writer: Writer, made: list[Scripted]) -> None:
    """The next append goes to a new one, and the old one is closed."""
    append = asyncio.ensure_future(writer.append(MESSAGE))
    await until(lambda: bool(made and made[0].sent))
    made[0].sent[0].failure(KafkaTimeoutError("expired"))
    with pytest.raises(LogUnavailable, match="expired"):
        await append
    again = asyncio.ensure_future(writer.append(MESSAGE))
    await until(lambda: len(made) == 2 and len(made[1].sent) == 1)
    acknowledge(made[1].sent[0], 7)
    assert await again == Position(0, 7)
    await until(lambda: made[0].closed)


async def test_late_failure_of_a_replaced_producer_leaves_the_new_one(writer: Writer, made: list[Scripted]) -> None:
    """Only its own producer is given up for a failed delivery."""
    both = [asyncio.ensure_future(writer.append(MESSAGE)) for _ in range(2)]
    await until(lambda: bool(made) and len(made[0].sent) == 2)
    made[0].sent[0].failure(KafkaTimeoutError("expired"))
    third = asyncio.ensure_future(writer.append(MESSAGE))
    await until(lambda: len(made) == 2 and len(made[1].sent) == 1)
    made[0].sent[1].failure(KafkaTimeoutError("expired"))
    fourth = asyncio.ensure_future(writer.append(MESSAGE))
    await until(lambda: len(made[1].sent) == 2)
    for offset, future in enumerate(made[1].sent):
        acknowledge(future, offset)
    assert await asyncio.gather(third, fourth) == [Position(0, 0), Position(0, 1)]
    await asyncio.gather(*both, return_exceptions=True)
    assert len(made) == 2


async def test_rights_that_are_taken_away_are_an_outage(writer: Writer, made: list[Scripted]) -> None:
    """Callers do with it what they do while brokers are away, and the message says what to check."""
    append = asyncio.ensure_future(writer.append(MESSAGE))
    await until(lambda: bool(made and made[0].sent))
    made[0].sent[0].failure(TopicAuthorizationFailedError())
    with pytest.raises(LogUnavailable, match=r"kafka\.username"):
        await append


async def test_size_that_the_broker_refuses_is_too_large(writer: Writer, made: list[Scripted]) -> None:
    """No retry helps, so it is not an unavailable log, and the producer stays."""
    append = asyncio.ensure_future(writer.append(MESSAGE))
    await until(lambda: bool(made and made[0].sent))
    made[0].sent[0].failure(MessageSizeTooLargeError())
    with pytest.raises(EventTooLarge, match=r"kafka\.max_message_bytes"):
        await append
    made[0].refuse = MessageSizeTooLargeError()
    with pytest.raises(EventTooLarge):
        await writer.append(MESSAGE)
    assert len(made) == 1


async def test_the_event_loop_never_waits_for_a_producer(writer: Writer, made: list[Scripted]) -> None:
    """Building one, which may wait for metadata, and sending happen in one other thread."""
    threads: list[int] = []
    build = writer._cluster.producer

    def noting() -> Any:
        threads.append(threading.get_ident())
        return build()

    object.__setattr__(writer, "_cluster", SimpleNamespace(producer=noting, table=writer._cluster.table))
    append = asyncio.ensure_future(writer.append(MESSAGE))
    await until(lambda: bool(made and made[0].sent))
    acknowledge(made[0].sent[0], 0)
    await append
    assert threads != [threading.get_ident()]
    assert len(threads) == 1
