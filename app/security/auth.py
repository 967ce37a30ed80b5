"""Who calls: bearer keys, looked up by hash and remembered for a few seconds."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from anyio import to_thread
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult

from app.errors import Forbidden, Unauthorized
from app.registry import Registry
from app.registry.errors import RegistryUnavailable
from app.registry.records import KeyRecord

REMEMBER_S = 2.0
NOBODY = KeyRecord(
    id="noauth",
    role="admin",
    name="authentication is off",
    created_at=datetime.fromtimestamp(0, UTC),
    revoked_at=None,
    store_content=True,
)


class Authenticator:
    """Finds the key behind a bearer token; a revoked key works for `REMEMBER_S` at most.

    While the registry is away nobody can revoke a key, and known ones go on working.
    """

    def __init__(self, registry: Registry, enabled: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._enabled = enabled
        self._clock = clock
        self._seen: dict[str, tuple[float, KeyRecord]] = {}

    async def key(self, authorization: str | None) -> KeyRecord:
        """Raises Unauthorized without a valid key, RegistryUnavailable where a new one cannot be looked up now."""
        if not self._enabled:
            return NOBODY
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthorized("an API key is needed: send the header `Authorization: Bearer KEY`")
        now = self._clock()
        at, seen = self._seen.get(token, (0.0, None))
        if seen is not None and now - at < REMEMBER_S:
            return seen
        try:
            record = await to_thread.run_sync(self._registry.keys.find, token)
        except RegistryUnavailable:
            if seen is None:
                raise
            record = seen
        if record is None:
            self._seen.pop(token, None)
            raise Unauthorized("the API key is unknown or revoked; ask an operator for one")
        self._seen[token] = (now, record)
        return record


class AuthMiddleware(AbstractAuthenticationMiddleware):
    """Puts the caller's KeyRecord into `request.user`."""

    async def authenticate_request(self, connection: ASGIConnection) -> AuthenticationResult:  # type: ignore[type-arg]
        authenticator: Authenticator = connection.app.state.services.authenticator
        key = await authenticator.key(connection.headers.get("authorization"))
        return AuthenticationResult(user=key, auth=None)


def admin_only(connection: ASGIConnection, _: BaseRouteHandler) -> None:  # type: ignore[type-arg]
    """A guard: raises Forbidden for a key that is not an admin's."""
    if connection.user.role != "admin":
        raise Forbidden("this needs an admin key; the key that was sent is a client key")
