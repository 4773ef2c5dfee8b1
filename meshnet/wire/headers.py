"""The headers of one step: names, limits, and both directions of the translation.

Protocol version 1, docs/wire-protocol.md. A change here is a change of the protocol.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv6Address
from typing import Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import from_json

from meshnet.errors import InvalidRequest
from meshnet.generation import Sampling
from meshnet.ids import TOKEN_PATTERN
from meshnet.wire.frames import ITEMSIZE, Dtype

PROTOCOL_VERSION: Final = 1

CacheMode = Literal["prefill", "decode", "stateless"]

SESSION: Final = "X-Meshnet-Session"
CACHE: Final = "X-Meshnet-Cache"
PAST_LEN: Final = "X-Meshnet-Past-Len"
SHAPE: Final = "X-Meshnet-Shape"
DTYPE: Final = "X-Meshnet-Dtype"
START_LAYER: Final = "X-Meshnet-Start-Layer"
FINGERPRINT: Final = "X-Meshnet-Fingerprint"
STEP: Final = "X-Meshnet-Step"
EPOCH: Final = "X-Meshnet-Epoch"
BOOT: Final = "X-Meshnet-Boot"
FORK_OF: Final = "X-Meshnet-Fork-Of"
SAMPLING: Final = "X-Meshnet-Sampling"
CONTEXT_BYTES: Final = "X-Meshnet-Context-Bytes"
# Direct return: the input comes from another shard, the output goes to another one as well.
INPUT_ID: Final = "X-Meshnet-Input-Id"
PUSH_ID: Final = "X-Meshnet-Push-Id"
PUSH_TO: Final = "X-Meshnet-Push-To"
PUSH_BOOT: Final = "X-Meshnet-Push-Boot"
REQUEST_ID: Final = "X-Request-Id"
TRACEPARENT: Final = "traceparent"
# Of a session's end only: whether it is kept for forks.
KEEP: Final = "X-Meshnet-Keep"
# Answers only: where the time went, milliseconds.
QUEUE_MS: Final = "X-Meshnet-Queue-Ms"
COMPUTE_MS: Final = "X-Meshnet-Compute-Ms"
SERIALISE_MS: Final = "X-Meshnet-Serialise-Ms"
# Answers only: whether the output was pushed as asked for, 1 or 0.
PUSHED: Final = "X-Meshnet-Pushed"
# The public endpoint: a pinned route; whether the answer is to tell where the time went.
ROUTE: Final = "X-Meshnet-Route"
TIMING: Final = "X-Meshnet-Timing"

MAX_CONTEXT_BYTES: Final = 16 * 1024**2
"""The longest sampling context; a shard takes what its model can need, which is less."""

_MAX_AXIS: Final = 2**31 - 1
_MAX_ENDPOINT: Final = 300
_ENDPOINT: Final = re.compile(
    r"https?://(?:[\w-]{1,63}(?:\.[\w-]{1,63})*|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])(?::(?P<port>\d{1,5}))?",
    re.ASCII,
)


def _split_shape(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _read_decimal(value: object) -> object:
    """Digits only: pydantic alone would also read `5.0`, `+5` and `1_0`."""
    if isinstance(value, str) and not (value.isascii() and value.isdecimal()):
        raise ValueError("digits only")
    return value


def _read_json(value: object) -> object:
    return from_json(value.encode(), allow_inf_nan=False) if isinstance(value, str) else value


def _check_endpoint(text: str) -> str:
    match = _ENDPOINT.fullmatch(text)
    if match is None or int(match["port"] or 0) > 2**16 - 1:
        raise ValueError("no endpoint")
    if match["ipv6"] is not None:
        IPv6Address(match["ipv6"])
    return text


Axis = Annotated[int, BeforeValidator(_read_decimal), Field(ge=1, le=_MAX_AXIS)]
Count = Annotated[int, BeforeValidator(_read_decimal), Field(ge=0, le=_MAX_AXIS)]
Shape = Annotated[
    tuple[Axis, ...], BeforeValidator(_split_shape), Field(min_length=2, max_length=3)
]
Token = Annotated[str, Field(pattern=TOKEN_PATTERN)]
Endpoint = Annotated[str, Field(max_length=_MAX_ENDPOINT), AfterValidator(_check_endpoint)]

_SHAPE: Final[TypeAdapter[tuple[int, ...]]] = TypeAdapter(Shape)
_EPOCH: Final[TypeAdapter[int]] = TypeAdapter(Count)


class StepHeaders(BaseModel):
    """One step's headers. Lax on purpose (a header is text), and blind to headers not ours."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    session: Annotated[Token | None, Field(alias=SESSION)] = None
    cache: Annotated[CacheMode, Field(alias=CACHE)] = "stateless"
    past_len: Annotated[Count, Field(alias=PAST_LEN)] = 0
    shape: Annotated[Shape, Field(alias=SHAPE)]
    dtype: Annotated[Dtype, Field(alias=DTYPE)]
    start_layer: Annotated[Count | None, Field(alias=START_LAYER)] = None
    fingerprint: Annotated[Token | None, Field(alias=FINGERPRINT)] = None
    step: Annotated[Token | None, Field(alias=STEP)] = None
    epoch: Annotated[Count, Field(alias=EPOCH)] = 0
    boot: Annotated[Token | None, Field(alias=BOOT)] = None
    fork_of: Annotated[Token | None, Field(alias=FORK_OF)] = None
    sampling: Annotated[Sampling | None, BeforeValidator(_read_json), Field(alias=SAMPLING)] = None
    context_bytes: Annotated[Count, Field(alias=CONTEXT_BYTES, le=MAX_CONTEXT_BYTES)] = 0
    input_id: Annotated[Token | None, Field(alias=INPUT_ID)] = None
    push_id: Annotated[Token | None, Field(alias=PUSH_ID)] = None
    push_to: Annotated[Endpoint | None, Field(alias=PUSH_TO)] = None
    push_boot: Annotated[Token | None, Field(alias=PUSH_BOOT)] = None
    request_id: Annotated[Token | None, Field(alias=REQUEST_ID)] = None
    traceparent: Annotated[str | None, Field(alias=TRACEPARENT, max_length=256)] = None


