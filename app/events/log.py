"""The event log's interface: append, read from positions, dead letters. One log a policy."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol

from app.errors import RiachoError, SetupError, Unavailable
from app.events.schema import Event


class Position(NamedTuple):
    """Where a record lies; ordered within a partition only."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        partition, offset = text.split(":")
        return cls(int(partition), int(offset))


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it lies on the log; `payload` is not yet known to be an event."""

    position: Position
    payload: bytes


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that could not be applied, kept as it came."""

    id: int
    position: Position
    reason: str
    attempts: int
    payload: bytes
    at: datetime


class LogUnavailable(Unavailable):
    """The log cannot take or give records now; the message says why and what to do."""


class EventRefused(RiachoError):
    """The log will never take this event; the message says why."""

    status, code = 503, "event_refused"


class EventTooLarge(EventRefused):
    """An event that the log never takes, however often it is sent."""

    status, code, kind = 413, "event_too_large", "invalid_request_error"

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"the event has {size} bytes and the log takes {limit} (kafka.max_message_bytes); "
            "send shorter messages, or raise the limit and that of the topics (`riacho log check` says how)"
        )


class PositionAhead(SetupError):
    """A reader stands beyond the end of the log: the log is another one, or older than the reader's checkpoint."""

    def __init__(self, partition: int, wanted: int, end: int) -> None:
        super().__init__(
            f"partition {partition}: the log ends at offset {end}, but the checkpoint has read up to {wanted}; "
            "restore the log that the checkpoint belongs to, or start with a new registry and adapter store"
        )


class LostRange(SetupError):
    """The log no longer holds positions that a reader asked for."""

    def __init__(self, partition: int, wanted: int, first: int) -> None:
        super().__init__(
            f"partition {partition}: offsets {wanted} to {first - 1} are gone from the log "
            f"(it begins at {first}); restore them, or start from a checkpoint at {first} or later"
        )


class EventSink(Protocol):
    """What takes events: a log, or the spool before it."""

    async def append(self, event: Event) -> object:
        """Append durably; raises LogUnavailable or EventRefused with nothing appended."""


class EventLog(ABC):
    """An append-only log of events with keyed partitions.

    `append` is called on the app's event loop; the readers are synchronous and belong to one thread.
    """

    @abstractmethod
    async def append(self, event: Event) -> Position:
        """Append durably: on return the event survives a crash of this process.

        Raises EventRefused for an event that will never fit, with nothing appended, and LogUnavailable; then append the
        same event again, which counts once even where the first append was only not acknowledged.
        """

    @abstractmethod
    def read(self, after: Mapping[int, int], limit: int) -> Sequence[Record]:
        """Up to `limit` records at or past `after[partition]` (0 where absent), in order within a partition.

        Partitions that have records take turns. Which one comes first follows from the positions alone, so that
        reading a log at rest a second time gives the same order.

        Raises LostRange where the log no longer holds the wanted offset, PositionAhead where it does not reach it,
        LogUnavailable where it cannot be asked now.
        """

    @abstractmethod
    def read_at(self, position: Position) -> Record:
        """The record at one position; raises LostRange if it is gone, LogUnavailable."""

    @abstractmethod
    def end_positions(self) -> dict[int, int]:
        """For each partition the offset that the next record will get; raises LogUnavailable."""

    @abstractmethod
    def bury(self, record: Record, reason: str, at: datetime) -> None:
        """Put a record in the dead letters; the same position again raises its attempt count."""

    @abstractmethod
    def dead_letters(self) -> Sequence[DeadLetter]:
        """All dead letters, oldest first."""

    def dead_letter(self, id: int) -> DeadLetter:
        """One of them; raises KeyError for an unknown id."""
        for letter in self.dead_letters():
            if letter.id == id:
                return letter
        raise KeyError(id)

    @abstractmethod
    async def replay_dead_letter(self, id: int) -> Position:
        """Append a dead letter's payload again as it came and take it out of the dead letters.

        Raises KeyError for an unknown id.
        """

    @abstractmethod
    def drop_dead_letter(self, id: int) -> None:
        """Take a dead letter out for good; raises KeyError for an unknown id."""

    def mark_read(self, positions: Mapping[int, int]) -> None:  # noqa: B027 - a log without monitoring has nothing to do
        """Show monitoring tools how far the learner's newest checkpoint has read; never read back, never fails."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections."""
