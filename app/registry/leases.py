"""Leases: one writer at a time, and a token that fences a writer which was paused too long."""

from datetime import timedelta

from sqlalchemy import Update, case, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.registry.database import Database, changed
from app.registry.errors import LeaseLost
from app.registry.models import LeaseEntry
from app.registry.records import Lease


def fence(session: Session, database: Database, lease: Lease) -> None:
    """Hold off a change of hands until this transaction ends; raises LeaseLost if there was one already."""
    query = (
        select(LeaseEntry.token)
        .where(
            LeaseEntry.name == lease.name,
            LeaseEntry.holder == lease.holder,
            LeaseEntry.token == lease.token,
            LeaseEntry.expires_at > database.now(),
        )
        .with_for_update()
    )
    if session.scalars(query).one_or_none() is None:
        raise _lost(lease)


class LeaseStore:
    """A lease counts as free from the moment `expires_at` on."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None:
        """Take a free lease or renew one's own, for `ttl_s` seconds; None while another holds it.

        `holder` must name one process at one start: two with the same name would share the lease.
        """
        now = self._database.now()
        expires_at = now + timedelta(seconds=ttl_s)
        free = LeaseEntry.expires_at <= now
        take = (
            update(LeaseEntry)
            .where(LeaseEntry.name == name, or_(LeaseEntry.holder == holder, free))
            .values(
                holder=holder,
                token=case((free, LeaseEntry.token + 1), else_=LeaseEntry.token),
                expires_at=expires_at,
            )
            .returning(LeaseEntry.token)
        )
        try:
            with self._database.write() as session:
                token = session.scalars(take).one_or_none()
                if token is not None:
                    return Lease(name, holder, token, expires_at)
                if session.get(LeaseEntry, name) is not None:
                    return None
                session.add(LeaseEntry(name=name, holder=holder, token=1, expires_at=expires_at))
        except IntegrityError:  # another process made the first row in between
            return None
        return Lease(name, holder, 1, expires_at)

    def renew(self, lease: Lease, ttl_s: float) -> Lease:
        """Hold on for `ttl_s` seconds from now, also after a lapse that nobody used; raises LeaseLost."""
        expires_at = self._database.now() + timedelta(seconds=ttl_s)
        with self._database.write() as session:
            if not changed(session, _mine(lease).values(expires_at=expires_at)):
                raise _lost(lease)
        return Lease(lease.name, lease.holder, lease.token, expires_at)

    def release(self, lease: Lease) -> None:
        """Free the lease; one that was lost already is left alone."""
        with self._database.write() as session:
            session.execute(_mine(lease).values(holder=None, expires_at=self._database.now()))

    def holder(self, name: str) -> Lease | None:
        """Who holds the lease now."""
        with self._database.read() as session:
            entry = session.get(LeaseEntry, name)
            if entry is None or entry.holder is None or entry.expires_at <= self._database.now():
                return None
            return Lease(name, entry.holder, entry.token, entry.expires_at)


def _mine(lease: Lease) -> Update:
    return update(LeaseEntry).where(
        LeaseEntry.name == lease.name, LeaseEntry.holder == lease.holder, LeaseEntry.token == lease.token
    )


def _lost(lease: Lease) -> LeaseLost:
    return LeaseLost(
        f"{lease.holder} no longer holds the lease {lease.name!r} (token {lease.token}): it ran out or another "
        "process took it over; stop writing and start again from the newest checkpoint"
    )
