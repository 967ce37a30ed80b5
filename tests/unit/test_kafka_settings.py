"""The `[kafka]` table: names, secrets, and mistakes that say what would be right."""

from pathlib import Path

import pytest

from app.config import Resolved, load
from app.errors import SetupError
from app.events.kafka_client import Cluster
from app.events.kafka_topics import wanted
from app.events.turns import take_turns
from app.settings import AppSettings

SASL = {"RIACHO_KAFKA_SECURITY_PROTOCOL": "SASL_SSL", "RIACHO_KAFKA_USERNAME": "u", "RIACHO_KAFKA_PASSWORD": "hush"}


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No riacho.toml but the one that a test writes."""
    monkeypatch.chdir(tmp_path)


def resolve(env: dict[str, str]) -> tuple[AppSettings, Resolved]:
    return load(AppSettings, {}, env)


def refused(env: dict[str, str]) -> str:
    with pytest.raises(SetupError) as caught:
        resolve(env)
    return str(caught.value)


def test_variables_fill_the_table() -> None:
    """RIACHO_KAFKA_X is x in [kafka], over the file."""
    Path("riacho.toml").write_text("[kafka]\nreplication = 2\nmax_in_flight = 7\n", encoding="utf-8")
    settings, resolved = resolve({"RIACHO_KAFKA_REPLICATION": "1"})
    assert (settings.kafka.replication, settings.kafka.max_in_flight) == (1, 7)
    assert resolved.sources["kafka.replication"] == "environment"
    assert resolved.sources["kafka.max_in_flight"] == "file"


def test_password_is_never_shown() -> None:
    """Neither in what is printed at start nor in an error about the table."""
    settings, resolved = resolve(SASL)
    assert settings.kafka.password is not None
    assert settings.kafka.password.get_secret_value() == "hush"
    assert "hush" not in str(resolved) + repr(settings) + str(resolved.values)
    assert "hush" not in refused({**SASL, "RIACHO_KAFKA_SECURITY_PROTOCOL": "SSL"})


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"RIACHO_KAFKA_REPLICATION": "0"}, "kafka.replication = '0'"),
        ({"RIACHO_KAFKA_REPLICAS": "3"}, "kafka.replicas"),
        ({"RIACHO_KAFKA_TOPIC": "events"}, "{policy}"),
        ({"RIACHO_KAFKA_TOPIC": "a b.{policy}"}, "letters"),
        ({"RIACHO_KAFKA_SECURITY_PROTOCOL": "SASL_SSL"}, "username and password"),
        ({"RIACHO_KAFKA_USERNAME": "u", "RIACHO_KAFKA_PASSWORD": "p"}, "SASL_SSL"),
        ({"RIACHO_KAFKA_CA_FILE": "missing.pem", "RIACHO_KAFKA_SECURITY_PROTOCOL": "SSL"}, "missing.pem"),
        ({"RIACHO_KAFKA_CA_FILE": __file__}, "SSL or SASL_SSL"),
        ({"RIACHO_KAFKA_CERT_FILE": __file__, "RIACHO_KAFKA_SECURITY_PROTOCOL": "SSL"}, "go together"),
        ({"RIACHO_LOG_URL": "kafka://h:1", "RIACHO_KAFKA_RETENTION_S": "60"}, "feedback_ttl_s"),
    ],
)
def test_mistake_says_what_would_be_right(env: dict[str, str], told: str) -> None:
    """Each message names the setting."""
    assert told in refused(env)


@pytest.mark.parametrize(
    "url", ["kafka://", "kafka://h", "kafka://h:x", "kafka://h:1,", "kafka://h:1/topic", "kafka://:1"]
)
def test_address_that_is_none(url: str) -> None:
    """The message shows what an address looks like."""
    with pytest.raises(SetupError, match="kafka://HOST:PORT"):
        Cluster.of(AppSettings(log_url=url))


def test_several_servers() -> None:
    """Commas separate them."""
    assert Cluster.of(AppSettings(log_url="kafka://a:9092,[::1]:2")).servers == ("a:9092", "[::1]:2")


@pytest.mark.parametrize(("replication", "in_sync"), [(1, "1"), (2, "1"), (3, "2")])
def test_one_broker_may_be_away(replication: int, in_sync: str) -> None:
    """Appends wait for all copies but one, and dead letters have no end of life."""
    settings = AppSettings(log_url="kafka://h:1", partitions=6, kafka={"replication": replication})  # type: ignore[arg-type]
    events, dead = wanted(Cluster.of(settings))
    assert (events.name, events.partitions) == ("riacho.riacho.events", 6)
    assert (dead.name, dead.partitions) == ("riacho.riacho.dead", 1)
    assert events.configs["min.insync.replicas"] == dead.configs["min.insync.replicas"] == in_sync
    assert (events.configs["retention.ms"], dead.configs["retention.ms"]) == ("2592000000", "-1")


def test_turns_are_taken() -> None:
    """One of each in turn, from the one that is first, until all are empty."""
    assert list(take_turns(["abcd", "", "x", "12"], 2)) == list("x1a2bcd")
    assert list(take_turns(["abcd", "", "x", "12"], 4)) == list("ax1b2cd")
