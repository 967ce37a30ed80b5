"""Scoring: a reward function gives numbers in time or none, and the log hears of either once a session is wanted."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.events.log import EventTooLarge, Position
from app.events.schema import ScoreEvent, decode
from app.events.sqlite import SqliteLog
from learner.guarded import MAX_HANGING, Guarded
from learner.joins import Joined, OnFailure
from learner.rewards.view import CannotScore, RewardFunction, Scores, SessionView
from learner.scoring import LONGEST_PAUSE_S, TRIES, Job, JobQueue, Scoring, session_view
from tests.builders import completion, moment
from tests.switchable import away_at_first

LONG_S = 60.0
VIEW = session_view("s", [completion("s", "a"), completion("s", "b")])


def guarded(function: Callable[[SessionView], Any], timeout_s: float = LONG_S) -> Guarded:
    return Guarded(function, timeout_s, 0.0, 1.0)


def reason(function: Callable[[SessionView], Any], timeout_s: float = LONG_S) -> str:
    with pytest.raises(CannotScore) as failed:
        guarded(function, timeout_s)(VIEW)
    return str(failed.value)


def raising(error: BaseException) -> RewardFunction:
    def function(view: SessionView) -> Scores:
        raise error

    return function


def test_view_shows_what_was_captured() -> None:
    """Each turn in time order, with content, tools and kinds as the event has them."""
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    event = completion(
        "s",
        "a",
        version=3,
        messages=[{"role": "user", "content": "?"}],
        tools=[{"type": "function"}],
        output="!",
        tool_calls=[call],
        tool_call_kinds=("valid",),
        finish_reason="tool_calls",
    )
    view = session_view("s", [event, completion("s", "b")])
    first, second = view.turns
    assert (first.completion_id, first.version, first.completion_tokens, first.finish_reason) == (
        "a",
        3,
        2,
        "tool_calls",
    )
    assert (first.messages, first.tools, first.output) == (event.messages, event.tools, "!")
    assert (first.tool_calls, first.tool_call_kinds) == ([call], ("valid",))
    assert (second.completion_id, second.messages, second.output, second.tool_call_kinds) == ("b", None, None, ())


def test_good_scores_pass() -> None:
    """Whole numbers are numbers, both ends of the range are inside, and no reward at all is an answer."""
    for scores in (Scores(1), Scores(0.0, {"a": 1.0, "b": 0}), Scores()):
        assert guarded(lambda view, scores=scores: scores)(VIEW) == scores  # type: ignore[misc]


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        0.5,
        "0.5",
        Scores("0.5"),  # type: ignore[arg-type]
        Scores(True),
        Scores(math.nan),
        Scores(math.inf),
        Scores(1.01),
        Scores(-0.01),
        Scores(turns={"elsewhere": 1.0}),
        Scores(turns={"a": None}),  # type: ignore[dict-item]
        Scores(turns={"a": math.nan}),
        Scores(turns={"a": 2.0}),
        Scores(turns=["a"]),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_nonsense_is_no_score(nonsense: Any) -> None:
    """Nothing but finite numbers inside the range, on the session or on its own turns."""
    assert "the reward function" in reason(lambda view: nonsense)


def test_reason_of_a_function_that_cannot_score_is_kept() -> None:
    """It is meant for people."""
    assert reason(raising(CannotScore("the judge is away"))) == "the judge is away"


@pytest.mark.parametrize("error", [ValueError("secret content"), TimeoutError("slow"), MemoryError()], ids=repr)
def test_any_error_of_a_function_is_a_failure_without_its_message(error: Exception) -> None:
    """The message may hold a user's text; the kind of error does not."""
    assert reason(raising(error)) == f"the reward function raised {type(error).__name__}"


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """What a hanging function waits for; the test's end lets its threads go."""
    event = threading.Event()
    yield event
    event.set()


def test_function_that_hangs_is_left_to_itself(hang: threading.Event) -> None:
    """The caller goes on after the time limit."""
    assert reason(lambda view: hang.wait(), timeout_s=0.01) == "no answer within 0.01 s"


