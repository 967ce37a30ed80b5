"""The whole service on Kafka and PostgreSQL under load and faults: nothing is lost, and nothing counts twice.

RIACHO_TEST_COMPLETIONS says how many answers are judged: a multiple of 4, and 200 by default.
"""

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.events.open import open_log
from app.events.schema import CompletionEvent, Event, FeedbackEvent, decode
from app.settings import SharedSettings
from tests.broker import Broker, Proxy
from tests.learning import LearnerProcess
from tests.postgres import Postgres
from tests.service import POLICY, REQUEST_S, Service, eventually, local_only, riacho

pytestmark = local_only

COMPLETIONS = int(os.environ.get("RIACHO_TEST_COMPLETIONS", "200"))  # a multiple of ROLLOUTS_PER_UPDATE
CLIENTS = 32
PARTITIONS = 3
ROLLOUTS_PER_UPDATE = 4
RETRY_S = 0.2
CATCH_UP_S = 900.0
BROKER_FAULTS, APP_KILLS, LEARNER_KILLS = 5, 2, 5
# As little work for each rollout as there can be: what is learned does not matter here.
LEARNER = {
    "RIACHO_LEARNER_ROLLOUTS_PER_UPDATE": str(ROLLOUTS_PER_UPDATE),
    "RIACHO_LEARNER_PUBLISH_EVERY": "4",
    "RIACHO_LEARNER_MAX_VERSION_LAG": "1000000",
    "RIACHO_LEARNER_POLICY_LR": "1e-5",
    "RIACHO_LEARNER_TARGET_MODULES": "q_proj",
    "RIACHO_LEARNER_CRITIC_MODULES": "down_proj",
    "RIACHO_LEARNER_CRITIC_STEPS": "1",
    "RIACHO_LEARNER_LEASE_S": "1",
}


@dataclass
class Place:
    """A service and a learner of its own on one broker behind a proxy."""

    broker: Broker
    proxy: Proxy
    service: Service
    learner: LearnerProcess
    lost: float = 0.0

    def freeze_broker(self) -> None:
        """Until an answer has met the outage."""
        self.broker.freeze()
        try:
            self._until_spooled()
        finally:
            self.broker.thaw()

    def cut_broker_off(self) -> None:
        self.proxy.cut()
        try:
            self._until_spooled()
        finally:
            self.proxy.join()

    def kill_app(self) -> None:
        self.lost += self.service.metric("riacho_lost_events_total")
        self.service.restart()

    def kill_learner(self) -> None:
        assert self.learner.running, self.learner.log_text[-3000:]
        self.learner.restart()

    def _until_spooled(self) -> None:
        eventually(lambda: self.service.metric("riacho_spool_events") > 0, "events in the spool")

    def events(self) -> list[Event]:
        """All records of the log as events; each of them must be one."""
        settings = SharedSettings(log_url=f"kafka://{self.proxy.address}", partitions=PARTITIONS)
        with closing(open_log(settings)) as log:
            ends = log.end_positions()
            records = log.read({}, sum(ends.values()))
        assert len(records) == sum(ends.values())
        return [decode(record.payload) for record in records]

    def updates(self) -> dict[int, dict[str, Any]]:
        """All of the learner's updates by number."""
        rows: list[dict[str, Any]] = []
        page = self._updates()
        while page:
            rows += page
            page = self._updates(before=page[-1]["number"])
        assert len({row["number"] for row in rows}) == len(rows)
        return {row["number"]: row for row in rows}

    def _updates(self, **query: int) -> list[dict[str, Any]]:
        answer = self.service.admin.get(f"/admin/policies/{POLICY}/updates", params={"limit": 1000, **query})
        rows: list[dict[str, Any]] = answer.json()["updates"]
        return rows

    def captured(self, ids: Iterable[str]) -> list[str]:
        """Those of the completions that the learner has not shown yet."""
        with closing(self.service.registry()) as registry:
            return [id for id in ids if registry.projections.completion(id) is None]

    def version_of_update(self) -> Callable[[int], int | None]:
        """From an update to the oldest version that has it; None for one that is not published yet."""
        with closing(self.service.registry()) as registry:
            versions = sorted((v.update_count, v.number) for v in registry.versions.list(POLICY, 100_000))
        return lambda update: next((number for count, number in versions if count >= update), None)


