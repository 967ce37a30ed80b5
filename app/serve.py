"""Start the API: first keys, a bound socket, uvicorn."""

import asyncio
import errno
import socket
from typing import Any

import click
import uvicorn

from app.asgi import create_app
from app.errors import RiachoError, SetupError
from app.registry import Registry
from app.security.secrets import first_key
from app.settings import AppSettings

GRACE_S = 20
KEEP_ALIVE_S = 75  # longer than clients and balancers keep an idle connection, so that none is closed as it is used


def serve_app(settings: AppSettings) -> None:
    """Serve until a signal. Raises SetupError for a port in use or a registry that needs an upgrade."""
    settings.home.mkdir(parents=True, exist_ok=True)
    listening = bind(settings.host, settings.port)
    show_first_keys(settings)
    host, port = listening.getsockname()[:2]
    click.echo(f"riacho serves {settings.policy!r} on http://{host}:{port}/v1", err=True)
    try:
        asyncio.run(_serve(settings, listening))
    except ExceptionGroup as group:  # Litestar starts its lifespan inside a task group
        known = group.subgroup(RiachoError)
        if known is None:
            raise
        raise _leaf(known) from group


async def _serve(settings: AppSettings, listening: socket.socket) -> None:
    """The lifespan is entered here and not by uvicorn, so that what stops a start is raised as it is."""
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    async with app.lifespan():
        await uvicorn.Server(config).serve(sockets=[listening])


def _leaf(group: ExceptionGroup[Any]) -> Exception:
    first: Exception = group.exceptions[0]
    return _leaf(first) if isinstance(first, ExceptionGroup) else first


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; raises SetupError that says what to do where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        hint = "another program listens there; stop it or choose another port with --port or RIACHO_PORT"
        if error.errno != errno.EADDRINUSE:
            hint = "choose an address of this machine with --host or RIACHO_HOST"
        raise SetupError(f"cannot listen on {host}:{port} ({error.strerror}): {hint}", param="port") from error
    return listening


def show_first_keys(settings: AppSettings) -> None:
    """Make the first keys of a new registry and show them, once; only hashes are kept."""
    if not settings.auth:
        click.echo("riacho: authentication is off", err=True)
        return
    registry = Registry.open(settings.resolved_database_url)
    given = {"admin": settings.admin_key, "client": settings.client_key}
    for role, secret in given.items():
        made = first_key(registry, role, secret.get_secret_value() if secret else None)  # type: ignore[arg-type]
        if made is not None:
            click.echo(f"first {role} key, shown once: {made}", err=True)
    registry.close()
