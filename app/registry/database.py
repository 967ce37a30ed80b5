"""The database under the registry: engines, transactions, and the revision of the schema."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from pydantic_core import to_json
from sqlalchemy import Connection, CursorResult, Engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import UpdateBase

import migrations
from app.errors import SetupError
from app.registry.errors import RegistryUnavailable

Clock = Callable[[], datetime]

log = logging.getLogger(__name__)

BUSY_TIMEOUT_MS = 30_000
CONNECT_TIMEOUT_S = 5
# A process that is frozen inside a transaction must not hold its row locks, such as the one on a lease, for ever.
IDLE_TRANSACTION_MS = 10_000
# Any number that no other program on the same server uses: it makes upgrades wait for each other.
UPGRADE_LOCK = 0x72696163686F


def utc_now() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


class Database:
    """Sessions on one engine, each of them one transaction that commits at the end of its block.

    Both kinds raise RegistryUnavailable where the database cannot be used now.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._writer = engine.execution_options(writes=True)
        self.now = clock

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that only reads."""
        with _explained(), Session(self._engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that may write; on SQLite it waits here for the other writers."""
        with _explained(), Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        self._engine.dispose()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except PoolTimeout as error:
        raise RegistryUnavailable("every connection to the registry is in use; try again in a moment") from error
    except DBAPIError as error:
        # A connection that the server cut while it was idle fails with other types too.
        if isinstance(error, OperationalError) or error.connection_invalidated:
            log.warning("the registry failed: %s", error.orig)
            raise RegistryUnavailable("the registry cannot be used now; try again in a moment") from error
        raise


def changed(session: Session, statement: UpdateBase) -> int:
    """Run an UPDATE or DELETE and say how many rows it met."""
    result = session.execute(statement)
    assert isinstance(result, CursorResult)
    return result.rowcount


def make_engine(url: str) -> Engine:
    """An engine for `sqlite:///FILE` or `postgresql+psycopg://…`; raises SetupError for any other url."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise _bad_url(repr(url)) from error
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        engine = sqlalchemy.create_engine(parsed, json_serializer=_to_json)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    if parsed.drivername in ("postgresql", "postgresql+psycopg"):
        try:
            return sqlalchemy.create_engine(
                parsed.set(drivername="postgresql+psycopg"),
                json_serializer=_to_json,
                pool_pre_ping=True,
                connect_args={
                    "connect_timeout": CONNECT_TIMEOUT_S,
                    "options": f"-c idle_in_transaction_session_timeout={IDLE_TRANSACTION_MS}",
                },
            )
        except ModuleNotFoundError as error:
            raise SetupError("a PostgreSQL registry needs psycopg: pip install 'psycopg[binary]'") from error
    raise _bad_url(parsed.render_as_string())


def upgrade(url: str) -> tuple[str | None, str]:
    """Migrate to the newest revision and return (from, to); several processes may call it at once.

    It is one transaction: after a failure the database is as it was. Raises SetupError where the
    database cannot be opened or is newer than this code, RegistryUnavailable where PostgreSQL is away.
    """
    with _connected(url, writes=True) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sqlalchemy.select(sqlalchemy.func.pg_advisory_xact_lock(UPGRADE_LOCK)))
        current, head = _current(connection), _head()
        _refuse_unknown(current)
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(_migrations()).replace("%", "%%"))
        command.upgrade(config, "head")
        return current, head


def revisions(url: str) -> tuple[str | None, str]:
    """(the database's revision, this code's revision); None where there are no tables yet."""
    with _connected(url) as connection:
        return _current(connection), _head()


def open_current(url: str, clock: Clock) -> Database:
    """The database, if it is at this code's revision; else SetupError says what to do."""
    current, head = revisions(url)
    _refuse_unknown(current)
    if current != head:
        found = "has no tables yet" if current is None else f"is at revision {current}"
        raise SetupError(f"the registry's database {found}, this code needs {head}: run `riacho db upgrade`")
    return Database(make_engine(url), clock)


@contextmanager
def _connected(url: str, *, writes: bool = False) -> Iterator[Connection]:
    engine = make_engine(url).execution_options(writes=writes)
    try:
        connection = engine.connect()
    except DBAPIError as error:
        shown = engine.url.render_as_string(hide_password=True)
        # A server may be back in a moment; a file that cannot be opened stays so.
        kind = SetupError if engine.dialect.name == "sqlite" else RegistryUnavailable
        raise kind(f"cannot open the registry's database {shown}: {error.orig}") from error
    try:
        with connection, connection.begin():
            yield connection
    finally:
        engine.dispose()


def _migrations() -> Path:
    return Path(migrations.__file__).parent


def _head() -> str:
    head = ScriptDirectory(str(_migrations())).get_current_head()
    assert head is not None
    return head


def _current(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _refuse_unknown(current: str | None) -> None:
    known = {script.revision for script in ScriptDirectory(str(_migrations())).walk_revisions()}
    if current is not None and current not in known:
        raise SetupError(
            f"the registry's database is at revision {current}, which this code does not know: run the newer "
            "Riacho, or restore the backup that was made before the upgrade"
        )


def _bad_url(shown: str) -> SetupError:
    return SetupError(
        f"{shown} is no address of a registry; use sqlite:////path/registry.db or "
        "postgresql+psycopg://user:password@host/database",
        param="registry",
    )


def _to_json(value: object) -> str:
    # As the events are encoded: a metric that is not finite becomes null, which both databases take.
    return to_json(value, inf_nan_mode="null").decode()


def _prepare_sqlite(connection: Any, _record: object) -> None:
    """Take transactions out of the driver's hands, so that `_begin_sqlite` decides how they begin.

    `synchronous` stays at FULL: an acknowledged judgement survives a power cut.
    """
    connection.isolation_level = None
    for pragma in (f"busy_timeout = {BUSY_TIMEOUT_MS}", "journal_mode = WAL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and then writes fails at once, without waiting, if somebody wrote in between.
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
