from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from meshnet.errors import ModelError
from services.cli.errors import BadOption
from services.cli.processes import ManagedProcess
from services.cli.serving import check_port_free, free_port, is_loopback, serve, share_of_cores

# Serves an app without routes, as the commands serve theirs. It has drained at once, never, or with
# an error.
SERVER = """
import asyncio
import sys
from fastapi import FastAPI
from services.cli.serving import serve

async def drain():
    print("draining", flush=True)
    if sys.argv[2] == "never":
        await asyncio.Event().wait()
    if sys.argv[2] == "fails":
        raise ZeroDivisionError

def make_app():
    app = FastAPI()
    app.state.drain = drain
    return app

serve(make_app, host="127.0.0.1", port=int(sys.argv[1]))
"""


async def drained() -> None:
    """Nothing is to be finished."""


def app_of(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """An app without routes."""
    app = FastAPI(lifespan=lifespan)
    app.state.drain = drained
    return app


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),  # noqa: S104  # only asked about
        ("::", False),
        ("192.168.0.1", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    """Only addresses that no other machine can reach are loopback."""
    assert expected == is_loopback(host)


def test_a_taken_port_is_named() -> None:
    """A port that somebody listens on is refused by number, before anything is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            BadOption, match=rf"^--port: .*127.0.0.1:{port}: Address already in use"
        ):
            check_port_free("127.0.0.1", port)


def test_an_address_of_no_machine_here_is_named() -> None:
    """An address that is not this machine's, or no address at all, is refused."""
    with pytest.raises(BadOption, match=r"192\.0\.2\.1"):
        check_port_free("192.0.2.1", 0)
    with pytest.raises(BadOption, match=r"^--host: "):
        check_port_free("no such host", 0)


def test_a_free_port_can_be_taken() -> None:
    """A free port is one that can be listened on."""
    check_port_free("127.0.0.1", free_port())


def test_cores_are_shared() -> None:
    """However many processes, each gets a thread."""
    assert share_of_cores(10_000) == 1
    assert share_of_cores(1) >= 1


def test_why_an_app_cannot_start_is_not_lost() -> None:
    """A MeshError that ends the start comes out of `serve`, instead of a traceback."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        raise ModelError("no such model")
        yield

    with pytest.raises(ModelError, match="no such model"):
        serve(lambda: app_of(lifespan), host="127.0.0.1", port=free_port())


def test_a_fault_at_start_ends_the_process() -> None:
    """An error that nobody foresaw is logged by uvicorn and ends with its exit code."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        raise ZeroDivisionError
        yield

    with pytest.raises(SystemExit) as raised:
        serve(lambda: app_of(lifespan), host="127.0.0.1", port=free_port())
    assert raised.value.code == 3


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)]
)
async def test_a_signal_ends_in_order(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Ctrl-C is no error; SIGTERM ends the process as whoever sent it expects."""
    async with served(tmp_path, drain="at once") as (process, _):
        process.send(number)
        assert code == await process.wait()
        assert process.last_log_lines() == ["draining"]


async def test_while_it_drains_it_answers(tmp_path: Path) -> None:
    """After the signal callers still learn what is the matter; a second signal stops at once."""
    async with served(tmp_path, drain="never") as (process, url):
        process.send(signal.SIGINT)
        await _until_it_drains(process)
        await _until_it_answers(url)
        process.send(signal.SIGINT)
        assert await process.wait() == 0


async def test_a_drain_that_fails_ends_too(tmp_path: Path) -> None:
    """Whatever finishing fails with, the process stops."""
    async with served(tmp_path, drain="fails") as (process, _):
        process.send(signal.SIGINT)
        assert await process.wait() == 0


@asynccontextmanager
async def served(tmp_path: Path, *, drain: str) -> AsyncGenerator[tuple[ManagedProcess, str]]:
    """A process that serves, and where."""
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port), drain]
    process = ManagedProcess("server", command, log_path=tmp_path / "log")
    await process.start()
    try:
        await _until_it_answers(f"http://127.0.0.1:{port}/")
        yield process, f"http://127.0.0.1:{port}/"
    finally:
        await process.stop()


async def _until_it_drains(process: ManagedProcess) -> None:
    async with asyncio.timeout(20):
        while process.last_log_lines() != ["draining"]:  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.05)


async def _until_it_answers(url: str) -> None:
    async with asyncio.timeout(20), httpx.AsyncClient(trust_env=False) as client:
        while True:
            try:
                await client.get(url)
            except httpx.TransportError:
                await asyncio.sleep(0.05)
            else:
                return
