"""What the registry refuses, where a caller has to tell the reason by type."""

from app.errors import Conflict, RiachoError


class RolloutClosed(Conflict):
    """The session already has its final judgement, or was closed: it takes no more feedback."""

    code = "rollout_closed"


class LeaseLost(RiachoError):
    """Another holder has the lease, or it ran out: whoever gets this must stop writing."""

    status, code = 503, "lease_lost"
