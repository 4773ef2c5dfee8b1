"""Over shards that are a few lines: WebSocket servers on this machine."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.http11 import Response

from meshnet.shard import neighbours as module
from meshnet.shard.neighbours import Neighbours
from meshnet.transport.hop_stream import StreamLimits
from meshnet.wire.stream_messages import StreamMessage, decode
from tests.support.streams import eventually
from tests.unit.transport.test_hop_stream import Shard, be_silent, served

KEY = {"authorization": "Bearer k"}
SOON = StreamLimits(first_pause_s=0.001)


def message(body: bytes = b"x") -> StreamMessage:
    return StreamMessage(0, {"x": "y"}, body)


async def pushed(neighbours: Neighbours, to: Shard, boot_id: str = "b", body: bytes = b"x") -> None:
    """Push as soon as there is a stream."""

    async def is_pushed() -> bool:
        return await neighbours.push(to.endpoint, boot_id, message(body))

    await eventually(is_pushed, within_s=20)


async def test_a_message_goes_over_a_stream_that_is_opened_meanwhile() -> None:
    """The first one does not wait for it, and is not sent."""
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def keep(connection: ServerConnection) -> None:
        while True:
            got.put_nowait(decode(await connection.recv(decode=False)).body)

    async with served(keep) as shard, Neighbours(KEY, SOON) as neighbours:
        assert not await neighbours.push(shard.endpoint, "b", message(b"lost"))
        for body in (b"1", b"2"):
            await pushed(neighbours, shard, body=body)
        async with asyncio.timeout(20):
            arrived = [await got.get(), await got.get()]
        (asked,) = shard.asked

    assert arrived == [b"1", b"2"]
    assert asked.headers["authorization"] == "Bearer k"
    assert asked.headers["x-meshnet-boot"] == "b"


async def test_another_life_of_a_shard_has_another_stream() -> None:
    """The stream to the old one is closed."""
    ended = asyncio.Event()

    async def until_closed(connection: ServerConnection) -> None:
        await connection.wait_closed()
        ended.set()

    async with served(until_closed) as shard, Neighbours(KEY, SOON) as neighbours:
        await pushed(neighbours, shard, "first")
        await pushed(neighbours, shard, "second")
        async with asyncio.timeout(20):
            await ended.wait()

        assert [asked.headers["x-meshnet-boot"] for asked in shard.asked] == ["first", "second"]


async def test_a_shard_that_takes_no_stream_is_sent_nothing() -> None:
    """And is not asked with every message."""
    async with served(be_silent) as shard, Neighbours(KEY, StreamLimits()) as neighbours:
        shard.refusal = Response(HTTPStatus.BAD_REQUEST, "no", Headers())
        for _ in range(50):
            assert not await neighbours.push(shard.endpoint, "b", message())
            await asyncio.sleep(0.001)

        assert len(shard.asked) == 1


async def test_the_one_that_was_not_used_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many streams as there may be."""
    monkeypatch.setattr(module, "MAX_NEIGHBOURS", 2)
    async with (
        served(be_silent) as a,
        served(be_silent) as b,
        served(be_silent) as c,
        Neighbours(KEY, SOON) as neighbours,
    ):
        for shard in (a, b, a, c, a):
            await pushed(neighbours, shard)
        await pushed(neighbours, b)

        assert [len(shard.asked) for shard in (a, b, c)] == [1, 2, 1]


async def test_streams_are_closed_with_the_block() -> None:
    """The shards see it."""
    ended = asyncio.Event()

    async def until_closed(connection: ServerConnection) -> None:
        await connection.wait_closed()
        ended.set()

    async with served(until_closed) as shard:
        async with Neighbours(KEY, SOON) as neighbours:
            await pushed(neighbours, shard)
        async with asyncio.timeout(20):
            await ended.wait()
