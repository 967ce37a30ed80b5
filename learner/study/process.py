"""A server that runs for as long as the demo needs it."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import click
import httpx

HOST = "127.0.0.1"
STOP_S = 20.0
POLL_S = 0.1
REQUEST_S = 30.0
LOG_TAIL = 25
KEPT = ("RIACHO_LEARNER_", "RIACHO_KAFKA_")


class ServerDied(click.ClickException):
    """A server ended or never became ready; the message ends with the last lines of its log."""

    def __init__(self, what: str, log: Path) -> None:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL:]
        super().__init__("\n".join([f"{what} The end of {log}:", *(f"  {line}" for line in lines)]))


class Server:
    """A command that serves HTTP, from entering the context to leaving it.

    Args:
        name: what to call it in errors.
        ready: an address that answers 200 once it is ready, within `ready_s` seconds.
        log: where its output goes, and that of the processes it starts.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], ready: str, ready_s: float, log: Path
    ) -> None:
        self._name, self._command, self._env = name, command, env
        self._ready, self._ready_s = ready, ready_s
        self._log = log

    def __enter__(self) -> Self:
        with self._log.open("wb") as output:
            # A session of its own: Ctrl-C reaches the demo alone, which then stops the server in order.
            self._process = subprocess.Popen(
                self._command, env=self._env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def check(self) -> None:
        """Raises ServerDied if it is no longer running."""
        code = self._process.poll()
        if code is not None:
            raise ServerDied(f"{self._name} ended with exit status {code}.", self._log)

    def failed(self, error: Exception) -> ServerDied:
        """What to tell of a call that failed: the server is gone, or it answered with an error."""
        self.check()
        return ServerDied(f"{self._name} did not do as asked: {error}.", self._log)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._ready_s
        while time.monotonic() < deadline:
            self.check()
            if _answers(self._ready):
                return
            time.sleep(POLL_S)
        raise ServerDied(f"{self._name} was not ready after {self._ready_s:.0f} seconds.", self._log)

    def _stop(self) -> None:
        """SIGTERM, time to end in order, then SIGKILL to whatever is left of its process group."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                click.echo(f"{self._name} did not end within {STOP_S:.0f} seconds and is killed.", err=True)
        with suppress(ProcessLookupError):  # nothing was left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def inherited() -> dict[str, str]:
    """The caller's variables without what would point at another Riacho; those in `KEPT` tune the demo's."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("RIACHO_") or name.startswith(KEPT)
    }


def _answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=REQUEST_S).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False  # it does not listen yet
