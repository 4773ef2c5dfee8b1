"""Every error that Meshnet raises, one tree.

MeshError
├── InvalidRequest            400  this request is wrong; repeating it cannot help
│   ├── PayloadTooLarge       413
│   ├── UnsupportedMediaType  415
│   ├── ModelNotFound         404  no model of that name is served
│   ├── UnsupportedParameter       a parameter we know and do not implement
│   └── ContextLengthExceeded      prompt and answer do not fit the model's context
├── Unauthorized              401
├── Forbidden                 403
├── RateLimited               429  the caller asks too often
├── SessionError              409  the session's state and the step do not fit
│   ├── CacheMiss                  the state is not here; feed it again
│   ├── SessionBusy                another step of the session is running
│   ├── InputsDropped              the head no longer has what a hop was fed
│   ├── InputMissing               the tensor that another shard was to push did not come
│   └── StaleEpoch                 a newer epoch steers the session, or it was closed
├── ModelMismatch             409  the shard runs another model than the head believes
├── CapacityError             503  later it may work
│   ├── CacheFull
│   ├── QueueFull
│   └── Draining                   it finishes what it has and takes nothing new
├── HopError                  503  a hop did not do its part
│   ├── HopUnreachable
│   ├── HopTimeout
│   └── HopProtocolError      502  it answered, but not in our protocol
├── RouteError                503  the configured hops do not make a route
├── ModelLoading              503  the shard is not ready yet
├── ModelError                500  the model cannot be loaded or split as asked
├── StageError                500  a forward pass failed; the session's state is gone
└── RecoveryExhausted         503  the bounded recovery gave up

An error crosses a process as its `code` and comes out as the same class (`from_code`). Decide on
the class, `code` or `retryable`, never on the text.
"""

from __future__ import annotations

from typing import ClassVar, Literal

MissReason = Literal[
    "unknown", "expired", "evicted", "restarted", "length_mismatch", "route_mismatch"
]


class MeshError(Exception):
    """Base of the tree.

    Args:
        message: One sentence for a person.
        members: What a program may want to know besides: `field`, `value`, `allowed`, `held`...
            Values must be JSON. They travel with the error.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    _by_code: ClassVar[dict[str, type[MeshError]]] = {}

    def __init_subclass__(cls) -> None:
        MeshError._by_code.setdefault(cls.code, cls)

    def __init__(self, message: str, /, **members: object) -> None:
        super().__init__(message)
        self.message = message
        self.members: dict[str, object] = members


class InvalidRequest(MeshError):
    """The request itself is wrong; `field`, `value` and `allowed` say where."""

    code = "invalid_request"
    status = 400


class PayloadTooLarge(InvalidRequest):
    """The body is longer than the limit; nothing of it was kept."""

    code = "payload_too_large"
    status = 413


class UnsupportedMediaType(InvalidRequest):
    """The body says that it is of a kind that is not read here."""

    code = "unsupported_media_type"
    status = 415


class ModelNotFound(InvalidRequest):
    """No model of that name is served; `allowed` lists those that are."""

    code = "model_not_found"
    status = 404


class UnsupportedParameter(InvalidRequest):
    """The parameter would change the answer and is not implemented; `field` names it."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """The prompt and the answer asked for are longer together than the model's context."""

    code = "context_length_exceeded"


class Unauthorized(MeshError):
    """No key, or a wrong one."""

    code = "unauthorized"
    status = 401


class Forbidden(MeshError):
    """The caller may not do this."""

    code = "forbidden"
    status = 403


class RateLimited(MeshError):
    """The caller asked more often than its key may. Member: `retry_after_s`, whole seconds."""

    code = "rate_limit_exceeded"
    status = 429
    retryable = True


class SessionError(MeshError):
    """The session's state and the step do not fit together."""

    code = "session_error"
    status = 409


class CacheMiss(SessionError):
    """The shard does not hold the state this step continues.

    Members: `reason` (a MissReason), `held`, the tokens still held, else 0, and for `restarted`
    `expected` and `actual`, the boot ids.
    """

    code = "cache_miss"


class SessionBusy(SessionError):
    """Another step of the same session is running; nothing was changed. Member: `held`."""

    code = "session_busy"
    retryable = True


class InputsDropped(SessionError):
    """What a hop was fed is not kept any more, so that all hops must be fed anew."""

    code = "inputs_dropped"


class InputMissing(SessionError):
    """The tensor that another shard was to push for this step did not come; nothing was changed."""

    code = "input_missing"


class StaleEpoch(SessionError):
    """The session is steered under a newer epoch, or was closed under this one.

    Nothing was changed. Members: `expected`, the lowest epoch that is taken, `actual`, and `held`.
    """

    code = "stale_epoch"


class ModelMismatch(MeshError):
    """The shard runs another model than the caller believes. Members: `expected`, `actual`."""

    code = "model_mismatch"
    status = 409


class CapacityError(MeshError):
    """There is no room now."""

    code = "capacity"
    status = 503
    retryable = True


class CacheFull(CapacityError):
    """Every session that could make room is in use, or the budget is too small for this one."""

    code = "cache_full"


class QueueFull(CapacityError):
    """Too many steps are waiting."""

    code = "queue_full"


class Draining(CapacityError):
    """It finishes what it has begun and takes nothing new; another one may."""

    code = "draining"


class HopError(MeshError):
    """A hop did not do its part. Member: `endpoint`."""

    code = "hop_error"
    status = 503


class HopUnreachable(HopError):
    """The hop refused or dropped the connection."""

    code = "hop_unreachable"
    retryable = True


class HopTimeout(HopError):
    """The hop did not answer within its limit."""

    code = "hop_timeout"
    retryable = True


class HopProtocolError(HopError):
    """The hop answered, but not in our protocol."""

    code = "hop_protocol"
    status = 502


class RouteError(MeshError):
    """The hops do not tile the model's layers exactly once, or are not all known yet."""

    code = "route_invalid"
    status = 503


class ModelLoading(MeshError):
    """The shard is still loading its span."""

    code = "model_loading"
    status = 503
    retryable = True


class ModelError(MeshError):
    """The model cannot be loaded, or not be split as asked."""

    code = "model_error"


class StageError(MeshError):
    """A forward pass failed. The session's state on this shard was dropped."""

    code = "stage_failed"


class RecoveryExhausted(MeshError):
    """The bounded recovery gave up; the last cause is in the text."""

    code = "recovery_exhausted"
    status = 503


def from_code(code: str, message: str, members: dict[str, object]) -> MeshError | None:
    """The error that `code` names, or None for a code this version does not know."""
    kind = MeshError._by_code.get(code)  # pyright: ignore[reportPrivateUsage]  # same module
    return kind(message, **members) if kind else None
