"""What capture costs and how fast it is learned from, against plain kafka-python on the same broker.

    python -m tests.bench.capture            # all three tables; --json FILE keeps the numbers

The broker is the tests' own, in memory on this machine; RIACHO_TEST_KAFKA names a real one.
"""

import asyncio
import itertools
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from kafka import TopicPartition

from app.engines.base import GenerateRequest
from app.events import kafka_topics
from app.events.kafka import KafkaLog
from app.events.kafka_client import Cluster
from app.events.kafka_settings import KafkaSettings
from app.events.log import EventSink
from app.events.schema import CompletionEvent, Event, FeedbackEvent, Sampling, Usage, encode
from app.events.spool import Spool
from app.events.sqlite import SqliteLog
from app.registry import Registry, upgrade
from app.registry.records import KeyRecord
from app.security.receipts import Receipts
from app.serving.call import Answer, ChatCall
from app.serving.capture import Capture
from app.settings import SharedSettings
from app.telemetry.metrics import Metrics
from learner.__main__ import build
from learner.loop import stop_at_end
from learner.settings import LearnerSettings
from tests.bench.rounds import Line, interleaved, percentile, report
from tests.broker import Broker, new_policy
from tests.fixed_log import sample

AT = datetime(2026, 1, 1, tzinfo=UTC)
CONCURRENCY = 32
SIZES = {"4 KB": 4 * 2**10, "1 MB": 2**20}
BYTES_A_MEASURE = {"4 KB": 2**22, "1 MB": 2**25}
CAPTURES = 200
TOKEN_BYTES = 10.7  # of an id and its logprob in base64
PLAIN = "plain kafka-python"
LEASE_S = 3600
UNJUDGED = 2000
VOCABULARY = 3072

Sampled = tuple[Sequence[int], Sequence[int], Sequence[float], str]  # prompt ids, completion ids, logprobs, text
MakeEvents = Callable[[Sequence[Sampled], str], list[Event]]


def tokens_in(size: int) -> int:
    """How many tokens make an event of about `size` bytes."""
    return int((size - 500) / TOKEN_BYTES)


def random_tokens(count: int, rng: random.Random) -> tuple[list[int], list[float]]:
    """Token ids and logprobs as unlike each other as sampled ones."""
    return [rng.randrange(VOCABULARY) for _ in range(count)], [-rng.expovariate(1.0) for _ in range(count)]


def call(uid: str, policy: str) -> ChatCall:
    """A chat call of a client's."""
    request = GenerateRequest(
        messages=[{"role": "user", "content": "Write a line about the sea."}],
        sampling=Sampling(temperature=1.0, max_tokens=2**17),
    )
    key = KeyRecord("key1", "client", "bench", AT, None, True)
    return ChatCall(request=request, pinned=None, n=1, key=key, uid=uid, policy=policy, at=AT)


class Nothing:
    """A log that keeps nothing: what capture costs without one."""

    async def append(self, event: Event) -> None:
        encode(event)


def new_cluster(address: str, folder: Path) -> Cluster:
    """A fresh policy's topics."""
    cluster = Cluster.of(
        SharedSettings(
            home=folder, log_url=f"kafka://{address}", policy=new_policy(), kafka=KafkaSettings(replication=1)
        )
    )
    kafka_topics.create(cluster)
    return cluster


def sinks(cluster: Cluster, folder: Path, stack: ExitStack) -> dict[str, EventSink]:
    """The logs to measure, closed with the stack."""
    kafka = stack.enter_context(closing(KafkaLog(cluster)))
    spool = stack.enter_context(closing(Spool(kafka, folder / "spool.db", 2**30)))
    sqlite = stack.enter_context(closing(SqliteLog(folder / "log.db")))
    return {"KafkaLog": kafka, "Spool before KafkaLog": spool, "SqliteLog": sqlite}


def same_bytes(events: Sequence[Event]) -> list[tuple[bytes, bytes]]:
    """Keys and values as KafkaLog sends them, made beforehand."""
    return [(event.session_id.encode(), encode(event)) for event in events]


async def append_all(sink: EventSink, events: Sequence[Event]) -> float:
    """Events a second, with CONCURRENCY appends under way."""
    waiting = iter(events)

    async def one_by_one() -> None:
        for event in waiting:
            await sink.append(event)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(one_by_one())
    return len(events) / (time.perf_counter() - started)


def send_all(producer: Any, topic: str, messages: Sequence[tuple[bytes, bytes]]) -> float:
    """Events a second by one producer, with CONCURRENCY of them not yet acknowledged."""
    under_way: deque[Any] = deque()
    started = time.perf_counter()
    for key, value in messages:
        if len(under_way) == CONCURRENCY:
            under_way.popleft().get()
        under_way.append(producer.send(topic, value, key))
    for sent in under_way:
        sent.get()
    return len(messages) / (time.perf_counter() - started)


