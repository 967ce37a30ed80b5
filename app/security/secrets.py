"""Secrets that the first start makes: the signing secret and the first keys."""

import os
import secrets
from pathlib import Path

from app.registry import Registry
from app.registry.records import Role

SECRET_BYTES = 32


def signing_secret(home: Path) -> bytes:
    """The secret that signs completion ids, in HOME/signing.key; made, readable by its owner only, if absent."""
    path = home / "signing.key"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_bytes()
    with os.fdopen(handle, "wb") as file:
        file.write(secret := secrets.token_bytes(SECRET_BYTES))
    return secret


def first_key(registry: Registry, role: Role, given: str | None) -> str | None:
    """Make the first key of a role; the plain key if it was made here and has to be shown, once."""
    if given is not None:
        registry.keys.add(given, role, f"first {role} key")
        return None
    if registry.keys.any(role):
        return None
    plain = f"rk-{role}-{secrets.token_urlsafe(24)}"
    registry.keys.add(plain, role, f"first {role} key")
    return plain
