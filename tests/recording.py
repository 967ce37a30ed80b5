"""The real API over a socket, in this process, with an engine whose own record of what it sampled is kept aside.

The record is taken where the engine hands over its chunks, before anything of the serving side, the log or the learner
has seen them: what is trained on can be compared with it.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from app.asgi import create_app
from app.engines.base import Adapter, Chunk, Engine, EngineState, FinishReason, GenerateRequest
from app.engines.open import open_engine
from app.events.schema import Event, decode
from app.events.sqlite import SqliteLog
from app.registry import Registry, upgrade
from app.security.secrets import first_key
from app.serve import bind
from app.settings import TINY_MODEL, AppSettings
from tests.service import eventually

CLIENT_KEY = "test-client-key"
START_S = 150.0


@dataclass
class Sampled:
    """One answer as the engine gave it; `finish_reason` is None where it was stopped before its end."""

    version: int
    session: str | None
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass
class RecordingEngine(Engine):
    """Another engine, with every answer that it gives noted down, in the order in which they end."""

    inner: Engine
    answers: list[Sampled] = field(default_factory=list)

    async def start(self) -> None:
        await self.inner.start()
        self.info = self.inner.info

    async def generate(self, request: GenerateRequest, version: int) -> AsyncGenerator[Chunk, None]:
        answer = Sampled(version, request.affinity)
        async with aclosing(self.inner.generate(request, version)) as chunks:
            try:
                async for chunk in chunks:
                    answer.prompt_ids = chunk.prompt_ids or answer.prompt_ids
                    answer.token_ids += chunk.token_ids
                    answer.logprobs += chunk.logprobs
                    answer.finish_reason = chunk.finish_reason
                    if chunk.finish_reason is not None:
                        self.answers.append(answer)
                    yield chunk
            finally:
                if answer.finish_reason is None:
                    self.answers.append(answer)

    async def load(self, adapter: Adapter) -> None:
        await self.inner.load(adapter)

    async def unload(self, version: int) -> None:
        await self.inner.unload(version)

    def loaded(self) -> frozenset[int]:
        return self.inner.loaded()

    def may_read(self, version: int) -> bool:
        return self.inner.may_read(version)

    def states(self) -> list[EngineState]:
        return self.inner.states()

    async def healthy(self) -> bool:
        return await self.inner.healthy()

    async def close(self) -> None:
        await self.inner.close()


@dataclass(frozen=True)
class RecordedService:
    """A running API: its address, its home, and the engine's own record."""

    home: Path
    base_url: str
    engine: RecordingEngine

    def events(self) -> list[Event]:
        """All events on the log, in order."""
        with closing(SqliteLog(self.home / "log.db")) as log:
            records = log.read({}, 1_000_000)
        return [decode(record.payload) for record in records]


@contextmanager
def recorded_service(home: Path, model: Path = TINY_MODEL) -> Iterator[RecordedService]:
    """Serve `model` with the local engine on a free port of this machine."""
    settings = AppSettings(home=home, model=str(model))
    upgrade(settings.resolved_database_url)
    with closing(Registry.open(settings.resolved_database_url)) as registry:
        first_key(registry, "client", CLIENT_KEY)
    engine = RecordingEngine(open_engine(settings))
    listening = bind("127.0.0.1", 0)
    config = uvicorn.Config(create_app(settings, engine=lambda _: engine), log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive(), "the API has started", START_S)
        assert thread.is_alive(), "the API ended at its start"
        yield RecordedService(home, f"http://127.0.0.1:{listening.getsockname()[1]}", engine)
    finally:
        server.should_exit = True
        thread.join()
