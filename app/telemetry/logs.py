"""Logs: one line an event on standard error, with the process's name; never secrets or content."""

import logging
import os
import sys
import time
import warnings

QUIET = ("httpx", "httpcore", "alembic", "uvicorn.access", "transformers", "kafka")
SELDOM_S = 60.0


class _Seldom(logging.Filter):
    """Lets a message of Kafka's client through once a minute: while a broker is away it repeats itself every second."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("kafka."):
            return True
        now = time.monotonic()
        told = now - self._last.get(str(record.msg), -SELDOM_S) < SELDOM_S
        if not told:
            self._last[str(record.msg)] = now
        return not told


def setup(process: str) -> None:
    """Configure logging for a process; libraries speak only to warn."""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {process:7} %(levelname)-7s %(message)s", stream=sys.stderr, force=True
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(_Seldom())
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|torch")
