"""Logs: one line an event on standard error, with the process's name; never secrets or content."""

import logging
import os
import sys
import warnings

QUIET = ("httpx", "httpcore", "alembic", "uvicorn.access", "transformers")


def setup(process: str) -> None:
    """Configure logging for a process; libraries speak only to warn."""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {process:7} %(levelname)-7s %(message)s", stream=sys.stderr, force=True
    )
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|torch")