async def throughput(address: str, folder: Path, rounds: int, target: Path | None) -> None:
    """Appends through each log, 4 KB and 1 MB an event."""
    lines: list[Line] = []
    for name, size in SIZES.items():
        cluster = new_cluster(address, folder)
        events = completions(BYTES_A_MEASURE[name] // size, size, cluster.policy)
        messages = same_bytes(events)
        with ExitStack() as stack:
            producer = stack.enter_context(closing(cluster.producer()))
            measures: dict[str, Callable[[], Awaitable[float]]] = {
                PLAIN: lambda: asyncio.to_thread(send_all, producer, cluster.events_topic, messages)  # noqa: B023
            }
            for log, sink in sinks(cluster, folder / name, stack).items():
                measures[log] = lambda sink=sink: append_all(sink, events)  # type: ignore[misc]  # noqa: B023
            found = await interleaved(rounds, measures)
        lines += [Line(f"{name}, {log}", "events/s", found[log], found[PLAIN], PLAIN) for log in found if log != PLAIN]
        lines.append(Line(f"{name}, {PLAIN}", "events/s", found[PLAIN], found[PLAIN], "itself"))
    report(f"Appending at concurrency {CONCURRENCY}", lines, target)


def completions(count: int, size: int, policy: str) -> list[CompletionEvent]:
    """Distinct events of about `size` bytes."""
    rng = random.Random(0)
    tokens = tokens_in(size)
    made = [completion(((1, 2, 3), *random_tokens(tokens, rng), ""), policy, f"s{n}") for n in range(count)]
    found = len(encode(made[0]))
    assert abs(found - size) < size / 10, f"events of {found} bytes"
    return made


async def latency(address: str, folder: Path, rounds: int, target: Path | None) -> None:
    """What recording an answer of 4 KB takes; what it takes beyond "no log" is what a log adds to a request."""
    cluster = new_cluster(address, folder)
    ids, logprobs = random_tokens(tokens_in(SIZES["4 KB"]), random.Random(0))
    given = Answer(prompt_ids=(1, 2, 3), token_ids=ids, logprobs=logprobs, finish_reason="stop")
    numbers = itertools.count()
    [message] = same_bytes(completions(1, SIZES["4 KB"], cluster.policy))

    def through(sink: EventSink) -> Callable[[], Awaitable[list[float]]]:
        capture = Capture(sink, Receipts(b"s" * 32), Metrics(), "fail_closed")

        async def measure() -> list[float]:
            return [
                await timed(capture.record(call(f"u{next(numbers)}", cluster.policy), 0, given, 0))
                for _ in range(CAPTURES)
            ]

        return measure

    with ExitStack() as stack:
        producer = stack.enter_context(closing(cluster.producer()))

        async def send_and_wait() -> None:
            await asyncio.to_thread(lambda: producer.send(cluster.events_topic, message[1], message[0]).get())

        async def plain() -> list[float]:
            return [await timed(send_and_wait()) for _ in range(CAPTURES)]

        logs = {"no log": Nothing(), **sinks(cluster, folder / "latency", stack)}
        captures = {f"Capture.record, {name}": through(sink) for name, sink in logs.items()}
        found = await interleaved(rounds, {PLAIN: plain, **captures})
    lines = []
    for percent in (50, 99):
        per_round = {name: [percentile(times, percent) for times in found[name]] for name in found}
        lines += [Line(f"p{percent}, {name}", "ms", per_round[name], per_round[PLAIN], PLAIN) for name in found]
    report("Recording one answer (4 KB), one after the other", lines, target)


async def timed(work: Awaitable[None]) -> float:
    """Milliseconds until it is done."""
    started = time.perf_counter()
    await work
    return 1000 * (time.perf_counter() - started)


def burst(address: str, folder: Path, rounds: int, sessions: int, target: Path | None) -> None:
    """How fast a learner comes after completions and rewards that arrive at once."""
    answers = sample(sessions, seed=0)
    lines = []
    kinds = {"judged": judged, "not judged": unjudged}
    for kind, events in kinds.items():
        outcomes = [come_after(address, folder / f"{kind} {number}", events, answers) for number in range(rounds)]
        whole = [outcome.time_to(0) for outcome in outcomes]
        for left in (75, 50, 25, 0):
            times = [outcome.time_to(left) for outcome in outcomes]
            lines.append(Line(f"{kind}: lag down to {left} %", "s", times, whole, "down to 0 %"))
        rates = [outcome.events / outcome.time_to(0) for outcome in outcomes]
        plain = [outcome.events / outcome.reading_s for outcome in outcomes]
        lines.append(Line(f"{kind}: learner", "events/s", rates, plain, f"{PLAIN} reading"))
    report(f"Learner behind a burst: {sessions} judged answers, or {UNJUDGED} without rewards", lines, target)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds until each event was applied, in order, and for a plain reader to have them all."""

    applied_s: Sequence[float]
    reading_s: float

    @property
    def events(self) -> int:
        return len(self.applied_s)

    def time_to(self, left: int) -> float:
        """Seconds until the lag is `left` percent of all events."""
        return self.applied_s[self.events - 1 - self.events * left // 100]


def come_after(address: str, folder: Path, make: MakeEvents, answers: Sequence[Sampled]) -> Outcome:
    """Append all events, read them plainly, and then let a learner fold them."""
    cluster = new_cluster(address, folder)
    events = make(answers, cluster.policy)
    with closing(KafkaLog(cluster)) as log:
        asyncio.run(append_all(log, events))
    reading_s = read_all(cluster, len(events))
    settings = LearnerSettings(
        home=folder, log_url=str(cluster), policy=cluster.policy, kafka=KafkaSettings(replication=1)
    )
    folder.mkdir()
    upgrade(settings.resolved_database_url)
    with closing(Registry.open(settings.resolved_database_url)) as registry:
        learner = build(settings, registry)
        lease = registry.leases.acquire(f"learner:{cluster.policy}", "bench", LEASE_S)
        assert lease is not None
        learner.resume(lease)
        applied: list[float] = []
        started = time.perf_counter()

        def keep_on() -> bool:
            if len(applied) < sum(learner.stream.positions.values()):
                applied.append(time.perf_counter() - started)
            return True

        learner.run(keep_on, stop_at_end)
    assert len(applied) == len(events)
    return Outcome(applied, reading_s)


def read_all(cluster: Cluster, count: int) -> float:
    """Seconds for a plain consumer to have `count` records of the one partition."""
    with closing(cluster.consumer()) as consumer:
        partition = TopicPartition(cluster.events_topic, 0)
        consumer.assign([partition])
        consumer.seek(partition, 0)
        started = time.perf_counter()
        while count > 0:
            count -= sum(map(len, consumer.poll(100).values()))
        return time.perf_counter() - started


def judged(answers: Sequence[Sampled], policy: str) -> list[Event]:
    """Each answer with a reward, never 0, so that every update moves the policy."""
    events: list[Event] = []
    for number, given in enumerate(answers):
        session, reward = f"s{number}", (1 + number % 5) / 5
        events.append(completion(given, policy, session))
        events.append(FeedbackEvent(policy=policy, session_id=session, at=AT, reward=reward, key_id="k"))
    return events


def unjudged(answers: Sequence[Sampled], policy: str) -> list[Event]:
    """Answers that wait for a reward."""
    return [completion(answers[number % len(answers)], policy, f"s{number}") for number in range(UNJUDGED)]


def completion(given: Sampled, policy: str, session: str) -> CompletionEvent:
    """The event of one answer."""
    prompt_ids, completion_ids, logprobs, _ = given
    return CompletionEvent(
        policy=policy,
        session_id=session,
        at=AT,
        completion_id=session,
        version=0,
        prompt_ids=tuple(prompt_ids),
        completion_ids=tuple(completion_ids),
        logprobs=tuple(logprobs),
        sampling=Sampling(temperature=1.0, max_tokens=2**17),
        finish_reason="stop",
        trainable=True,
        usage=Usage(prompt_tokens=len(prompt_ids), completion_tokens=len(completion_ids)),
        key_id="k",
    )


@contextmanager
def kafka() -> Iterator[str]:
    """The address of a broker: RIACHO_TEST_KAFKA's, or one of the tests' own."""
    if given := os.environ.get("RIACHO_TEST_KAFKA"):
        yield given
        return
    with Broker() as broker:
        yield broker.address


@click.command()
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Each measures everything once.")
@click.option("--sessions", default=40, show_default=True, type=click.IntRange(1), help="Judged answers in the burst.")
@click.option("--only", type=click.Choice(["throughput", "latency", "burst"]))
@click.option("--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers there.")
def main(rounds: int, sessions: int, only: str | None, target: Path | None) -> None:
    """What capture costs, and how fast it is learned from, against plain kafka-python."""
    with kafka() as address, tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        if only in (None, "throughput"):
            asyncio.run(throughput(address, home, rounds, target))
        if only in (None, "latency"):
            asyncio.run(latency(address, home, rounds, target))
        if only in (None, "burst"):
            burst(address, home, min(rounds, 3), sessions, target)


if __name__ == "__main__":
    main()