@pytest.fixture
def place(tmp_path: Path, postgres: Postgres) -> Iterator[Place]:
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy())
        broker = stack.enter_context(Broker(advertised=proxy.address))
        proxy.target = broker.port
        extra = {
            "RIACHO_LOG_URL": f"kafka://{proxy.address}",
            "RIACHO_DATABASE_URL": stack.enter_context(postgres.database(migrated=True)),
            "RIACHO_PARTITIONS": str(PARTITIONS),
            "RIACHO_KAFKA_REPLICATION": "1",
            "RIACHO_KAFKA_DELIVERY_TIMEOUT_S": "2",
            "RIACHO_DEPLOYER_LEASE_S": "2",
        }
        made = riacho(tmp_path, "log", "create", extra=extra)
        assert made.returncode == 0, made.stderr
        service = stack.enter_context(Service(tmp_path, "serve", extra))
        learner = stack.enter_context(LearnerProcess(tmp_path, extra | LEARNER))
        yield Place(broker, proxy, service, learner)


class Unanswered(Exception):
    """The service said that it cannot answer now."""


@dataclass
class Clients:
    """Ask and judge as real clients do: again and again until there is an answer.

    Attributes:
        judged: completion id → reward, once the judgement was acknowledged.
        failed: attempts without an answer.
        over: set when nobody waits for answers any more.
    """

    service: Service
    judged: dict[str, float] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    over: threading.Event = field(default_factory=threading.Event)
    _local: threading.local = field(default_factory=threading.local)

    def wait_for(self, count: int) -> None:
        eventually(lambda: len(self.judged) >= count, f"{count} judgements", CATCH_UP_S)

    def ask_and_judge(self, number: int) -> None:
        rng = random.Random(number)
        completion_id = self._until_answered("answer", lambda: self._ask(rng, stream=number % 2 == 0))
        body = {"completion_id": completion_id, "reward": round(rng.random(), 2), "id": f"judgement-{number}"}
        self._until_answered("judgement", lambda: self._post("/v1/feedback", body).json()["reward"] == body["reward"])
        self.judged[completion_id] = float(body["reward"])

    def _until_answered(self, what: str, attempt: Callable[[], Any]) -> Any:
        while not self.over.is_set():
            try:
                if answer := attempt():
                    return answer
            except (httpx.TransportError, Unanswered):
                pass
            self.failed[what] += 1
            self.over.wait(RETRY_S)
        raise Unanswered("the test is over")

    def _ask(self, rng: random.Random, *, stream: bool) -> str | None:
        messages = [{"role": "user", "content": f"Write a line about {rng.choice(['the sea', 'a tree', 'rain'])}."}]
        body = {"model": POLICY, "messages": messages, "max_tokens": rng.randint(3, 6), "stream": stream}
        response = self._post("/v1/chat/completions", body)
        if not stream:
            return str(response.json()["id"])
        data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        return str(json.loads(data[0])["id"]) if data and data[-1] == "[DONE]" else None

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.service.client_key}"}
        response = self._http.post(f"{self.service.base_url}{path}", json=body, headers=headers)
        if response.is_server_error:
            raise Unanswered(response.text)
        assert response.status_code == httpx.codes.OK, response.text
        return response

    @property
    def _http(self) -> httpx.Client:
        if not hasattr(self._local, "http"):
            self._local.http = httpx.Client(timeout=REQUEST_S)
        http: httpx.Client = self._local.http
        return http