_ALIASES: Final = {
    str(field.alias).lower(): str(field.alias) for field in StepHeaders.model_fields.values()
}

_ALLOWED: Final = {
    SESSION: "1-128 characters of [A-Za-z0-9._-]",
    CACHE: "prefill, decode, stateless",
    PAST_LEN: "0 to 2147483647",
    SHAPE: "1,TOKENS for token ids or 1,TOKENS,HIDDEN for hidden states, each at least 1",
    DTYPE: "int32, float32, bfloat16, float16",
    START_LAYER: "0 to 2147483647",
    FINGERPRINT: "1-128 characters of [A-Za-z0-9._-]",
    STEP: "1-128 characters of [A-Za-z0-9._-]",
    EPOCH: "0 to 2147483647",
    BOOT: "1-128 characters of [A-Za-z0-9._-]",
    FORK_OF: "1-128 characters of [A-Za-z0-9._-], another session's id",
    SAMPLING: 'JSON such as {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "seed": 1}',
    CONTEXT_BYTES: f"0 to {MAX_CONTEXT_BYTES}",
    INPUT_ID: "1-128 characters of [A-Za-z0-9._-]",
    PUSH_ID: "1-128 characters of [A-Za-z0-9._-]",
    PUSH_TO: f"http://HOST:PORT or https://HOST:PORT, {_MAX_ENDPOINT} characters at most",
    PUSH_BOOT: "1-128 characters of [A-Za-z0-9._-]",
    REQUEST_ID: "1-128 characters of [A-Za-z0-9._-]",
    TRACEPARENT: "at most 256 characters",
    KEEP: "0 or 1",
}


def parse(headers: Mapping[str, str]) -> StepHeaders:
    """Read a request's headers.

    Raises:
        InvalidRequest: A header is missing, malformed or out of range, or two of them contradict
            each other. `field`, `value` and `allowed` name the first one.
    """
    ours = {name: v for k, v in headers.items() if (name := _ALIASES.get(k.lower()))}
    try:
        step = StepHeaders.model_validate(ours)
    except ValidationError as error:
        raise _to_invalid_request(error, ours) from error
    _check_together(step)
    return step


def _to_invalid_request(error: ValidationError, ours: Mapping[str, str]) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = str(first["loc"][0])
    where = ".".join(str(part) for part in first["loc"])
    return InvalidRequest(
        f"{where[:100]}: {first['msg'][:200]}",  # cut, since a member's name is input too
        field=field,
        value=ours.get(field, "")[:200],  # a limit, so that an error is never a copy of the input
        allowed=_ALLOWED[field],
    )


def _check_together(step: StepHeaders) -> None:
    if step.cache != "stateless" and step.session is None:
        raise InvalidRequest(
            f"{SESSION} is missing: a cached step belongs to a session",
            field=SESSION,
            value=None,
            allowed=_ALLOWED[SESSION],
        )
    if step.cache == "stateless" and step.past_len:
        raise InvalidRequest(
            f"{PAST_LEN} is {step.past_len}, but a stateless step has no past",
            field=PAST_LEN,
            value=step.past_len,
            allowed=0,
        )
    if step.context_bytes and step.sampling is None:
        raise InvalidRequest(
            f"{CONTEXT_BYTES} is {step.context_bytes}, but there is no {SAMPLING}",
            field=CONTEXT_BYTES,
            value=step.context_bytes,
            allowed=0,
        )
    if step.cache == "decode" and not step.past_len:
        raise InvalidRequest(
            f"{PAST_LEN} is 0, but a decode continues a session",
            field=PAST_LEN,
            value=0,
            allowed="1 or more; the first step of a session is a prefill",
        )
    _check_direct_return(step)
    if step.fork_of is not None:
        _check_fork(step)


