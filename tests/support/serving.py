"""Real uvicorn servers in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp


class _Server(uvicorn.Server):
    """Leaves the process's signals alone, and sees within 10 ms, not 100, that it is to exit."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # noqa: ASYNC110  # `should_exit` is a flag of uvicorn's
            await asyncio.sleep(0.01)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@dataclass
class Served:
    """A running app."""

    url: str
    port: int
    server: uvicorn.Server
    _task: asyncio.Task[None]

    async def stop(self) -> None:
        """Stop, and close what connections there are."""
        self.server.should_exit = True
        await self._task

    async def kill(self) -> None:
        """Vanish: listening socket and connections are gone, nothing is answered any more."""
        for listening in self.server.servers:
            listening.close()
        for connection in list(self.server.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        self.server.force_exit = True
        await self.stop()
        # uvicorn skips this when forced; the process is to be gone, not the test's threads to stay.
        await self.server.lifespan.shutdown()


@asynccontextmanager
async def serve(app: ASGIApp, port: int = 0) -> AsyncGenerator[Served]:
    """Serve `app` on 127.0.0.1, on an ephemeral port unless one is given."""
    # The protocol is named since asyncio sets TCP_NODELAY only where it is: without, each answer
    # waits 40 ms for the client's delayed acknowledgement of its headers.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_keep_alive=75, lifespan="on"
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if task.done():
                await task
                raise RuntimeError("the app did not start")
            await asyncio.sleep(0.005)
        port = listener.getsockname()[1]
        served = Served(f"http://127.0.0.1:{port}", port, server, task)
        yield served
    finally:
        server.should_exit = True
        await task
        listener.close()
