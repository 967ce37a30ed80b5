"""`riacho doctor`: each fault is found, named with what to do, and hides no other finding."""

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from app.cli import main
from app.doctor.machine import disk, local_engine
from app.events.log import LogUnavailable, Record
from app.events.schema import Event, RollbackEvent
from app.events.spool import Spool
from app.events.sqlite import SqliteLog
from app.fingerprint import fingerprint
from app.registry import Registry, upgrade
from app.settings import TINY_MODEL
from tests.broker import Broker
from tests.builders import completion
from tests.publishing import Publisher
from tests.service import Service, environment, riacho

ALL = {
    *("settings", "home", "adapter store", "disk", "model", "database", "policy", "versions", "outbox"),
    *("log", "spool", "dead letters", "learner", "engine", "app"),
}
Findings = dict[str, dict[str, str]]
Doctor = Callable[..., Findings]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An installation as its first start leaves it, with nothing running."""
    made = tmp_path / "home"
    made.mkdir()
    url = f"sqlite:///{made / 'registry.db'}"
    upgrade(url)
    with closing(Registry.open(url)) as registry:
        registry.policies.ensure("riacho", str(TINY_MODEL), fingerprint(TINY_MODEL), 0.0, 1.0)
    SqliteLog(made / "log.db").close()
    return made


@pytest.fixture
def doctor(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs `riacho doctor --json` on the home with further variables; its findings by name, of one check each."""
    monkeypatch.chdir(home)
    for name in [name for name in os.environ if name.startswith("RIACHO_")]:
        monkeypatch.delenv(name)

    def run(**variables: str) -> Findings:
        given = {"RIACHO_HOME": str(home), "RIACHO_PORT": "1", **variables}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.argv", ["riacho", "doctor", "--json"])
        with pytest.raises(SystemExit) as left:
            main()
        rows = json.loads(capsys.readouterr().out)
        assert bool(left.value.code) == any(row["status"] == "fail" for row in rows)
        for row in rows:
            assert bool(row["advice"]) == (row["status"] != "ok"), row
        found = {row["check"]: row for row in rows}
        assert len(found) == len(rows)
        return found

    return run


def statuses(findings: Findings, but: str = "") -> set[str]:
    """The checks that failed, without the one named."""
    return {name for name, finding in findings.items() if finding["status"] == "fail"} - {but}


