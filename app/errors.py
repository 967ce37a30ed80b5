"""One error family for everything a caller can do wrong or has to hear about."""

from typing import Any


class RiachoError(Exception):
    """An error with an HTTP status, a stable code and a message that says what would be right.

    Args:
        message: what is wrong, with the field and the value, and what to do about it.
        param: the request field or setting at fault, if there is one.
    """

    status = 500
    code = "internal_error"
    kind = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        """The OpenAI-shaped error body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class InvalidRequest(RiachoError):
    status, code, kind = 400, "invalid_request", "invalid_request_error"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class WrongSignal(InvalidRequest):
    """A reward under a name that this policy does not take from clients."""

    status, code = 422, "wrong_signal"


class Unauthorized(RiachoError):
    status, code, kind = 401, "invalid_api_key", "authentication_error"


class Forbidden(RiachoError):
    status, code, kind = 403, "permission_denied", "permission_error"


class NotFound(RiachoError):
    status, code, kind = 404, "not_found", "invalid_request_error"


class Conflict(RiachoError):
    status, code, kind = 409, "conflict", "invalid_request_error"


class Unavailable(RiachoError):
    status, code, kind = 503, "unavailable", "server_error"


class AdapterRejected(RiachoError):
    """An adapter version that must not serve; the message is the reason that the registry keeps."""

    status, code, kind = 422, "adapter_rejected", "invalid_request_error"


class SetupError(RiachoError):
    """A wrong setting, database, model or directory, found at start; the message says what to do."""

    status, code = 500, "setup_error"
