"""A TCP proxy that keeps everything back for a while, each way, and is otherwise not there.

It knows no protocol: bytes come out as they went in, in order, so many seconds later.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import cast


class Delay:
    """How long bytes are kept back, one way; may be changed while there is nothing under way.

    Attributes:
        one_way_s: Seconds.
    """

    def __init__(self) -> None:
        self.one_way_s = 0.0


class _Side(asyncio.Protocol):
    """One of a proxy's two connections; what it receives goes to the other one.

    asyncio sets TCP_NODELAY on both.
    """

    def __init__(self, delay: Delay, sides: set[_Side]) -> None:
        self._delay = delay
        self._sides = sides
        self._kept: deque[bytes] = deque()
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._sides.add(self)

    def data_received(self, data: bytes) -> None:
        self._keep(data)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._sides.discard(self)
        self._keep(b"")

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self.loop.call_later(self._delay.one_way_s, self._pass_on)

    def _pass_on(self) -> None:
        """Give on what came first; the end is empty."""
        data = self._kept.popleft()
        if self.other is None or self.other.transport is None:
            return
        if data:
            self.other.transport.write(data)
        else:
            self.other.transport.close()


class _Front(_Side):
    """The side of who connects: it is not read before there is somewhere to pass it on."""

    def __init__(self, delay: Delay, sides: set[_Side], port: int) -> None:
        super().__init__(delay, sides)
        self._back = _Side(delay, sides)
        self._back.other, self.other = self, self._back
        self._port = port
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        front = cast("asyncio.Transport", transport)
        front.pause_reading()
        self._connecting = asyncio.create_task(self._connect(front))

    async def _connect(self, front: asyncio.Transport) -> None:
        try:
            await self.loop.create_connection(lambda: self._back, "127.0.0.1", self._port)
        except OSError:
            front.abort()
        else:
            front.resume_reading()


@asynccontextmanager
async def delayed(delay: Delay, port: int) -> AsyncGenerator[str]:
    """The URL of a proxy to a port of this machine; its connections end with it."""
    sides: set[_Side] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Front(delay, sides, port), "127.0.0.1", 0)
    async with server:
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            for side in list(sides):
                if side.transport is not None:
                    side.transport.abort()
            await asyncio.sleep(0)  # which takes effect in the loop's next turn
