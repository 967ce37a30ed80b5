"""A PostgreSQL registry that goes away and comes back: serving goes on, nothing is lost, everything recovers."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy

from app.events.schema import CompletionEvent, FeedbackEvent
from app.registry import Registry, utc_now
from app.registry.database import Database, make_engine
from app.registry.errors import RegistryUnavailable
from app.registry.leases import fence
from tests.postgres import Postgres
from tests.service import Service, environment, error_of, eventually, riacho


@pytest.fixture
def server() -> Iterator[Postgres]:
    """A server of this test's own, to be stopped."""
    folder = Path(tempfile.mkdtemp(prefix="riacho-pg-"))
    server = Postgres(folder / "data")
    yield server
    server.close()
    shutil.rmtree(folder, ignore_errors=True)


class Talker(threading.Thread):
    """Asks and judges until told to stop; remembers what was answered and accepted, and how the rest was refused."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self._service, self._http = service, service.http(service.client_key)
        self.stopping = threading.Event()
        self.answered: list[str] = []
        self.accepted: list[str] = []
        self.refused: list[dict[str, object]] = []

    def run(self) -> None:
        while not self.stopping.is_set():
            answer = self._service.post_chat(max_tokens=4, http=self._http)
            if answer.status_code != 200:
                self.refused.append(error_of(answer, 503))
                continue
            id = answer.json()["id"]
            self.answered.append(id)
            judged = self._service.judge(self._http, completion_id=id, reward=0.5, id=id)
            if judged.status_code == 200:
                self.accepted.append(id)
            else:
                self.refused.append(error_of(judged, 503))


@pytest.mark.timeout(600)
def test_app_and_learner_outlive_a_restart_of_the_registry(tmp_path: Path, server: Postgres) -> None:
    """Chat goes on for known keys, the rest hears a clear 503; then all recovers without a process being started."""
    with server.database(migrated=True) as url:
        extra = {"RIACHO_DATABASE_URL": url, "RIACHO_LEARNER_LEASE_S": "1", "RIACHO_DEPLOYER_LEASE_S": "1"}
        with Service(tmp_path, "up", extra) as service:
            talker = Talker(service)
            talker.start()
            eventually(lambda: service.policy()["live_version"] >= 2, "learning is under way")
            server.stop()
            eventually(lambda: service.anonymous.get("/health/ready").status_code == 503, "not ready")
            assert service.anonymous.get("/health/live").status_code == 200
            during = service.ask(max_tokens=4)["id"]
            refused = error_of(service.judge(completion_id=during, reward=1, id="later"), 503)
            assert refused["code"] == "registry_unavailable"
            error_of(service.http("another-key").get("/v1/models"), 503)
            eventually(lambda: "learning begins again" in service.log_text, "the learner notices")
            server.start()
            eventually(service.ready, "ready again")
            before = service.policy()["live_version"]
            assert service.judge(completion_id=during, reward=1, id="later").status_code == 200
            eventually(lambda: service.policy()["live_version"] > before, "versions are published and deployed again")
            talker.stopping.set()
            talker.join()
            eventually(lambda: service.client.get(f"/v1/completions/{during}").json()["state"] == "trained", "trained")
            last = talker.accepted[-1]
            eventually(
                lambda: service.client.get(f"/v1/completions/{last}").json()["state"] == "trained", "all trained"
            )
            assert {error["code"] for error in talker.refused} == {"registry_unavailable"}
            events = service.events()
            captured = [event.completion_id for event in events if isinstance(event, CompletionEvent)]
            assert sorted(captured) == sorted([*talker.answered, during])
            assert {*talker.accepted, during} <= {e.completion_id for e in events if isinstance(e, FeedbackEvent)}
            sessions = [id for update in service.updates() for id in update["session_ids"]]
            assert len(sessions) == len(set(sessions))
            assert "the learner ended" not in service.log_text


def test_a_start_without_the_registry_says_so_and_is_temporary(tmp_path: Path, server: Postgres) -> None:
    """Commands name the database and never its password; the learner ends as one whom a supervisor starts again."""
    with server.database(migrated=True) as url:
        extra = {"RIACHO_DATABASE_URL": url.replace("postgres:@", "postgres:secret@")}
        server.stop()
        status = riacho(tmp_path, "db", "status", extra=extra)
        learner = subprocess.run(
            [sys.executable, "-m", "learner", "run"],
            env=environment(tmp_path, extra),
            capture_output=True,
            text=True,
            check=False,
        )
        server.start()
        assert learner.returncode == os.EX_TEMPFAIL
        for said in (status.stderr, learner.stderr):
            assert "cannot open the registry's database postgresql" in said
            assert "secret" not in said


def test_a_process_frozen_in_a_transaction_does_not_keep_its_locks(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL ends the transaction, another takes the lease, and the first hears that the registry failed it."""
    monkeypatch.setattr("app.registry.database.IDLE_TRANSACTION_MS", 300)
    database = Database(make_engine(postgres_url), utc_now)
    with closing(database), closing(Registry.open(postgres_url)) as registry:
        lease = registry.leases.acquire("l", "one", 0.1)
        assert lease is not None
        lease = registry.leases.renew(lease, 1)

        def freeze() -> None:
            with database.write() as session:
                fence(session, database, lease)
                eventually(lambda: registry.leases.acquire("l", "two", 10), "the lease is taken over")
                session.execute(sqlalchemy.text("SELECT 1"))

        with pytest.raises(RegistryUnavailable):
            freeze()


def test_a_used_up_pool_is_a_registry_that_is_away_for_now(postgres_url: str) -> None:
    """Callers hear that they may try again, and not that there is a bug."""
    engine = sqlalchemy.create_engine(postgres_url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    database = Database(engine, utc_now)
    with closing(database), database.read() as session:
        session.execute(sqlalchemy.text("SELECT 1"))
        with pytest.raises(RegistryUnavailable, match="every connection"), database.read() as other:
            other.execute(sqlalchemy.text("SELECT 1"))
