"""A tensor that one shard pushes to another, as a message of a stream (docs/wire-protocol.md)."""

from __future__ import annotations

from meshnet.errors import InvalidRequest
from meshnet.ids import TOKEN_PATTERN, is_token
from meshnet.wire import headers
from meshnet.wire.frames import Frame
from meshnet.wire.stream_messages import UNANSWERED, StreamMessage


def as_message(push_id: str, frame: Frame) -> StreamMessage:
    """The message that carries a frame to the step that waits for it under this id."""
    named = {
        headers.PUSH_ID: push_id,
        headers.SHAPE: headers.render_shape(frame.shape),
        headers.DTYPE: frame.dtype,
    }
    return StreamMessage(UNANSWERED, named, frame.data)


def from_message(message: StreamMessage) -> tuple[str, Frame]:
    """The id under which a frame is waited for, and the frame.

    Raises:
        InvalidRequest: A header is missing or malformed, or the body is of another length.
    """
    push_id = message.headers.get(headers.PUSH_ID.lower(), "")
    if not is_token(push_id):
        raise InvalidRequest(
            f"{headers.PUSH_ID} is no id",
            field=headers.PUSH_ID,
            value=push_id[:200],
            allowed=TOKEN_PATTERN,
        )
    shape = headers.parse_shape(message.headers.get(headers.SHAPE.lower(), ""))
    dtype = headers.parse_dtype(message.headers.get(headers.DTYPE.lower(), ""))
    return push_id, Frame(dtype, shape, message.body)
