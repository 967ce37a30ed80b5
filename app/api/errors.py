"""Every error leaves as an OpenAI-shaped body; the mapping is here and nowhere else."""

import logging
from typing import Any

from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from sqlalchemy.exc import OperationalError

from app.errors import InvalidRequest, RiachoError, Unavailable

log = logging.getLogger(__name__)


def riacho_error(_: Request[Any, Any, Any], error: RiachoError) -> Response[dict[str, Any]]:
    return Response(error.body(), status_code=error.status)


def validation_error(_: Request[Any, Any, Any], error: ValidationException) -> Response[dict[str, Any]]:
    """Name each field at fault, what is wrong and what would be right."""
    problems = [item for item in (error.extra or []) if isinstance(item, dict)]
    parts = [f"{item['key']}: {item['message']}" if item.get("key") else str(item["message"]) for item in problems]
    invalid = InvalidRequest("; ".join(parts) or error.detail, param=problems[0].get("key") if problems else None)
    return Response(invalid.body(), status_code=400)


def http_error(_: Request[Any, Any, Any], error: HTTPException) -> Response[dict[str, Any]]:
    """Litestar's own: unknown routes, wrong methods, malformed JSON, bodies that are too large."""
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    body = {"message": error.detail, "type": kind, "param": None, "code": type(error).__name__}
    return Response({"error": body}, status_code=error.status_code, headers=error.headers)


def database_error(_: Request[Any, Any, Any], error: OperationalError) -> Response[dict[str, Any]]:
    """The registry is away, locked or full: the caller may try again."""
    log.error("the registry failed: %s", error.orig)
    unavailable = Unavailable("the registry cannot be used now; send the request again in a moment")
    return Response(unavailable.body(), status_code=unavailable.status)


def unexpected_error(_: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
    """A bug: the trace goes to the log, not to the caller."""
    log.error("unexpected error", exc_info=error)
    return Response(RiachoError("an unexpected error; the service's log has the details").body(), status_code=500)


HANDLERS: dict[Any, Any] = {
    RiachoError: riacho_error,
    ValidationException: validation_error,
    HTTPException: http_error,
    OperationalError: database_error,
    Exception: unexpected_error,
}
