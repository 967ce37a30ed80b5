"""Upgrades from every released revision, with rows in every table, lose nothing."""

from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

import migrations
from app.events.schema import FeedbackEvent, encode
from app.registry import Registry, upgrade, utc_now
from app.registry.models import Base
from tests.databases import connected

FOLDER = str(Path(migrations.__file__).parent)
REVISIONS = sorted(script.revision for script in ScriptDirectory(FOLDER).walk_revisions())
AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
EVENT = FeedbackEvent(policy="p", session_id="s", at=AT, reward=1.0, key_id="key")
MESSAGES = [{"role": "user", "content": "a\x00b"}]

# What a column of any table holds; a column that is not named here holds something of its type.
VALUES: dict[str, Any] = {
    "policy": "p",
    "policies.name": "p",
    "session_id": "s",
    "final_key": "s",
    "session_ids": ["s"],
    "messages": MESSAGES,
    "comment": "a\x00b",
    "output": "a\x00b",
    "payload": encode(EVENT).decode(),
    "role": "client",
    "kind": "publish",
    "versions.state": "retired",
    "completions.state": "trained",
}


def tables_at(url: str, revision: str) -> list[sa.Table]:
    """Bring an empty database to a revision; its tables as they are there, the referred ones first."""
    config, found = Config(), sa.MetaData()
    config.set_main_option("script_location", FOLDER)
    with connected(url) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        found.reflect(connection)
    return [table for table in found.sorted_tables if table.name != "alembic_version"]


def sample(column: sa.Column[Any]) -> Any:
    for name in (f"{column.table.name}.{column.name}", column.name):
        if name in VALUES:
            return VALUES[name]
    kind = column.type
    if isinstance(kind, sa.JSON):
        return {"0": 7}
    if isinstance(kind, sa.DateTime):
        return AT if kind.timezone else AT.replace(tzinfo=None)
    return {bool: True, int: 1, float: 0.5, str: "x"}[kind.python_type]


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_released_database_keeps_its_rows(empty_url: str, revision: str) -> None:
    """After the upgrade each column that still exists holds what it held, and every store reads its rows."""
    tables = tables_at(empty_url, revision)
    with connected(empty_url) as connection:
        for table in tables:
            connection.execute(table.insert(), {column.name: sample(column) for column in table.c})
    _, head = upgrade(empty_url)
    assert head == REVISIONS[-1]
    with connected(empty_url) as connection:
        for table in tables:
            columns = [column for column in table.c if column.name in Base.metadata.tables[table.name].c]
            [row] = connection.execute(sa.select(*columns)).all()
            assert tuple(row) == tuple(sample(column) for column in columns), table.name
    with closing(Registry.open(empty_url)) as registry:
        read_everything(registry)


def read_everything(registry: Registry) -> None:
    assert [policy.name for policy in registry.policies.list()] == ["p"]
    [version] = registry.versions.list("p")
    assert (version.state, version.position, version.created_at, version.directory) == ("retired", {"0": 7}, AT, "x")
    assert [deployment.at for deployment in registry.versions.deployments("p")] == [AT]
    assert [judgement.comment for judgement in registry.feedback.list("p", "s")] == ["a\x00b"]
    assert [promise.event for promise in registry.outbox.pending("p", utc_now(), 10)] == [EVENT]
    assert [key.role for key in registry.keys.list()] == ["client"]
    lease = registry.leases.acquire("x", "next", 10)
    assert lease is not None
    assert lease.token == 2
    assert [entry.policy for entry in registry.audit.list()] == ["p"]
    [completion] = registry.projections.session("p", "s")
    assert (completion.messages, completion.output, completion.at) == (MESSAGES, "a\x00b", AT)
    assert [update.session_ids for update in registry.projections.updates("p")] == [["s"]]
