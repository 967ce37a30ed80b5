"""Settings of the serving process: sources, their order, and errors that say what is wrong."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.config import Resolved, load
from app.errors import SetupError
from app.settings import TINY_MODEL, AppSettings, RewardSettings


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No riacho.toml but the one that a test writes."""
    monkeypatch.chdir(tmp_path)


def _load(
    options: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, toml: str | None = None
) -> tuple[AppSettings, Resolved]:
    if toml is not None:
        Path("riacho.toml").write_text(toml, encoding="utf-8")
    return load(AppSettings, options or {}, env or {})


def _refused(**sources: Any) -> str:
    with pytest.raises(SetupError) as caught:
        _load(**sources)
    return str(caught.value)


def test_defaults_need_nothing() -> None:
    """Without file, variables and options: the tiny model, on the loopback, with everything under ~/.riacho."""
    settings, resolved = _load()
    home = Path.home() / ".riacho"
    assert settings.model == str(TINY_MODEL)
    assert (settings.host, settings.port, settings.policy) == ("127.0.0.1", 8700, "riacho")
    assert settings.resolved_log_url == f"sqlite:///{home}/log.db"
    assert settings.resolved_database_url == f"sqlite:///{home}/registry.db"
    assert settings.resolved_adapter_store == home / "adapters"
    assert set(resolved.sources.values()) == {"default"}


def test_later_sources_win_and_each_value_names_its_own() -> None:
    """File, then variables, then options."""
    toml = 'port = 1\nhost = "localhost"\nslots = 3\n'
    settings, resolved = _load({"port": 3}, {"RIACHO_PORT": "2", "RIACHO_SLOTS": "4"}, toml)
    assert (settings.host, settings.slots, settings.port) == ("localhost", 4, 3)
    wanted = {"host": "file", "slots": "environment", "port": "option", "policy": "default"}
    assert {key: resolved.sources[key] for key in wanted} == wanted
    assert {key: resolved.values[key] for key in ("host", "slots", "port")} == {
        "host": "localhost",
        "slots": 4,
        "port": 3,
    }


def test_an_option_that_was_not_given_does_not_hide_a_variable() -> None:
    """A command line passes None for options that the user left out."""
    settings, resolved = _load({"port": None}, {"RIACHO_PORT": "9"})
    assert (settings.port, resolved.sources["port"]) == (9, "environment")


def test_named_file_is_read(tmp_path: Path) -> None:
    """RIACHO_CONFIG names another file than ./riacho.toml."""
    (tmp_path / "other.toml").write_text("port = 77", encoding="utf-8")
    settings, _ = _load(env={"RIACHO_CONFIG": str(tmp_path / "other.toml")}, toml="port = 1")
    assert settings.port == 77


def test_named_file_that_is_missing_is_an_error() -> None:
    """A wrong RIACHO_CONFIG is not silently the defaults."""
    message = _refused(env={"RIACHO_CONFIG": "/nowhere/riacho.toml"})
    assert "RIACHO_CONFIG" in message
    assert "/nowhere/riacho.toml" in message


def test_broken_file_is_an_error_with_its_name_and_line() -> None:
    """A typing mistake in the file says where."""
    message = _refused(toml="port = 1\nhost = \n")
    assert "riacho.toml" in message
    assert "line 2" in message


@pytest.mark.parametrize(
    "source", [{"toml": "prot = 1"}, {"env": {"RIACHO_PROT": "1"}}, {"options": {"prot": 1}}], ids=str
)
def test_unknown_key_is_an_error_from_every_source(source: dict[str, Any]) -> None:
    """The message names the key, its variable, and what is known."""
    message = _refused(**source)
    assert "'prot'" in message
    assert "RIACHO_PROT" in message
    assert "port" in message.split("known:")[1]


def test_the_learners_table_is_left_to_the_learner() -> None:
    """One file serves both processes."""
    settings, _ = _load(toml='port = 5\n[learner]\neps_low = "nonsense"\n', env={"RIACHO_LEARNER_SEED": "x"})
    assert settings.port == 5