def run_with_faults(place: Place, clients: Clients) -> None:
    """All clients at once, with the faults in a random order at even steps of their progress."""
    rng = random.Random(20261129)
    faults = [place.freeze_broker, place.cut_broker_off] * BROKER_FAULTS
    faults = faults[:BROKER_FAULTS] + [place.kill_app] * APP_KILLS + [place.kill_learner] * LEARNER_KILLS
    rng.shuffle(faults)
    with ThreadPoolExecutor(CLIENTS) as pool:
        work = [pool.submit(clients.ask_and_judge, number) for number in range(COMPLETIONS)]
        try:
            for step, fault in enumerate(faults, 1):
                clients.wait_for(step * COMPLETIONS // (len(faults) + 2))
                fault()
            for done in work:
                done.result()
        finally:
            clients.over.set()


def check_log(place: Place, clients: Clients) -> dict[str, CompletionEvent]:
    """Every answer and every judgement is on the log, once in effect; the completions by id."""
    events = place.events()
    by_id = {event.event_id: event for event in events}
    assert all(event == by_id[event.event_id] for event in events)
    completions = {e.completion_id: e for e in by_id.values() if isinstance(e, CompletionEvent)}
    judgements = [e for e in by_id.values() if isinstance(e, FeedbackEvent)]
    assert len(completions) + len(judgements) == len(by_id)
    assert len(judgements) == len(clients.judged) == COMPLETIONS
    assert {e.completion_id: e.reward for e in judgements} == clients.judged
    assert clients.judged.keys() <= completions.keys()
    with closing(place.service.registry()) as registry:
        for judgement in judgements:
            [row] = registry.feedback.list(POLICY, judgement.session_id)
            assert (row.event_id, row.completion_id) == (judgement.event_id, judgement.completion_id)
        assert registry.outbox.pending(POLICY, datetime.now(UTC), 1) == []
    assert place.service.metric("riacho_log_events") == len(events)
    print(f"{len(events)} records, {len(by_id)} events, {len(completions)} completions, {len(judgements)} judgements")
    return completions


def check_training(place: Place, clients: Clients, completions: dict[str, CompletionEvent]) -> None:
    """Every judged rollout is in one update, and its completion names that update and its version; no other is."""
    updates = place.updates()
    assert sorted(updates) == list(range(1, COMPLETIONS // ROLLOUTS_PER_UPDATE + 1))
    trained = {session: number for number, row in updates.items() for session in row["session_ids"]}
    assert sum(len(row["session_ids"]) for row in updates.values()) == len(trained) == COMPLETIONS
    assert trained.keys() == {completions[id].session_id for id in clients.judged}
    version_of = place.version_of_update()
    for id, event in completions.items():
        shown = place.service.client.get(f"/v1/completions/{id}").json()
        facts = (shown["state"], shown["rollout_update"], shown["trained_version"])
        if id in clients.judged:
            update = trained[event.session_id]
            assert facts == ("trained", update, version_of(update)), id
        else:
            assert facts == ("waiting" if event.trainable else "not_trainable", None, None), id
    assert {number: row["version"] for number, row in updates.items()} == {n: version_of(n) for n in updates}
    not_trained = updates[len(updates)]["metrics"]["not_trained"]
    assert {reason for reason, count in not_trained.items() if count} <= {"late", "waiting"}


@pytest.mark.timeout(3600)
def test_nothing_is_lost_and_nothing_counts_twice(place: Place) -> None:
    """Broker unreachable five times, app killed twice, learner five times: log, tables and counters agree."""
    clients = Clients(place.service)
    started = time.monotonic()
    run_with_faults(place, clients)
    served = time.monotonic() - started
    eventually(lambda: place.service.metric("riacho_spool_events") == 0, "an empty spool", CATCH_UP_S)
    last = COMPLETIONS // ROLLOUTS_PER_UPDATE
    eventually(lambda: place.service.metric("riacho_learner_updates") == last, f"{last} updates", CATCH_UP_S)
    print(f"served in {served:.0f} s, learned in {time.monotonic() - started:.0f} s, {dict(clients.failed)} failed")
    completions = check_log(place, clients)
    eventually(lambda: place.captured(completions) == [], "the learner has read everything", CATCH_UP_S)
    check_training(place, clients, completions)
    assert place.service.admin.get(f"/admin/policies/{POLICY}/dead-letters").json() == {"dead_letters": []}
    assert place.lost + place.service.metric("riacho_lost_events_total") == 0
    assert place.service.metric("riacho_refused_events_total") == 0
