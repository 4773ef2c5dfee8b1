"""Errors in OpenAI's shape: what a client sees of a MeshError, or of a fault of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypedDict

from meshnet.errors import (
    CapacityError,
    Forbidden,
    HopError,
    InvalidRequest,
    MeshError,
    ModelLoading,
    ModelMismatch,
    RateLimited,
    RecoveryExhausted,
    RouteError,
    StaleEpoch,
    Unauthorized,
)

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "rate_limit_error",
    "server_error",
]


class ErrorMembers(TypedDict):
    """OpenAI's four keys, always all of them."""

    message: str
    type: ErrorType
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of an error, and the data of an error event in a stream."""

    error: ErrorMembers


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as it is answered; `retry_after_s` is the `Retry-After` header, if any."""

    status: int
    body: ErrorBody
    retry_after_s: int | None = None


_LATER: Final[tuple[tuple[type[MeshError], str, int], ...]] = (
    # What to wait for: a running request to end, a shard to be restarted, weights to be read.
    (CapacityError, "server_overloaded", 1),
    (ModelLoading, "model_loading", 5),
    (RouteError, "shard_unavailable", 5),
    (ModelMismatch, "shard_unavailable", 5),
    (StaleEpoch, "shard_unavailable", 5),
    (HopError, "shard_unavailable", 5),
    (RecoveryExhausted, "shard_unavailable", 5),
)


def to_openai(error: Exception, *, request_id: str) -> ErrorAnswer:
    """The answer to a request that failed with `error`.

    An error which is not foreseen here is ours: 500, and the client learns the request's id only.
    """
    if isinstance(error, MeshError) and "endpoint" in error.members:
        return _server_error(error, request_id)  # a hop refused the head's step, not the client's
    match error:
        case InvalidRequest():
            return _invalid_request(error)
        case Unauthorized():
            body = error_body(error.message, "authentication_error", code="invalid_api_key")
            return ErrorAnswer(401, body)
        case Forbidden():
            return ErrorAnswer(403, error_body(error.message, "permission_error"))
        case RateLimited(members={"retry_after_s": int(retry_after_s)}):
            body = error_body(error.message, "rate_limit_error", code=error.code)
            return ErrorAnswer(429, body, retry_after_s)
        case _:
            return _server_error(error, request_id)


def error_body(
    message: str, kind: ErrorType, *, param: str | None = None, code: str | None = None
) -> ErrorBody:
    """A body of the four keys."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _invalid_request(error: InvalidRequest) -> ErrorAnswer:
    field = error.members.get("field")
    body = error_body(
        error.message,
        "invalid_request_error",
        param=None if field is None else str(field),
        # Its subclasses are named as OpenAI names them; "invalid_request" would repeat the type.
        code=None if type(error) is InvalidRequest else error.code,
    )
    return ErrorAnswer(error.status, body)


def _server_error(error: Exception, request_id: str) -> ErrorAnswer:
    for kind, code, retry_after_s in _LATER:
        if isinstance(error, kind):
            body = error_body(error.message, "server_error", code=code)
            return ErrorAnswer(503, body, retry_after_s)
    return ErrorAnswer(
        500, error_body(f"Internal error; the request's id is {request_id}", "server_error")
    )
