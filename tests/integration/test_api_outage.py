"""The API while a remote log is away: answers flow, nothing is lost, and a full spool follows the setting."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar import Litestar
from litestar.testing import TestClient

from app.asgi import create_app
from app.events.schema import Event
from app.events.spool import Spool
from app.registry import upgrade
from app.settings import AppSettings
from tests.builders import completion
from tests.service import POLICY, eventually, stream_data
from tests.switchable import SwitchableLog

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Litestar's, about how handlers are declared

MEGABYTE = 2**20
BODY = {"model": POLICY, "messages": [{"role": "user", "content": "Write a line about the sea."}], "max_tokens": 4}

Client = TestClient[Litestar]


class Place:
    """A home whose app appends to a log that can be taken away."""

    def __init__(self, folder: Path, refuses: Callable[[Event], bool] = lambda _: False) -> None:
        self.home = folder
        self.log = SwitchableLog(folder / "remote.db", refuses)
        self.settings = AppSettings(home=folder, auth=False, spool_max_bytes=MEGABYTE)
        upgrade(self.settings.resolved_database_url)

    @contextmanager
    def app(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[Client]:
        with monkeypatch.context() as patch:
            patch.setattr("app.asgi.open_log", lambda *_: self.log)
            patch.setattr(self.log, "close", lambda: None)
            with TestClient(create_app(self.settings.model_copy(update=settings))) as client:
                yield client

    def fill(self) -> None:
        """Leave no room in the spool, as other traffic would."""
        spool = Spool(self.log, self.settings.spool_path, MEGABYTE)
        with closing(spool):
            while not spool.full():
                asyncio.run(spool.append(completion(output="x" * (MEGABYTE // 2))))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.log.inner.close()


def ask(client: Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json=BODY | fields)


def metric(client: Client, sample: str) -> float:
    lines = (line.rpartition(" ") for line in client.get("/metrics").text.splitlines())
    return next((float(value) for name, _, value in lines if name == sample), 0.0)


def ready(client: Client) -> tuple[int, list[str]]:
    answer = client.get("/health/ready")
    return answer.status_code, answer.json()["problems"]


def test_answers_and_feedback_flow_through_an_outage(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait where operators see it, the service stays ready, and all reaches the log in order."""
    with place.app(monkeypatch) as client:
        place.log.mode = "away"
        ids = [ask(client).json()["id"] for _ in range(3)]
        assert client.post("/v1/feedback", json={"completion_id": ids[0], "reward": 1}).status_code == 200
        assert ready(client) == (200, [])
        assert metric(client, "riacho_spool_events") == 4
        assert metric(client, "riacho_spool_bytes") > 1000
        assert place.log.event_ids() == []
        place.log.mode = "up"
        eventually(lambda: metric(client, "riacho_spool_events") == 0, "the spool is empty")
        assert metric(client, "riacho_spool_forwarded_total") == 4
        assert place.log.event_ids()[:3] == ids
        assert metric(client, "riacho_log_events") == 4
        direct = ask(client).json()["id"]
        assert place.log.event_ids()[-1] == direct
        assert metric(client, "riacho_lost_events_total") == 0


def test_restart_forwards_what_waited(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was acknowledged before a stop is forwarded by the next start; the log being away holds up neither."""
    place.log.mode = "away"
    with place.app(monkeypatch) as client:
        id = ask(client).json()["id"]
        place.log.mode, before = "hangs", place.log.attempts
        eventually(lambda: place.log.attempts > before, "the forwarder waits for the log")
    assert place.log.event_ids() == []
    place.log.mode = "up"
    with place.app(monkeypatch):
        eventually(lambda: place.log.event_ids() == [id], "the event is on the log")


def test_full_spool_fails_closed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer ends with a 503 or, in a stream, with an error and no [DONE]; the service is not ready and says why."""
    place.log.mode = "away"
    place.fill()
    with place.app(monkeypatch, on_capture_failure="fail_closed") as client:
        whole = ask(client)
        assert whole.status_code == 503
        assert "spool_max_bytes" in whole.json()["error"]["message"]
        data = stream_data(ask(client, stream=True).text.splitlines())
        assert "[DONE]" not in data
        assert json.loads(data[-1])["error"]["code"] == "unavailable"
        status, problems = ready(client)
        assert status == 503
        assert "spool is full" in " ".join(problems)
        assert metric(client, "riacho_lost_events_total") == 2


def test_full_spool_fails_open(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers flow to their end, the losses are counted, and requests may still be sent here."""
    place.log.mode = "away"
    place.fill()
    with place.app(monkeypatch, on_capture_failure="fail_open") as client:
        assert ask(client).status_code == 200
        assert stream_data(ask(client, stream=True).text.splitlines())[-1] == "[DONE]"
        assert metric(client, "riacho_lost_events_total") == 2
        assert ready(client) == (200, [])


@pytest.mark.parametrize(("on_failure", "status"), [("fail_closed", 503), ("fail_open", 200)])
def test_answer_that_the_log_refuses_follows_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_failure: str, status: int
) -> None:
    """An event that is too large for the log is counted, and is no 500."""
    place = Place(tmp_path, lambda event: event.type == "completion")
    with place.app(monkeypatch, on_capture_failure=on_failure) as client:
        assert ask(client).status_code == status
        assert metric(client, "riacho_refused_events_total") == 1
        assert metric(client, "riacho_lost_events_total") == 1
        assert metric(client, "riacho_spool_events") == 0
    place.log.inner.close()
