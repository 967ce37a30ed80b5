"""Waits for a log that is away: a broker that restarts is no reason for the learner to die."""

import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from app.events.log import LogUnavailable

PAUSE_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


class Patience:
    """Calls again until the log answers; says once that it is away, and that it is back.

    Args:
        keep_on: when it says stop, LogUnavailable is raised after all.
    """

    def __init__(self, keep_on: Callable[[], bool], sleep: Callable[[float], None] = time.sleep) -> None:
        self._keep_on = keep_on
        self._sleep = sleep

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        away = False
        while True:
            try:
                answer = call(*args, **kwargs)
            except LogUnavailable as error:
                if not self._keep_on():
                    raise
                if not away:
                    log.warning("the log is away; waiting for it: %s", error)
                away = True
                self._sleep(PAUSE_S)
            else:
                if away:
                    log.info("the log is back")
                return answer
