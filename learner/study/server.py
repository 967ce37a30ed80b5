"""The service under the demo: its two processes, and what an operator asks of it."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import click
import httpx

POLICY = "riacho"
HOST = "127.0.0.1"
READY_S = 120.0
STOP_S = 20.0
POLL_S = 0.1
REQUEST_S = 30.0
PAGE = 200
LOG_TAIL = 25


class ServiceDied(click.ClickException):
    """The service ended or never became ready; the message ends with the last lines of its log."""

    def __init__(self, what: str, log: Path) -> None:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL:]
        super().__init__("\n".join([f"{what} The end of {log}:", *(f"  {line}" for line in lines)]))


class Service:
    """`riacho up` in a home of its own on a free port, from entering the context to leaving it.

    Args:
        home: state, keys and adapters; a fresh directory.
        log: where the output of both processes goes.
        settings: RIACHO_* variables on top of the demo's own.
    """

    def __init__(self, home: Path, log: Path, settings: Mapping[str, str]) -> None:
        self._home, self._log = home, log
        self._settings = settings
        self._port = _free_port()
        self.url = f"http://{HOST}:{self._port}"
        self.admin_key = secrets.token_urlsafe(24)
        self.client_key = secrets.token_urlsafe(24)

    def __enter__(self) -> Self:
        with self._log.open("wb") as output:
            # A session of its own: Ctrl-C reaches the demo alone, which then stops the service in order.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "app.cli", "up"],
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
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
        """Raises ServiceDied if it is no longer running."""
        code = self._process.poll()
        if code is not None:
            raise ServiceDied(f"The service ended with exit status {code}.", self._log)

    def failed(self, error: Exception) -> ServiceDied:
        """What to tell of a call that failed: the service is gone, or it answered with an error."""
        self.check()
        return ServiceDied(f"The service did not do as asked: {error}.", self._log)

    def _environment(self) -> dict[str, str]:
        """The caller's variables without what would point at another Riacho; RIACHO_LEARNER_* may tune the demo."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RIACHO_") or name.startswith("RIACHO_LEARNER_")
        }
        config = self._home / "riacho.toml"
        config.touch()
        return {
            **inherited,
            "PYTHONUNBUFFERED": "1",
            "RIACHO_CONFIG": str(config),
            "RIACHO_HOME": str(self._home),
            "RIACHO_HOST": HOST,
            "RIACHO_PORT": str(self._port),
            "RIACHO_POLICY": POLICY,
            "RIACHO_ADMIN_KEY": self.admin_key,
            "RIACHO_CLIENT_KEY": self.client_key,
            **self._settings,
        }

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            self.check()
            if _ready(self.url):
                return
            time.sleep(POLL_S)
        raise ServiceDied(f"The service was not ready after {READY_S:.0f} seconds.", self._log)

    def _stop(self) -> None:
        """SIGTERM, time to end in order, then SIGKILL to whatever is left of its process group."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                click.echo(f"The service did not end within {STOP_S:.0f} seconds and is killed.", err=True)
        with suppress(ProcessLookupError):  # nothing was left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=REQUEST_S).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False  # it does not listen yet


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class Operator:
    """Calls of the admin API for the one policy of the demo."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(
            base_url=f"{url}/admin/policies/{POLICY}",
            headers={"Authorization": f"Bearer {key}"},
            timeout=REQUEST_S,
        )

    def close(self) -> None:
        self._http.close()

    def live_version(self) -> int:
        """The version that new requests start with; 0 is the base."""
        return int(self._get("")["live_version"] or 0)

    def newest_updates(self, limit: int) -> list[dict[str, Any]]:
        """The newest first."""
        found: list[dict[str, Any]] = self._get("/updates", limit=limit)["updates"]
        return found

    def updates(self) -> list[dict[str, Any]]:
        """All updates, oldest first, with sessions as their client named them (the service says `KEY:NAME`)."""
        rows = self._all("/updates", "updates")
        return [{**row, "session_ids": [name.rpartition(":")[2] for name in row["session_ids"]]} for row in rows]

    def versions(self) -> list[dict[str, Any]]:
        """All versions ever made, oldest first."""
        return self._all("/versions", "versions")

    def pin(self, version: int) -> None:
        """Keep this version's files when old versions are cleared away."""
        self._post(f"/versions/{version}/pin", pinned=True)

    def roll_back(self, version: int, reason: str) -> None:
        self._post("/rollback", to=version, reason=reason)

    def _all(self, path: str, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        page = self._get(path, limit=PAGE)[name]
        while page:
            rows += page
            page = self._get(path, limit=PAGE, before=page[-1]["number"])[name]
        return rows[::-1]

    def _get(self, path: str, **query: int) -> dict[str, Any]:
        response = self._http.get(path, params=query)
        response.raise_for_status()
        body: dict[str, Any] = response.json()
        return body

    def _post(self, path: str, **body: Any) -> None:
        self._http.post(path, json=body).raise_for_status()
