"""The service under the demo: its two processes, and what an operator asks of it."""

import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import click
import httpx

from learner.study.process import HOST, REQUEST_S, Server, free_port, inherited

READY_S = 120.0
PAGE = 200


class Service(Server):
    """`riacho up` in a home of its own on a free port, with a policy of its own: on Kafka it has new topics.

    Args:
        home: state, keys and adapters; a fresh directory.
        log: where the output of both processes goes.
        settings: RIACHO_* variables on top of the demo's own.
    """

    def __init__(self, home: Path, log: Path, settings: Mapping[str, str]) -> None:
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        self.policy = f"demo-{secrets.token_hex(4)}"
        self.admin_key = secrets.token_urlsafe(24)
        self.client_key = secrets.token_urlsafe(24)
        config = home / "riacho.toml"
        config.touch()
        env = {
            **inherited(),
            "PYTHONUNBUFFERED": "1",
            "RIACHO_CONFIG": str(config),
            "RIACHO_HOME": str(home),
            "RIACHO_HOST": HOST,
            "RIACHO_PORT": str(port),
            "RIACHO_POLICY": self.policy,
            "RIACHO_ADMIN_KEY": self.admin_key,
            "RIACHO_CLIENT_KEY": self.client_key,
            **settings,
        }
        command = [sys.executable, "-m", "app.cli", "up"]
        super().__init__("The service", command, env, f"{self.url}/health/ready", READY_S, log)

    def __enter__(self) -> Self:
        self._make_topics()
        return super().__enter__()

    def _make_topics(self) -> None:
        """What an operator does before the first start on Kafka; nothing for the embedded log."""
        command = [sys.executable, "-m", "app.cli", "log", "create"]
        made = subprocess.run(command, env=self._env, capture_output=True, text=True, check=False)
        if made.returncode:
            raise click.ClickException(f"`riacho log create` failed: {made.stderr.strip()}")


class Operator:
    """Calls of the admin API for the one policy of the demo."""

    def __init__(self, service: Service) -> None:
        self._http = httpx.Client(
            base_url=f"{service.url}/admin/policies/{service.policy}",
            headers={"Authorization": f"Bearer {service.admin_key}"},
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
