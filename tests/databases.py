"""A registry's database under its stores' feet, for tests of what lies in it."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from app.registry.database import make_engine


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    """A writing transaction of its own."""
    engine = make_engine(url)
    try:
        with engine.execution_options(writes=True).begin() as connection:
            yield connection
    finally:
        engine.dispose()
