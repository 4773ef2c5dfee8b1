"""A process that is to end finishes what it has, takes nothing new, and says so meanwhile."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from meshnet.model.fake_stage import next_token
from services.cli.processes import ManagedProcess
from services.cli.serving import free_port
from tests.support.http import plain_client
from tests.support.mesh import (
    CLUSTER_KEY,
    VOCAB_SIZE,
    Mesh,
    Shard,
    body_of,
    fake_stages,
    fake_text,
    get_shard,
    serve_mesh,
    serve_shard,
    shard_settings,
    spell,
)
from tests.support.recorder import SeenStep
from tests.support.stages import slow_stages
from tests.support.steps import ShardClient, shard_client
from tests.support.streams import DONE, eventually, open_stream, read_stream, text_of

pytestmark = pytest.mark.mesh

PROMPT = [5, 6, 7, 8]
N_TOKENS = 30
TEXT = fake_text(PROMPT, N_TOKENS)
TWO = ((0, 2), (2, 4))
NEVER_S = 3600.0


async def _is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).json()["state"] == "ready"


async def _drain_head(mesh: Mesh) -> None:
    await cast("FastAPI", mesh.head.server.config.app).state.drain()


async def _drain_shard(shard: Shard) -> None:
    await cast("FastAPI", shard.recorder.app).state.drain()


async def _state(url: str) -> tuple[int, str]:
    async with plain_client(url) as client:
        response = await client.get("/readyz")
    return response.status_code, response.json()["state"]


async def _begun(drain: asyncio.Task[None], url: str) -> None:
    """Wait until the process says that it drains."""

    async def is_draining() -> bool:
        return await _state(url) == (503, "draining")

    await eventually(is_draining, within_s=10)
    assert not drain.done()


# The head.


async def test_draining_head_finishes_its_streams_and_is_done_then() -> None:
    """A stream that runs when the drain begins gets its whole text, and the drain waits for it."""
    async with serve_mesh(slow_stages(*TWO, delay_s=0.01)) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        events: list[str] = []
        drain: asyncio.Task[None] | None = None
        async with open_stream(mesh.client, spell(PROMPT), max_tokens=N_TOKENS) as stream:
            async for event in stream:
                events.append(event)
                if drain is None:
                    drain = asyncio.create_task(_drain_head(mesh))
                    await _begun(drain, mesh.head.url)
        assert text_of(events) == TEXT
        assert events[-1] == DONE
        assert drain is not None
        await asyncio.wait_for(drain, 5)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_draining_head_refuses_what_is_new(*, stream: bool) -> None:
    """A new request is a plain 503 `server_overloaded` with Retry-After, and touches no hop."""
    async with serve_mesh(fake_stages(*TWO)) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        await _drain_head(mesh)
        refused = await mesh.chat(spell(PROMPT), stream=stream)
        assert (refused.status_code, refused.headers["content-type"]) == (503, "application/json")
        assert int(refused.headers["retry-after"]) > 0
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "server_overloaded")
        assert "takes no new one" in error["message"]
        assert mesh.shards[0].recorder.steps == []


async def test_draining_head_still_answers_everything_else() -> None:
    """Who asks a draining head how it is learns it; bad requests are still told what is wrong."""
    async with serve_mesh(fake_stages(*TWO)) as mesh:
        await _drain_head(mesh)
        for path in ("/livez", "/v1/models", "/v1/cluster", "/metrics"):
            assert (await mesh.client.get(path)).status_code == 200
        assert (await mesh.client.post("/v1/chat/completions", json={})).status_code == 400
        assert await _state(mesh.head.url) == (503, "draining")


async def test_draining_head_waits_for_a_bounded_time() -> None:
    """A stream that does not come to its end holds the drain for its limit and no longer."""
    async with serve_mesh(slow_stages(*TWO, delay_s=0.02), drain_timeout_s=0.3) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        async with open_stream(mesh.client, spell(PROMPT), max_tokens=400) as stream:
            await anext(stream)
            started_at = perf_counter()
            await _drain_head(mesh)
            assert perf_counter() - started_at < 0.3 + 5
            assert (await anext(stream)) != DONE


# A shard.


@asynccontextmanager
async def _one_shard(**settings: object) -> AsyncGenerator[tuple[Shard, ShardClient]]:
    (stage,) = fake_stages((0, 4))
    async with (
        serve_shard(stage, settings=shard_settings(**settings)) as shard,
        shard_client(shard.url) as hop,
    ):
        yield shard, hop


def _guarded(step: str) -> dict[str, str | bytes | None]:
    return {"X-Meshnet-Step": step, "X-Meshnet-Epoch": "1"}


def _token(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["token_id"]


@asynccontextmanager
async def _draining(shard: Shard) -> AsyncGenerator[asyncio.Task[None]]:
    drain = asyncio.create_task(_drain_shard(shard))
    await _begun(drain, shard.url)
    yield drain
    await asyncio.wait_for(drain, 5)


async def test_draining_shard_goes_on_with_its_sessions_until_they_are_closed() -> None:
    """What is held is decoded on; the drain is over when the last session is closed."""
    async with _one_shard() as (shard, hop):
        await hop.step("s", "prefill", 0, [5, 6])
        async with _draining(shard) as drain:
            for past_len in (2, 3, 4):
                assert _token(await hop.step("s", "decode", past_len, [1])) >= 0
            assert not drain.done()
            await hop.close("s")


async def test_draining_shard_goes_on_with_a_prompt_that_it_has_begun() -> None:
    """The next chunk of a prompt is no new session."""
    async with _one_shard() as (shard, hop):
        await hop.step("s", "prefill", 0, [5, 6])
        async with _draining(shard):
            chunk = await hop.step("s", "prefill", 2, [7])
            assert _token(chunk) == next_token([5, 6, 7], VOCAB_SIZE)
            await hop.close("s")


async def test_draining_shard_repeats_the_answer_that_began_a_session() -> None:
    """A first step whose answer was lost is no new session either."""
    async with _one_shard() as (shard, hop):
        await hop.step("s", "prefill", 0, [5, 6], changed=_guarded("a"))
        async with _draining(shard):
            again = await hop.step("s", "prefill", 0, [5, 6], changed=_guarded("a"))
            await hop.close("s")
        assert _token(again) == next_token([5, 6], VOCAB_SIZE)


async def test_draining_shard_begins_no_session() -> None:
    """A new session is 503 `draining`, retryable; `/v1/shard` and `/readyz` say why."""
    async with _one_shard() as (shard, hop):
        await hop.step("s", "prefill", 0, [5, 6])
        async with _draining(shard):
            refused = await hop.step("t", "prefill", 0, [5, 6], changed=_guarded("a"))
            problem = refused.json()
            assert (refused.status_code, problem["code"]) == (503, "draining")
            assert problem["retryable"] is True
            info = cast("dict[str, Any]", await get_shard(shard.url))
            assert (info["draining"], info["cache"]["sessions"]) == (True, 1)
            await hop.close("s")


async def test_draining_shard_waits_for_a_bounded_time() -> None:
    """A session that nobody closes holds the drain for its limit and no longer."""
    async with _one_shard(drain_timeout_s=0.3) as (shard, hop):
        await hop.step("s", "prefill", 0, [5, 6])
        started_at = perf_counter()
        await _drain_shard(shard)
        assert perf_counter() - started_at < 0.3 + 5


# A shard of a mesh.


async def test_stream_ends_where_it_began_while_its_shard_drains() -> None:
    """A draining shard keeps its stream to the end, though a standby is there; then it is done."""
    stages = slow_stages(*TWO, TWO[0], delay_s=0.01)
    async with serve_mesh(stages, route_poll_s=0.1) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        primary, _, standby = mesh.shards
        events: list[str] = []
        drain: asyncio.Task[None] | None = None
        async with open_stream(mesh.client, spell(PROMPT), max_tokens=N_TOKENS) as stream:
            async for event in stream:
                events.append(event)
                if drain is None:
                    drain = asyncio.create_task(_drain_shard(primary))
                    await _begun(drain, primary.url)
        assert text_of(events) == TEXT
        assert standby.recorder.steps == []
        assert drain is not None
        await asyncio.wait_for(drain, 5)


@pytest.mark.parametrize("route_poll_s", [0.05, NEVER_S], ids=["noticed", "unnoticed"])
async def test_new_request_goes_to_the_other_shard_of_the_span(*, route_poll_s: float) -> None:
    """While one shard of a span drains requests begin at another, noticed before or not."""
    stages = fake_stages(*TWO, TWO[0])
    async with serve_mesh(stages, route_poll_s=route_poll_s) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        primary, _, standby = mesh.shards
        async with shard_client(primary.url) as hop:
            await hop.step("kept", "prefill", 0, [5, 6])
            async with _draining(primary):
                if route_poll_s < 1:
                    await asyncio.sleep(0.5)
                primary.recorder.steps.clear()
                events = await read_stream(mesh.client, spell(PROMPT), max_tokens=8)
                assert text_of(events) == fake_text(PROMPT, 8)
                assert len(standby.recorder.steps) == 8
                assert len(primary.recorder.steps) == (0 if route_poll_s < 1 else 1)
                assert (await get_shard(primary.url))["cache"]["sessions"] == 1
                await hop.close("kept")


async def test_request_waits_for_the_next_life_of_the_only_shard_that_drains() -> None:
    """With no other shard a request that came too early is served by the one started after it."""
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(
            serve_mesh(fake_stages(*TWO), route_poll_s=NEVER_S, recovery_timeout_s=60)
        )
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        tail = mesh.shards[1]
        async with shard_client(tail.url, start_layer=2) as hop:
            await hop.step("kept", "prefill", 0, [5, 6])
            async with _draining(tail):
                asked = asyncio.create_task(mesh.chat(spell(PROMPT), max_tokens=8))
                await asyncio.sleep(0.2)
                assert not asked.done()
                await hop.close("kept")
        await tail.served.stop()
        (stage,) = fake_stages(TWO[1])
        await stack.enter_async_context(serve_shard(stage, port=tail.served.port))
        answer = await asked
        assert answer.json()["choices"][0]["message"]["content"] == fake_text(PROMPT, 8)


async def test_standby_that_drains_degrades_the_head() -> None:
    """A shard that takes nothing new is missed: `degraded`, named, and requests are served."""
    async with serve_mesh(fake_stages(*TWO, TWO[0]), route_poll_s=0.05) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        await _drain_shard(mesh.shards[2])

        async def is_degraded() -> bool:
            return not await _is_ready(mesh.client)

        await eventually(is_degraded, within_s=10)
        response = await mesh.client.get("/readyz")
        assert (response.status_code, response.json()["state"]) == (200, "degraded")
        assert mesh.shards[2].url in response.json()["reason"]


async def test_stream_whose_shard_dies_goes_past_the_one_that_drains() -> None:
    """A draining shard takes nothing over: of two standbys the other one does."""
    stages = fake_stages(*TWO, TWO[0], TWO[0])
    async with serve_mesh(stages, route_poll_s=NEVER_S) as mesh:
        await eventually(lambda: _is_ready(mesh.client), within_s=10)
        primary, tail, drains, standby = mesh.shards
        await _drain_shard(drains)

        async def kill(step: SeenStep) -> None:
            if step.past_len == 6:
                await primary.served.kill()

        tail.recorder.before_step = kill
        events = await read_stream(mesh.client, spell(PROMPT), max_tokens=8)
        assert text_of(events) == fake_text(PROMPT, 8)
        assert standby.recorder.steps != []
        assert await _state(drains.url) == (503, "draining")
        assert (await get_shard(drains.url))["cache"]["sessions"] == 0


# Real processes.


_HEAD = """
import sys
from services.cli.serving import serve
from services.head.app import create_app
from services.head.settings import HeadSettings, HopSetting
from tests.support.mesh import number_tokenizer

