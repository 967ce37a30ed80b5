"""What every test shares: one torch thread, and property tests without a clock."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.postgres import database_url, empty_url, postgres, postgres_url  # noqa: F401 - fixtures

# CI judges a change, so it draws the same examples every time; elsewhere each run looks further.
settings.register_profile("riacho", deadline=None, max_examples=60, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("riacho")

try:
    import torch
except ImportError:  # the app's tests run without it
    pass
else:
    torch.set_num_threads(1)


REAL_KAFKA = os.environ.get("RIACHO_TEST_KAFKA")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What only a real Kafka shows runs where there is one."""
    if REAL_KAFKA:
        return
    for item in items:
        if item.get_closest_marker("kafka_only"):
            item.add_marker(pytest.mark.skip(reason="needs a real Kafka: RIACHO_TEST_KAFKA=host:port"))


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[str]:
    """`host:port` of a Kafka: the one that RIACHO_TEST_KAFKA names, or a broker of the tests' own."""
    if REAL_KAFKA:
        yield REAL_KAFKA
        return
    from tests.broker import Broker

    with Broker() as broker:
        yield broker.address
