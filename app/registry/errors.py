"""What the registry refuses, where a caller has to tell the reason by type."""

from app.errors import Conflict, RiachoError, Unavailable


class RolloutClosed(Conflict):
    """The session already has its final judgement, or was closed: it takes no more feedback."""

    code = "rollout_closed"


class NumberTaken(Conflict):
    """Another version has this number: one is never used twice."""


class LeaseLost(RiachoError):
    """Another holder has the lease, or it ran out: whoever gets this must stop writing."""

    status, code = 503, "lease_lost"


class RegistryUnavailable(Unavailable):
    """The database is away, locked, full or out of connections: the same call may succeed in a moment.

    Whether a write that failed so took effect is not known; every write of the registry may be repeated.
    """

    code = "registry_unavailable"
