"""One or more vLLM servers as one engine: who gets a request, and what every one of them must hold.

Balancers for vLLM (vllm-router and others) know neither versions nor leases nor probes: which replica may serve which
version is decided here, and so is the choice among them.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

from app.engines.adapter_options import require_slot
from app.engines.base import Adapter, Chunk, Engine, EngineLost, EngineState, GenerateRequest, VersionMissing
from app.engines.replica import Replica
from app.engines.vllm import VllmClient
from app.engines.vllm_checks import NotReachable
from app.errors import AdapterRejected, Unavailable

CHECK_S = 1.0
FIRST_S = 120.0  # for the first replica to do what all must
STRAGGLER_S = 5.0  # for each further one after the last that was done
AFFINITY_SLACK = 8  # requests that a session's own replica may have more than the least loaded

Operation = Callable[[VllmClient], Awaitable[None]]


class Replicas(Engine):
    """One policy's versions on one or more vLLM servers.

    A replica in service holds every version that is loaded here. One that fails or is too slow goes out of service and
    holds up nothing; it comes back by itself once it has loaded and proved what is wanted.
    """

    def __init__(self, clients: Sequence[VllmClient], slots: int) -> None:
        self._slots = slots
        self._wanted: dict[int, Adapter] = {}
        self._loading: set[int] = set()
        self._replicas = [
            Replica(client, lambda: self._wanted, lambda: self._wanted.keys() | self._loading) for client in clients
        ]
        self._jobs: list[asyncio.Task[None]] = []
        self._turn = 0

    async def start(self) -> None:
        """Raises SetupError where a server is set up wrongly, or none answers; one that is away may come later."""
        outcomes = await asyncio.gather(*(r.client.start() for r in self._replicas), return_exceptions=True)
        started = []
        for replica, error in zip(self._replicas, outcomes, strict=True):
            if error is None:
                started.append(replica)
            elif isinstance(error, NotReachable):
                replica.take_out(error.message)
            else:
                raise error
        if not started:
            raise NotReachable("; ".join(replica.problem for replica in self._replicas), param="engine_urls")
        infos = [replica.client.info for replica in started]
        self.info = replace(infos[0], max_context=min(info.max_context for info in infos))
        self._wanted = {version: started[0].client.adapter(version) for version in _common(started)}
        await asyncio.gather(*(replica.put_in() for replica in started))
        self._jobs = [asyncio.create_task(_watch(r), name=f"watch {r.client.url}") for r in self._replicas]

    async def generate(self, request: GenerateRequest, version: int) -> AsyncGenerator[Chunk, None]:
        """As Engine.generate; a replica that fails before the first token is passed over for another."""
        failed: dict[Replica, Unavailable] = {}
        healed: set[Replica] = set()
        while True:
            replica = self._choose(request.affinity, failed)
            begun = False
            try:
                async with aclosing(replica.generate(request, version)) as chunks:
                    async for chunk in _from_first_token(chunks):
                        begun = True
                        yield chunk
                return
            except VersionMissing as error:
                if replica in healed or version not in self._wanted or not await _heal(replica):
                    failed[replica] = error
                healed.add(replica)
            except Unavailable as error:
                if isinstance(error, EngineLost):
                    replica.suspected.set()
                if begun:
                    raise
                failed[replica] = error

    async def load(self, adapter: Adapter) -> None:
        if adapter.version in self._wanted:
            return  # a version never changes, so it is the same
        require_slot(adapter, self._wanted.keys(), self._slots)
        self._loading.add(adapter.version)
        try:
            await self._load_everywhere(adapter)
            self._wanted[adapter.version] = adapter
        finally:
            self._loading.discard(adapter.version)
            if adapter.version not in self._wanted:
                await self._unload_everywhere(adapter.version)

    async def unload(self, version: int) -> None:
        self._wanted.pop(version, None)
        await self._unload_everywhere(version)

    def loaded(self) -> frozenset[int]:
        return frozenset(self._wanted)

    def may_read(self, version: int) -> bool:
        return any(version in replica.client.held() for replica in self._replicas)

    def states(self) -> list[EngineState]:
        return [replica.state() for replica in self._replicas]

    async def healthy(self) -> bool:
        return bool(self._serving())

    async def close(self) -> None:
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await asyncio.gather(*(replica.client.close() for replica in self._replicas))

    def _serving(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.serving]

    def _choose(self, affinity: str | None, failed: dict[Replica, Unavailable]) -> Replica:
        """A session's own replica, whose prefix cache knows it, unless that is much busier than the least loaded."""
        candidates = [replica for replica in self._serving() if replica not in failed]
        if not candidates:
            raise list(failed.values())[-1] if failed else self._none_serves()
        self._turn += 1
        first = self._turn % len(candidates)
        least = min(candidates[first:] + candidates[:first], key=lambda replica: replica.running)
        if affinity is None:
            return least
        own = max(candidates, key=lambda replica: zlib.crc32(f"{affinity} {replica.client.url}".encode()))
        return own if own.running <= least.running + AFFINITY_SLACK else least

    def _none_serves(self) -> Unavailable:
        problems = "; ".join(f"{replica.client.url}: {replica.problem}" for replica in self._replicas)
        return Unavailable(f"No engine is in service ({problems}); retry in a moment.")

    async def _load_everywhere(self, adapter: Adapter) -> None:
        """Also on replicas that come into service meanwhile."""
        done: set[Replica] = set()
        while left := [replica for replica in self._serving() if replica not in done]:
            done.update(left)
            await _on_all(left, f"{adapter.name} could not be loaded", lambda client: client.load(adapter))
        if not self._serving():
            raise self._none_serves()

    async def _unload_everywhere(self, version: int) -> None:
        await _on_all(self._serving(), f"version {version} could not be unloaded", lambda c: c.unload(version))


def _common(replicas: Collection[Replica]) -> frozenset[int]:
    """The versions that all hold."""
    return frozenset.intersection(*(replica.client.loaded() for replica in replicas))


async def _on_all(replicas: Collection[Replica], problem: str, operation: Operation) -> None:
    """Do something on several servers at once; who fails or straggles goes out of service.

    Raises AdapterRejected if any does.
    """
    tasks = {asyncio.ensure_future(operation(replica.client)): replica for replica in replicas}
    pending, patience = set(tasks), FIRST_S
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            if any(task.exception() is None for task in done):
                patience = STRAGGLER_S
    finally:
        for task in pending:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for replica, outcome in zip(tasks.values(), outcomes, strict=True):
        if isinstance(outcome, asyncio.CancelledError):
            replica.take_out(f"{problem} in time")
        elif isinstance(outcome, Unavailable):
            replica.take_out(f"{problem}: {outcome.message}")
    for outcome in outcomes:
        if isinstance(outcome, Exception) and not isinstance(outcome, Unavailable):
            raise outcome


async def _heal(replica: Replica) -> bool:
    """Load again what a server has lost; whether it serves."""
    try:
        await replica.settle()
    except (Unavailable, AdapterRejected) as error:
        replica.take_out(error.message)
    return replica.serving


async def _watch(replica: Replica) -> None:
    """Check a replica every second, and at once where a request found it gone, until cancelled."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_S):  # wait_for of Python 3.11 can swallow the cancellation
                await replica.suspected.wait()
        await replica.check()


async def _from_first_token(chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    """The same chunks, but nothing before the first token: until then another replica can take over."""
    held: list[Chunk] = []
    begun = False
    async for chunk in chunks:
        begun = begun or bool(chunk.token_ids or chunk.finish_reason)
        held.append(chunk)
        if begun:
            for ready in held:
                yield ready
            held = []
