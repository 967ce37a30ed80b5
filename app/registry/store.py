"""The registry: one object, an area store for each kind of thing it keeps."""

from typing import Self

from app.registry.audit import AuditStore
from app.registry.database import Clock, Database, open_current, utc_now
from app.registry.feedback import FeedbackStore
from app.registry.keys import KeyStore
from app.registry.leases import LeaseStore
from app.registry.outbox import OutboxStore
from app.registry.policies import PolicyStore
from app.registry.projections import ProjectionStore
from app.registry.versions import VersionStore


class Registry:
    """Synchronous and safe to use from several threads; each call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.policies = PolicyStore(database)
        self.versions = VersionStore(database)
        self.feedback = FeedbackStore(database)
        self.keys = KeyStore(database)
        self.leases = LeaseStore(database)
        self.projections = ProjectionStore(database)
        self.audit = AuditStore(database)
        self.outbox = OutboxStore(database)

    @classmethod
    def open(cls, url: str, *, clock: Clock = utc_now) -> Self:
        """Open a database at this code's revision; else SetupError says what to do. `clock` gives aware times."""
        return cls(open_current(url, clock))

    def close(self) -> None:
        """Close the connections."""
        self._database.close()
