"""The spool: what happens to events while the log is away, and after."""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import SetupError
from app.events.log import EventRefused, LogUnavailable
from app.events.schema import Event, encode
from app.events.spool import Spool
from app.serving.forwarder import LONGEST_PAUSE_S, Forwarder
from app.telemetry.metrics import Metrics
from tests.builders import completion, feedback
from tests.switchable import SwitchableLog

MEGABYTE = 2**20


def too_large(event: Event) -> bool:
    return event.event_id.startswith("large")


class Place:
    """A log, a spool before it and its forwarder, in one folder; `restart` is the app's."""

    def __init__(self, folder: Path, max_bytes: int = MEGABYTE) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.log = SwitchableLog(folder / "log.db", too_large)
        self.metrics = Metrics()
        self._open()

    def _open(self) -> None:
        self.spool = Spool(self.log, self.folder / "spool.db", self.max_bytes)
        self.forwarder = Forwarder(self.spool, self.log, self.metrics)

    def restart(self) -> None:
        self.spool.close()
        self._open()

    def close(self) -> None:
        self.spool.close()
        self.log.close()

    async def append(self, *ids: str, session: str = "s") -> None:
        for id in ids:
            await self.spool.append(feedback(session, id))

    def sample(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name) or 0.0


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with closing(Place(tmp_path)) as made:
        yield made


async def test_nothing_waits_while_the_log_is_there(place: Place) -> None:
    """With a log that answers, the spool stays empty."""
    await place.append("a", "b")
    assert place.log.event_ids() == ["a", "b"]
    assert place.spool.size() == (0, 0)


async def test_events_wait_while_the_log_is_away(place: Place) -> None:
    """They are taken, counted in events and bytes, and not on the log."""
    place.log.mode = "away"
    await place.append("a", "b")
    assert place.log.event_ids() == []
    size = sum(len(encode(feedback("s", id))) for id in ("a", "b"))
    assert place.spool.size() == (2, size)


async def test_waiting_events_are_forwarded_in_order(place: Place) -> None:
    """Once the log is back, each waiting event is on it once, in order, and the spool is empty."""
    place.log.mode = "away"
    await place.append("a", "b", "c")
    place.log.mode = "up"
    await place.forwarder.drain()
    assert place.log.event_ids() == ["a", "b", "c"]
    assert place.spool.size() == (0, 0)
    assert place.sample("riacho_spool_forwarded_total") == 3


async def test_no_event_overtakes_one_that_waits(place: Place) -> None:
    """Though the log is back, new events go behind those that wait."""
    place.log.mode = "away"
    await place.append("a")
    place.log.mode = "up"
    await place.append("b")
    assert place.log.event_ids() == []
    await place.forwarder.drain()
    await place.append("c")
    assert place.log.event_ids() == ["a", "b", "c"]


async def test_one_failure_spares_all_others_the_log(place: Place) -> None:
    """After the first failed append no append tries the log: each would wait for the delivery timeout."""
    place.log.mode = "away"
    await place.append("a")
    place.log.mode = "hangs"
    await place.append("b", "c")
    assert place.log.attempts == 1


async def test_another_process_goes_behind_what_waits(place: Place) -> None:
    """A second process with the same file neither tries the broken log nor overtakes."""
    place.log.mode = "away"
    await place.append("a")
    place.log.mode = "up"
    with closing(Spool(place.log, place.folder / "spool.db", MEGABYTE)) as other:
        await other.append(feedback("s", "b"))
    assert place.log.event_ids() == []
    await place.forwarder.drain()
    assert place.log.event_ids() == ["a", "b"]


async def test_one_process_forwards_at_a_time(place: Place) -> None:
    """While one has the turn, another's drain leaves the spool alone; afterwards it may."""
    place.log.mode = "away"
    await place.append("a")
    place.log.mode = "up"
    with closing(Spool(place.log, place.folder / "spool.db", MEGABYTE)) as other:
        with other.forwarding() as theirs:
            assert theirs
            await place.forwarder.drain()
            assert place.log.event_ids() == []
        await place.forwarder.drain()
    assert place.log.event_ids() == ["a"]


