from __future__ import annotations

import json
from pathlib import Path
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import InvalidRequest
from meshnet.wire import headers
from meshnet.wire.headers import StepHeaders
from meshnet.wire.stream_messages import (
    MAX_BODY_BYTES,
    MAX_HEADERS_BYTES,
    MAX_IN_FLIGHT,
    MAX_MESSAGE_BYTES,
    PATH,
    SUBPROTOCOL,
    StreamMessage,
    decode,
    encode,
)

texts = st.text(st.characters(codec="utf-8"), max_size=20)
messages = st.builds(
    StreamMessage,
    number=st.integers(0, 2**64 - 1),
    headers=st.dictionaries(texts.filter(lambda name: name == name.lower()), texts),
    body=st.binary(max_size=64),
    status=st.integers(0, 2**32 - 1),
)


def raw(block: bytes, body: bytes = b"", claimed: int | None = None) -> bytes:
    """A message with any block of headers, and any claim of its length."""
    return pack("<QII", 1, 0, len(block) if claimed is None else claimed) + block + body


PAGE = (Path(__file__).parents[3] / "docs" / "wire-protocol.md").read_text()


def test_the_page_has_the_limits_and_the_names() -> None:
    """docs/wire-protocol.md says what is compared here."""
    section = PAGE.partition("### Steps over a stream\n")[2].partition("\n### ")[0]
    assert f"`GET {PATH}`" in section
    assert f"`Sec-WebSocket-Protocol: {SUBPROTOCOL}`" in section
    assert f"at most {MAX_HEADERS_BYTES} |" in section
    assert f"at most {MAX_BODY_BYTES} |" in section
    assert f"at most {MAX_IN_FLIGHT} steps" in section


def test_the_pages_example_is_a_message() -> None:
    """The bytes that the page names make the step that it names."""
    begin = bytes.fromhex("0700000000000000 00000000 36000000")
    block = b'{"X-Meshnet-Shape": "1,3", "X-Meshnet-Dtype": "int32"}'
    for part in (block.decode(), "`07 00 00 00 00 00 00 00`, `00 00 00 00`, `36 00 00 00`"):
        assert part in PAGE.replace("\n", " ")
    assert decode(begin + block + bytes(12)) == StreamMessage(
        7, {"x-meshnet-shape": "1,3", "x-meshnet-dtype": "int32"}, bytes(12)
    )


@given(messages)
def test_every_message_survives_the_stream(message: StreamMessage) -> None:
    """What is sent is what comes out."""
    assert decode(encode(message)) == message


def test_a_message_is_three_numbers_a_json_object_and_the_body() -> None:
    """The layout is that of docs/wire-protocol.md."""
    data = pack("<QII", 7, 200, 9) + b'{"a":"b"}' + b"body"

    assert encode(StreamMessage(7, {"a": "b"}, b"body", 200)) == data


def test_names_are_read_in_lower_case() -> None:
    """A header's name is found however it was written, the last one of two as in a request."""
    assert decode(raw(b'{"X-A": "1", "x-a": "2"}')).headers == {"x-a": "2"}


def test_a_steps_headers_are_those_of_a_post() -> None:
    """They are rendered and parsed by the same code, and come out the same."""
    step = StepHeaders(session="s", cache="decode", past_len=3, shape=(1, 1), dtype="int32")
    message = StreamMessage(1, headers.render(step), b"")

    assert headers.parse(decode(encode(message)).headers) == step


@given(messages, st.data())
def test_a_message_cut_short_is_malformed_or_has_a_shorter_body(
    message: StreamMessage, data: st.DataObject
) -> None:
    """No length of a cut message is taken for headers that it does not have."""
    whole = encode(message)
    part = whole[: data.draw(st.integers(0, len(whole)))]
    if len(part) >= len(whole) - len(message.body):
        assert decode(part).headers == message.headers
    else:
        with pytest.raises(InvalidRequest, match="malformed"):
            decode(part)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    """Nothing but InvalidRequest is raised."""
    try:
        result: object = decode(data)
    except InvalidRequest as error:
        result = error

    assert isinstance(result, StreamMessage | InvalidRequest)


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"a": 1}',
        b'{"a": null}',
        b'{"a": ["b"]}',
        b'{"a": "\xff"}',
        b"[" * 10_000,
        b'{"a": "b"} ,',
    ],
)
def test_headers_that_are_no_object_of_strings_are_malformed(block: bytes) -> None:
    """They are text by name, as in a request."""
    with pytest.raises(InvalidRequest, match="no JSON object of strings") as caught:
        decode(raw(block))

    assert caught.value.members == {"field": "message"}


def test_headers_that_claim_too_much_are_malformed() -> None:
    """They may be neither longer than the message nor than headers can be."""
    longest = json.dumps({"a": "b" * (MAX_HEADERS_BYTES - 9)}).encode()
    assert len(decode(raw(longest)).headers["a"]) == MAX_HEADERS_BYTES - 9

    for data in (raw(longest + b" "), raw(b"{}", claimed=3), raw(b"{}", claimed=2**32 - 1)):
        with pytest.raises(InvalidRequest, match="claim"):
            decode(data)


def test_a_message_that_is_too_long_is_malformed() -> None:
    """The longest headers and the longest body make the longest message."""
    longest = raw(b"{}".ljust(MAX_HEADERS_BYTES), bytes(MAX_BODY_BYTES))
    assert len(longest) == MAX_MESSAGE_BYTES
    assert len(decode(longest).body) == MAX_BODY_BYTES

    with pytest.raises(InvalidRequest, match=f"{MAX_MESSAGE_BYTES + 1} bytes"):
        decode(longest + b"x")
