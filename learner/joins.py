"""The join of completions with their feedback: what waits, by log position, in event time.

Everything here goes into the checkpoint. Payloads do not: they are read from the log again when a rollout is
complete, so that a checkpoint stays small however much traffic waits.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from app.events.log import Position
from app.events.schema import CompletionEvent, FeedbackEvent, ForgetEvent, SessionClosedEvent

_NEVER = datetime.min.replace(tzinfo=UTC)
_LATEST = datetime.max.replace(tzinfo=UTC)


@dataclass
class Pending:
    """One session that is not yet a rollout."""

    completions: dict[str, Position] = field(default_factory=dict)
    feedback: dict[str, Position] = field(default_factory=dict)
    judged: set[str] = field(default_factory=set)
    final: bool = False
    closed: bool = False
    at: datetime = _NEVER

    @property
    def complete(self) -> bool:
        """A final judgement, or a close with rewards there; and every judged completion has arrived."""
        ended = self.final or (self.closed and bool(self.feedback))
        return ended and bool(self.completions) and self.judged <= self.completions.keys()

    def state(self) -> dict[str, Any]:
        return {
            "completions": {id: str(position) for id, position in self.completions.items()},
            "feedback": {id: str(position) for id, position in self.feedback.items()},
            "judged": sorted(self.judged),
            "final": self.final,
            "closed": self.closed,
            "at": self.at.isoformat(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Pending":
        return cls(
            {id: Position.parse(text) for id, text in state["completions"].items()},
            {id: Position.parse(text) for id, text in state["feedback"].items()},
            set(state["judged"]),
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

    def state(self) -> list[Any]:
        return [self.session_id, [str(p) for p in self.completions], [str(p) for p in self.feedback]]

    @classmethod
    def from_state(cls, state: list[Any]) -> "Joined":
        session_id, completions, feedback = state
        return cls(
            session_id,
            tuple(Position.parse(text) for text in completions),
            tuple(Position.parse(text) for text in feedback),
        )


class Joins:
    """Sessions that wait, in order of their last event, and the sessions that have ended.

    Args:
        ttl: event time for which a session waits, and for which an ended one is remembered, so that a
            redelivered event counts once.
    """

    def __init__(self, ttl: timedelta) -> None:
        self._ttl = ttl
        self._pending: dict[str, Pending] = {}
        self._ended: dict[str, datetime] = {}
        self._oldest = _LATEST
        self.late = 0

    def __len__(self) -> int:
        return len(self._pending)

    def apply(
        self, event: CompletionEvent | FeedbackEvent | SessionClosedEvent | ForgetEvent, position: Position
    ) -> Joined | None:
        """Take one event; the session's rollout if this completes it.

        The same event again changes nothing. An event of an ended session is late and counted.
        """
        session = event.session_id
        if session in self._ended:
            self.late += 1
            return None
        if isinstance(event, ForgetEvent):
            self._pending.pop(session, None)
            self._remember(session, event.at)
            return None
        pending = self._pending.pop(session, None) or Pending()
        self._pending[session] = pending
        pending.at = max(pending.at, event.at)
        self._oldest = min(self._oldest, pending.at)
        _add(pending, event, position)
        return self._end(session, event.at) if pending.complete else None

    def is_new(self, event: CompletionEvent) -> bool:
        """Whether this completion was not met before and its session has not ended."""
        pending = self._pending.get(event.session_id)
        met = pending is not None and event.completion_id in pending.completions
        return not met and event.session_id not in self._ended

    def waiting(self) -> list[str]:
        """The completions of all sessions that wait."""
        return [id for pending in self._pending.values() for id in pending.completions]

    def expire(self, now: datetime) -> list[str]:
        """Give up, in event time, on sessions whose last event is older than the time to live; which they were.

        Looks at each session only once the oldest may be due.
        """
        horizon = now - self._ttl
        if self._oldest >= horizon:
            return []
        expired = [session for session, pending in self._pending.items() if pending.at < horizon]
        for session in expired:
            del self._pending[session]
        self._ended = {session: at for session, at in self._ended.items() if at >= horizon}
        self._ended |= dict.fromkeys(expired, now)
        self._oldest = min([*(p.at for p in self._pending.values()), *self._ended.values()], default=_LATEST)
        return expired

    def _end(self, session: str, at: datetime) -> Joined:
        pending = self._pending.pop(session)
        self._remember(session, at)
        return Joined(session, tuple(pending.completions.values()), tuple(pending.feedback.values()))

    def _remember(self, session: str, at: datetime) -> None:
        self._ended[session] = at
        self._oldest = min(self._oldest, at)

    def state(self) -> dict[str, Any]:
        return {
            "pending": {session: pending.state() for session, pending in self._pending.items()},
            "ended": {session: at.isoformat() for session, at in self._ended.items()},
            "late": self.late,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._pending = {session: Pending.from_state(pending) for session, pending in state["pending"].items()}
        self._ended = {session: datetime.fromisoformat(at) for session, at in state["ended"].items()}
        self._oldest = _NEVER
        self.late = state["late"]


def _add(pending: Pending, event: CompletionEvent | FeedbackEvent | SessionClosedEvent, position: Position) -> None:
    if isinstance(event, CompletionEvent):
        pending.completions.setdefault(event.completion_id, position)
    elif isinstance(event, FeedbackEvent):
        pending.feedback.setdefault(event.event_id, position)
        pending.final |= event.final
        if event.completion_id is not None:
            pending.judged.add(event.completion_id)
    else:
        pending.closed = True