def test_test_variables_are_no_settings() -> None:
    """RIACHO_TEST_* is for the test suite."""
    settings, _ = _load(env={"RIACHO_TEST_DATABASE_URL": "x", "PATH": "/bin"})
    assert settings == AppSettings()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", "70000"),
        ("port", "http"),
        ("slots", "1"),
        ("policy", "Two Words"),
        ("reward_min", "nan"),
        ("reward_max", "inf"),
        ("feedback_ttl_s", "0"),
        ("partitions", "0"),
        ("poll_s", "5"),
    ],
)
def test_wrong_value_is_named_with_its_key(key: str, value: str) -> None:
    """`key = value: reason`."""
    assert f"{key} = {value!r}: " in _refused(env={f"RIACHO_{key.upper()}": value})


def test_two_wrong_values_are_both_named() -> None:
    """One start shows all mistakes."""
    message = _refused(env={"RIACHO_PORT": "-1", "RIACHO_SLOTS": "0"})
    assert "port = '-1'" in message
    assert "slots = '0'" in message


@pytest.mark.parametrize(("low", "high"), [("1", "1"), ("2", "1")])
def test_reward_range_has_to_have_a_width(low: str, high: str) -> None:
    """A range of no width would divide by zero in the shift test; the message names both ends."""
    message = _refused(env={"RIACHO_REWARD_MIN": low, "RIACHO_REWARD_MAX": high})
    assert f"reward_min = {float(low)}" in message
    assert f"reward_max = {float(high)}" in message


@pytest.mark.parametrize(
    ("host", "allowed"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_no_authentication_only_on_the_loopback(host: str, allowed: bool) -> None:
    """auth = false on an address that others reach is refused."""
    sources: dict[str, Any] = {"env": {"RIACHO_AUTH": "false", "RIACHO_HOST": host}}
    if allowed:
        assert _load(**sources)[0].auth is False
    else:
        assert "auth = false" in _refused(**sources)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("postgresql+psycopg://me:topsecret@host:5432/riacho", "postgresql+psycopg://me:***@host:5432/riacho"),
        ("postgresql://me:top/sec@ret@host/riacho?sslmode=require", "postgresql://me:***@host/riacho?sslmode=require"),
        ("postgresql://host/riacho?password=topsecret&user=me", "postgresql://host/riacho?password=***&user=me"),
        ("postgresql://me@host:5432/riacho", "postgresql://me@host:5432/riacho"),
        ("sqlite:////srv/riacho/registry.db", "sqlite:////srv/riacho/registry.db"),
    ],
)
def test_passwords_in_addresses_are_not_shown(given: str, shown: str) -> None:
    """The registry's address is used with its password and shown without."""
    settings, resolved = _load(env={"RIACHO_DATABASE_URL": given})
    assert settings.resolved_database_url == given
    assert resolved.values["database_url"] == shown


def test_secrets_are_not_shown() -> None:
    """The resolved values are printed at start; keys are not in them."""
    settings, resolved = _load(env={"RIACHO_ADMIN_KEY": "topsecret", "RIACHO_CLIENT_KEY": "alsosecret"})
    assert settings.admin_key is not None
    assert settings.admin_key.get_secret_value() == "topsecret"
    assert "secret" not in str(resolved) + repr(settings)
    assert resolved.sources["admin_key"] == "environment"


def test_home_is_absolute_and_the_rest_lies_in_it(tmp_path: Path) -> None:
    """A relative home is fixed at start, so that a change of directory later moves nothing."""
    settings, _ = _load(env={"RIACHO_HOME": "here"})
    assert settings.home == tmp_path / "here"
    assert settings.resolved_log_url == f"sqlite:///{tmp_path}/here/log.db"
    assert settings.resolved_adapter_store == tmp_path / "here" / "adapters"


