"""Runs one of the two apps with uvicorn in this process, until a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ipaddress import ip_address
from time import sleep
from types import FrameType
from typing import Annotated, Final, cast

import typer
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshnet.errors import MeshError
from meshnet.wire import stream_messages
from services.cli.errors import BadOption

GRACE_S: Final = 5
"""How long answers may go on when the app has nothing more to finish."""
_STDIN: Final = 0
_KEEP_ALIVE_S: Final = 75
"""Longer than any client's of ours, so that none sends into a connection being closed."""

StopWithStdin = Annotated[
    bool,
    typer.Option("--stop-with-stdin", hidden=True, help="Stop when stdin ends: with the parent."),
]


def serve(make_app: Callable[[], FastAPI], *, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal stops at once.

    The app's `state.drain`, which its start sets, refuses what is new, finishes what it has, and
    returns when that is done or its own limit is over. Meanwhile everything is answered, so that
    callers learn why.

    Raises:
        BadOption: The port is taken.
        MeshError: The app could not start, and said why.
    """
    check_port_free(host, port)
    made = make_app()
    app = _StartupWatch(made)
    server = _DrainingServer(
        lambda: made.state.drain(),  # made when the app starts
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_config=None,  # create_app has set up the logs
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            ws_max_size=stream_messages.MAX_MESSAGE_BYTES,
        ),
    )
    try:
        server.run()
    except KeyboardInterrupt:  # uvicorn has stopped in order, and raises the signal once more
        return
    except SystemExit:
        if app.error is not None:
            raise app.error from None
        raise


class _DrainingServer(uvicorn.Server):
    """Goes on serving after the first signal until the app is drained."""

    def __init__(self, drain: Callable[[], Awaitable[None]], config: uvicorn.Config) -> None:
        super().__init__(config)
        self._drain = drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._signalled = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain first; stop at once if told so twice, or if nothing is served yet."""
        if self._signalled or not self.started or self._loop is None:
            super().handle_exit(sig, frame)
            return
        self._signalled = True
        self._loop.call_soon_threadsafe(self._start_draining, sig)

    def _start_draining(self, sig: int) -> None:
        self._draining = asyncio.create_task(self._drain_and_exit(sig))

    async def _drain_and_exit(self, sig: int) -> None:
        try:
            await self._drain()
        finally:
            super().handle_exit(sig, None)


class _StartupWatch:
    """Keeps the MeshError that ends an app's start, which uvicorn would log as a traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self.error: MeshError | None = None
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        held: list[Message] = []

        async def hold_failure(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed":
                held.append(message)  # its text is the traceback
            else:
                await send(message)

        try:
            await self._app(scope, receive, hold_failure)
        except MeshError as error:
            self.error = error
            await send({"type": "lifespan.startup.failed", "message": ""})
        except BaseException:
            for message in held:
                await send(message)
            raise


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine only."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ip_address(host.strip("[]")).is_loopback
    return False


def check_port_free(host: str, port: int) -> None:
    """Find out before a model is loaded.

    Raises:
        BadOption: Somebody listens there already, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            where = "--host" if isinstance(error, socket.gaierror) else "--port"
            reason = f"cannot listen on {host}:{port}: {error.strerror}"
            raise BadOption(where, reason) from error


def free_port() -> int:
    """A port of the loopback interface that is free now; another process may take it first."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return cast("int", probe.getsockname()[1])


def share_of_cores(n_processes: int) -> int:
    """Threads for each of so many processes: more would wait for each other, spinning."""
    return max(1, (os.cpu_count() or 1) // n_processes)


def stop_with_stdin() -> None:
    """Stop this process when stdin ends: when the parent is gone, however it ended."""
    threading.Thread(target=_await_end_of_stdin, name="stdin", daemon=True).start()


def _await_end_of_stdin() -> None:
    # Not sys.stdin: a thread inside its buffer at the interpreter's end is a fatal error.
    with suppress(OSError):
        while os.read(_STDIN, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(2 * GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)  # nobody is left who could
