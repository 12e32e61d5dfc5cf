"""The one error a client ever sees, in OpenAI's shape. Knows status codes and fields; never carries a stack trace."""

from __future__ import annotations

from typing import Any

from spec.errors import RequestError


class ApiError(Exception):
    """`code` is machine-readable, `param` names the field at fault, `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.headers = headers

    @property
    def type(self) -> str:
        if self.status >= 500:
            return "server_error"
        return "rate_limit_error" if self.status == 429 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """400: the client's request cannot be meant. The message should name what came and what is allowed."""
    return ApiError(400, message, code=code, param=param)


def from_request_error(error: RequestError) -> ApiError:
    return ApiError(400, str(error), code=error.code, param=error.param)


# Codes of error events that are not the client's doing, with the status each gets.
_SERVER_STATUS = {
    "engine_failed": 500,
    "engine_crashed": 500,
    "scores_not_finite": 500,
    "grammar_failed": 500,
    "server_stopping": 503,
    "server_draining": 503,
}


def from_engine(message: str, code: str | None, param: str | None = None) -> ApiError:
    """An error event of the engine: the client's fault when the engine refused the request, the server's otherwise."""
    status = 500 if code is None else _SERVER_STATUS.get(code, 400)
    return ApiError(status, message, code=code or "internal_error", param=param)
