"""`meshnet up` as its users meet it: it answers, survives its shards, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from services.cli.serving import free_port
from tests.e2e.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = "Count from one to thirty in words."
N_TOKENS = 60


@dataclass
class Up:
    """A running `meshnet up`."""

    process: asyncio.subprocess.Process
    url: str

    def children(self) -> list[int]:
        """The process ids of its children."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def shard(self, index: int) -> int:
        """The process id of a shard."""
        shards = [pid for pid in self.children() if "shard" in _command_line(pid)]
        return sorted(shards, key=_command_line)[index]


@asynccontextmanager
async def meshnet_up(model: Path) -> AsyncGenerator[Up]:
    """Start it, and wait until it says that it is ready; at the end make sure that it is gone."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "up", "--model", str(model)),
        *("--port", str(free_port())),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        while True:
            line = (await process.stdout.readline()).decode()
            if not line:
                raise AssertionError(f"up ended with {await process.wait()}")
            if found := re.search(r"Ready: (http://\S+)/v1", line):
                break
        yield Up(process, found[1])
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 60)


async def test_ctrl_c_stops_everything_and_is_no_error(smollm2: Path) -> None:
    """A Ctrl-C ends `meshnet up` with exit code 0, and its children are gone with it."""
    async with meshnet_up(smollm2) as up:
        children = up.children()
        up.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(up.process.wait(), 60) == 0
    assert len(children) == 3
    assert [pid for pid in children if _is_alive(pid)] == []


async def test_children_do_not_outlive_a_killed_parent(smollm2: Path) -> None:
    """After a kill -9 of `meshnet up` its shards and head end by themselves."""
    async with meshnet_up(smollm2) as up:
        children = up.children()
        up.process.kill()
        await up.process.wait()
        for _ in range(300):
            if not any(map(_is_alive, children)):
                break
            await asyncio.sleep(0.1)
    assert [pid for pid in children if _is_alive(pid)] == []


@pytest.mark.parametrize("index", [0, 1])
async def test_a_stream_survives_the_death_of_a_shard(smollm2: Path, index: int) -> None:
    """A shard killed in mid-stream is started again, and the stream goes on to the same text."""
    async with meshnet_up(smollm2) as up:
        undisturbed = [piece async for piece in _stream(up)]
        pieces: list[str] = []
        async for piece in _stream(up):
            pieces.append(piece)
            if len(pieces) == 10:
                os.kill(up.shard(index), signal.SIGKILL)
    assert "".join(pieces) == "".join(undisturbed)


async def _stream(up: Up) -> AsyncGenerator[str]:
    """The pieces of a greedy answer; an error event or a missing [DONE] fails."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": N_TOKENS,
        "stream": True,
    }
    async with (
        httpx.AsyncClient(base_url=up.url, trust_env=False, timeout=120) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield event["choices"][0]["delta"].get("content", "")
    raise AssertionError("the stream ended without [DONE]")


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
