"""The join of completions with their feedback and scores: what waits, by log position, in event time.

Everything here goes into the checkpoint. Payloads do not: they are read from the log again when a rollout is
complete, so that a checkpoint stays small however much traffic waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from app.events.log import Position
from app.events.schema import CompletionEvent, FeedbackEvent, ForgetEvent, ScoreEvent, SessionClosedEvent

OnFailure = Literal["train", "park"]
Joinable = CompletionEvent | FeedbackEvent | SessionClosedEvent | ScoreEvent | ForgetEvent

_NEVER = datetime.min.replace(tzinfo=UTC)
_LATEST = datetime.max.replace(tzinfo=UTC)


@dataclass
class Scores:
    """What the scorers of one session have said: where the score that counts lies, by signal, and who has failed."""

    given: dict[str, Position] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def add(self, event: ScoreEvent, position: Position) -> None:
        """A signal's first score counts, also after a failure."""
        if event.failure is not None:
            self.failed.add(event.signal)
        else:
            self.given.setdefault(event.signal, position)

    def missing(self, scorers: Mapping[str, OnFailure]) -> tuple[str, ...]:
        """The signals that are still to be scored; one that failed and is trained without is not."""
        given_up = {signal for signal in self.failed if scorers.get(signal) == "train"}
        return tuple(signal for signal in scorers if signal not in self.given and signal not in given_up)

    def state(self) -> dict[str, Any]:
        return {"given": _texts(self.given), "failed": sorted(self.failed)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Scores":
        return cls(_positions(state["given"]), set(state["failed"]))


@dataclass
class Pending:
    """One session that is not yet a rollout."""

    completions: dict[str, Position] = field(default_factory=dict)
    feedback: dict[str, Position] = field(default_factory=dict)
    judged: set[str] = field(default_factory=set)
    scores: Scores = field(default_factory=Scores)
    final: bool = False
    closed: bool = False
    at: datetime = _NEVER

    def complete(self, scored: bool) -> bool:
        """A final judgement, or a close with rewards there (`scored`: to come); and all that is judged has arrived."""
        ended = self.final or (self.closed and (scored or bool(self.feedback)))
        return ended and bool(self.completions) and self.judged <= self.completions.keys()

    def state(self) -> dict[str, Any]:
        return {
            "completions": _texts(self.completions),
            "feedback": _texts(self.feedback),
            "judged": sorted(self.judged),
            "scores": self.scores.state(),
            "final": self.final,
            "closed": self.closed,
            "at": self.at.isoformat(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Pending":
        return cls(
            _positions(state["completions"]),
            _positions(state["feedback"]),
            set(state["judged"]),
            Scores.from_state(state["scores"]) if "scores" in state else Scores(),
            state["final"],
            state["closed"],
            datetime.fromisoformat(state["at"]),
        )


@dataclass(frozen=True, slots=True)
class Joined:
    """A session whose rollout is complete: where its events lie."""

    session_id: str
    completions: tuple[Position, ...]
    feedback: tuple[Position, ...]
    scores: tuple[Position, ...] = ()

    def state(self) -> list[Any]:
        columns = (self.completions, self.feedback, self.scores)
        return [self.session_id, *([str(p) for p in column] for column in columns)]

    @classmethod
    def from_state(cls, state: list[Any]) -> "Joined":
        session_id, *columns = state
        return cls(session_id, *(tuple(Position.parse(text) for text in column) for column in columns))


@dataclass
class Held:
    """A complete session that waits for scores, since the event time `at`."""

    joined: Joined
    scores: Scores
    at: datetime

    def state(self) -> list[Any]:
        return [self.joined.state(), self.scores.state(), self.at.isoformat()]

    @classmethod
    def from_state(cls, state: list[Any]) -> "Held":
        joined, scores, at = state
        return cls(Joined.from_state(joined), Scores.from_state(scores), datetime.fromisoformat(at))


class Joins:
    """Sessions that wait, in order of their last event, complete ones that wait for scores, and those that have ended.

    Args:
        ttl: event time for which a session waits, for feedback and then for scores, and for which an ended one is
            remembered, so that a redelivered event counts once.
        scorers: the signals that every complete session waits for, and what is done where one cannot be had.
    """

    def __init__(self, ttl: timedelta, scorers: Mapping[str, OnFailure] | None = None) -> None:
        self._ttl = ttl
        self.scorers = scorers or {}
        self._pending: dict[str, Pending] = {}
        self._held: dict[str, Held] = {}
        self._ended: dict[str, datetime] = {}
        self._oldest = _LATEST
        self.late = 0

    @property
    def scored(self) -> bool:
        """Whether complete sessions wait for scores."""
        return bool(self.scorers)

    def __len__(self) -> int:
        return len(self._pending)

    def apply(self, event: Joinable, position: Position) -> Joined | None:
        """Take one event; the session's rollout if this completes it, or is the last score that it was held for.

        A complete rollout with `missing` scores is held from then on. The same event again changes nothing. An event
        of an ended session is late and counted.
        """
        session = event.session_id
        held = self._held.get(session)
        if held is not None and isinstance(event, ScoreEvent):
            held.scores.add(event, position)
            return None if self.missing(session) else self._release(held)
        if session in self._ended and not (held is not None and isinstance(event, ForgetEvent)):
            self.late += 1
            return None
        if isinstance(event, ForgetEvent):
            self._pending.pop(session, None)
            self._held.pop(session, None)
            self._remember(session, event.at)
            return None
        pending = self._pending.pop(session, None) or Pending()
        self._pending[session] = pending
        pending.at = max(pending.at, event.at)
        self._oldest = min(self._oldest, pending.at)
        _add(pending, event, position)
        return self._end(session, event.at) if pending.complete(self.scored) else None

    def is_new(self, event: CompletionEvent) -> bool:
        """Whether this completion was not met before and its session has not ended."""
        pending = self._pending.get(event.session_id)
        met = pending is not None and event.completion_id in pending.completions
        return not met and event.session_id not in self._ended

    def waiting(self) -> list[str]:
        """The completions of all sessions that wait for their end."""
        return [id for pending in self._pending.values() for id in pending.completions]

    def missing(self, session: str) -> tuple[str, ...]:
        """The signals that a session is held for; none where it is not held."""
        held = self._held.get(session)
        return () if held is None else held.scores.missing(self.scorers)

    def held(self) -> list[Joined]:
        """All sessions that wait for scores."""
        return [held.joined for held in self._held.values()]

    def parked(self, session: str) -> tuple[str, ...]:
        """The signals whose scorer has failed and that the session is held for all the same."""
        return tuple(signal for signal in self.missing(session) if signal in self._held[session].scores.failed)

    def parked_signals(self) -> list[str]:
        """For each session the signals that it is parked for."""
        return [signal for session in self._held for signal in self.parked(session)]

    def drop(self, session: str) -> None:
        """Hold a session no longer."""
        self._held.pop(session, None)

    def release(self) -> list[Joined]:
        """Sessions that are held for signals which the settings no longer name; held no longer."""
        return [self._release(held) for session, held in list(self._held.items()) if not self.missing(session)]

    def expire(self, now: datetime) -> list[str]:
        """Give up, in event time, on sessions whose last event is older than the time to live; which they were.

        Looks at each session only once the oldest may be due.
        """
        horizon = now - self._ttl
        if self._oldest >= horizon:
            return []
        waiting: dict[str, Pending | Held] = {**self._pending, **self._held}
        expired = [session for session, item in waiting.items() if item.at < horizon]
        for session in expired:
            self._pending.pop(session, None)
            self._held.pop(session, None)
            del waiting[session]
        self._ended = {session: at for session, at in self._ended.items() if at >= horizon or session in self._held}
        self._ended |= dict.fromkeys(expired, now)
        self._oldest = min([*(item.at for item in waiting.values()), *self._ended.values()], default=_LATEST)
        return expired

    def _end(self, session: str, at: datetime) -> Joined:
        pending = self._pending.pop(session)
        self._remember(session, at)
        joined = Joined(session, tuple(pending.completions.values()), tuple(pending.feedback.values()))
        held = self._held[session] = Held(joined, pending.scores, pending.at)
        return joined if self.missing(session) else self._release(held)

    def _release(self, held: Held) -> Joined:
        del self._held[held.joined.session_id]
        return replace(held.joined, scores=tuple(held.scores.given.values()))

    def _remember(self, session: str, at: datetime) -> None:
        self._ended[session] = at
        self._oldest = min(self._oldest, at)

    def state(self) -> dict[str, Any]:
        return {
            "pending": {session: pending.state() for session, pending in self._pending.items()},
            "held": {session: held.state() for session, held in self._held.items()},
            "ended": {session: at.isoformat() for session, at in self._ended.items()},
            "late": self.late,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._pending = {session: Pending.from_state(pending) for session, pending in state["pending"].items()}
        self._held = {session: Held.from_state(held) for session, held in state.get("held", {}).items()}
        self._ended = {session: datetime.fromisoformat(at) for session, at in state["ended"].items()}
        self._oldest = _NEVER
        self.late = state["late"]


def _add(
    pending: Pending, event: CompletionEvent | FeedbackEvent | SessionClosedEvent | ScoreEvent, position: Position
) -> None:
    if isinstance(event, CompletionEvent):
        pending.completions.setdefault(event.completion_id, position)
    elif isinstance(event, FeedbackEvent):
        pending.feedback.setdefault(event.event_id, position)
        pending.final |= event.final
        if event.completion_id is not None:
            pending.judged.add(event.completion_id)
    elif isinstance(event, ScoreEvent):
        pending.scores.add(event, position)
    else:
        pending.closed = True


def _texts(positions: Mapping[str, Position]) -> dict[str, str]:
    return {id: str(position) for id, position in positions.items()}


def _positions(texts: Mapping[str, str]) -> dict[str, Position]:
    return {id: Position.parse(text) for id, text in texts.items()}
