"""A log that can be taken away: SQLite behind a switch, as a remote log is seen by those who append to it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from app.events.log import DeadLetter, EventLog, EventRefused, LogUnavailable, Position, Record
from app.events.schema import Event, decode
from app.events.sqlite import SqliteLog

Mode = Literal["up", "away", "hangs", "mute"]


class SwitchableLog(EventLog):
    """Its `mode` is `up`, `away` (refuses at once), `hangs` (never answers) or `mute` (appends and then fails).

    Args:
        refuses: which events it will never take.
    """

    def __init__(self, path: Path, refuses: Callable[[Event], bool] = lambda _: False) -> None:
        self.inner = SqliteLog(path)
        self.mode: Mode = "up"
        self.attempts = 0
        self._refuses = refuses

    async def append(self, event: Event) -> Position:
        self.attempts += 1
        if self.mode == "hangs":
            await asyncio.Event().wait()
        if self.mode == "away":
            raise LogUnavailable("the broker is away")
        if self._refuses(event):
            raise EventRefused("the event is too large")
        position = await self.inner.append(event)
        if self.mode == "mute":
            raise LogUnavailable("the broker did not answer")
        return position

    def event_ids(self, session: str | None = None) -> list[str]:
        """The ids on the log in order, of one session or of all."""
        events = [decode(record.payload) for record in self.inner.read({}, 1_000_000)]
        return [event.event_id for event in events if session in (None, event.session_id)]

    def read(self, after: Mapping[int, int], limit: int) -> Sequence[Record]:
        return self.inner.read(after, limit)

    def read_at(self, position: Position) -> Record:
        return self.inner.read_at(position)

    def end_positions(self) -> dict[int, int]:
        if self.mode != "up":
            raise LogUnavailable("the broker is away")
        return self.inner.end_positions()

    def bury(self, record: Record, reason: str, at: datetime) -> None:
        self.inner.bury(record, reason, at)

    def dead_letters(self) -> Sequence[DeadLetter]:
        return self.inner.dead_letters()

    async def replay_dead_letter(self, id: int) -> Position:
        return await self.inner.replay_dead_letter(id)

    def drop_dead_letter(self, id: int) -> None:
        self.inner.drop_dead_letter(id)

    def close(self) -> None:
        self.inner.close()


def away_at_first(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, that fails the first time as a log does whose brokers are away."""
    left = [LogUnavailable("no broker answers")]

    def once_away(*args: Any) -> Any:
        if left:
            raise left.pop()
        return call(*args)

    return once_away
