"""The `riacho` command: what it prints, its exit status, and errors in one line."""

import base64
import json
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from app.cli import main
from app.events.log import Record
from app.events.sqlite import SqliteLog


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of the test's own, no riacho.toml, and room for wide tables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RIACHO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("app.cli_log.console.width", 400, raising=False)


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int | str | None:
    """Run the command in this process; what it exits with (None or 0: success)."""
    monkeypatch.setattr("sys.argv", ["riacho", *args])
    try:
        main()
    except SystemExit as left:
        return left.code
    return None


def test_config_shows_value_and_source(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each setting with its value and whether file, variable, option or default gave it."""
    Path("riacho.toml").write_text("slots = 5\n", encoding="utf-8")
    monkeypatch.setenv("RIACHO_POLICY", "stream")
    assert run(monkeypatch, "config", "--port", "9123") in (None, 0)
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if len(line.split()) > 5}
    for key, value, source in (
        ("slots", "5", "file"),
        ("policy", "stream", "environment"),
        ("port", "9123", "option"),
        ("host", "127.0.0.1", "default"),
    ):
        assert value in lines[key]
        assert source in lines[key]


def test_config_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for programs."""
    assert run(monkeypatch, "config", "--json", "--port", "9123") in (None, 0)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["values"]["port"], shown["sources"]["port"]) == (9123, "option")
    assert (shown["values"]["policy"], shown["sources"]["policy"]) == ("riacho", "default")


def test_config_hides_secrets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys are not printed, in neither form."""
    monkeypatch.setenv("RIACHO_ADMIN_KEY", "topsecret")
    run(monkeypatch, "config")
    run(monkeypatch, "config", "--json")
    out = capsys.readouterr().out
    assert "admin_key" in out
    assert "topsecret" not in out


def test_database_is_upgraded_and_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """status: empty; upgrade: from nothing to the head; status: the head."""
    for command in ("upgrade", "status", "upgrade"):
        assert run(monkeypatch, "db", command) in (None, 0)
    upgraded, status, again = capsys.readouterr().out.splitlines()
    head = upgraded.split()[-1]
    assert upgraded == f"registry: empty -> {head}"
    assert status == f"registry: {head}, this code: {head}"
    assert again == f"registry: {head} -> {head}"


def test_status_before_the_first_upgrade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asking is allowed before anything is there."""
    (tmp_path / "home").mkdir()
    assert run(monkeypatch, "db", "status") in (None, 0)
    assert "registry: empty, this code:" in capsys.readouterr().out


def bury(home: Path, payload: bytes) -> int:
    """Put a record on a log and into its dead letters; the letter's id."""
    with closing(SqliteLog(home / "log.db")) as log:
        position = log.append_raw("k", payload)
        log.bury(Record(position, payload), "it is no event", datetime(2026, 1, 1, tzinfo=UTC))
        return log.dead_letters()[-1].id


def test_dead_letters_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Id, position, attempts and reason, as a table and as JSON lines."""
    bury(tmp_path / "home", b"x")
    assert run(monkeypatch, "log", "dead") in (None, 0)
    assert "it is no event" in capsys.readouterr().out
    assert run(monkeypatch, "log", "dead", "--json") in (None, 0)
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "id": 1,
        "position": "0:0",
        "reason": "it is no event",
        "attempts": 1,
        "at": "2026-01-01T00:00:00+00:00",
    }


def test_reason_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reason with square brackets is text, not markup."""
    with closing(SqliteLog(tmp_path / "home" / "log.db")) as log:
        record = Record(log.append_raw("k", b"x"), b"x")
        log.bury(record, "logprobs[0]: [red]bad[/red] [/x]", datetime(2026, 1, 1, tzinfo=UTC))
    assert run(monkeypatch, "log", "dead") in (None, 0)
    assert "logprobs[0]: [red]bad[/red] [/x]" in capsys.readouterr().out


def test_dead_letter_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record is on the log again as it came, and no dead letter is left."""
    id = bury(tmp_path / "home", b"payload")
    assert run(monkeypatch, "log", "replay", str(id)) in (None, 0)
    assert "0:1" in capsys.readouterr().out
    with closing(SqliteLog(tmp_path / "home" / "log.db")) as log:
        assert [record.payload for record in log.read({}, 10)] == [b"payload", b"payload"]
        assert log.dead_letters() == []


def test_dead_letter_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything about it, with a JSON payload laid out."""
    id = bury(tmp_path / "home", b'{"type": "surprise", "n": [1]}')
    assert run(monkeypatch, "log", "show", str(id)) in (None, 0)
    fields, _, payload = capsys.readouterr().out.partition("payload")
    for expected in (str(id), "0:0", "it is no event", "2026-01-01T00:00:00+00:00"):
        assert expected in fields
    assert payload.count("\n") > 3
    assert json.loads(payload) == {"type": "surprise", "n": [1]}


@pytest.mark.parametrize("payload", [b"\x1b[2J\xff", b"[" * 100_000, b""], ids=["terminal codes", "deep", "empty"])
def test_payload_that_is_no_json_is_shown_in_base64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], payload: bytes
) -> None:
    """Nothing that a record holds can act on the terminal or break the command."""
    id = bury(tmp_path / "home", payload)
    assert run(monkeypatch, "log", "show", str(id)) in (None, 0)
    out = capsys.readouterr().out
    assert base64.b64decode(out.rpartition(":")[2]) == payload
    assert f"{len(payload)} bytes" in out


def test_dead_letter_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is gone, and the log is as it was."""
    id = bury(tmp_path / "home", b"payload")
    assert run(monkeypatch, "log", "drop", str(id)) in (None, 0)
    assert str(id) in capsys.readouterr().out
    with closing(SqliteLog(tmp_path / "home" / "log.db")) as log:
        assert log.end_positions() == {0: 1}
        assert log.dead_letters() == []


@pytest.mark.parametrize("command", ["show", "replay", "drop"])
def test_unknown_dead_letter(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """A wrong id names the command that lists the right ones; a number that no letter can have is a wrong usage."""
    assert "riacho log dead" in str(run(monkeypatch, "log", command, "7"))
    assert run(monkeypatch, "log", command, "9" * 30) == 2


@pytest.mark.parametrize("args", [["config"], ["db", "status"], ["db", "upgrade"], ["serve"], ["up"], ["log", "dead"]])
def test_unknown_setting_is_one_line(monkeypatch: pytest.MonkeyPatch, args: list[str]) -> None:
    """A mistyped variable ends every command with one line that names it."""
    monkeypatch.setenv("RIACHO_PROT", "1")
    message = str(run(monkeypatch, *args))
    assert message.startswith("riacho: ")
    assert "RIACHO_PROT" in message
    assert "\n" not in message


@pytest.mark.parametrize("args", [["nonsense"], ["config", "--nonsense"], ["serve", "--port", "http"]])
def test_wrong_usage_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    """An unknown command or option is explained, with the exit status that shells expect."""
    assert run(monkeypatch, *args) == 2
    assert args[-1].lstrip("-") in capsys.readouterr().err


def test_every_command_explains_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`riacho --help` has a line of help for every command."""
    assert run(monkeypatch, "--help") in (None, 0)
    out = capsys.readouterr().out.split("Commands:")[1]
    lines = [line.split(maxsplit=1) for line in out.splitlines() if line.strip()]
    assert {"up", "serve", "learn", "replay", "demo", "db", "log", "config"} <= {line[0] for line in lines}
    assert all(len(line) == 2 for line in lines)