def registry_of(home: Path, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Registry:
    return Registry.open(f"sqlite:///{home / 'registry.db'}", clock=clock)


@pytest.fixture
def published(home: Path) -> Iterator[Path]:
    """Version 1 is live; its directory."""
    publisher = Publisher(home)
    publisher.publish(1)
    with closing(registry_of(home)) as registry:
        assert registry.versions.make_live("riacho", 1, "test", "test", 0) is not None
    yield home / "adapters/riacho/1"
    publisher.close()


# All is well


def test_running_service_is_well(tmp_path: Path) -> None:
    """Beside a running app everything is ok but the learner, which does not run; the status is 0."""
    with Service(tmp_path) as service:
        port = service.base_url.rpartition(":")[2]
        result = riacho(tmp_path, "doctor", "--json", extra={"RIACHO_PORT": port})
    assert result.returncode == 0, result.stdout + result.stderr
    found = {row["check"]: row["status"] for row in json.loads(result.stdout)}
    assert found == dict.fromkeys(ALL, "ok") | {"learner": "warn"}


def test_every_check_reports(doctor: Doctor) -> None:
    """Each has its finding, and an installation that nobody started yet fails in none."""
    found = doctor()
    assert found.keys() == ALL
    assert statuses(found) == set()


def test_findings_are_shown_to_people(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each finding, and under it what to do."""
    doctor(RIACHO_MODEL="/nonexistent/model")
    monkeypatch.setattr("sys.argv", ["riacho", "doctor"])
    with pytest.raises(SystemExit):
        main()
    lines = capsys.readouterr().out.splitlines()
    [at] = [number for number, line in enumerate(lines) if line.startswith("fail model")]
    assert "/nonexistent/model" in lines[at]
    assert "RIACHO_MODEL" in lines[at + 1]


def test_looking_changes_nothing(tmp_path: Path, doctor: Doctor) -> None:
    """On an empty home no database, log or directory is made."""
    empty = tmp_path / "empty"
    empty.mkdir()
    found = doctor(RIACHO_HOME=str(empty))
    assert list(empty.iterdir()) == []
    assert found["database"]["status"] == "fail"
    assert "db upgrade" in found["database"]["advice"]
    assert found["log"]["status"] == "warn"


def test_torch_is_not_imported(home: Path) -> None:
    """To say whether the local engine can run, its packages are found and not loaded."""
    code = "import asyncio, sys, app.doctor; asyncio.run(app.doctor.examine({})); sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], env=environment(home), cwd=home, check=False, timeout=120)
    assert result.returncode == 0


# This machine


def test_wrong_setting(doctor: Doctor) -> None:
    """A mistyped variable is the finding; nothing else can be looked at under unknown settings."""
    found = doctor(RIACHO_PROT="1")
    assert found.keys() == {"settings"}
    assert "RIACHO_PROT" in found["settings"]["found"]


def test_password_is_not_shown(doctor: Doctor) -> None:
    """The settings that were given are listed without the database's password; an absent database is one failure."""
    found = doctor(RIACHO_DATABASE_URL="postgresql+psycopg://me:hush@127.0.0.1:1/riacho")
    assert "hush" not in json.dumps(found)
    assert "postgresql+psycopg://me:***@127.0.0.1:1/riacho" in found["settings"]["found"]
    assert statuses(found) == {"database"}


def test_home_that_cannot_be_written(home: Path, doctor: Doctor) -> None:
    """A directory in which nobody may make files; what lies elsewhere is looked at all the same."""
    found = doctor(
        RIACHO_HOME="/proc",
        RIACHO_DATABASE_URL=f"sqlite:///{home / 'registry.db'}",
        RIACHO_LOG_URL=f"sqlite:///{home / 'log.db'}",
        RIACHO_ADAPTER_STORE=str(home / "adapters"),
    )
    assert statuses(found, but="disk") == {"home"}
    assert "/proc" in found["home"]["found"]


def test_adapter_store_that_is_a_file(home: Path, doctor: Doctor) -> None:
    """The store must be a directory."""
    (home / "store").write_text("x")
    assert statuses(doctor(RIACHO_ADAPTER_STORE=str(home / "store"))) == {"adapter store"}


@pytest.mark.parametrize(("mib", "status"), [(100, "fail"), (1000, "warn"), (5000, "ok")])
def test_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mib: int, status: str) -> None:
    """Scarce room is a warning, none a failure."""
    usage = shutil.disk_usage(tmp_path)._replace(free=mib * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert disk({tmp_path}).status == status


def test_missing_model(doctor: Doctor) -> None:
    """What depends on the model fails with it; database, log and engine are as they are."""
    found = doctor(RIACHO_MODEL="/nonexistent/model")
    assert statuses(found) == {"model", "policy", "versions"}
    assert "/nonexistent/model" in found["model"]["found"]


def test_model_without_chat_template(tmp_path: Path, doctor: Doctor) -> None:
    """It cannot serve chat."""
    model = tmp_path / "model"
    shutil.copytree(TINY_MODEL, model, ignore=shutil.ignore_patterns("chat_template*"))
    found = doctor(RIACHO_MODEL=str(model))
    assert statuses(found) == {"model"}
    assert "chat template" in found["model"]["found"]


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local engine needs packages that the app does not."""
    monkeypatch.setattr("app.doctor.machine.LOCAL_PACKAGES", ("torch", "no_such_package"))
    finding = local_engine()
    assert (finding.status, finding.found) == ("fail", "the local engine needs no_such_package")
    assert "riacho[local]" in finding.advice


# Registry and log


def test_database_without_tables(home: Path, doctor: Doctor) -> None:
    """It says to upgrade, and what needs the registry is said to be unknown."""
    (home / "registry.db").unlink()
    sqlite3.connect(home / "registry.db").close()
    found = doctor()
    assert statuses(found) == {"database"}
    assert "db upgrade" in found["database"]["found"]
    assert found["learner"]["status"] == "warn"
    assert found["log"]["status"] == "ok"


def test_database_of_a_newer_riacho(home: Path, doctor: Doctor) -> None:
    """It says to run the newer code or to restore a backup."""
    with closing(sqlite3.connect(home / "registry.db", isolation_level=None)) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    found = doctor()
    assert statuses(found) == {"database"}
    assert "9999" in found["database"]["found"]
    assert "backup" in found["database"]["found"]


@pytest.mark.parametrize(("file", "check"), [("registry.db", "database"), ("log.db", "log")])
def test_file_that_is_no_database(home: Path, doctor: Doctor, file: str, check: str) -> None:
    """One of the two is broken, the other is still looked at."""
    for path in home.glob(f"{file}*"):
        path.unlink()
    (home / file).write_bytes(b"no database" * 1000)
    assert statuses(doctor()) == {check}


def test_model_of_another_policy(tmp_path: Path, doctor: Doctor) -> None:
    """Adapters belong to one base."""
    model = tmp_path / "model"
    shutil.copytree(TINY_MODEL, model)
    config = json.loads((model / "config.json").read_bytes())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    found = doctor(RIACHO_MODEL=str(model))
    assert statuses(found) == {"policy"}
    assert str(TINY_MODEL) in found["policy"]["found"]


def test_another_range_of_rewards(doctor: Doctor) -> None:
    """A policy keeps the range that it was made with."""
    found = doctor(RIACHO_REWARD_MIN="-1")
    assert statuses(found) == {"policy"}
    assert "from 0 to 1" in found["policy"]["found"]


def test_dead_letters_are_counted(home: Path, doctor: Doctor) -> None:
    """A warning that names the command which lists them."""
    with closing(SqliteLog(home / "log.db")) as log:
        for payload in (b"x", b"y"):
            log.bury(Record(log.append_raw("k", payload), payload), "it is no event", datetime(2026, 1, 1, tzinfo=UTC))
    found = doctor()["dead letters"]
    assert found["status"] == "warn"
    assert found["found"].startswith("2 ")
    assert "riacho log dead" in found["advice"]


@pytest.fixture
def spool(home: Path) -> Iterator[Spool]:
    """The policy's spool before a log that is away, with two events that wait."""

    class Away:
        async def append(self, event: Event) -> object:
            raise LogUnavailable("away")

    with closing(Spool(Away(), home / "spool-riacho.db", 2**20)) as made:
        for _ in range(2):
            asyncio.run(made.append(completion()))
        yield made


def test_looking_makes_no_spool(home: Path, doctor: Doctor) -> None:
    """Where nothing ever waited there is no file, before and after."""
    assert doctor()["spool"]["status"] == "ok"
    assert not list(home.glob("spool*"))


def test_events_in_the_spool_are_counted(spool: Spool, doctor: Doctor) -> None:
    """What waits, what the log refused and why, and a spool that takes nothing more."""
    found = doctor()["spool"]
    assert (found["status"], found["found"].split()[0]) == ("warn", "2")
    oldest = spool.oldest()
    assert oldest is not None
    spool.set_aside(oldest.id, "it is too large")
    found = doctor()["spool"]
    assert found["status"] == "warn"
    assert "refused 1 events" in found["found"]
    assert "it is too large" in found["found"]
    assert "riacho log spool" in found["advice"]
    asyncio.run(spool.append(completion(output="x" * 2**20)))
    assert statuses(doctor(RIACHO_SPOOL_MAX_BYTES=str(2**20))) == {"spool"}


def test_a_spool_that_cannot_be_read(home: Path, doctor: Doctor) -> None:
    """It fails, and hides nothing else."""
    (home / "spool-riacho.db").write_bytes(b"no database" * 100)
    found = doctor()
    assert statuses(found) == {"spool"}
    assert str(home / "spool-riacho.db") in found["spool"]["found"]


def test_the_spool_is_shown(home: Path, spool: Spool) -> None:
    """`riacho log spool`, for people and as JSON; nothing is changed, and an empty one is no error."""
    oldest = spool.oldest()
    assert oldest is not None
    spool.set_aside(oldest.id, "it is too large")
    shown = json.loads(riacho(home, "log", "spool", "--json").stdout)
    refused = [{"id": oldest.id, "bytes": len(oldest.payload), "reason": "it is too large"}]
    assert shown == {"events": 1, "bytes": spool.size().bytes, "refused": refused}
    assert "1 events" in (text := riacho(home, "log", "spool").stdout)
    assert "it is too large" in text
    assert riacho(home, "log", "spool", extra={"RIACHO_POLICY": "other"}).stdout.startswith("0 events")
    assert not (home / "spool-other.db").exists()


def test_topics_are_compared_with_the_settings(home: Path) -> None:
    """On Kafka each difference is a finding with what to do."""
    with Broker() as broker:
        extra = {"RIACHO_LOG_URL": f"kafka://{broker.address}", "RIACHO_KAFKA_REPLICATION": "1"}
        assert riacho(home, "log", "create", extra=extra).returncode == 0

        def topics(**further: str) -> list[tuple[str, str, str]]:
            rows = json.loads(riacho(home, "doctor", "--json", extra=extra | further).stdout)
            return [(row["status"], row["found"], row["advice"]) for row in rows if row["check"] == "topics"]

        [(status, _, _)] = topics()
        assert status == "ok"
        [(status, found, advice)] = topics(RIACHO_PARTITIONS="2")
        assert (status, "1 partitions" in found, "RIACHO_PARTITIONS=1" in advice) == ("fail", True, True)


def test_promises_that_wait(home: Path, doctor: Doctor) -> None:
    """A rollback of two minutes ago that is not on the log; one of this moment is no news."""

    def roll_back(age: timedelta) -> None:
        at = datetime.now(UTC) - age
        event = RollbackEvent(event_id=f"r{age}", policy="riacho", session_id="s", at=at, to=0, epoch=1, reason="test")
        with closing(registry_of(home, clock=lambda: at)) as registry:
            registry.versions.rollback("riacho", 0, "test", "test", lambda _: event)

    roll_back(timedelta(0))
    assert doctor()["outbox"]["status"] == "ok"
    roll_back(timedelta(minutes=2))
    found = doctor()["outbox"]
    assert found["status"] == "warn"
    assert found["found"].startswith("1 ")


# The learner


def append(home: Path, count: int) -> None:
    with closing(SqliteLog(home / "log.db")) as log:
        for number in range(count):
            asyncio.run(log.append(completion(completion_id=f"c{number}")))


def test_stopped_learner_with_events_that_wait(home: Path, doctor: Doctor) -> None:
    """A failure that counts the events; without any it is a warning."""
    assert doctor()["learner"]["status"] == "warn"
    append(home, 3)
    found = doctor()["learner"]
    assert found["status"] == "fail"
    assert "3 events" in found["found"]
    assert "riacho learn" in found["advice"]


def test_learner_that_holds_its_lease(home: Path, doctor: Doctor) -> None:
    """It is named, with how far it is behind; paused learning is a warning."""
    append(home, 2)
    with closing(registry_of(home)) as registry:
        assert registry.leases.acquire("learner:riacho", "machine:7", 600) is not None
        found = doctor()["learner"]
        assert found["status"] == "ok"
        assert "machine:7" in found["found"]
        assert "2 events" in found["found"]
        registry.policies.set_paused("riacho", True, "test")
    assert doctor()["learner"]["status"] == "warn"


def test_log_that_is_not_the_checkpoints(home: Path, published: Path, doctor: Doctor) -> None:
    """A log that ends before the newest checkpoint, and one that is gone, belong to other versions."""
    with closing(sqlite3.connect(home / "registry.db", isolation_level=None)) as database:
        database.execute("""UPDATE versions SET position = '{"0": 5}'""")
    append(home, 4)
    found = doctor()
    assert statuses(found) == {"learner"}
    assert "restore the log" in found["learner"]["advice"]
    append(home, 1)
    assert "learner" not in statuses(doctor(), but="")
    for path in home.glob("log.db*"):
        path.unlink()
    assert statuses(doctor()) == {"log"}


# Versions


def test_whole_version(published: Path, doctor: Doctor) -> None:
    """The live version is named."""
    found = doctor()
    assert found["versions"] == {"check": "versions", "status": "ok", "found": "whole: 1", "advice": ""}
    assert "version 1" in found["policy"]["found"]


def test_truncated_adapter(published: Path, doctor: Doctor) -> None:
    """A file that is shorter than its header says."""
    file = published / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    found = doctor()
    assert statuses(found) == {"versions"}
    assert "truncated" in found["versions"]["found"]
    assert "backup" in found["versions"]["advice"]


def test_truncated_checkpoint(published: Path, doctor: Doctor) -> None:
    """What the learner needs of a version must be whole too."""
    shutil.copy(published / "adapter_model.safetensors", published / "optimizer.safetensors")
    assert statuses(doctor()) == set()
    file = published / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "optimizer.safetensors" in doctor()["versions"]["found"]


def test_version_without_files(published: Path, doctor: Doctor) -> None:
    """The live version's directory is gone."""
    shutil.rmtree(published)
    found = doctor()
    assert statuses(found) == {"versions"}
    assert str(published) in found["versions"]["found"]


# Over HTTP


@pytest.fixture
def answering() -> Iterator[Callable[[int, str], str]]:
    """Starts a server that gives every request one answer; its address."""
    servers: list[HTTPServer] = []

    def start(status: int, body: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_engine_that_is_away(doctor: Doctor) -> None:
    """No server at the address: the command that starts one is named."""
    found = doctor(RIACHO_ENGINE_URLS="http://127.0.0.1:1")
    assert statuses(found) == {"engine"}
    assert "http://127.0.0.1:1" in found["engine"]["found"]
    assert "riacho vllm" in found["engine"]["advice"]


@pytest.mark.parametrize("body", ["<html>", "[]", "{}", '{"data": []}'])
def test_engine_that_is_another_program(answering: Callable[[int, str], str], doctor: Doctor, body: str) -> None:
    """Whatever it answers is one failure that gives its address."""
    url = answering(200, body)
    found = doctor(RIACHO_ENGINE_URLS=url)
    assert statuses(found) == {"engine"}
    assert url in found["engine"]["found"]


def test_every_engine_is_asked(home: Path) -> None:
    """Of several addresses each has its finding."""
    urls = "http://127.0.0.1:1, http://127.0.0.1:2,ftp://x"
    result = riacho(home, "doctor", "--json", extra={"RIACHO_ENGINE_URLS": urls})
    found = [row["found"] for row in json.loads(result.stdout) if row["check"] == "engine"]
    assert result.returncode == 1
    assert len(found) == 3
    assert all(url.strip() in text for url, text in zip(urls.split(","), found, strict=True))


def test_app_that_is_not_ready(answering: Callable[[int, str], str], doctor: Doctor) -> None:
    """Its own problems are the finding."""
    url = answering(503, '{"status": "not ready", "problems": ["the engine does not answer"]}')
    found = doctor(RIACHO_PORT=url.rpartition(":")[2])
    assert statuses(found) == {"app"}
    assert "the engine does not answer" in found["app"]["found"]


def test_another_program_at_the_apps_address(answering: Callable[[int, str], str], doctor: Doctor) -> None:
    """What answers there is not Riacho."""
    found = doctor(RIACHO_PORT=answering(404, "not here").rpartition(":")[2])
    assert statuses(found) == {"app"}
    assert "RIACHO_PORT" in found["app"]["advice"]
