"""What an operator does to the policy: the rollback."""

import uuid
from collections.abc import Callable
from datetime import datetime

from anyio import to_thread

from app.engines.base import BASE_VERSION
from app.errors import Conflict
from app.events.schema import RollbackEvent
from app.registry import Registry
from app.registry.records import DeploymentRecord
from app.serving.relay import Relay
from app.serving.versions import Versions

ROLLBACK_SESSION = "rollback"


class Operations:
    """Operations on one policy."""

    def __init__(
        self, registry: Registry, versions: Versions, relay: Relay, policy: str, clock: Callable[[], datetime]
    ) -> None:
        self._registry = registry
        self._versions = versions
        self._relay = relay
        self._policy = policy
        self._clock = clock

    async def rollback(self, to: int, actor: str, reason: str) -> DeploymentRecord:
        """Serve version `to` at once, begin a new epoch, and tell the learner.

        The version is loaded before the pointer moves. Raises NotFound, and Conflict for a version that was
        rejected or whose files are gone, with the pointer unmoved.
        """
        await to_thread.run_sync(self._require_servable, to)
        events: list[RollbackEvent] = []
        deployments: list[DeploymentRecord] = []

        def make_event(epoch: int) -> RollbackEvent:
            event = RollbackEvent(
                event_id=uuid.uuid4().hex,
                policy=self._policy,
                session_id=ROLLBACK_SESSION,
                at=self._clock(),
                to=to,
                epoch=epoch,
                reason=reason,
            )
            events.append(event)
            return event

        async def commit() -> bool:
            deployments.append(
                await to_thread.run_sync(self._registry.versions.rollback, self._policy, to, actor, reason, make_event)
            )
            return True

        await self._versions.move(to, commit)
        await self._relay.deliver(events[-1])
        return deployments[0]

    def _require_servable(self, version: int) -> None:
        if version == BASE_VERSION:
            return
        record = self._registry.versions.get(self._policy, version)
        if record.state == "rejected" or record.deleted_at is not None:
            why = f"was rejected: {record.reason}" if record.state == "rejected" else "is no longer on disk"
            raise Conflict(f"version {version} {why}; choose another from the list of versions", param="to")
