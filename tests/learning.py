"""The learner as a process of its own, which a test may kill and start again."""

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.service import environment

STOP_S = 60.0


class LearnerProcess:
    """`python -m learner run` on a home; what it prints is in the home's `learner.log`.

    Args:
        extra: RIACHO_* variables.
    """

    def __init__(self, home: Path, extra: Mapping[str, str]) -> None:
        self._home = home
        self._extra = extra
        self._output = home / "learner.log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "learner", "run"],
                env=environment(self._home, self._extra),
                cwd=self._home,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def stop(self) -> int:
        """SIGTERM and an orderly end; the exit status."""
        self._process.terminate()
        return self._process.wait(STOP_S)

    def kill(self) -> None:
        """SIGKILL: nothing can be caught."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(STOP_S)

    def restart(self) -> None:
        self.kill()
        self.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def log_text(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace") if self._output.exists() else ""
