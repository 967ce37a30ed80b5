"""Every error leaves as an OpenAI-shaped body; the mapping is here and nowhere else."""

import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi import ResponseSpec

from app.errors import InvalidRequest, RiachoError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ErrorDetail:
    """What went wrong, and what would be right."""

    message: str
    type: str
    param: str | None
    code: str | None


@dataclass(frozen=True)
class ErrorBody:
    """OpenAI's error shape, for the OpenAPI document."""

    error: ErrorDetail


DOCUMENTED: dict[int, ResponseSpec] = {
    status: ResponseSpec(ErrorBody, generate_examples=False, description=status.phrase)
    for status in (
        *(HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND),
        *(HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY),
        HTTPStatus.SERVICE_UNAVAILABLE,
    )
}


def riacho_error(_: Request[Any, Any, Any], error: RiachoError) -> Response[dict[str, Any]]:
    return Response(error.body(), status_code=error.status)


def validation_error(_: Request[Any, Any, Any], error: ValidationException) -> Response[dict[str, Any]]:
    """Name each field at fault, what is wrong and what would be right."""
    problems = [item for item in (error.extra or []) if isinstance(item, dict)]
    if any(item["message"] == "'data'" for item in problems):  # how Litestar says that there is no body
        return Response(InvalidRequest("the body is empty; send a JSON object").body(), status_code=400)
    parts = [f"{item['key']}: {item['message']}" if item.get("key") else str(item["message"]) for item in problems]
    invalid = InvalidRequest("; ".join(parts) or error.detail, param=problems[0].get("key") if problems else None)
    return Response(invalid.body(), status_code=400)


def http_error(_: Request[Any, Any, Any], error: HTTPException) -> Response[dict[str, Any]]:
    """Litestar's own: unknown routes, wrong methods, malformed JSON, bodies that are too large."""
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    status = HTTPStatus(error.status_code)
    code = InvalidRequest.code if status is HTTPStatus.BAD_REQUEST else status.name.lower()
    body = {"message": error.detail, "type": kind, "param": None, "code": code}
    return Response({"error": body}, status_code=error.status_code, headers=error.headers)


def too_deep(_: Request[Any, Any, Any], error: RecursionError) -> Response[dict[str, Any]]:
    """Only a body can be nested without end."""
    log.warning("a body is nested too deeply: %s", error)
    return Response(InvalidRequest("the body is nested too deeply; send a flatter one").body(), status_code=400)


def unexpected_error(_: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
    """A bug: the trace goes to the log, not to the caller."""
    log.error("unexpected error", exc_info=error)
    return Response(RiachoError("an unexpected error; the service's log has the details").body(), status_code=500)


HANDLERS: dict[Any, Any] = {
    RiachoError: riacho_error,
    ValidationException: validation_error,
    HTTPException: http_error,
    RecursionError: too_deep,
    Exception: unexpected_error,
}
