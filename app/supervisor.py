"""`riacho up`: the API and the learner as two processes; a learner that dies is started again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import FrameType

import click

POLL_S = 0.2
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
STABLE_S = 60.0
STOP_S = 30.0


def supervise(env: Mapping[str, str]) -> int:
    """Run both until a signal or until the API ends; the API's exit status.

    The learner resumes from its newest checkpoint, so that a restart loses nothing. One that keeps dying is
    started ever more seldom; serving goes on meanwhile. Wrong settings, which no restart mends, end both.
    """
    stopping: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        stopping.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    api = _start(("-m", "app.cli", "serve"), env)
    learner = _Restarted(("-m", "learner", "run"), env)
    while not stopping and api.poll() is None and not learner.misconfigured:
        learner.check()
        time.sleep(POLL_S)
    learner.stop()
    status = _stop(api)
    return os.EX_CONFIG if learner.misconfigured else status


class _Restarted:
    """A process that is started again when it ends, after a pause that doubles while it keeps ending soon."""

    def __init__(self, args: tuple[str, ...], env: Mapping[str, str]) -> None:
        self._args, self._env = args, env
        self._pause = FIRST_PAUSE_S
        self._started = time.monotonic()
        self._restart_at: float | None = None
        self._process = _start(args, env)

    @property
    def misconfigured(self) -> bool:
        return self._process.returncode == os.EX_CONFIG

    def check(self) -> None:
        now = time.monotonic()
        if self._process.poll() is None or self.misconfigured:
            return
        if self._restart_at is None:
            self._pause = FIRST_PAUSE_S if now - self._started > STABLE_S else min(2 * self._pause, LONGEST_PAUSE_S)
            self._restart_at = now + self._pause
            click.echo(
                f"riacho: the learner ended with status {self._process.returncode}; "
                f"it starts again in {self._pause:.0f} s",
                err=True,
            )
        elif now >= self._restart_at:
            self._started, self._restart_at = now, None
            self._process = _start(self._args, self._env)

    def stop(self) -> None:
        _stop(self._process)


def _start(args: tuple[str, ...], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *args], env=dict(env))


def _stop(process: subprocess.Popen[bytes]) -> int:
    if process.poll() is None:
        process.terminate()
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
