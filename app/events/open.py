"""Open the event log that a URL names."""

from pathlib import Path

from app.errors import SetupError
from app.events.log import EventLog
from app.events.sqlite import SqliteLog


def open_log(url: str, partitions: int = 1) -> EventLog:
    """The log at `sqlite:///PATH`; raises SetupError for another scheme."""
    scheme, _, rest = url.partition(":///")
    if scheme == "sqlite" and rest:
        return SqliteLog(Path(rest), partitions)
    raise SetupError(f"log_url = {url!r}: give sqlite:///PATH (an absolute path takes four slashes)", param="log_url")
