"""Which version serves: the live pointer, leases that hold a version to a request's last token, engine slots."""

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from anyio import to_thread

from app.engines.base import BASE_VERSION, Adapter, Engine
from app.errors import NotFound, Unavailable
from app.registry import Registry
from app.registry.records import VersionRecord

log = logging.getLogger(__name__)


class ModelNotFound(NotFound):
    code = "model_not_found"


class Versions:
    """One policy's versions in one engine.

    The pointer moves only to a loaded version and only inside `_moving`, so that a version is never evicted
    between its load and its first request. Taking a lease on the live version does not wait.
    """

    def __init__(self, engine: Engine, registry: Registry, policy: str, store: Path) -> None:
        self._engine = engine
        self._registry = registry
        self._policy = policy
        self._directory = store / policy
        self._leases: Counter[int] = Counter()
        self._moving = asyncio.Lock()
        self._used: list[int] = []
        self.live = BASE_VERSION

    def name(self, version: int) -> str:
        return f"{self._policy}@{version or 'base'}"

    def delete_files(self, version: VersionRecord) -> None:
        """Delete a version's files, and what attempts to write it have left behind."""
        left = (*self._directory.glob(f"{version.number}.*"), *self._directory.glob(f".{version.number}.*.part"))
        for path in (self._directory / version.directory, *left):
            shutil.rmtree(path, ignore_errors=True)

    def in_use(self) -> frozenset[int]:
        """Versions that a lease or the pointer holds."""
        return frozenset(self._leases) | {self.live}

    @property
    def leases(self) -> int:
        return self._leases.total()

    def pinned_version(self, model: str) -> int | None:
        """The version that a model name pins; None for the policy's name, which follows the pointer.

        Raises ModelNotFound for any other name.
        """
        policy, at, version = model.partition("@")
        if policy == self._policy and not at:
            return None
        if policy == self._policy and version == "base":
            return BASE_VERSION
        if policy == self._policy and version.isascii() and version.isdigit() and len(version) < 10:
            return int(version)
        raise ModelNotFound(
            f"model {model!r} is not served here; use {self._policy!r} (the live version), "
            f"'{self._policy}@N' (version N) or '{self._policy}@base'",
            param="model",
        )

    @asynccontextmanager
    async def lease(self, pinned: int | None) -> AsyncIterator[int]:
        """Hold a version (None = the live one) until the block ends; it stays loaded so long."""
        version = self.live if pinned is None else pinned
        if pinned is None or pinned == self.live:
            self._leases[version] += 1
        else:
            async with self._moving:
                await self._load_known(version)
                self._leases[version] += 1
        self._touch(version)
        try:
            yield version
        finally:
            self._leases[version] -= 1
            if not self._leases[version]:
                del self._leases[version]

    async def move(self, version: int, commit: Callable[[], Awaitable[bool]]) -> bool:
        """Load a version, run `commit`, and if it says so point at the version.

        Raises AdapterRejected with the pointer unmoved where the engine refuses the version.
        """
        async with self._moving:
            await self._load(version)
            moved = await commit()
            if moved:
                self._point(version)
            return moved

    async def follow(self) -> None:
        """Point where the registry points: another process may have moved it, or the engine may have lost it."""
        async with self._moving:
            record = await to_thread.run_sync(self._registry.policies.get, self._policy)
            if record.live_version != self.live:
                await self._load(record.live_version)
                self._point(record.live_version)
            else:
                await self._load(self.live)

    async def evict(self, version: int) -> bool:
        """Unload a version unless something holds it; whether no engine may read its files any more."""
        async with self._moving:
            if version in self.in_use():
                return False
            await self._engine.unload(version)
            return not self._engine.may_read(version)

    def _point(self, version: int) -> None:
        self.live = version
        self._touch(version)
        log.info("%s is live", self.name(version))

    def _touch(self, version: int) -> None:
        self._used = [*(v for v in self._used if v != version), version]

    async def _load_known(self, version: int) -> None:
        """Load a version that a client named; raises ModelNotFound unless it may serve."""
        if version != BASE_VERSION:
            try:
                record = await to_thread.run_sync(self._registry.versions.get, self._policy, version)
            except NotFound as error:
                raise ModelNotFound(error.message, param="model") from error
            if record.state == "rejected" or record.deleted_at is not None:
                why = f"rejected: {record.reason}" if record.state == "rejected" else "no longer on disk"
                raise ModelNotFound(f"{self.name(version)} cannot serve: it is {why}", param="model")
        await self._load(version)

    async def _load(self, version: int) -> None:
        if version == BASE_VERSION or version in self._engine.loaded():
            return
        record = await to_thread.run_sync(self._registry.versions.get, self._policy, version)
        await self._make_room()
        await self._engine.load(Adapter(self._policy, version, self._directory / record.directory))

    async def _make_room(self) -> None:
        """Unload the version idle for longest if every slot is taken."""
        loaded = self._engine.loaded()
        if len(loaded) < self._engine.info.slots:
            return
        idle = [version for version in loaded if version not in self.in_use()]
        if not idle:
            raise Unavailable(
                f"all {self._engine.info.slots} adapter slots are held by running requests; retry in a moment, "
                "or raise `slots`"
            )
        oldest = min(idle, key=lambda v: self._used.index(v) if v in self._used else -1)
        await self._engine.unload(oldest)