def test_hanging_calls_are_bounded_until_they_return(hang: threading.Event) -> None:
    """No more threads than the limit hang at once; when they have returned the function is called again."""
    calls: list[int] = []

    def function(view: SessionView) -> Scores:
        calls.append(1)
        hang.wait()
        return Scores(1.0)

    scorer = guarded(function, timeout_s=0.01)
    for _ in range(MAX_HANGING):
        with pytest.raises(CannotScore, match="no answer within"):
            scorer(VIEW)
    with pytest.raises(CannotScore, match=f"{MAX_HANGING} earlier calls"):
        scorer(VIEW)
    assert len(calls) == MAX_HANGING
    hanging = list(scorer._hanging)
    hang.set()
    for thread in hanging:
        thread.join(LONG_S)
    scorer._timeout_s = LONG_S
    assert scorer(VIEW) == Scores(1.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def jobs(count: int) -> list[Job]:
    return [Job(Joined(f"s{i}", (), ()), "judge") for i in range(count)]


def test_jobs_come_when_they_are_due() -> None:
    """The earliest first, and those of one time in the order in which they came."""
    clock = Clock()
    queue = JobQueue(clock)
    late, first, second = jobs(3)
    queue.put(late, 5.0)
    queue.put(first)
    queue.put(second)
    assert [queue.take(), queue.take()] == [first, second]
    clock.now = 5.0
    assert queue.take() is late


def test_waiting_worker_hears_of_a_new_job_and_of_the_end() -> None:
    """One that waits for a job of later takes one that is due before, and ends when the queue is closed."""
    queue = JobQueue(Clock())
    late, now = jobs(2)
    queue.put(late, LONG_S * 1000)
    taken: list[Job | None] = []
    thread = threading.Thread(target=lambda: taken.extend([queue.take(), queue.take()]))
    thread.start()
    queue.put(now)
    queue.close()
    thread.join(LONG_S)
    assert taken in ([now, None], [None, None])
    assert not thread.is_alive()


class Bench:
    """Scoring on a real log, run by hand: no threads, and a clock that the test moves."""

    def __init__(self, folder: Path, function: RewardFunction, rule: OnFailure) -> None:
        self.log = SqliteLog(folder / "log.db")
        self.clock = Clock()
        self.pauses: list[float] = []
        functions = {"judge": Guarded(function, LONG_S, 0.0, 1.0)}
        self.scoring = Scoring(
            "riacho", self.log, functions, {"judge": rule}, 1.0, lambda: moment(7), self.clock, self.pauses.append
        )
        self.queue = self.scoring._queues["judge"]

    def session(self, name: str = "s") -> Joined:
        position = asyncio.run(self.log.append(completion(name, f"c-{name}")))
        return Joined(name, (position,), ())

    def run_next(self) -> float:
        """Run the next job at the time that it is due; how long that was to wait."""
        due = self.queue._heap[0][0]
        waited, self.clock.now = due - self.clock.now, max(due, self.clock.now)
        job = self.queue.take()
        assert job is not None
        self.scoring.run(job)
        return waited

    @property
    def idle(self) -> bool:
        return not self.queue._heap

    def scores(self) -> list[ScoreEvent]:
        events = [decode(record.payload) for record in self.log.read({}, 1000)]
        return [event for event in events if isinstance(event, ScoreEvent)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(function: RewardFunction, rule: OnFailure = "train") -> Bench:
        made.append(Bench(tmp_path, function, rule))
        return made[-1]

    yield make
    for one in made:
        one.scoring.close()


def failing(times: int) -> RewardFunction:
    """A function that cannot score the first times."""
    left = [CannotScore("away")] * times

    def function(view: SessionView) -> Scores:
        if left:
            raise left.pop()
        return Scores(0.5, {view.turns[0].completion_id: 1})

    return function


def test_score_goes_onto_the_log(bench: Callable[..., Bench]) -> None:
    """With the session's rewards, the policy, and the time of its making as event time."""
    made = bench(failing(0))
    made.scoring.submit(made.session(), ["judge"])
    assert made.run_next() == 0
    [event] = made.scores()
    assert (event.policy, event.session_id, event.signal, event.at) == ("riacho", "s", "judge", moment(7))
    assert (event.session, event.turns, event.failure) == (0.5, {"c-s": 1.0}, None)
    assert made.idle


def test_session_that_is_handed_over_twice_is_scored_once(bench: Callable[..., Bench]) -> None:
    """Also when the second time comes after its score, which the learner may not have read yet."""
    made = bench(failing(0))
    joined = made.session()
    made.scoring.submit(joined, ["judge"])
    made.scoring.submit(joined, ["judge"])
    made.run_next()
    made.scoring.submit(joined, ["judge"])
    assert made.idle
    assert len(made.scores()) == 1


def test_failed_scorer_is_tried_again_after_growing_pauses(bench: Callable[..., Bench]) -> None:
    """A failure that passes leaves no trace on the log."""
    made = bench(failing(2))
    made.scoring.submit(made.session(), ["judge"])
    assert [made.run_next() for _ in range(3)] == [0, 1, 2]
    [event] = made.scores()
    assert event.failure is None


def test_log_hears_of_a_failure_that_lasts(bench: Callable[..., Bench]) -> None:
    """After the tries, once and with the reason; then a session that is trained without the signal is left alone."""
    made = bench(failing(1000))
    made.scoring.submit(made.session(), ["judge"])
    for _ in range(TRIES):
        assert made.scores() == []
        made.run_next()
    [event] = made.scores()
    assert (event.failure, event.rewards) == ("away", {})
    assert made.idle


def test_parked_session_is_tried_until_it_is_scored(bench: Callable[..., Bench]) -> None:
    """With pauses that double up to the longest; the log hears of the failure once, and then of the score."""
    made = bench(failing(14), "park")
    made.scoring.submit(made.session(), ["judge"])
    waited = [made.run_next() for _ in range(15)]
    assert waited == [0, *(min(2.0**i, LONGEST_PAUSE_S) for i in range(14))]
    failure, success = made.scores()
    assert (failure.failure, success.failure, success.session) == ("away", None, 0.5)
    assert failure.event_id != success.event_id
    assert made.idle


def test_dropped_session_is_scored_no_more(bench: Callable[..., Bench]) -> None:
    """Not where it waits for its next try, and not where it was dropped while it was scored."""
    made = bench(failing(1), "park")
    made.scoring.submit(made.session(), ["judge"])
    made.run_next()
    made.scoring.drop("s")
    made.run_next()
    assert (made.scores(), made.idle) == ([], True)

    def dropping(view: SessionView) -> Scores:
        other.scoring.drop(view.session_id)
        return Scores(1.0)

    other = bench(dropping)
    other.scoring.submit(other.session("t"), ["judge"])
    other.run_next()
    assert other.scores() == []


def test_log_that_is_away_is_no_failure_of_the_scorer(bench: Callable[..., Bench], monkeypatch: Any) -> None:
    """Reading and appending are waited for; the function is called once."""
    made = bench(failing(0))
    joined = made.session()
    for name in ("read_at", "append"):
        monkeypatch.setattr(made.log, name, away_at_first(getattr(made.log, name)))
    made.scoring.submit(joined, ["judge"])
    made.run_next()
    assert len(made.scores()) == 1
    assert len(made.pauses) == 2


def test_session_whose_events_are_gone_cannot_be_scored(bench: Callable[..., Bench]) -> None:
    """The rule for failures holds, with the log's reason."""
    made = bench(failing(0))
    made.scoring.submit(Joined("s", (Position(0, 99),), ()), ["judge"])
    for _ in range(TRIES):
        made.run_next()
    [event] = made.scores()
    assert "cannot be read" in (event.failure or "")


def test_score_that_the_log_refuses_does_not_stop_the_others(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is lost, which is said."""
    made = bench(failing(0))
    joined = made.session()
    with monkeypatch.context() as patch:
        patch.setattr(made.log, "append", refusing)
        made.scoring.submit(joined, ["judge"])
        made.run_next()
    made.scoring.submit(made.session("t"), ["judge"])
    made.run_next()
    assert "the score of session s is lost" in caplog.text
    assert [event.session_id for event in made.scores()] == ["t"]


async def refusing(event: ScoreEvent) -> None:
    raise EventTooLarge(2, 1)


def test_threads_score_and_end(tmp_path: Path, hang: threading.Event) -> None:
    """With workers running, a session that hangs does not hold up the next one, and closing does not wait for it."""
    scored = threading.Event()

    def function(view: SessionView) -> Scores:
        if view.session_id == "hangs":
            hang.wait()
        return Scores(1.0)

    class Watched(SqliteLog):
        async def append(self, event: Any) -> Position:
            position = await super().append(event)
            if isinstance(event, ScoreEvent):
                scored.set()
            return position

    log = Watched(tmp_path / "log.db")
    positions = {name: asyncio.run(log.append(completion(name, name))) for name in ("hangs", "s")}
    scoring = Scoring("riacho", log, {"judge": Guarded(function, LONG_S, 0.0, 1.0)}, {"judge": "train"}, 1.0)
    scoring.start(2)
    for name, position in positions.items():
        scoring.submit(Joined(name, (position,), ()), ["judge"])
    assert scored.wait(LONG_S)
    scoring.close()
    reopened = SqliteLog(tmp_path / "log.db")
    assert [decode(record.payload).type for record in reopened.read({}, 9)] == ["completion", "completion", "score"]
    reopened.close()
