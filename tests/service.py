"""The real service as a process, for tests that come through the front door.

A test module has one service: `service = service_fixture()`. RIACHO_TEST_ENGINE_URLS and RIACHO_TEST_MODEL run the
same tests against other engines; what holds only for the local engine and the tiny model is marked `local_only`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import openai
import pytest

from app.events.schema import CompletionEvent, Event, decode
from app.events.sqlite import SqliteLog
from app.registry import Registry, upgrade
from app.settings import TINY_MODEL

T = TypeVar("T")

POLICY = "riacho"
START_S = 150.0
STOP_S = 30.0
REQUEST_S = 120.0
POLL_S = 0.05
ENGINE_URLS = os.environ.get("RIACHO_TEST_ENGINE_URLS", "local")
MODEL = os.environ.get("RIACHO_TEST_MODEL", str(TINY_MODEL))
SERVING = re.compile(r"riacho serves .* on (http://\S+)/v1")

local_only = pytest.mark.skipif(
    ENGINE_URLS != "local" or str(TINY_MODEL) != MODEL, reason="holds for the local engine and the tiny model"
)


def eventually(probe: Callable[[], T], what: str = "", timeout_s: float = 120.0) -> T:
    """Ask until the answer is true in Python's sense; fails after `timeout_s`, which is no claim about speed."""
    deadline = time.monotonic() + timeout_s
    while not (answer := probe()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what or probe}; the last answer was {answer!r}")
        time.sleep(POLL_S)
    return answer


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables without any setting of Riacho's, and then the given ones."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RIACHO_")}
    return {
        **inherited,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTHONUNBUFFERED": "1",
        "RIACHO_HOME": str(home),
        **(extra or {}),
    }


