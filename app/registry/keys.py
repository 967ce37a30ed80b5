"""API keys: only their hashes are kept."""

import hashlib
from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError

from app.errors import NotFound
from app.registry import audit
from app.registry.database import Database, changed
from app.registry.models import ApiKey
from app.registry.records import KeyRecord, Role, record_of


def _hash(plain: str) -> str:
    # A plain hash is enough: keys are long and random, so there is no dictionary to try.
    return hashlib.sha256(plain.encode()).hexdigest()


class KeyStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, plain: str, role: Role, name: str, store_content: bool = True) -> KeyRecord:
        """Store a key; the same plain key again returns what is stored, unchanged, revoked or not."""
        sha256 = _hash(plain)
        key = ApiKey(
            id=sha256[:8],
            sha256=sha256,
            role=role,
            name=name,
            created_at=self._database.now(),
            revoked_at=None,
            store_content=store_content,
        )
        try:
            with self._database.write() as session:
                session.add(key)
        except IntegrityError:
            with self._database.read() as session:
                stored = session.scalars(select(ApiKey).where(ApiKey.sha256 == sha256)).one_or_none()
            if stored is None:
                raise
            return record_of(KeyRecord, stored)
        return record_of(KeyRecord, key)

    def find(self, plain: str) -> KeyRecord | None:
        """The key, if it is known and not revoked."""
        query = select(ApiKey).where(ApiKey.sha256 == _hash(plain), ApiKey.revoked_at.is_(None))
        with self._database.read() as session:
            key = session.scalars(query).one_or_none()
            return None if key is None else record_of(KeyRecord, key)

    def list(self) -> Sequence[KeyRecord]:
        """All keys, revoked ones too, oldest first."""
        with self._database.read() as session:
            query = select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)
            return [record_of(KeyRecord, key) for key in session.scalars(query)]

    def revoke(self, id: str, actor: str) -> None:
        """Refuse the key from now on; audited once. Raises NotFound."""
        now = self._database.now()
        with self._database.write() as session:
            revoke = update(ApiKey).where(ApiKey.id == id, ApiKey.revoked_at.is_(None)).values(revoked_at=now)
            if changed(session, revoke):
                audit.add_entry(session, now, actor, "revoke_key", None, {"key_id": id})
            elif session.get(ApiKey, id) is None:
                raise NotFound(f"there is no key {id!r}", param="id")

    def any(self, role: Role) -> bool:
        """Whether there is a key of this role that is not revoked."""
        query = select(ApiKey.id).where(ApiKey.role == role, ApiKey.revoked_at.is_(None)).limit(1)
        with self._database.read() as session:
            return session.scalars(query).one_or_none() is not None
