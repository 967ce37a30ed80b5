"""Scoring: complete sessions go to reward functions in threads, and what they say goes onto the log.

The learner reads the scores there like any event, so that a replay and a resumed run see what this run saw.
Nothing here is in the checkpoint: after a crash the learner hands over again what is not scored.
"""

import asyncio
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from app.errors import RiachoError
from app.events.log import EventLog, EventRefused, LogUnavailable, Position
from app.events.schema import CompletionEvent, ScoreEvent, decode
from learner.joins import Joined, OnFailure
from learner.patience import Patience
from learner.rewards.view import CannotScore, RewardFunction, Scores, SessionView, TurnView

TRIES = 3
LONGEST_PAUSE_S = 600.0
MAX_REASON = 500

log = logging.getLogger(__name__)


def session_view(session_id: str, completions: Iterable[CompletionEvent]) -> SessionView:
    """What a reward function sees of a session; the completions come in time order."""
    return SessionView(session_id, tuple(map(_turn_view, completions)))


def _turn_view(event: CompletionEvent) -> TurnView:
    return TurnView(
        completion_id=event.completion_id,
        version=event.version,
        messages=event.messages,
        tools=event.tools,
        output=event.output,
        tool_calls=event.tool_calls,
        tool_call_kinds=event.tool_call_kinds,
        finish_reason=event.finish_reason,
        completion_tokens=event.usage.completion_tokens,
    )


@dataclass(slots=True, eq=False)
class Job:
    """One session that one signal's scorer has to score."""

    joined: Joined
    signal: str
    failures: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.joined.session_id, self.signal


class JobQueue:
    """Jobs that are done when they are due, the earliest first.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Job]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: Job, pause_s: float = 0.0) -> None:
        with self._changed:
            heapq.heappush(self._heap, (self._clock() + pause_s, next(self._order), job))
            self._changed.notify()

    def take(self) -> Job | None:
        """The next job that is due; waits for it. None once the queue is closed."""
        with self._changed:
            while not self._closed:
                left = self._heap[0][0] - self._clock() if self._heap else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._heap)[-1]
                self._changed.wait(left)
            return None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class ScoringLog:
    """The log as the scorers' threads use it: a client of their own, one call at a time."""

    def __init__(self, events: EventLog) -> None:
        self._log = events
        self._lock = threading.Lock()
        self._closed = False

    def completions(self, positions: Sequence[Position]) -> list[CompletionEvent]:
        """Raises LogUnavailable, also after `close`, and LostRange."""
        with self._open():
            events = [decode(self._log.read_at(position).payload) for position in positions]
        return [event for event in events if isinstance(event, CompletionEvent)]

    def append(self, event: ScoreEvent) -> None:
        """Raises LogUnavailable, also after `close`, and EventRefused."""
        with self._open():
            asyncio.run(self._log.append(event))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._log.close()

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise LogUnavailable("the log is closed: the learner stops")
            yield


class Scoring:
    """Has sessions scored, each signal by threads of its own, so that a slow scorer holds up no other.

    A scorer that fails is tried again, after pauses that double. After TRIES failures the log hears of it; a session
    that is to be parked is then still tried, until it is scored or dropped.

    Args:
        functions: the scorer of each signal.
        on_failure: what becomes of a session that a signal's scorer cannot score.
        retry_s: the first pause.
        now: event time of the scores.
        clock, sleep: of a monotonic clock, for the pauses.
    """

    def __init__(
        self,
        policy: str,
        events: EventLog,
        functions: Mapping[str, RewardFunction],
        on_failure: Mapping[str, OnFailure],
        retry_s: float,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._policy = policy
        self._log = ScoringLog(events)
        self._functions = functions
        self._on_failure = on_failure
        self._retry_s = retry_s
        self._now = now
        self._patience = Patience(lambda: not self._closed, sleep)
        self._queues = {signal: JobQueue(clock) for signal in functions}
        self._wanted: dict[tuple[str, str], Job] = {}
        self._closed = False

    def start(self, workers: int) -> None:
        """Begin to work, with so many threads a signal."""
        for signal in self._queues:
            for _ in range(workers):
                threading.Thread(target=self._work, args=(signal,), name=f"scorer-{signal}", daemon=True).start()

    def submit(self, joined: Joined, signals: Iterable[str]) -> None:
        """Have a session scored; nothing changes for signals whose scorer has it already."""
        for signal in signals:
            job = Job(joined, signal)
            if self._wanted.setdefault(job.key, job) is job:
                self._queues[signal].put(job)

    def drop(self, session_id: str) -> None:
        """Score a session no more; a score that is on its way may still come."""
        for signal in self._queues:
            self._wanted.pop((session_id, signal), None)

    def clear(self) -> None:
        """Drop every session."""
        self._wanted.clear()

    def close(self) -> None:
        """Stop; calls of reward functions that are under way are left to themselves."""
        self._closed = True
        self.clear()
        for queue in self._queues.values():
            queue.close()
        self._log.close()

    def _work(self, signal: str) -> None:
        while (job := self._queues[signal].take()) is not None:
            try:
                self.run(job)
            except LogUnavailable:
                log.info("scoring stopped while the log was away")

    def run(self, job: Job) -> None:
        """Score one session, and put the score or the failure onto the log; a failed job is tried again later."""
        if not self._is_wanted(job):
            return
        try:
            scores = self._functions[job.signal](self._view(job))
        except CannotScore as error:
            self._failed(job, str(error)[:MAX_REASON])
        else:
            self._append(job, scores, None)

    def _view(self, job: Job) -> SessionView:
        try:
            completions = self._patience(self._log.completions, job.joined.completions)
        except LogUnavailable:
            raise
        except RiachoError as error:
            raise CannotScore(f"the session cannot be read: {error}") from error
        return session_view(job.joined.session_id, completions)

    def _failed(self, job: Job, reason: str) -> None:
        job.failures += 1
        log.warning("session %s has no score for %r (try %d): %s", *job.key, job.failures, reason)
        if job.failures == TRIES:
            self._append(job, Scores(), reason)
        if job.failures < TRIES or self._on_failure[job.signal] == "park":
            pause_s = min(LONGEST_PAUSE_S, self._retry_s * 2.0 ** min(job.failures - 1, 32))
            self._queues[job.signal].put(job, pause_s)

    def _append(self, job: Job, scores: Scores, failure: str | None) -> None:
        if not self._is_wanted(job):
            return
        event = ScoreEvent(
            event_id=f"score-{job.signal}-{job.failures}-{job.joined.session_id}",
            policy=self._policy,
            session_id=job.joined.session_id,
            at=self._now(),
            signal=job.signal,
            session=None if scores.session is None else float(scores.session),
            turns={id: float(reward) for id, reward in scores.turns.items()},
            failure=failure,
        )
        try:
            self._patience(self._log.append, event)
        except EventRefused as error:
            log.error("the score of session %s is lost: %s", job.joined.session_id, error)

    def _is_wanted(self, job: Job) -> bool:
        return self._wanted.get(job.key) is job
