"""The whole service with its log on Kafka: it learns, and a broker that is away stops nobody for good."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from kafka import KafkaAdminClient

from tests.broker import Broker
from tests.service import Service, eventually, local_only, riacho

pytestmark = local_only

GROUP = "riacho.riacho.learner"


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


@pytest.fixture(scope="module")
def service(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home: Path = tmp_path_factory.mktemp("home")
    extra = {
        "RIACHO_LOG_URL": f"kafka://{broker.address}",
        "RIACHO_PARTITIONS": "3",
        "RIACHO_KAFKA_REPLICATION": "1",
        "RIACHO_KAFKA_DELIVERY_TIMEOUT_S": "4",
    }
    made = riacho(home, "log", "create", extra=extra)
    assert made.returncode == 0, made.stderr
    with Service(home, "up", extra) as running:
        yield running


def learn_once(service: Service) -> dict[str, Any]:
    """A chat and its feedback; the update that they become."""
    session = f"session-{len(service.updates())}"
    answer = service.ask(session=session)
    assert service.judge(completion_id=answer["id"], reward=1.0).status_code == httpx.codes.OK
    before = len(service.updates())
    return eventually(lambda: service.updates()[: len(service.updates()) - before], "an update")[0]


def test_chat_feedback_and_an_update(service: Service, broker: Broker) -> None:
    """One judged answer is one update and one version, and the learner's progress shows in Kafka's tools."""
    update = learn_once(service)
    assert update["number"] == 1
    eventually(lambda: service.policy()["live_version"] == 1, "the version is live")
    with closing(KafkaAdminClient(bootstrap_servers=[broker.address])) as admin:
        committed = eventually(lambda: admin.list_group_offsets({GROUP: None})[GROUP], "a commit")
    assert sum(offsets.offset for offsets in committed.values()) == 2


def test_broker_that_hangs_for_a_while(service: Service, broker: Broker) -> None:
    """Answers go on, their records wait in the spool, and afterwards both processes go on without a restart."""
    broker.freeze()
    assert service.post_chat().status_code == httpx.codes.OK
    assert service.metric("riacho_spool_events") == 1
    eventually(lambda: "the log is away" in service.log_text, "the learner waits")
    assert service.client.get("/metrics").status_code == httpx.codes.OK
    broker.thaw()
    eventually(lambda: "the log is back" in service.log_text, "the learner reads again")
    eventually(lambda: service.metric("riacho_spool_events") == 0, "the spool is empty")
    learn_once(service)
    assert "the learner ended" not in service.log_text
