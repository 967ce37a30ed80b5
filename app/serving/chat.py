"""Runs chat calls: lease a version, sample the choices, record them, hand the chunks on.

A call runs in a task of its own and hands its chunks over a queue. So a response body that is never read, or
a client that leaves, cannot keep a lease.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from app.engines.base import Chunk, Engine
from app.errors import Unavailable
from app.serving.call import Answer, ChatCall
from app.serving.capture import Capture
from app.serving.versions import Versions


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of one choice."""

    choice: int
    chunk: Chunk


class Running:
    """A call under way: `begin` it, read its `pieces`, and `stop` it whatever happens."""

    def __init__(self, call: ChatCall, engine: Engine, versions: Versions, capture: Capture) -> None:
        self.call = call
        self.version = 0
        self.answers = [Answer() for _ in range(call.n)]
        self._engine = engine
        self._versions = versions
        self._capture = capture
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._first: Piece | None = None
        self._task: asyncio.Task[None]

    async def begin(self) -> None:
        """Start, and wait for the first chunk: what is wrong with the request is raised here."""
        self._task = asyncio.create_task(self._run())
        try:
            self._first = await self._pieces.get()
        except asyncio.CancelledError:
            await self.stop()
            raise
        if self._first is None:
            await self._task

    async def pieces(self) -> AsyncIterator[Piece]:
        """The chunks of all choices as they come. A choice's last chunk comes after its event is durable.

        Raises what ended the call early.
        """
        piece = self._first
        while piece is not None:
            yield piece
            piece = await self._pieces.get()
        await self._task

    async def stop(self) -> None:
        """Stop sampling if it still goes on, and wait until the lease is given back."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async with self._versions.lease(self.call.pinned) as self.version:
                async with asyncio.TaskGroup() as group:
                    for choice in range(self.call.n):
                        group.create_task(self._sample(choice))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._pieces.put_nowait(None)

    async def _sample(self, choice: int) -> None:
        answer = self.answers[choice]
        ended = False
        try:
            async with aclosing(self._engine.generate(self.call.request_for(choice), self.version)) as chunks:
                async for chunk in chunks:
                    answer.add(chunk)
                    if chunk.finish_reason == "abort":
                        raise Unavailable("the engine stopped before the answer ended; send the request again")
                    if chunk.finish_reason is not None:
                        ended = True
                        await self._capture.record(self.call, choice, answer, self.version)
                    self._pieces.put_nowait(Piece(choice, chunk))
        finally:
            if not ended and answer.token_ids:
                self._capture.record_abort(self.call, choice, answer, self.version)


class ChatService:
    """Starts calls on one engine."""

    def __init__(self, engine: Engine, versions: Versions, capture: Capture) -> None:
        self._engine = engine
        self._versions = versions
        self._capture = capture

    def run(self, call: ChatCall) -> Running:
        return Running(call, self._engine, self._versions, self._capture)
