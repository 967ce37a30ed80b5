"""Starting the service: what goes wrong says what to do, keys are shown once, and the open door stays on loopback."""

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from app.registry import upgrade
from app.registry.database import make_engine
from app.settings import TINY_MODEL
from tests.service import Service, error_of, local_only, riacho

PORT_ZERO = {"RIACHO_PORT": "0"}


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The message of a command that failed as it should: on standard error, without a stack trace."""
    assert result.returncode not in (0, None), result.stdout
    assert "Traceback" not in result.stderr, result.stderr[-3000:]
    return result.stderr


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a registry."""
    upgrade(f"sqlite:///{tmp_path / 'registry.db'}")
    return tmp_path


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that another program listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def set_revision(home: Path, revision: str) -> None:
    engine = make_engine(f"sqlite:///{home / 'registry.db'}")
    with engine.execution_options(writes=True).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :r"), {"r": revision})
    engine.dispose()


@pytest.mark.parametrize("command", ["serve", "up"])
def test_port_in_use(home: Path, taken_port: int, command: str) -> None:
    """The message names the address and both ways to choose another port."""
    message = refused(riacho(home, command, extra={"RIACHO_PORT": str(taken_port)}))
    assert f"127.0.0.1:{taken_port}" in message
    assert "--port" in message
    assert "RIACHO_PORT" in message


def test_address_of_another_machine(home: Path) -> None:
    """A host that is not this machine's says so."""
    message = refused(riacho(home, "serve", "--host", "203.0.113.9", extra=PORT_ZERO))
    assert "203.0.113.9" in message
    assert "--host" in message


@pytest.mark.parametrize("command", ["serve", "up"])
def test_database_newer_than_the_code(home: Path, command: str) -> None:
    """A registry of a newer release is left alone, and the message says what to run instead."""
    set_revision(home, "9999")
    message = refused(riacho(home, command, extra=PORT_ZERO))
    assert "revision 9999" in message
    assert "newer" in message


def test_database_without_tables(tmp_path: Path) -> None:
    """`serve` alone does not migrate; it says which command does."""
    assert "riacho db upgrade" in refused(riacho(tmp_path, "serve", extra=PORT_ZERO))


def test_log_that_is_no_log(home: Path) -> None:
    """A log file that is no database is named."""
    (home / "log.db").write_text("no database at all " * 100)
    message = refused(riacho(home, "serve", extra=PORT_ZERO))
    assert "log.db" in message


@local_only
def test_model_without_a_chat_template(home: Path, tmp_path: Path) -> None:
    """A model that cannot chat is named, with what to do."""
    model = tmp_path / "no-template"
    shutil.copytree(TINY_MODEL, model)
    (model / "chat_template.jinja").unlink()
    message = refused(riacho(home, "serve", "--model", str(model), extra=PORT_ZERO))
    assert str(model) in message
    assert "chat template" in message
    assert "chat_template.jinja" in message


@local_only
def test_model_that_is_none(home: Path) -> None:
    """A directory without a model is named, with the setting to change."""
    model = home / "empty"
    model.mkdir()
    message = refused(riacho(home, "serve", "--model", str(model), extra=PORT_ZERO | {"HF_HUB_OFFLINE": "1"}))
    assert str(model) in message
    assert "RIACHO_MODEL" in message


def test_unknown_setting(tmp_path: Path) -> None:
    """A mistyped variable stops the start, with its name and the known ones."""
    message = refused(riacho(tmp_path, "up", extra={"RIACHO_PROT": "8701"}))
    assert "RIACHO_PROT" in message
    assert "port" in message


def test_no_authentication_beyond_loopback(tmp_path: Path) -> None:
    """--no-auth is refused on an address that others reach."""
    message = refused(riacho(tmp_path, "up", "--no-auth", "--host", "0.0.0.0"))
    assert "auth" in message
    assert "127.0.0.1" in message


def test_no_authentication_on_loopback(tmp_path: Path) -> None:
    """Without authentication everything is open on the loopback: a request needs no key."""
    with Service(tmp_path, extra={"RIACHO_AUTH": "false"}) as service:
        answer = service.anonymous.post(
            "/v1/chat/completions",
            json={"model": "riacho", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4},
        )
        assert answer.status_code == 200, answer.text
        judged = service.judge(service.anonymous, completion_id=answer.json()["id"], thumb="up")
        assert judged.status_code == 200
        assert service.anonymous.get("/admin/policies").status_code == 200
        assert "authentication is off" in service.log_text


def test_first_keys_are_shown_once(tmp_path: Path) -> None:
    """A first start without given keys makes and shows them; they work, also after a restart, and stay hidden."""
    with Service(tmp_path, extra={"RIACHO_ADMIN_KEY": None, "RIACHO_CLIENT_KEY": None}) as service:
        shown = dict(re.findall(r"first (admin|client) key, shown once: (\S+)", service.log_text))
        assert set(shown) == {"admin", "client"}
        service.restart()
        assert all(service.log_text.count(key) == 1 for key in shown.values())
        with service.http(shown["client"]) as client, service.http(shown["admin"]) as admin:
            assert client.get("/v1/models").status_code == 200
            error_of(client.get("/admin/policies"), 403)
            assert admin.get("/admin/policies").status_code == 200
        stored = b"".join(path.read_bytes() for path in tmp_path.glob("registry.db*"))
        assert all(key.encode() not in stored for key in shown.values())
