from __future__ import annotations

import pytest

from meshnet.errors import InvalidRequest
from meshnet.wire.frames import Frame
from meshnet.wire.pushed_frames import as_message, from_message
from meshnet.wire.stream_messages import UNANSWERED, StreamMessage, decode, encode

FRAME = Frame("bfloat16", (1, 2, 3), bytes(range(12)))
RIGHT = {"x-meshnet-push-id": "p-1", "x-meshnet-shape": "1,2,3", "x-meshnet-dtype": "bfloat16"}


def test_a_frame_comes_over_as_it_was() -> None:
    """With its id, shape and dtype, and as a message that nobody answers."""
    sent = decode(encode(as_message("p-1", FRAME)))

    assert from_message(sent) == ("p-1", FRAME)
    assert (sent.number, sent.headers) == (UNANSWERED, RIGHT)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"x-meshnet-push-id": ""}, "X-Meshnet-Push-Id"),
        ({"x-meshnet-push-id": "a b"}, "X-Meshnet-Push-Id"),
        ({"x-meshnet-push-id": "x" * 129}, "X-Meshnet-Push-Id"),
        ({"x-meshnet-shape": "1,2"}, "body"),
        ({"x-meshnet-shape": "-1,2"}, "X-Meshnet-Shape"),
        ({"x-meshnet-shape": ""}, "X-Meshnet-Shape"),
        ({"x-meshnet-dtype": "object"}, "X-Meshnet-Dtype"),
        ({"x-meshnet-dtype": "float32"}, "body"),
    ],
)
def test_what_is_no_frame_is_refused(changed: dict[str, str], field: str) -> None:
    """With the name of what is wrong, and not all of its value."""
    with pytest.raises(InvalidRequest) as caught:
        from_message(StreamMessage(UNANSWERED, RIGHT | changed, FRAME.data))

    assert caught.value.members["field"] == field
    assert len(str(caught.value.members["value"])) <= 200
