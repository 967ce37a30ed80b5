"""The spool: events wait in a local SQLite file, fsynced and in order, while the log is away."""

import fcntl
import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from anyio import to_thread

from app.errors import SetupError
from app.events.log import EventSink, LogUnavailable
from app.events.schema import Event, encode

_SCHEMA = """
CREATE TABLE IF NOT EXISTS waiting (id INTEGER PRIMARY KEY AUTOINCREMENT, payload BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS refused (id INTEGER PRIMARY KEY, payload BLOB NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS size (
    one INTEGER PRIMARY KEY CHECK (one = 1), events INTEGER NOT NULL, bytes INTEGER NOT NULL
);
INSERT OR IGNORE INTO size VALUES (1, 0, 0);
CREATE TRIGGER IF NOT EXISTS waiting_more AFTER INSERT ON waiting BEGIN
    UPDATE size SET events = events + 1, bytes = bytes + LENGTH(new.payload);
END;
CREATE TRIGGER IF NOT EXISTS waiting_less AFTER DELETE ON waiting BEGIN
    UPDATE size SET events = events - 1, bytes = bytes - LENGTH(old.payload);
END;
"""

log = logging.getLogger(__name__)


class Spooled(NamedTuple):
    """An event that waits; ids rise in the order of the appends and are never used again."""

    id: int
    payload: bytes


class SpoolSize(NamedTuple):
    events: int
    bytes: int


class Spool:
    """Stands before a log that may be away. Several processes may share one file.

    While anything waits, of whichever process, an event goes behind it, and the log is tried by the forwarder
    alone: an event that met a broken log spares all later ones the delivery timeout, and none overtakes it.

    Args:
        primary: the log.
        path: the file; made with its folder if it is not there.
        max_bytes: payloads that may wait; the event that passes the bound is the last to be taken.
    """

    def __init__(self, primary: EventSink, path: Path, max_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._primary = primary
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        try:
            self._db = _connect(path, "FULL")
            self._db.executescript(_SCHEMA)
            self._unsynced = _connect(path, "NORMAL")
            self._turn = path.with_suffix(".lock").open("ab")
        except (sqlite3.DatabaseError, OSError) as error:
            raise SetupError(f"the spool {path} cannot be opened: {error}") from error

    async def append(self, event: Event) -> None:
        """Append durably, to the log or to the spool.

        Raises LogUnavailable where the log is away and the spool is full or broken, and EventRefused.
        """
        if not (await to_thread.run_sync(self.size)).events:
            try:
                await self._primary.append(event)
            except LogUnavailable as error:
                log.warning("events wait in %s: %s", self._path, error)
            else:
                return
        await to_thread.run_sync(self._put, encode(event))

    def size(self) -> SpoolSize:
        """What waits; raises LogUnavailable where the file cannot be read."""
        return SpoolSize(*self._execute("SELECT events, bytes FROM size")[0])

    def full(self) -> bool:
        return self.size().bytes >= self._max_bytes

    def oldest(self) -> Spooled | None:
        """The event that is next to be forwarded."""
        rows = self._execute("SELECT id, payload FROM waiting ORDER BY id LIMIT 1")
        return Spooled(*rows[0]) if rows else None

    def remove(self, id: int) -> None:
        """Forget an event: it is on the log. Not fsynced, since a power failure only repeats it."""
        self._execute("DELETE FROM waiting WHERE id = ?", id, db=self._unsynced)

    def set_aside(self, id: int, reason: str) -> None:
        """Keep an event that the log will never take out of the others' way, in the table `refused`."""
        self._execute("INSERT OR IGNORE INTO refused SELECT id, payload, ? FROM waiting WHERE id = ?", reason, id)
        self.remove(id)

    @contextmanager
    def forwarding(self) -> Iterator[bool]:
        """Whether this process is the one that forwards, until the block ends or the process dies."""
        try:
            fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def close(self) -> None:
        with self._lock:
            self._db.close()
            self._unsynced.close()
        self._turn.close()

    def _put(self, payload: bytes) -> None:
        taken = self._execute(
            "INSERT INTO waiting (payload) SELECT ? FROM size WHERE bytes < ? RETURNING id", payload, self._max_bytes
        )
        if not taken:
            raise LogUnavailable(
                f"the log is away and the spool {self._path} is full (spool_max_bytes = {self._max_bytes}); "
                "bring the log back or allow more"
            )

    def _execute(self, sql: str, *args: object, db: sqlite3.Connection | None = None) -> list[Any]:
        try:
            with self._lock:
                return (db or self._db).execute(sql, args).fetchall()
        except sqlite3.Error as error:
            raise LogUnavailable(f"{self._path}: {error}; free disk space or repair the file") from error


def _connect(path: Path, synchronous: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(f"PRAGMA synchronous={synchronous}")
    return db