def riacho(
    home: Path, *args: str, extra: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a `riacho` command that ends by itself, in a directory without a riacho.toml."""
    return subprocess.run(
        [sys.executable, "-m", "app.cli", *args],
        env=environment(home, extra),
        cwd=cwd or home,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


class Service:
    """`riacho serve` or `riacho up` on a free port, with a client key and an admin key.

    Args:
        home: state and keys; an existing directory.
        command: `serve` (the API alone) or `up` (API and learner).
        extra: RIACHO_* variables on top; None takes one away.
        name: tells apart services that share a home.
    """

    def __init__(
        self,
        home: Path,
        command: str = "serve",
        extra: Mapping[str, str | None] | None = None,
        name: str = "output",
    ) -> None:
        self.home = home
        self.admin_key, self.client_key = "test-admin-key", "test-client-key"
        self._command = command
        self._extra = dict(extra or {})
        self._output = home / f"{name}.log"
        self._http: list[httpx.Client] = []

    def __enter__(self) -> Self:
        if self._command == "serve":
            upgrade(self.database_url)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it on the home, as it is, and wait until it is ready; the address may be another than before."""
        seen = len(self.log_text)
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "app.cli", self._command],
                env=environment(self.home, self._variables()),
                cwd=self.home,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.base_url: str = eventually(lambda: self._address(seen), "an address in the log", START_S) or ""
            self._http = [self.http(self.client_key), self.http(self.admin_key), self.http(None)]
            self.client, self.admin, self.anonymous = self._http
            eventually(self.ready, "ready", START_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> int:
        """SIGTERM and an orderly end; whatever is left of its processes is then killed. The exit status."""
        for client in self._http:
            client.close()
        self._http = []
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return self.kill()
        finally:
            self._kill_group()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to the service and all its processes, and wait; the exit status."""
        self._kill_group(number)
        return self._process.wait(STOP_S)

    @property
    def pid(self) -> int:
        """The process that was started; with `serve` the API itself."""
        return self._process.pid

    def restart(self) -> None:
        """Kill it without warning and start it again on the same home."""
        self.kill()
        self.start()

    def ready(self) -> bool:
        """Whether /health/ready says so; raises if the process has ended."""
        if self._process.poll() is not None:
            pytest.fail(f"the service ended with status {self._process.returncode}:\n{self.log_text[-3000:]}")
        try:
            return self.anonymous.get("/health/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    @property
    def log_text(self) -> str:
        """All that its processes have printed."""
        return self._output.read_text(encoding="utf-8", errors="replace") if self._output.exists() else ""

    def http(self, key: str | None) -> httpx.Client:
        """Plain HTTP with a key, or without any."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.base_url, headers=headers, timeout=REQUEST_S)

    def openai(self, key: str | None = None) -> openai.OpenAI:
        """The public client, as any user has it; it does not hide errors behind retries."""
        return openai.OpenAI(
            base_url=f"{self.base_url}/v1", api_key=key or self.client_key, max_retries=0, timeout=REQUEST_S
        )

    def registry(self) -> Registry:
        """The service's registry, from outside; close it."""
        return Registry.open(self.database_url)

    @property
    def database_url(self) -> str:
        return self._extra.get("RIACHO_DATABASE_URL") or f"sqlite:///{self.home / 'registry.db'}"

    def add_client(self, plain: str, store_content: bool = True) -> str:
        """Another client's key; its id."""
        with closing(self.registry()) as registry:
            return registry.keys.add(plain, "client", plain, store_content).id

    def log(self) -> SqliteLog:
        """The service's event log, from outside; close it."""
        return SqliteLog(self.home / "log.db")

    def events(self) -> list[Event]:
        """All events on the log, in order."""
        with closing(self.log()) as log:
            records = log.read({}, 1_000_000)
        return [decode(record.payload) for record in records]

    def recorded(self, completion_id: str) -> CompletionEvent:
        """The one event of a completion."""
        found = [e for e in self.events() if isinstance(e, CompletionEvent) and e.completion_id == completion_id]
        assert len(found) == 1, f"{len(found)} events of {completion_id}"
        return found[0]

    def metric(self, sample: str) -> float:
        """A sample of /metrics, such as `riacho_leases`; 0 where it is absent."""
        for line in self.client.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        return 0.0

    def ask(self, text: str = "Write a line about the sea.", **fields: Any) -> dict[str, Any]:
        """One chat completion of a client's, by plain HTTP; 16 tokens unless `fields` says otherwise."""
        response = self.post_chat(text, **fields)
        assert response.status_code == httpx.codes.OK, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def post_chat(self, text: str = "Write a line about the sea.", **fields: Any) -> httpx.Response:
        """POST /v1/chat/completions as `ask` does, whatever comes back; `session` goes into the header."""
        session = fields.pop("session", None)
        headers = {} if session is None else {"X-Riacho-Session": session}
        body: dict[str, Any] = {"model": POLICY, "messages": [{"role": "user", "content": text}], "max_tokens": 16}
        body |= fields
        http: httpx.Client = body.pop("http", self.client)
        return http.post("/v1/chat/completions", json=body, headers=headers)

    def judge(self, http: httpx.Client | None = None, **body: Any) -> httpx.Response:
        """POST /v1/feedback with a client's key, or with that of `http`."""
        return (http or self.client).post("/v1/feedback", json=body)

    def policy(self) -> dict[str, Any]:
        """The policy as the admin API shows it."""
        return self._admin("")

    def updates(self) -> list[dict[str, Any]]:
        """The learner's updates, newest first."""
        rows: list[dict[str, Any]] = self._admin("/updates")["updates"]
        return rows

    def _admin(self, path: str) -> dict[str, Any]:
        response = self.admin.get(f"/admin/policies/{POLICY}{path}")
        assert response.status_code == httpx.codes.OK, response.text
        body: dict[str, Any] = response.json()
        return body

    def _variables(self) -> dict[str, str]:
        variables = {
            "RIACHO_PORT": "0",
            "RIACHO_ADMIN_KEY": self.admin_key,
            "RIACHO_CLIENT_KEY": self.client_key,
            "RIACHO_ENGINE_URLS": ENGINE_URLS,
            "RIACHO_MODEL": MODEL,
            **self._extra,
        }
        return {name: value for name, value in variables.items() if value is not None}

    def _address(self, seen: int) -> str | None:
        if self._process.poll() is not None:
            pytest.fail(f"the service ended with status {self._process.returncode}:\n{self.log_text[-3000:]}")
        found = SERVING.search(self.log_text, seen)
        return found[1] if found else None

    def _kill_group(self, number: signal.Signals = signal.SIGKILL) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # nothing was left


def stream_data(lines: Iterator[str] | Sequence[str]) -> list[str]:
    """The data of server-sent events, in order."""
    return [line.removeprefix("data: ") for line in lines if line]


def chunks_of(data: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON chunks of a stream without its [DONE]."""
    return [json.loads(item) for item in data if item != "[DONE]"]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The OpenAI-shaped error in a response with this status; fails on any other shape."""
    assert response.status_code == status, f"{response.status_code}: {response.text}"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"], error
    return error


def service_fixture(command: str = "serve", **extra: str) -> Any:
    """A module's own running service: `service = service_fixture()` at its top."""

    @pytest.fixture(scope="module", name="service")
    def running_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
        with Service(tmp_path_factory.mktemp("home"), command, extra) as running:
            yield running

    return running_service
