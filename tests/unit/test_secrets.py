"""Secrets that the first start makes: once, for the owner's eyes, and the same for every process."""

import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from app.registry import Registry, upgrade
from app.security.secrets import SECRET_BYTES, first_key, signing_secret


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    upgrade(url)
    with closing(Registry.open(url)) as opened:
        yield opened


def test_signing_secret_is_made_once(tmp_path: Path) -> None:
    """The first call makes it, later ones read it: receipts outlive a restart."""
    first = signing_secret(tmp_path)
    assert len(first) == SECRET_BYTES
    assert signing_secret(tmp_path) == first


def test_signing_secrets_differ(tmp_path: Path) -> None:
    """Two installations do not accept each other's receipts."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert signing_secret(tmp_path / "a") != signing_secret(tmp_path / "b")


def test_signing_secret_is_the_owners(tmp_path: Path) -> None:
    """No other user can read it."""
    signing_secret(tmp_path)
    assert stat.S_IMODE((tmp_path / "signing.key").stat().st_mode) == 0o600


def test_starts_at_once_agree(tmp_path: Path) -> None:
    """However many meet an empty home together, all get one whole secret: none meets a file not yet filled."""
    for n in range(100):
        home = tmp_path / str(n)
        home.mkdir()
        with ThreadPoolExecutor(8) as pool:
            made = set(pool.map(signing_secret, [home] * 8))
        assert len(made) == 1
        assert len(made.pop()) == SECRET_BYTES


def test_cut_off_secret_is_refused(tmp_path: Path) -> None:
    """A secret that a crash or a full disk left empty must not sign: anybody could forge receipts."""
    (tmp_path / "signing.key").write_bytes(b"")
    with pytest.raises(Exception, match=r"signing\.key"):
        signing_secret(tmp_path)


def test_first_key_is_made_and_works(registry: Registry) -> None:
    """Without a given key one is made, shown to the caller, and found again by its text alone."""
    made = first_key(registry, "client", None)
    assert made is not None
    assert len(made) > 24
    found = registry.keys.find(made)
    assert found is not None
    assert found.role == "client"


def test_second_start_makes_no_key(registry: Registry) -> None:
    """A key is made once for each role, and only its hash is kept."""
    assert first_key(registry, "admin", None) is not None
    assert first_key(registry, "admin", None) is None
    assert first_key(registry, "client", None) is not None
    assert [key.role for key in registry.keys.list()] == ["admin", "client"]


def test_given_key_is_stored_and_never_shown(registry: Registry) -> None:
    """RIACHO_ADMIN_KEY is taken as it is, start after start, and not printed."""
    for _ in range(2):
        assert first_key(registry, "admin", "given") is None
    assert [key.role for key in registry.keys.list()] == ["admin"]
    found = registry.keys.find("given")
    assert found is not None
    assert found.role == "admin"


def test_revoked_key_stays_revoked(registry: Registry) -> None:
    """A restart with a revoked key in its settings does not bring the key back."""
    first_key(registry, "admin", "given")
    registry.keys.revoke(registry.keys.list()[0].id, "test")
    first_key(registry, "admin", "given")
    assert registry.keys.find("given") is None


def test_empty_given_key_is_none(registry: Registry) -> None:
    """An empty variable, as a Compose file passes it on, is no key: one is made, and nobody is locked out."""
    made = first_key(registry, "admin", "")
    assert made is not None
    assert registry.keys.find(made) is not None
