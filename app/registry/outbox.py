"""Events that a transaction promised to the log, kept until they are known to be there."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from app.events.schema import Event, decode, encode
from app.registry.database import Database
from app.registry.models import OutboxEntry
from app.registry.records import OutboxRecord


def add_entry(session: Session, at: datetime, event: Event) -> None:
    """Promise an event in a transaction that is under way."""
    session.add(OutboxEntry(event_id=event.event_id, policy=event.policy, at=at, payload=encode(event).decode()))


class OutboxStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def pending(self, policy: str, older_than: datetime, limit: int) -> Sequence[OutboxRecord]:
        """Events promised at or before `older_than` and not marked as appended, oldest first.

        Whoever appends them may repeat one that another process appends: the learner counts an event id once.
        """
        query = (
            select(OutboxEntry)
            .where(OutboxEntry.policy == policy, OutboxEntry.at <= older_than)
            .order_by(OutboxEntry.id)
            .limit(limit)
        )
        with self._database.read() as session:
            return [OutboxRecord(entry.event_id, decode(entry.payload.encode())) for entry in session.scalars(query)]

    def mark_appended(self, event_id: str) -> None:
        """Forget the promise: the event is on the log. An unknown or forgotten id changes nothing."""
        with self._database.write() as session:
            session.execute(delete(OutboxEntry).where(OutboxEntry.event_id == event_id))