async def test_full_spool_is_a_failure_that_names_the_setting(place: Place) -> None:
    """What passes the bound is refused with nothing kept, whatever fitted is forwarded, and then there is room."""
    place.log.mode = "away"
    large = [completion(completion_id=f"c{i}", output="x" * (MEGABYTE // 4)) for i in range(4)]
    for event in large:
        await place.spool.append(event)
    assert place.spool.full()
    with pytest.raises(LogUnavailable, match=r"spool\.db is full .*spool_max_bytes"):
        await place.append("d")
    assert place.spool.size().events == 4
    place.log.mode = "up"
    await place.forwarder.drain()
    await place.append("d")
    assert place.log.event_ids() == [*(event.event_id for event in large), "d"]


async def test_event_that_is_never_taken_does_not_block(place: Place) -> None:
    """It is set aside with the reason and counted; those behind it are forwarded."""
    place.log.mode = "away"
    await place.append("a", "large", "b")
    place.log.mode = "up"
    await place.forwarder.drain()
    assert place.log.event_ids() == ["a", "b"]
    assert place.spool._execute("SELECT payload, reason FROM refused") == [
        (encode(feedback("s", "large")), "the event is too large")
    ]
    assert place.sample("riacho_refused_events_total") == 1
    assert place.sample("riacho_spool_forwarded_total") == 2


async def test_event_that_this_code_cannot_read_does_not_block(place: Place) -> None:
    """What another release put there is kept, too."""
    place.log.mode = "away"
    place.spool._put(b'{"type": "surprise"}')
    await place.append("a")
    place.log.mode = "up"
    await place.forwarder.drain()
    assert place.log.event_ids() == ["a"]
    [(payload,)] = place.spool._execute("SELECT payload FROM refused")
    assert payload == b'{"type": "surprise"}'


async def test_refusal_by_the_log_reaches_the_caller(place: Place) -> None:
    """An event that the log refuses while it is there is not put into the spool."""
    with pytest.raises(EventRefused, match="too large"):
        await place.append("large")
    assert place.spool.size() == (0, 0)


class Stop(Exception):
    """Ends a forwarder after the rounds that a test wants."""


async def pauses(place: Place, count: int) -> list[float]:
    """The pauses of a forwarder's first rounds."""
    seen: list[float] = []

    async def sleep(seconds: float) -> None:
        seen.append(seconds)
        if len(seen) == count:
            raise Stop

    with pytest.raises(Stop):
        await place.forwarder.run(sleep)
    return seen


async def test_broken_log_is_tried_ever_more_seldom(place: Place) -> None:
    """One try a round; the pauses double up to their bound, and are short again once the log is back."""
    place.log.mode = "away"
    await place.append("a")
    seen = await pauses(place, 10)
    assert place.log.attempts == 1 + 10
    assert seen == sorted(seen)
    assert seen[1] == 2 * seen[0]
    assert seen[-1] == LONGEST_PAUSE_S
    place.log.mode = "up"
    assert (await pauses(place, 1))[0] < seen[0]


async def test_removal_that_fails_repeats_no_event(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk after the append: the event is removed later and not appended again."""
    place.log.mode = "away"
    await place.append("a", "b")
    place.log.mode = "up"

    def broken(_: int) -> None:
        raise LogUnavailable("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(place.spool, "remove", broken)
        with pytest.raises(LogUnavailable):
            await place.forwarder.drain()
    await place.forwarder.drain()
    assert place.log.event_ids() == ["a", "b"]


@contextmanager
def running(place: Place) -> Iterator["asyncio.Task[None]"]:
    job = asyncio.create_task(place.forwarder.run())
    try:
        yield job
    finally:
        job.cancel()


async def test_stop_does_not_wait_for_a_log_that_hangs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled forwarder ends though its append never does; the event still waits, and the turn is free."""
    monkeypatch.setattr("app.serving.forwarder.STOP_S", 0.05)
    place.log.mode = "away"
    await place.append("a")
    place.log.mode = "hangs"
    with running(place) as job:
        while place.log.attempts < 2:
            await asyncio.sleep(0.01)
    with contextlib.suppress(asyncio.CancelledError):
        await job
    assert place.spool.size().events == 1
    with place.spool.forwarding() as ours:
        assert ours


async def test_stop_lets_an_event_on_its_way_arrive(place: Place) -> None:
    """Cancelled in the middle of an append, the forwarder removes the event: the next start does not repeat it."""
    place.log.mode = "away"
    await place.append("a")
    place.log.mode = "up"
    append = place.log.append
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(event: Event) -> object:
        begun.set()
        await go_on.wait()
        return await append(event)

    place.log.append = slow  # type: ignore[method-assign, assignment]
    with running(place) as job:
        await begun.wait()
    go_on.set()
    with contextlib.suppress(asyncio.CancelledError):
        await job
    assert place.log.event_ids() == ["a"]
    assert place.spool.size() == (0, 0)


def test_file_that_is_no_spool_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Another file in the spool's place is not overwritten."""
    path = tmp_path / "spool.db"
    path.write_bytes(b"something else entirely" * 100)
    with closing(SwitchableLog(tmp_path / "log.db")) as log, pytest.raises(SetupError, match=r"spool\.db"):
        Spool(log, path, MEGABYTE)
    assert path.read_bytes() == b"something else entirely" * 100


def first_seen(ids: list[str]) -> list[str]:
    """As the learner counts them: an id once."""
    return list(dict.fromkeys(ids))


STEPS = st.lists(
    st.sampled_from(["append s", "append t", "append s", "append t", "away", "mute", "up", "forward", "restart"]),
    max_size=40,
)


@given(steps=STEPS)
async def test_each_session_keeps_its_order(steps: list[str]) -> None:
    """Whatever the order of appends, outages, lost answers, forwarding and restarts: all is there, in order, once."""
    with tempfile.TemporaryDirectory() as folder, closing(Place(Path(folder))) as place:
        appended: dict[str, list[str]] = {"s": [], "t": []}
        for number, step in enumerate(steps):
            if step.startswith("append"):
                session = step[-1]
                appended[session].append(f"{session}{number}")
                await place.append(f"{session}{number}", session=session)
            elif step == "forward":
                with contextlib.suppress(LogUnavailable):
                    await place.forwarder.drain()
            elif step == "restart":
                place.restart()
            else:
                place.log.mode = step  # type: ignore[assignment]
        place.log.mode = "up"
        await place.forwarder.drain()
        for session, ids in appended.items():
            assert first_seen(place.log.event_ids(session)) == ids
        if "mute" not in steps:
            assert len(place.log.event_ids()) == len(set(place.log.event_ids()))
        assert place.spool.size() == (0, 0)
