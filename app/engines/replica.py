"""One vLLM replica: in service while it answers and has proved every version that it must hold."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Set
from contextlib import aclosing

from app.engines.base import Adapter, Chunk, EngineLost, EngineSlow, EngineState, GenerateRequest
from app.engines.vllm import VllmClient
from app.errors import AdapterRejected, SetupError, Unavailable

FAILURES = 3  # checks in a row that a server which only keeps silent may fail

log = logging.getLogger(__name__)


class Replica:
    """A server, whether it is in service, and how many requests it has under way.

    Args:
        wanted: gives the versions that a replica in service must hold.
        allowed: gives those that it may hold: the wanted ones and those on their way.
    """

    def __init__(
        self, client: VllmClient, wanted: Callable[[], Mapping[int, Adapter]], allowed: Callable[[], Set[int]]
    ) -> None:
        self.client = client
        self.serving = False
        self.running = 0
        self.problem = "it has not been started"
        self.suspected = asyncio.Event()
        self._wanted = wanted
        self._allowed = allowed
        self._failures = 0
        self._settling = asyncio.Lock()
        self._waiting: set[asyncio.Timeout] = set()

    def state(self) -> EngineState:
        versions = tuple(sorted(self.client.loaded()))
        return EngineState(self.client.url, self.serving, self.problem, self.running, versions)

    async def generate(self, request: GenerateRequest, version: int) -> AsyncGenerator[Chunk, None]:
        """As VllmClient.generate; EngineLost as soon as the server is found gone, also while it is silent."""
        self.running += 1
        try:
            async with aclosing(self.client.generate(request, version)) as chunks:
                while (chunk := await self._next(chunks)) is not None:
                    yield chunk
        finally:
            self.running -= 1

    async def _next(self, chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
        try:
            async with asyncio.timeout(None) as patience:
                self._waiting.add(patience)
                return await anext(chunks)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            raise EngineLost(self.problem) from None
        finally:
            self._waiting.discard(patience)

    async def put_in(self) -> None:
        """Put a started server into service with what is wanted; raises RiachoError with the reason if it cannot be."""
        await self.settle()
        self.serving, self.problem, self._failures = True, "", 0
        log.info("%s is in service", self.client.url)

    def take_out(self, problem: str) -> None:
        """No new request goes there until a check has put it in again."""
        if self.serving or problem != self.problem:
            log.warning("%s is out of service: %s", self.client.url, problem)
        self.serving, self.problem = False, problem

    async def settle(self) -> None:
        """Unload what is not allowed and load what is wanted, until nothing is left to do."""
        async with self._settling:
            while True:
                wanted, loaded = self._wanted(), self.client.loaded()
                extra, missing = loaded - self._allowed(), wanted.keys() - loaded
                if not extra and not missing:
                    return
                for version in extra:
                    await self.client.unload(version)
                for version in missing:
                    await self.client.load(wanted[version])

    async def check(self) -> None:
        """Take it out if it does not answer; put it in, or up to date, if it does."""
        self.suspected.clear()
        try:
            if self.serving:
                await self._check_answers()
                await self.settle()
            else:
                await self.client.start()
                await self.put_in()
        except (SetupError, Unavailable, AdapterRejected) as error:
            self.take_out(error.message)
            if isinstance(error, EngineLost):
                self._give_up_waiting()

    async def _check_answers(self) -> None:
        """Raises EngineLost at once where nothing is there, and after some silence."""
        try:
            if await self.client.healthy():
                await self.client.refresh()
                self._failures = 0
                return
        except EngineSlow as error:
            log.info("%s is slow: %s", self.client.url, error.message)
        self._failures += 1
        if self._failures >= FAILURES:
            raise EngineLost(f"The engine at {self.client.url} does not answer.")

    def _give_up_waiting(self) -> None:
        """End the requests under way: a server that is frozen or cut off does not end them itself."""
        for patience in self._waiting:
            patience.reschedule(asyncio.get_running_loop().time())
