"""Two apps on one PostgreSQL registry and one log: one deployer, one pointer, and feedback that counts once."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, cast

import httpx
import pytest

from app.engines.base import Engine
from app.events.schema import FeedbackEvent
from app.registry import Registry
from app.serving.versions import Versions
from tests.postgres import Postgres
from tests.publishing import Publisher
from tests.service import POLICY, Service, eventually

CLIENTS = 20
ROLLBACK = f"/admin/policies/{POLICY}/rollback"


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[list[Service]]:
    home = tmp_path_factory.mktemp("home")
    with ExitStack() as stack:
        url = stack.enter_context(postgres.database(migrated=True))
        extra = {"RIACHO_DATABASE_URL": url, "RIACHO_DEPLOYER_LEASE_S": "2"}
        yield [stack.enter_context(Service(home, "serve", extra, name)) for name in ("one", "two")]


@pytest.fixture(scope="module")
def registry(apps: list[Service]) -> Iterator[Registry]:
    with closing(apps[0].registry()) as registry:
        yield registry


@pytest.fixture(scope="module")
def publisher(apps: list[Service]) -> Iterator[Publisher]:
    with closing(Publisher(apps[0].home, database_url=apps[0].database_url)) as publisher:
        yield publisher


def deployer(registry: Registry) -> int:
    """The process id of the deployer; 0 if there is none now."""
    holder = registry.leases.holder(f"deployer:{POLICY}")
    return int(holder.holder.split(":")[1]) if holder else 0


def publish(publisher: Publisher, number: int) -> None:
    publisher.publish(number, epoch=publisher.epoch)


def serve(app: Service, version: str) -> None:
    eventually(lambda: app.ask(max_tokens=1)["model"] == f"{POLICY}@{version}", f"{version} serves")


def post_at_once(apps: list[Service], bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """The same moment, half of the clients at each app."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda n: apps[n % 2].judge(**bodies[n]), range(len(bodies))))


def test_pointer_moves_reach_both_apps(apps: list[Service], registry: Registry, publisher: Publisher) -> None:
    """One of them deploys; a version and a rollback asked of either serve from both."""
    assert deployer(registry) in {app.pid for app in apps}
    publish(publisher, 1)
    for app in apps:
        serve(app, "1")
    for app, other in (apps, apps[::-1]):
        assert app.admin.post(ROLLBACK, json={"to": 0, "reason": "worse"}).is_success
        serve(other, "base")
        assert other.admin.post(ROLLBACK, json={"to": 1, "reason": "better"}).is_success
        serve(app, "1")


def test_a_version_is_loaded_from_its_registered_directory(
    apps: list[Service], registry: Registry, publisher: Publisher
) -> None:
    """What another attempt left under the plain name is not touched and not served."""
    left = apps[0].home / "adapters" / POLICY / "2"
    left.mkdir()
    publisher.publish(2, publisher.epoch, lambda number: publisher.write(number, "2.1"))
    for app in apps:
        serve(app, "2")
    assert registry.versions.get(POLICY, 2).directory == "2.1"
    assert list(left.iterdir()) == []


def test_clean_up_takes_what_attempts_have_left(apps: list[Service], registry: Registry, publisher: Publisher) -> None:
    """With a version's own directory go those of other attempts at it, whole or half-written; others stay."""
    publish(publisher, 3)
    store = apps[0].home / "adapters" / POLICY
    for name in ("3.1", ".3.0a.part", "30.1"):
        (store / name).mkdir()
    publisher.publish(4, publisher.epoch)
    for app in apps:
        serve(app, "4")
    versions = Versions(cast(Engine, None), registry, POLICY, apps[0].home / "adapters")
    versions.delete_files(registry.versions.get(POLICY, 3))
    assert sorted(path.name for path in store.iterdir()) == ["1", "2", "2.1", "30.1", "4"]


def test_the_same_feedback_from_all_sides_counts_once(apps: list[Service], registry: Registry) -> None:
    """20 posts of one id at both apps: one row, one event, one answer; other content under the id is refused."""
    completion = apps[0].recorded(apps[0].ask()["id"])
    body = {"completion_id": completion.completion_id, "reward": 1.0, "id": "once", "metadata": {"page": 1}}
    answers = post_at_once(apps, [body] * CLIENTS)
    assert {answer.status_code for answer in answers} == {200}
    facts = [{k: v for k, v in answer.json().items() if k != "duplicate"} for answer in answers]
    assert facts == [facts[0]] * CLIENTS
    [row] = registry.feedback.list(POLICY, completion.session_id)
    events = [e for e in apps[0].events() if isinstance(e, FeedbackEvent) and e.session_id == completion.session_id]
    assert {event.event_id for event in events} == {row.event_id}
    for app in apps:
        assert app.judge(**body | {"reward": 0.0}).status_code == 409


def test_of_different_final_judgements_one_is_taken(apps: list[Service], registry: Registry) -> None:
    """20 clients close one rollout with different rewards: one is accepted, the others hear that it is closed."""
    completion = apps[1].recorded(apps[1].ask()["id"])
    judged = {"completion_id": completion.completion_id}
    answers = post_at_once(apps, [judged | {"reward": n / CLIENTS, "id": f"f{n}"} for n in range(CLIENTS)])
    assert Counter(answer.status_code for answer in answers) == {200: 1, 409: CLIENTS - 1}
    refused = [answer.json()["error"] for answer in answers if answer.status_code == 409]
    assert {error["code"] for error in refused} == {"rollout_closed"}
    assert all("closed" in error["message"] for error in refused)
    assert len(registry.feedback.list(POLICY, completion.session_id)) == 1


def test_the_other_app_deploys_when_the_deployer_is_killed(
    apps: list[Service], registry: Registry, publisher: Publisher
) -> None:
    """SIGKILL of the lease's holder: after the lease the other deploys, and the killed one follows once it is back."""
    publish(publisher, 5)
    first = eventually(lambda: deployer(registry), "a deployer")
    killed, left = sorted(apps, key=lambda app: app.pid != first)
    killed.kill()
    publish(publisher, 6)
    serve(left, "6")
    assert deployer(registry) == left.pid
    killed.start()
    serve(killed, "6")
