"""The registry: policies, versions, deployments, feedback, keys, leases and audit, in SQLite or PostgreSQL.

Both processes use it; it knows neither HTTP nor training. Calls are synchronous: from an event loop, use a thread.
"""

from app.registry.database import revisions, upgrade, utc_now
from app.registry.store import Registry

__all__ = ["Registry", "revisions", "upgrade", "utc_now"]
