"""The embedded event log: SQLite in WAL mode, fsynced at every append, keyed partitions."""

import asyncio
import sqlite3
import threading
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from app.errors import SetupError
from app.events.log import DeadLetter, EventLog, LogUnavailable, LostRange, Position, PositionAhead, Record
from app.events.schema import Event, encode
from app.events.turns import take_turns

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    part INTEGER NOT NULL, pos INTEGER NOT NULL, payload BLOB NOT NULL, PRIMARY KEY (part, pos)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS dead_letters (
    id INTEGER PRIMARY KEY AUTOINCREMENT, part INTEGER NOT NULL, pos INTEGER NOT NULL, reason TEXT NOT NULL,
    attempts INTEGER NOT NULL, payload BLOB NOT NULL, at TEXT NOT NULL, UNIQUE (part, pos)
);
"""


class SqliteLog(EventLog):
    """One file, one log. Safe for several processes: SQLite's own locks order the appends.

    Args:
        path: the file; made with its folder if it is not there.
        partitions: partitions of a new log; an existing log keeps its own.
    """

    def __init__(self, path: Path, partitions: int = 1) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise SetupError(f"the event log {path} cannot be opened: {error}") from error
        self._db.execute("INSERT OR IGNORE INTO meta VALUES ('partitions', ?)", (partitions,))
        self.partitions: int = self._db.execute("SELECT value FROM meta WHERE key = 'partitions'").fetchone()[0]

    async def append(self, event: Event) -> Position:
        return await asyncio.to_thread(self._append, event.session_id, encode(event))

    def read(self, after: Mapping[int, int], limit: int) -> Sequence[Record]:
        starts = [after.get(part, 0) for part in range(self.partitions)]
        found = [self._read(part, start, limit) for part, start in enumerate(starts)]
        return list(islice(take_turns(found, sum(starts)), limit))

    def read_at(self, position: Position) -> Record:
        rows = self._query("SELECT payload FROM records WHERE part = ? AND pos = ?", tuple(position))
        if not rows:
            raise LostRange(position.partition, position.offset, position.offset + 1)
        return Record(position, rows[0][0])

    def end_positions(self) -> dict[int, int]:
        ends = dict(self._query("SELECT part, MAX(pos) + 1 FROM records GROUP BY part", ()))
        return {part: ends.get(part, 0) for part in range(self.partitions)}

    def bury(self, record: Record, reason: str, at: datetime) -> None:
        self._write(
            "INSERT INTO dead_letters (part, pos, reason, attempts, payload, at) VALUES (?, ?, ?, 1, ?, ?) "
            "ON CONFLICT (part, pos) DO UPDATE SET attempts = attempts + 1, reason = excluded.reason",
            (*record.position, reason, record.payload, at.isoformat()),
        )

    def dead_letters(self) -> Sequence[DeadLetter]:
        rows = self._query("SELECT id, part, pos, reason, attempts, payload, at FROM dead_letters ORDER BY id", ())
        return [
            DeadLetter(id, Position(part, pos), reason, attempts, payload, datetime.fromisoformat(at))
            for id, part, pos, reason, attempts, payload, at in rows
        ]

    async def replay_dead_letter(self, id: int) -> Position:
        return await asyncio.to_thread(self._replay, id)

    def drop_dead_letter(self, id: int) -> None:
        if not self._query("DELETE FROM dead_letters WHERE id = ? RETURNING id", (id,)):
            raise KeyError(id)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def append_raw(self, key: str, payload: bytes) -> Position:
        """Append bytes as they are, as a producer outside Riacho might."""
        return self._append(key, payload)

    def _append(self, key: str, payload: bytes) -> Position:
        part = zlib.crc32(key.encode()) % self.partitions
        try:
            with self._lock, _Immediate(self._db):
                return self._insert(part, payload)
        except sqlite3.Error as error:
            raise LogUnavailable(f"{self._path}: {error}; free disk space or repair the file") from error

    def _insert(self, part: int, payload: bytes) -> Position:
        [offset] = self._db.execute(
            "INSERT INTO records SELECT ?, COALESCE(MAX(pos) + 1, 0), ? FROM records WHERE part = ? RETURNING pos",
            (part, payload, part),
        ).fetchone()
        return Position(part, offset)

    def _read(self, part: int, start: int, limit: int) -> list[Record]:
        rows = self._query(
            "SELECT pos, payload FROM records WHERE part = ? AND pos >= ? ORDER BY pos LIMIT ?", (part, start, limit)
        )
        if rows and rows[0][0] > start:
            raise LostRange(part, start, rows[0][0])
        if not rows and start > (end := self.end_positions()[part]):
            raise PositionAhead(part, start, end)
        return [Record(Position(part, pos), payload) for pos, payload in rows]

    def _replay(self, id: int) -> Position:
        with self._lock, _Immediate(self._db):
            row = self._db.execute("DELETE FROM dead_letters WHERE id = ? RETURNING part, payload", (id,)).fetchone()
            if row is None:
                raise KeyError(id)
            return self._insert(*row)

    def _query(self, sql: str, args: tuple[object, ...]) -> list[Any]:
        with self._lock:
            return self._db.execute(sql, args).fetchall()

    def _write(self, sql: str, args: tuple[object, ...]) -> None:
        with self._lock:
            self._db.execute(sql, args)


class _Immediate:
    """A write transaction that takes SQLite's write lock at once, so that it never has to upgrade."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        self._db.execute("ROLLBACK" if kind else "COMMIT")