port, key, *urls = sys.argv[1:]
route = tuple(HopSetting(endpoint=url) for url in urls)
settings = HeadSettings(model="fake", route=route, cluster_key=key, route_poll_s=0.1)
serve(lambda: create_app(settings, tokenizer=number_tokenizer()), host="127.0.0.1", port=int(port))
"""
_SHARD = """
import sys
from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.topology import LayerSpan
from services.cli.serving import serve
from services.shard.app import create_app
from services.shard.settings import ShardSettings

port, key = sys.argv[1:]
settings = ShardSettings(model="fake", layers="0-4", cluster_key=key)
stage = FakeStage(fake_facts(LayerSpan(0, 4)))
serve(lambda: create_app(settings, stage=stage), host="127.0.0.1", port=int(port))
"""
_ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def _process(
    tmp_path: Path, script: str, *arguments: str
) -> AsyncGenerator[tuple[ManagedProcess, str]]:
    """A head or shard in a process of its own that listens; and its URL."""
    port = free_port()
    process = ManagedProcess(
        "child",
        [sys.executable, "-c", script, str(port), CLUSTER_KEY, *arguments],
        env={"PYTHONPATH": str(_ROOT)},
        log_path=tmp_path / "child.log",
    )
    await process.start()
    url = f"http://127.0.0.1:{port}"
    try:
        async with plain_client(url) as client:

            async def is_ready() -> bool:
                assert process.returncode is None, (tmp_path / "child.log").read_text()
                try:
                    return (await client.get("/readyz")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(is_ready, within_s=60)
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def _head_process(tmp_path: Path) -> AsyncGenerator[tuple[ManagedProcess, str]]:
    """A head over two slow shards."""
    async with AsyncExitStack() as stack:
        shards = [
            await stack.enter_async_context(serve_shard(stage))
            for stage in slow_stages(*TWO, delay_s=0.02)
        ]
        urls = [shard.url for shard in shards]
        yield await stack.enter_async_context(_process(tmp_path, _HEAD, *urls))


async def test_signal_lets_a_stream_finish_before_the_process_ends(tmp_path: Path) -> None:
    """After the signal a stream goes on to its end and new requests are 503; then it ends."""
    async with _head_process(tmp_path) as (process, url), plain_client(url) as client:
        events: list[str] = []
        async with open_stream(client, spell(PROMPT), max_tokens=N_TOKENS) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == 3:
                    process.terminate()
                    await _comes_to_drain(url)
                    refused = await client.post("/v1/chat/completions", json=body_of(spell(PROMPT)))
                    assert refused.status_code == 503
        assert text_of(events) == TEXT
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert await asyncio.wait_for(process.wait(), 10) == -signal.SIGTERM


async def _comes_to_drain(url: str) -> None:
    async def is_draining() -> bool:
        return await _state(url) == (503, "draining")

    await eventually(is_draining, within_s=10)


async def test_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    """A second SIGTERM waits for no stream, whatever the drain's limit is."""
    async with _head_process(tmp_path) as (process, url), plain_client(url) as client:
        n_events = 0
        async with open_stream(client, spell(PROMPT), max_tokens=480) as stream:
            try:
                async for _ in stream:
                    n_events += 1
                    if n_events == 3:
                        process.terminate()
                        await _comes_to_drain(url)
                        process.terminate()
                        signalled_at = perf_counter()
                        await asyncio.wait_for(process.wait(), 15)
                        assert perf_counter() - signalled_at < 4
            except httpx.TransportError:
                pass
        assert n_events < 100


async def test_shard_process_finishes_its_session_before_it_ends(tmp_path: Path) -> None:
    """After SIGTERM a shard decodes on until its last session is closed; then it ends."""
    async with _process(tmp_path, _SHARD) as (process, url), shard_client(url) as hop:
        await hop.step("s", "prefill", 0, [5, 6])
        process.terminate()
        await _comes_to_drain(url)
        assert _token(await hop.step("s", "decode", 2, [7])) == next_token([5, 6, 7], VOCAB_SIZE)
        assert process.returncode is None
        await hop.close("s")
        assert await asyncio.wait_for(process.wait(), 10) == -signal.SIGTERM
