from __future__ import annotations

import pytest

from meshnet import errors
from meshnet.openai.errors import ErrorAnswer, error_body, to_openai

SECRET = "10.0.0.3:8001 said: assertion failed in layer 7"


def answer(error: Exception) -> ErrorAnswer:
    return to_openai(error, request_id="req_1")


def test_a_wrong_request_names_its_parameter() -> None:
    """A plain InvalidRequest is a 400 with the field as param and no code."""
    error = errors.InvalidRequest("temperature: too hot", field="temperature")
    body = error_body("temperature: too hot", "invalid_request_error", param="temperature")

    assert answer(error) == ErrorAnswer(400, body)


def test_a_body_has_all_four_keys() -> None:
    """Message, type, param and code are there, null where there is nothing to say."""
    assert answer(errors.InvalidRequest("no")).body == {
        "error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}
    }


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.UnsupportedParameter("x"), 400, "invalid_request_error", "unsupported_parameter"),
        (
            errors.ContextLengthExceeded("x"),
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (errors.ModelNotFound("x"), 404, "invalid_request_error", "model_not_found"),
        (errors.PayloadTooLarge("x"), 413, "invalid_request_error", "payload_too_large"),
        (errors.UnsupportedMediaType("x"), 415, "invalid_request_error", "unsupported_media_type"),
        (errors.Unauthorized("x"), 401, "authentication_error", "invalid_api_key"),
        (errors.Forbidden("x"), 403, "permission_error", None),
    ],
)
def test_the_clients_faults(
    error: errors.MeshError, status: int, kind: str, code: str | None
) -> None:
    """Each fault of the client has its status, type and string code, and is not to be repeated."""
    result = answer(error)

    assert (result.status, result.body["error"]["type"]) == (status, kind)
    assert result.body["error"]["code"] == code
    assert result.body["error"]["message"] == "x"
    assert result.retry_after_s is None


def test_too_many_requests() -> None:
    """A key that was used too often is a 429 that says when to come back."""
    error = errors.RateLimited("too often", retry_after_s=7)
    body = error_body("too often", "rate_limit_error", code="rate_limit_exceeded")

    assert answer(error) == ErrorAnswer(429, body, retry_after_s=7)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CapacityError("x"), "server_overloaded"),
        (errors.CacheFull("x"), "server_overloaded"),
        (errors.QueueFull("x"), "server_overloaded"),
        (errors.ModelLoading("x"), "model_loading"),
        (errors.RouteError("x"), "shard_unavailable"),
        (errors.HopError("x"), "shard_unavailable"),
        (errors.HopTimeout("x"), "shard_unavailable"),
        (errors.HopUnreachable("x"), "shard_unavailable"),
        (errors.HopProtocolError("x"), "shard_unavailable"),
        (errors.RecoveryExhausted("x"), "shard_unavailable"),
        (errors.Draining("x"), "server_overloaded"),
        (errors.ModelMismatch("x"), "shard_unavailable"),
        (errors.StaleEpoch("x"), "shard_unavailable"),
    ],
)
def test_what_may_work_later_is_503(error: errors.MeshError, code: str) -> None:
    """A lack of room, shards or weights is a 503 that says when to come back."""
    result = answer(error)

    assert (result.status, result.body["error"]["type"]) == (503, "server_error")
    assert result.body["error"]["code"] == code
    assert result.retry_after_s is not None
    assert 1 <= result.retry_after_s <= 120  # over it the official clients give up


@pytest.mark.parametrize(
    "error",
    [
        errors.MeshError(SECRET),
        errors.StageError(SECRET),
        errors.ModelError(SECRET),
        errors.CacheMiss(SECRET),
        errors.InvalidRequest(SECRET, field="X-Meshnet-Shape", endpoint="http://10.0.0.3:8001"),
        errors.Unauthorized(SECRET, endpoint="http://10.0.0.3:8001"),
        errors.Forbidden(SECRET, endpoint="http://10.0.0.3:8001"),
        errors.RateLimited(SECRET, endpoint="http://10.0.0.3:8001", retry_after_s=7),
        errors.RateLimited(SECRET),
        RuntimeError(SECRET),
    ],
)
def test_our_faults_tell_the_requests_id_only(error: Exception) -> None:
    """A fault of ours, a step that a hop calls invalid too, is a 500 without internals."""
    body = error_body("Internal error; the request's id is req_1", "server_error")

    assert answer(error) == ErrorAnswer(500, body)
