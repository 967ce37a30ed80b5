"""Secrets that the first start makes: the signing secret and the first keys."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from app.errors import SetupError
from app.registry import Registry
from app.registry.records import Role

SECRET_BYTES = 32


def signing_secret(home: Path) -> bytes:
    """The secret that signs completion ids, in HOME/signing.key; made, readable by its owner only, if absent."""
    path = home / "signing.key"
    if not path.exists():
        _make_secret(path)
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise SetupError(
            f"{path} has {len(secret)} bytes instead of {SECRET_BYTES}: restore it from a backup; without it, "
            "completion ids that were given out cannot be judged (delete the file to begin anew)"
        )
    return secret


def _make_secret(path: Path) -> None:
    """The file appears whole or not at all, and the first of several processes wins."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        path.hardlink_to(aside)
    aside.unlink()


def first_key(registry: Registry, role: Role, given: str | None) -> str | None:
    """Make the first key of a role; the plain key if it was made here and has to be shown, once."""
    if given:  # Compose passes an unset variable as an empty one
        registry.keys.add(given, role, f"first {role} key")
        return None
    if registry.keys.any(role):
        return None
    plain = f"rk-{role}-{secrets.token_urlsafe(24)}"
    registry.keys.add(plain, role, f"first {role} key")
    return plain