def _check_direct_return(step: StepHeaders) -> None:
    push = {PUSH_ID: step.push_id, PUSH_TO: step.push_to, PUSH_BOOT: step.push_boot}
    missing = [name for name, value in push.items() if value is None]
    if 0 < len(missing) < len(push):
        raise InvalidRequest(
            f"{missing[0]} is missing: {', '.join(push)} go together",
            field=missing[0],
            value=None,
            allowed=_ALLOWED[missing[0]],
        )
    if step.cache == "stateless":
        refuse_direct_return(step, "a stateless step has no part in direct return")


def refuse_direct_return(step: StepHeaders, message: str) -> None:
    """Refuse a step whose input another shard pushes, or whose output is to be pushed.

    Raises:
        InvalidRequest: It is one.
    """
    if step.input_id or step.push_id:
        raise InvalidRequest(
            message,
            field=INPUT_ID if step.input_id else PUSH_ID,
            value=step.input_id or step.push_id,
            allowed=None,
        )


def _check_fork(step: StepHeaders) -> None:
    if step.cache == "stateless" or not step.past_len:
        raise InvalidRequest(
            f"{FORK_OF} is for a cached step that continues at least one token",
            field=FORK_OF,
            value=step.fork_of,
            allowed=None,
        )
    if step.fork_of == step.session:
        raise InvalidRequest(
            f"{FORK_OF} is the step's own session",
            field=FORK_OF,
            value=step.fork_of,
            allowed=_ALLOWED[FORK_OF],
        )


def render(step: StepHeaders) -> dict[str, str]:
    """The headers as they are sent; what is None is left out."""
    sampling = step.sampling and step.sampling.model_dump_json(exclude_defaults=True)
    optional: dict[str, str | None] = {
        SESSION: step.session,
        START_LAYER: None if step.start_layer is None else str(step.start_layer),
        FINGERPRINT: step.fingerprint,
        STEP: step.step,
        EPOCH: str(step.epoch) if step.epoch else None,
        BOOT: step.boot,
        FORK_OF: step.fork_of,
        SAMPLING: sampling,
        CONTEXT_BYTES: str(step.context_bytes) if step.context_bytes else None,
        INPUT_ID: step.input_id,
        PUSH_ID: step.push_id,
        PUSH_TO: step.push_to,
        PUSH_BOOT: step.push_boot,
        REQUEST_ID: step.request_id,
        TRACEPARENT: step.traceparent,
    }
    return {
        CACHE: step.cache,
        PAST_LEN: str(step.past_len),
        SHAPE: render_shape(step.shape),
        DTYPE: step.dtype,
        **{name: value for name, value in optional.items() if value is not None},
    }


def render_shape(shape: tuple[int, ...]) -> str:
    """A shape as `X-Meshnet-Shape` carries it."""
    return ",".join(map(str, shape))


def parse_epoch(text: str | None) -> int:
    """An epoch from `X-Meshnet-Epoch`; 0 where there is none.

    Raises:
        InvalidRequest: It is no number, or too large.
    """
    try:
        return _EPOCH.validate_python("0" if text is None else text)
    except ValidationError as error:
        raise _malformed(EPOCH, "epoch", text or "") from error


def parse_keep(text: str | None) -> bool:
    """Whether a session is to be kept, from `X-Meshnet-Keep`; it is not where there is none.

    Raises:
        InvalidRequest: It is neither 0 nor 1.
    """
    if text not in {None, "0", "1"}:
        raise _malformed(KEEP, "yes or no", text or "")
    return text == "1"


def parse_dtype(text: str) -> Dtype:
    """A dtype from `X-Meshnet-Dtype`.

    Raises:
        InvalidRequest: There is no such dtype on the wire.
    """
    for dtype in ITEMSIZE:
        if dtype == text:
            return dtype
    raise _malformed(DTYPE, "dtype", text)


def parse_shape(text: str) -> tuple[int, ...]:
    """A shape from `X-Meshnet-Shape`.

    Raises:
        InvalidRequest: `text` is not a shape that a step could have.
    """
    try:
        return _SHAPE.validate_python(text)
    except ValidationError as error:
        raise _malformed(SHAPE, "shape", text) from error


def _malformed(header: str, what: str, text: str) -> InvalidRequest:
    value = text[:200]  # a limit, so that an error is never a copy of the input
    return InvalidRequest(
        f"{header}: {value!r} is no {what}", field=header, value=value, allowed=_ALLOWED[header]
    )
