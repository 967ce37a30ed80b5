"""Feedback: each judgement counts once, and a rollout is closed once."""

from collections.abc import Sequence

from sqlalchemy import and_, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.errors import Conflict
from app.events.schema import Event
from app.registry import outbox
from app.registry.database import Database
from app.registry.errors import RolloutClosed
from app.registry.models import Feedback
from app.registry.records import FeedbackRecord, NewFeedback, record_of


class FeedbackStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, new: NewFeedback, event: Event) -> FeedbackRecord:
        """Store a judgement and promise its event, in one transaction.

        The same idempotency key with the same content returns what is stored, as a duplicate. Raises
        Conflict for the same key with other content, RolloutClosed once the session's rollout is closed.
        """
        row = self._row(new, event)
        try:
            with self._database.write() as session:
                earlier = _settled(session, new)
                if earlier is not None:
                    return earlier
                session.add(row)
                outbox.add_entry(session, row.at, event)
        except IntegrityError:  # another process was first, and the constraints chose
            with self._database.read() as session:
                earlier = _settled(session, new)
            if earlier is None:
                raise
            return earlier
        return _record(row)

    def has_rewards(self, policy: str, session_id: str) -> bool:
        """Whether any judgement of this session has a reward."""
        query = select(Feedback.id).where(
            Feedback.policy == policy, Feedback.session_id == session_id, Feedback.reward.is_not(None)
        )
        with self._database.read() as session:
            return session.scalars(query.limit(1)).one_or_none() is not None

    def list(self, policy: str, session_id: str) -> Sequence[FeedbackRecord]:
        """A session's judgements, oldest first."""
        query = select(Feedback).where(Feedback.policy == policy, Feedback.session_id == session_id)
        with self._database.read() as session:
            return [_record(row) for row in session.scalars(query.order_by(Feedback.id))]

    def _row(self, new: NewFeedback, event: Event) -> Feedback:
        return Feedback(
            client_id=new.id,
            policy=new.policy,
            session_id=new.session_id,
            completion_id=new.completion_id,
            signal=new.signal,
            reward=new.reward,
            final=new.final,
            closes=new.closes,
            final_key=new.session_id if new.final or new.closes else None,
            key_id=new.key_id,
            comment=new.comment,
            details=new.metadata,
            event_id=event.event_id,
            at=self._database.now(),
        )


def _settled(session: Session, new: NewFeedback) -> FeedbackRecord | None:
    """The earlier row that this judgement repeats; raises where an earlier row forbids it.

    One statement sees both kinds of earlier rows at one moment, so that a retry of a final judgement never meets
    its own first attempt as a stranger. A judgement that is not final and arrives together with the final one may
    be stored beside it: their events reach the log in no certain order anyway, and the learner goes by the log.
    """
    closing = and_(Feedback.policy == new.policy, Feedback.final_key == new.session_id)
    same_key = and_(Feedback.policy == new.policy, Feedback.key_id == new.key_id, Feedback.client_id == new.id)
    rows = session.scalars(select(Feedback).where(closing if new.id is None else or_(closing, same_key))).all()
    for row in rows:
        if new.id is not None and (row.key_id, row.client_id) == (new.key_id, new.id):
            return _repeated(row, new)
    if rows:
        raise _closed(rows[0])
    return None


def _repeated(row: Feedback, new: NewFeedback) -> FeedbackRecord:
    if _content(row) != _content(new):
        raise Conflict(
            f"the feedback id {new.id!r} was already used for other content; send a changed judgement under a new id",
            param="id",
        )
    return _record(row, duplicate=True)


def _closed(row: Feedback) -> RolloutClosed:
    how = "was closed" if row.closes else "got its final feedback"
    return RolloutClosed(
        f"the rollout of session {row.session_id!r} {how} at {row.at.isoformat()}: it is closed and takes "
        "no more feedback; go on in a new session"
    )


def _content(judgement: Feedback | NewFeedback) -> tuple[object, ...]:
    return (
        judgement.session_id,
        judgement.completion_id,
        judgement.signal,
        judgement.reward,
        judgement.final,
        judgement.closes,
        judgement.comment,
        judgement.details if isinstance(judgement, Feedback) else judgement.metadata,
    )


def _record(row: Feedback, *, duplicate: bool = False) -> FeedbackRecord:
    return record_of(FeedbackRecord, row, metadata=row.details, duplicate=duplicate)
