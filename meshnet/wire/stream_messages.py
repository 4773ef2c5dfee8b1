"""Steps and their answers as messages of a kept-open stream; no input or output happens here.

A message has what a POST or its answer has: a status, headers and a body; and a number, by which
an answer finds its step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from meshnet.errors import InvalidRequest

PATH: Final = "/v1/stream"
SUBPROTOCOL: Final = "meshnet-1"
"""What both sides must name when a stream is opened; another form of messages has another name."""

MAX_BODY_BYTES: Final = 256 * 1024
"""Longer steps and answers go by POST: on a stream everything behind them would wait for them."""
MAX_HEADERS_BYTES: Final = 16 * 1024

_PREFIX: Final = Struct("<QII")
"""Number, status (0 in a step) and the length of the headers, which follow as a JSON object."""
_HEADERS: Final = TypeAdapter(dict[str, str])

MAX_MESSAGE_BYTES: Final = _PREFIX.size + MAX_HEADERS_BYTES + MAX_BODY_BYTES
UNANSWERED: Final = 0
"""The number of a message that is no step and has no answer: a pushed tensor."""
MAX_IN_FLIGHT: Final = 128
"""Steps of one stream that a shard has at once; further ones it does not read yet."""


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A step, an answer, or a pushed tensor.

    Attributes:
        number: Of the step, chosen by who sends it; an answer has its step's. `UNANSWERED` for a
            pushed tensor.
        headers: As those of a POST or its answer.
        body: Likewise.
        status: As that of the answer to a POST; 0 in a step.
    """

    number: int
    headers: Mapping[str, str]
    body: bytes
    status: int = 0


def encode(message: StreamMessage) -> bytes:
    """A message as it is sent."""
    headers = to_json(message.headers)
    return _PREFIX.pack(message.number, message.status, len(headers)) + headers + message.body


def decode(data: bytes) -> StreamMessage:
    """Read a message.

    Raises:
        InvalidRequest: It is too long or cut short, or its headers are no JSON object of strings.
    """
    if not _PREFIX.size <= len(data) <= MAX_MESSAGE_BYTES:
        raise _malformed(f"it has {len(data)} bytes")
    number, status, n_headers = _PREFIX.unpack_from(data)
    body_at = _PREFIX.size + n_headers
    if n_headers > MAX_HEADERS_BYTES or body_at > len(data):
        raise _malformed(f"its headers claim {n_headers} bytes")
    try:
        headers = _HEADERS.validate_json(data[_PREFIX.size : body_at], strict=True)
    except ValidationError as error:
        raise _malformed("its headers are no JSON object of strings") from error
    named = {name.lower(): value for name, value in headers.items()}
    return StreamMessage(number, named, data[body_at:], status)


def _malformed(why: str) -> InvalidRequest:
    return InvalidRequest(f"a message of the stream is malformed: {why}", field="message")
