"""Session names: what a client calls a session, and what the log calls it."""

import re

from app.errors import InvalidRequest, NotFound
from app.registry.records import KeyRecord

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
OWNER = re.compile(r"[0-9a-z]{1,16}")


def internal_session(key: KeyRecord, name: str, param: str) -> str:
    """`KEY:NAME`: a key can only name its own sessions. An admin may also give the internal form.

    Raises InvalidRequest for a name with other characters or longer than 64.
    """
    owner, colon, rest = name.partition(":")
    if colon and key.role == "admin" and OWNER.fullmatch(owner) and NAME.fullmatch(rest):
        return f"{owner}:{rest}"
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"{param} = {name[:80]!r}: use 1 to 64 letters, digits, dots, underscores or hyphens", param=param
        )
    return f"{key.id}:{name}"


def own_completion(key: KeyRecord, owner_id: str, completion_id: str) -> None:
    """Only the key that made a completion, or an admin, may see or judge it; raises NotFound for others."""
    if key.role != "admin" and key.id != owner_id:
        raise NotFound(
            f"completion {completion_id[:64]!r} was not made with this key; use the key that made it",
            param="completion_id",
        )