def test_addresses_given_are_used_as_they_are(tmp_path: Path) -> None:
    """log_url, database_url and adapter_store win over the home directory."""
    settings, _ = _load(
        env={
            "RIACHO_LOG_URL": "kafka://h:9092",
            "RIACHO_DATABASE_URL": "postgresql+psycopg://db/r",
            "RIACHO_ADAPTER_STORE": "~/store",
        }
    )
    assert settings.resolved_log_url == "kafka://h:9092"
    assert settings.resolved_database_url == "postgresql+psycopg://db/r"
    assert settings.resolved_adapter_store == Path.home() / "store"


def test_settings_do_not_change_after_the_start() -> None:
    """What was shown at start is what is in force."""
    settings, _ = _load()
    with pytest.raises(ValidationError):
        settings.port = 1


JUDGE = """
[rewards.thumbs]
[rewards.judge]
weight = 0.5
scorer = "judge"
on_failure = "park"
[rewards.judge.options]
url = "http://judge"
api_key = "s3cret"
"""


def test_thumbs_are_one_signal_by_default() -> None:
    """Without a table there is the signal `reward`, of weight 1, which clients give."""
    settings, resolved = _load()
    assert settings.rewards == {"reward": RewardSettings()}
    assert settings.scorers == {}
    assert resolved.values["rewards.reward.weight"] == 1.0


def test_signals_come_from_their_tables() -> None:
    """Each table is a signal; those that name a scorer are given by it."""
    settings, resolved = _load(toml=JUDGE)
    assert list(settings.rewards) == ["thumbs", "judge"]
    assert settings.scorers == {"judge": settings.rewards["judge"]}
    judge = settings.rewards["judge"]
    assert (judge.weight, judge.scorer, judge.on_failure, judge.options["url"]) == (
        0.5,
        "judge",
        "park",
        "http://judge",
    )
    wanted = {"rewards.judge.weight": "file", "rewards.thumbs.weight": "default"}
    assert {key: resolved.sources[key] for key in wanted} == wanted


def test_what_a_reward_function_logs_in_with_is_not_shown() -> None:
    """Options that are keys, tokens, secrets or passwords are masked; the others are shown."""
    _, resolved = _load(toml=JUDGE)
    assert resolved.values["rewards.judge.options.api_key"] == "***"
    assert resolved.values["rewards.judge.options.url"] == "http://judge"
    assert "s3cret" not in str(resolved)


def test_signals_come_from_variables_too() -> None:
    """The field is what ends the variable's name, so that signals and options may hold underscores."""
    env = {
        "RIACHO_REWARDS_TASK_DONE_WEIGHT": "2",
        "RIACHO_REWARDS_TASK_DONE_SCORER": "contains",
        "RIACHO_REWARDS_TASK_DONE_ON_FAILURE": "park",
        "RIACHO_REWARDS_TASK_DONE_OPTIONS_MAX_TOKENS": "64",
    }
    settings, resolved = _load(env=env)
    options = {"max_tokens": "64"}
    wanted = RewardSettings(weight=2, scorer="contains", on_failure="park", options=options)
    assert settings.rewards == {"task_done": wanted}
    assert resolved.sources["rewards.task_done.options.max_tokens"] == "environment"


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[rewards.Thumbs]", ["rewards.Thumbs", "[a-z][a-z0-9_]"]),
        ("[rewards.thumbs]\nweight = inf", ["rewards.thumbs.weight", "finite"]),
        ("[rewards.thumbs]\nweight = 0", ["no signal weighs anything"]),
        ("[rewards.thumbs]\nwieght = 1", ["rewards.thumbs.wieght"]),
        ("[rewards.thumbs]\noptions = {url = 'x'}", ["url", "without a scorer"]),
        ("[rewards.thumbs]\non_failure = 'ignore'", ["rewards.thumbs.on_failure", "'train' or 'park'"]),
        ("rewards = {}", ["no signal weighs anything"]),
    ],
)
def test_wrong_signals_are_refused(toml: str, words: list[str]) -> None:
    """The message names the key, the value and what would be right."""
    message = _refused(toml=toml)
    for word in words:
        assert word in message
