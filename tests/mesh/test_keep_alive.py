"""A stream whose first token takes long: the status goes ahead, and comments keep it alive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from tests.support.mesh import Mesh, body_of, fake_stages, fake_text, serve_mesh, spell
from tests.support.recorder import SeenStep
from tests.support.streams import DONE, eventually, text_of

pytestmark = pytest.mark.mesh

PROMPT = [5, 6, 7, 8]
TEXT = fake_text(PROMPT, 8)
TWO = ((0, 2), (2, 4))
COMMENT = ": keep-alive"
NEVER_S = 3600.0


class Prefill:
    """Holds the first step at the tail until it is let go."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()

    async def hold(self, step: SeenStep) -> None:
        self.begun.set()
        await self.gate.wait()


@asynccontextmanager
async def serve_held(
    start_s: float = 0.05, n_at_once: int = 16
) -> AsyncGenerator[tuple[Mesh, Prefill]]:
    """A mesh whose prefills are held, and that gives a lost shard up soon."""
    async with serve_mesh(
        fake_stages(*TWO),
        stream_start_s=start_s,
        stream_ping_s=0.05,
        recovery_timeout_s=0.2,
        max_concurrent_requests=n_at_once,
    ) as mesh:

        async def is_ready() -> bool:
            return (await mesh.client.get("/readyz")).json()["state"] == "ready"

        await eventually(is_ready, within_s=10)
        prefill = Prefill()
        mesh.shards[1].recorder.before_step = prefill.hold
        try:
            yield mesh, prefill
        finally:
            prefill.gate.set()


@asynccontextmanager
async def asking(mesh: Mesh) -> AsyncGenerator[httpx.Response]:
    """A streamed request, from the moment when its status is there."""
    body = body_of(spell(PROMPT), stream=True)
    async with mesh.client.stream("POST", "/v1/chat/completions", json=body) as response:
        yield response


async def two_comments(lines: AsyncGenerator[str]) -> None:
    """Read until the connection was kept alive twice, and nothing else was said."""
    for _ in range(2):
        assert [await anext(lines), await anext(lines)] == [COMMENT, ""]


async def holds_nothing(mesh: Mesh) -> bool:
    return await mesh.usage() == [(0, 0), (0, 0)]


def data_of(line: str) -> str:
    return line.removeprefix("data: ")


async def test_a_long_prefill_is_kept_alive() -> None:
    """200 at once, comments while it lasts, then the whole text: nothing is computed twice."""
    async with serve_held() as (mesh, prefill), asking(mesh) as response:
        assert response.status_code == 200
        assert not prefill.gate.is_set()
        lines = aiter_lines(response)
        await two_comments(lines)
        prefill.gate.set()
        events = [data_of(line) async for line in lines if line.startswith("data: ")]
        assert (text_of(events), events[-1]) == (TEXT, DONE)
        steps = [step.mode for step in mesh.shards[1].recorder.steps]
        assert steps == ["prefill"] + ["decode"] * 7
        await eventually(lambda: holds_nothing(mesh), within_s=5)


async def aiter_lines(response: httpx.Response) -> AsyncGenerator[str]:
    async for line in response.aiter_lines():
        yield line


async def test_the_official_client_waits_through_comments() -> None:
    """It sees the chunks and nothing else."""
    async with serve_held() as (mesh, prefill):
        http = DefaultAsyncHttpxClient(trust_env=False)
        async with AsyncOpenAI(
            base_url=f"{mesh.head.url}/v1", api_key="any", max_retries=0, http_client=http
        ) as client:
            stream = await client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": spell(PROMPT)}],
                max_tokens=8,
                temperature=0,
                stream=True,
            )
            await asyncio.sleep(0.2)
            prefill.gate.set()
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == TEXT


async def test_an_error_after_the_status_is_an_event() -> None:
    """A shard that is lost in a long prefill: an error event, [DONE], and no finish reason."""
    async with serve_held() as (mesh, prefill), asking(mesh) as response:
        lines = aiter_lines(response)
        await two_comments(lines)
        await mesh.shards[1].served.kill()
        prefill.gate.set()
        events = [data_of(line) async for line in lines if line.startswith("data: ")]
        error, done = events
        assert json.loads(error)["error"]["code"] == "shard_unavailable"
        assert json.loads(error)["error"]["type"] == "server_error"
        assert done == DONE


async def test_the_official_client_raises_an_error_after_the_status() -> None:
    """A stream that fails before its first chunk is an exception, never an empty answer."""
    async with serve_held() as (mesh, prefill):
        http = DefaultAsyncHttpxClient(trust_env=False)
        async with AsyncOpenAI(
            base_url=f"{mesh.head.url}/v1", api_key="any", max_retries=0, http_client=http
        ) as client:
            stream = await client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": spell(PROMPT)}],
                stream=True,
            )
            await mesh.shards[1].served.kill()
            prefill.gate.set()
            with pytest.raises(openai.APIError) as caught:
                _ = [chunk async for chunk in stream]
        assert caught.value.code == "shard_unavailable"


async def test_an_error_before_the_status_has_its_own() -> None:
    """A shard that is lost before the stream began is a plain 503 with Retry-After."""
    async with serve_held(NEVER_S) as (mesh, prefill):
        asked = asyncio.create_task(mesh.chat(spell(PROMPT), stream=True))
        await prefill.begun.wait()
        await mesh.shards[1].served.kill()
        prefill.gate.set()
        response = await asked
        assert (response.status_code, response.headers["content-type"]) == (503, "application/json")
        assert response.json()["error"]["code"] == "shard_unavailable"
        assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("start_s", [0.05, NEVER_S], ids=["after", "before"])
async def test_a_client_that_leaves_in_the_prefill_frees_every_hop(start_s: float) -> None:
    """Before the status or after it: the sessions are closed, once each, and the place is free."""
    async with serve_held(start_s, n_at_once=1) as (mesh, prefill):
        if start_s == NEVER_S:
            asked = asyncio.create_task(mesh.chat(spell(PROMPT), stream=True))
            await prefill.begun.wait()
            asked.cancel()
            await asyncio.wait({asked})
        else:
            async with asking(mesh) as response:
                await two_comments(aiter_lines(response))

        async def is_free() -> bool:
            metrics = (await mesh.client.get("/metrics")).text
            return 'meshnet_head_active{model="fake"} 0.0' in metrics

        prefill.gate.set()
        await eventually(is_free, within_s=10)
        await eventually(lambda: holds_nothing(mesh), within_s=10)
        assert [len(shard.recorder.closed) for shard in mesh.shards] == [1, 1]
        assert (await mesh.chat(spell(PROMPT))).status_code == 200


async def test_one_that_waits_for_its_turn_is_kept_alive() -> None:
    """A stream in the queue begins too, and is served in its turn."""
    async with serve_held(n_at_once=1) as (mesh, prefill):
        first = asyncio.create_task(mesh.chat(spell(PROMPT)))
        await prefill.begun.wait()
        async with asking(mesh) as response:
            lines = aiter_lines(response)
            await two_comments(lines)
            prefill.gate.set()
            events = [data_of(line) async for line in lines if line.startswith("data: ")]
        assert text_of(events) == TEXT
        assert (await first).status_code == 200
