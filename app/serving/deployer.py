"""Deploys what the learner publishes: one app process at a time, under a lease."""

import asyncio
import logging
import time
from collections.abc import Callable

from anyio import to_thread

from app.errors import AdapterRejected, Conflict, Unavailable
from app.registry import Registry
from app.registry.records import Lease, VersionRecord
from app.serving.versions import Versions

CLEAN_EVERY_S = 5.0
HELD_UP_S = 1.0
ACTOR = "deployer"

log = logging.getLogger(__name__)


class Deployer:
    """Loads the newest candidate, moves the pointer, and deletes the files of versions that nothing needs.

    Args:
        holder: names this process at this start.
        keep: the newest versions whose files stay.
    """

    def __init__(
        self, versions: Versions, registry: Registry, policy: str, holder: str, lease_s: float, keep: int
    ) -> None:
        self._versions = versions
        self._registry = registry
        self._policy = policy
        self._holder = holder
        self._lease_s = lease_s
        self._keep = keep
        self._lease: Lease | None = None
        self._renew_at = 0.0
        self._clean_at = 0.0

    async def run(self, poll_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Follow the pointer, and while this process holds the lease deploy and clean up, until cancelled."""
        while True:
            try:
                await self._round(clock)
            except (AdapterRejected, Unavailable) as error:
                log.warning("deploying is held up: %s", error)
                await asyncio.sleep(HELD_UP_S)
            await asyncio.sleep(poll_s)

    async def _round(self, clock: Callable[[], float]) -> None:
        await self._versions.follow()
        if await self._holds_lease(clock()):
            await self.deploy_newest()
            if clock() >= self._clean_at:
                self._clean_at = clock() + CLEAN_EVERY_S
                await self.clean_up()

    async def deploy_newest(self) -> None:
        """Make the newest candidate live; one that the engine refuses is rejected with the engine's reason."""
        candidate = await to_thread.run_sync(self._registry.versions.newest_candidate, self._policy)
        if candidate is None:
            return

        async def commit() -> bool:
            moved = await to_thread.run_sync(
                self._registry.versions.make_live,
                *(self._policy, candidate.number, ACTOR, "newest candidate", candidate.epoch),
            )
            return moved is not None

        try:
            await self._versions.move(candidate.number, commit)
        except AdapterRejected as error:
            log.warning("version %d is rejected: %s", candidate.number, error.message)
            await to_thread.run_sync(
                self._registry.versions.reject, self._policy, candidate.number, error.message, "engine"
            )
        except Unavailable as error:
            log.info("version %d waits: %s", candidate.number, error.message)

    async def clean_up(self) -> None:
        """Delete old versions: the newest `keep`, the live one, pinned ones and all that a lease holds stay."""
        newest = await to_thread.run_sync(self._registry.versions.latest_number, self._policy)
        old = await to_thread.run_sync(self._registry.versions.list, self._policy, 500, newest - self._keep + 1)
        checkpoint = await to_thread.run_sync(self._registry.versions.newest_checkpoint, self._policy)
        needed = {checkpoint.number, checkpoint.parent} if checkpoint else set()
        for version in old:
            if version.deleted_at is None and not version.pinned and version.number not in needed:
                await self._delete(version)

    async def _delete(self, version: VersionRecord) -> None:
        if not await self._versions.evict(version.number):
            return
        try:
            await to_thread.run_sync(self._registry.versions.mark_deleted, self._policy, version.number)
        except Conflict:
            return
        await to_thread.run_sync(self._versions.delete_files, version)

    async def _holds_lease(self, now: float) -> bool:
        if self._lease is not None and now < self._renew_at:
            return True
        name = f"deployer:{self._policy}"
        self._lease = await to_thread.run_sync(self._registry.leases.acquire, name, self._holder, self._lease_s)
        self._renew_at = now + self._lease_s / 3
        return self._lease is not None

    async def close(self) -> None:
        """Give the lease back, so that the next process need not wait for it to run out."""
        if self._lease is not None:
            await to_thread.run_sync(self._registry.leases.release, self._lease)
