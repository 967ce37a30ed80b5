"""The registry's migrations: they build what the models say, and old and new code refuse each other's databases."""

import multiprocessing
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from app.errors import SetupError
from app.registry import Registry, revisions, upgrade
from app.registry.models import Base
from tests.databases import connected


def set_revision(url: str, revision: str) -> None:
    with connected(url) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :r"), {"r": revision})


def test_upgrade_brings_an_empty_database_to_head(empty_url: str) -> None:
    """After an upgrade the registry opens; a second upgrade changes nothing."""
    current, head = revisions(empty_url)
    assert current is None
    assert upgrade(empty_url) == (None, head)
    assert upgrade(empty_url) == (head, head)
    assert revisions(empty_url) == (head, head)
    with closing(Registry.open(empty_url)) as registry:
        assert registry.policies.list() == []


def test_migrated_schema_is_the_models_schema(empty_url: str) -> None:
    """Alembic finds no difference between the migrated tables and the models."""
    upgrade(empty_url)
    with connected(empty_url) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_database_that_was_not_upgraded_is_refused(empty_url: str) -> None:
    """Opening a database without tables says which command to run."""
    with pytest.raises(SetupError, match=r"no tables yet.*run `riacho db upgrade`"):
        Registry.open(empty_url)


def test_older_database_is_refused(empty_url: str) -> None:
    """A database at an earlier revision is named, with the command that upgrades it."""
    upgrade(empty_url)
    set_revision(empty_url, "0001")
    with pytest.raises(SetupError, match="at revision 0001, this code needs 0002: run `riacho db upgrade`"):
        Registry.open(empty_url)


def test_newer_database_is_refused(empty_url: str) -> None:
    """Neither opening nor upgrading touches a database of a newer release; the message says what to do."""
    upgrade(empty_url)
    set_revision(empty_url, "9999")
    for call in (Registry.open, upgrade):
        with pytest.raises(SetupError, match="revision 9999, which this code does not know: run the newer Riacho"):
            call(empty_url)
    assert revisions(empty_url)[0] == "9999"


def test_failed_upgrade_leaves_no_tables(empty_url: str) -> None:
    """A migration that fails half-way is undone as a whole."""
    with connected(empty_url) as connection:
        connection.execute(text("CREATE TABLE updates (id INTEGER)"))
    with pytest.raises(Exception, match="updates"):
        upgrade(empty_url)
    with connected(empty_url) as connection:
        assert inspect(connection).get_table_names() == ["updates"]


def test_processes_upgrade_at_once(empty_url: str) -> None:
    """Several processes that start together on an empty database all succeed."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=upgrade, args=(empty_url,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    current, head = revisions(empty_url)
    assert current == head


@pytest.mark.parametrize("url", ["mysql://u:secret@h/d", "nothing"])
def test_unusable_address_is_explained(url: str) -> None:
    """An address of another kind is refused with the two kinds that work, without its password."""
    with pytest.raises(SetupError, match=r"sqlite:////path/registry.db or postgresql") as refused:
        upgrade(url)
    assert "secret" not in refused.value.message


def test_unreachable_database_is_explained(tmp_path: Path) -> None:
    """A file that cannot be opened is named together with the reason."""
    with pytest.raises(SetupError, match=r"missing/registry.db: unable to open"):
        upgrade(f"sqlite:///{tmp_path}/missing/registry.db")
    (tmp_path / "text.db").write_text("no database " * 100)
    with pytest.raises(SetupError, match="not a database"):
        upgrade(f"sqlite:///{tmp_path}/text.db")
