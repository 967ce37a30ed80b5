"""API keys at the door: remembered for a moment, and for as long as the registry is away."""

from types import SimpleNamespace
from typing import Any

import pytest
from test_registry_support import START

from app.errors import Unauthorized
from app.registry.errors import RegistryUnavailable
from app.registry.records import KeyRecord
from app.security.auth import REMEMBER_S, Authenticator

KNOWN = KeyRecord("k", "client", "laptop", START, None, True)


class Keys:
    """A registry whose database can be taken away."""

    def __init__(self) -> None:
        self.known: dict[str, KeyRecord] = {"rk-known": KNOWN}
        self.away = False
        self.keys = SimpleNamespace(find=self._find)

    def _find(self, plain: str) -> KeyRecord | None:
        if self.away:
            raise RegistryUnavailable("away")
        return self.known.get(plain)


@pytest.fixture
def registry() -> Keys:
    return Keys()


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def authenticator(registry: Any, now: list[float]) -> Authenticator:
    return Authenticator(registry, True, lambda: now[0])


async def test_revoked_key_works_for_a_moment_at_most(
    registry: Keys, now: list[float], authenticator: Authenticator
) -> None:
    """It is looked up again after `REMEMBER_S`, and then refused."""
    assert await authenticator.key("Bearer rk-known") == KNOWN
    registry.known.clear()
    assert await authenticator.key("Bearer rk-known") == KNOWN
    now[0] += REMEMBER_S
    with pytest.raises(Unauthorized):
        await authenticator.key("Bearer rk-known")


async def test_known_keys_work_while_the_registry_is_away(
    registry: Keys, now: list[float], authenticator: Authenticator
) -> None:
    """A key that was seen before is taken however long that was ago; one never seen is neither taken nor refused."""
    await authenticator.key("Bearer rk-known")
    registry.away = True
    for _ in range(3):
        now[0] += 1000
        assert await authenticator.key("Bearer rk-known") == KNOWN
    with pytest.raises(RegistryUnavailable):
        await authenticator.key("Bearer rk-other")
    registry.away = False
    registry.known.clear()
    now[0] += REMEMBER_S
    with pytest.raises(Unauthorized):
        await authenticator.key("Bearer rk-known")
