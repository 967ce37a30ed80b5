"""Feedback on Kafka and PostgreSQL at the wrong moment, or many times over, is one judgement of one rollout."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.events.open import open_log
from app.events.schema import Event, decode
from app.settings import SharedSettings
from tests.broker import Broker
from tests.postgres import Postgres
from tests.service import POLICY, Service, eventually, local_only, riacho

pytestmark = local_only

CLIENTS = 20
STREAMS = 20


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


@pytest.fixture(scope="module")
def service(broker: Broker, postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home: Path = tmp_path_factory.mktemp("home")
    with ExitStack() as stack:
        extra = {
            "RIACHO_LOG_URL": f"kafka://{broker.address}",
            "RIACHO_DATABASE_URL": stack.enter_context(postgres.database(migrated=True)),
            "RIACHO_PARTITIONS": "3",
            "RIACHO_KAFKA_REPLICATION": "1",
        }
        made = riacho(home, "log", "create", extra=extra)
        assert made.returncode == 0, made.stderr
        yield stack.enter_context(Service(home, "up", extra))


def events_of(broker: Broker, session_id: str) -> list[Event]:
    """A session's events in the order of the log."""
    with closing(open_log(SharedSettings(log_url=f"kafka://{broker.address}", partitions=3))) as log:
        records = log.read({}, sum(log.end_positions().values()))
    events = [decode(record.payload) for record in records]
    return [event for event in events if event.session_id == session_id]


def trained(service: Service, completion_id: str) -> dict[str, Any]:
    """The completion once it was trained on; it is in one update."""

    def shown() -> dict[str, Any] | None:
        body: dict[str, Any] = service.client.get(f"/v1/completions/{completion_id}").json()
        return body if body["state"] == "trained" else None

    row = eventually(shown, "the completion is trained on")
    assert row is not None
    updates = [update["number"] for update in service.updates() if row["session_id"] in update["session_ids"]]
    assert updates == [row["rollout_update"]]
    return row


def judge_in_the_stream(service: Service) -> str:
    """A stream whose answer is judged as soon as its id is there; the id."""
    body = {"model": POLICY, "messages": [{"role": "user", "content": "Write about the sea."}], "max_tokens": 200}
    with service.client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        completion_id = str(json.loads(next(lines).removeprefix("data: "))["id"])
        assert service.judge(completion_id=completion_id, reward=1.0).status_code == httpx.codes.OK
        assert [line for line in lines if line][-1] == "data: [DONE]"
    return completion_id


def test_feedback_while_the_answer_streams(service: Service, broker: Broker) -> None:
    """On the log it stands before its completion, and both are one rollout."""
    for _ in range(STREAMS):
        row = trained(service, judge_in_the_stream(service))
        if [event.type for event in events_of(broker, row["session_id"])] == ["feedback", "completion"]:
            return
    pytest.fail(f"in {STREAMS} streams no judgement came before the end")


def test_feedback_before_the_session_has_begun(service: Service, broker: Broker) -> None:
    """A judgement of a session that has no completion yet waits for it."""
    assert service.judge(session_id="early", reward=1.0).status_code == httpx.codes.OK
    row = trained(service, service.ask(session="early")["id"])
    assert [event.type for event in events_of(broker, row["session_id"])] == ["feedback", "completion"]


def test_the_same_feedback_from_many_clients_counts_once(service: Service, broker: Broker) -> None:
    """20 posts of one id at once: one answer, one event in effect, one update; changed content is refused."""
    body = {"completion_id": service.ask()["id"], "reward": 1.0, "id": "once", "metadata": {"page": 1}}
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda _: service.judge(**body), range(CLIENTS)))
    assert [answer.status_code for answer in answers] == [httpx.codes.OK] * CLIENTS
    assert [answer.json() for answer in answers] == [answers[0].json()] * CLIENTS
    row = trained(service, str(body["completion_id"]))
    assert len({e.event_id for e in events_of(broker, row["session_id"]) if e.type == "feedback"}) == 1
    for changed in ({"reward": 0.0}, {"metadata": {"page": 2}}, {"comment": "no"}):
        assert service.judge(**body | changed).status_code == httpx.codes.CONFLICT
