"""The spool as its file shows it, read from outside; a spool that is not there is not made."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from app.errors import SetupError


@dataclass(frozen=True, slots=True)
class RefusedEvent:
    """An event that the log will never take, and why."""

    id: int
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class SpoolView:
    """How much waits for the log, and what the log refused, oldest first."""

    events: int = 0
    bytes: int = 0
    refused: tuple[RefusedEvent, ...] = ()


def view_spool(path: Path) -> SpoolView:
    """Raises SetupError where the file is there and cannot be read."""
    if not path.exists():
        return SpoolView()
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as db:
            [(events, size)] = db.execute("SELECT events, bytes FROM size").fetchall()
            refused = db.execute("SELECT id, LENGTH(payload), reason FROM refused ORDER BY id").fetchall()
    except (sqlite3.Error, ValueError) as error:
        raise SetupError(f"the spool {path} cannot be read: {error}") from error
    return SpoolView(events, size, tuple(RefusedEvent(*row) for row in refused))
