from __future__ import annotations

import asyncio

import pytest

from benchmarks.faults.http1 import Message, read_answer, read_request

STEP = (
    b"POST /v1/forward HTTP/1.1\r\nHost: x\r\nx-meshnet-session: %s\r\n"
    b"X-Meshnet-Cache: %s\r\nX-Meshnet-Past-Len: 7\r\nX-Meshnet-Fingerprint: abc\r\n"
    b"Content-Length: 4\r\n\r\n\1\0\0\0"
)
DECODE = STEP % (b"s1", b"decode")
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3;x=y\r\nabc\r\nb\r\n0123456789\n\r\n0\r\ntrailer: 1\r\n\r\n"
)


def reader_of(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def request_of(data: bytes) -> Message:
    request = await read_request(reader_of(data))
    assert request is not None
    return request


async def test_a_step_is_read_whole_and_known_by_its_headers() -> None:
    """A decode step is recognised, and passed on byte for byte."""
    step = await request_of(DECODE)
    assert (step.is_step, step.is_decode, step.session, step.past_len) == (True, True, "s1", 7)
    assert step.raw == DECODE


async def test_requests_of_one_connection_are_read_one_after_the_other() -> None:
    """Two requests on a connection are two messages; its end after them is None."""
    reader = reader_of(DECODE + b"GET /readyz HTTP/1.1\r\n\r\n")
    messages = [await read_request(reader) for _ in range(3)]
    assert [message and message.is_step for message in messages] == [True, False, None]


@pytest.mark.parametrize("name", ["Input", "Push"])
async def test_a_step_of_direct_return_is_known_by_its_headers(name: str) -> None:
    """It takes its input from another shard, or gives one its output."""
    direct = DECODE.replace(b"Host: x", b"Host: x\r\nX-Meshnet-%s-Id: i" % name.encode())
    assert (await request_of(direct)).is_direct
    assert not (await request_of(DECODE)).is_direct


@pytest.mark.parametrize("end", [30, len(DECODE) - 1])
async def test_a_request_that_breaks_off_is_an_error(end: int) -> None:
    """An end within the headers or the body is not taken for a whole request."""
    with pytest.raises(asyncio.IncompleteReadError):
        await request_of(DECODE[:end])


async def test_a_probe_is_no_step() -> None:
    """A step of a session that a head made to see whether a shard computes belongs to none."""
    probe = await request_of(STEP % (b"probe-1", b"prefill"))
    assert (probe.is_step, probe.session) == (False, None)


async def test_a_delete_names_its_session() -> None:
    """The closing of a session belongs to it, and is no step."""
    delete = await request_of(b"DELETE /v1/sessions/s1 HTTP/1.1\r\n\r\n")
    assert (delete.is_step, delete.session) == (False, "s1")


async def test_a_header_is_changed_alone() -> None:
    """Another fingerprint changes its own line and nothing else."""
    changed = (await request_of(DECODE)).with_header("X-Meshnet-Fingerprint", "0000")
    assert changed.raw == DECODE.replace(b"abc", b"0000")


@pytest.mark.parametrize("answer", [CHUNKED, b"HTTP/1.1 204 No Content\r\n\r\n"])
async def test_an_answer_ends_where_it_ends(answer: bytes) -> None:
    """Chunked bodies with trailers, and answers without a body, are read to their end."""
    reader = reader_of(answer + b"next")
    assert (await read_answer(reader)).raw == answer
    assert await reader.read() == b"next"
