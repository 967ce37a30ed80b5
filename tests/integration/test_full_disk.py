"""A full disk: said plainly, nothing acknowledged is lost, and writing goes on once there is room."""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.events.log import LogUnavailable
from app.events.schema import decode
from app.events.sqlite import SqliteLog
from tests.builders import completion

LIMIT = 200_000


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes: the operating system refuses the write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(log: SqliteLog, acknowledged: list[str]) -> None:
    """Append until the log refuses; raises LogUnavailable."""
    for number in range(1000):
        asyncio.run(log.append(completion(completion_id=f"c{number}", output="x" * 4000)))
        acknowledged.append(f"e-c{number}")


def test_the_log_loses_nothing_on_a_full_disk(tmp_path: Path) -> None:
    """What was acknowledged is there, what was refused is not, and the message names the file and what to do."""
    log = SqliteLog(tmp_path / "log.db")
    acknowledged: list[str] = []
    with disk_of(LIMIT), pytest.raises(LogUnavailable, match=r"log\.db.*free disk space"):
        fill(log, acknowledged)
    assert acknowledged
    asyncio.run(log.append(completion(completion_id="later")))
    log.close()
    reopened = SqliteLog(tmp_path / "log.db")
    stored = [decode(record.payload).event_id for record in reopened.read({}, 2000)]
    assert stored == [*acknowledged, "e-later"]
    reopened.close()
