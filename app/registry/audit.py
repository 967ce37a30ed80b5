"""The audit trail: what people changed, written in the transaction that changes it."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.registry.database import Database
from app.registry.models import AuditEntry
from app.registry.records import AuditRecord, record_of


def add_entry(
    session: Session, at: datetime, actor: str, action: str, policy: str | None, detail: dict[str, Any]
) -> AuditEntry:
    """Add an entry to a transaction that is under way."""
    entry = AuditEntry(at=at, actor=actor, action=action, policy=policy, detail=detail)
    session.add(entry)
    return entry


class AuditStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, actor: str, action: str, policy: str | None, detail: dict[str, Any]) -> AuditRecord:
        """Record an action that changed nothing else in the registry."""
        with self._database.write() as session:
            entry = add_entry(session, self._database.now(), actor, action, policy, detail)
            session.flush()
            return record_of(AuditRecord, entry)

    def list(self, limit: int = 200, policy: str | None = None) -> Sequence[AuditRecord]:
        """The newest entries first, of one policy or of all."""
        query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(limit)
        if policy is not None:
            query = query.where(AuditEntry.policy == policy)
        with self._database.read() as session:
            return [record_of(AuditRecord, entry) for entry in session.scalars(query)]
