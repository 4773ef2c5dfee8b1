"""The benchmark's proxy keeps back, and does nothing else."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from urllib.parse import urlsplit

import pytest

from benchmarks.bench.delay import Delay, delayed
from services.cli.serving import free_port

pytestmark = pytest.mark.mesh

ONE_WAY_S = 0.05


class Capitals:
    """Answers in capitals.

    Attributes:
        left: Set once a caller has gone.
    """

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def __call__(self, reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1000):
                writer.write(data.upper())
        self.left.set()
        writer.close()


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[tuple[StreamReader, StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def through(
    delay: Delay, capitals: Capitals
) -> AsyncGenerator[tuple[StreamReader, StreamWriter]]:
    """A connection through the proxy."""
    async with await asyncio.start_server(capitals, "127.0.0.1", 0) as server:
        port: int = server.sockets[0].getsockname()[1]
        async with delayed(delay, port) as url, connected(url) as (reader, writer):
            yield reader, writer
        await capitals.left.wait()


async def test_everything_comes_in_order() -> None:
    """What was written first comes first, also what was written before there was anybody."""
    async with through(Delay(), Capitals()) as (reader, writer):
        parts = [b"%d;" % i for i in range(200)]
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)

        assert await reader.readexactly(sum(map(len, parts))) == b"".join(parts)


async def test_each_way_takes_the_delay() -> None:
    """A question and its answer take it twice, however many are under way."""
    delay = Delay()
    async with through(delay, Capitals()) as (reader, writer):
        writer.write(b"x")
        await reader.readexactly(1)
        delay.one_way_s = ONE_WAY_S
        asked_at = perf_counter()
        for _ in range(20):
            writer.write(b"x")
            await asyncio.sleep(0.001)

        assert await reader.readexactly(20) == b"X" * 20
        assert 2 * ONE_WAY_S <= perf_counter() - asked_at < 20 * ONE_WAY_S


async def test_an_end_passes() -> None:
    """Whoever is behind it hears that the other side has gone."""
    capitals = Capitals()
    async with through(Delay(), capitals) as (_, writer):
        writer.close()
        await asyncio.wait_for(capitals.left.wait(), 10)


async def test_nobody_behind_it_is_an_end() -> None:
    """It does not hang."""
    async with delayed(Delay(), free_port()) as url, connected(url) as (reader, _):
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
