"""`/readyz` says what a request would meet: a route is ready once a token went through it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from meshnet.errors import ModelLoading, StageError
from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.model.interface import CacheState, StageOutput, StageStep
from meshnet.topology import LayerSpan
from meshnet.wire import problems
from tests.support.flaky import Delivery, LinedShard, OnRequest, Reply, counting_stage, serve_lined
from tests.support.http import plain_client
from tests.support.mesh import (
    VOCAB_SIZE,
    Shard,
    body_of,
    fake_stages,
    fake_text,
    get_shard,
    serve_head,
    serve_mesh,
    serve_shard,
    shard_settings,
    spell,
)
from tests.support.stages import slow_stages
from tests.support.streams import eventually

pytestmark = pytest.mark.mesh

PROMPT = [5, 6, 7, 8]
TEXT = fake_text(PROMPT, 8)
TWO = ((0, 2), (2, 4))


async def _readyz(client: httpx.AsyncClient) -> tuple[int, str, str | None]:
    response = await client.get("/readyz")
    body: dict[str, Any] = response.json()
    assert body.keys() == {"state", "reason"}
    return response.status_code, body["state"], body["reason"]


async def _comes_to(client: httpx.AsyncClient, status: int, state: str) -> str:
    """Wait for a state; its reason."""

    async def is_there() -> bool:
        return (await _readyz(client))[:2] == (status, state)

    await eventually(is_there, within_s=15)
    return (await _readyz(client))[2] or ""


async def _chat(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=body_of(spell(PROMPT)))


def _text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


async def _holds_nothing(shard: Shard) -> bool:
    return (await get_shard(shard.url))["cache"]["sessions"] == 0


@asynccontextmanager
async def _lined_tail(
    on_other: OnRequest,
) -> AsyncGenerator[tuple[Shard, LinedShard, httpx.AsyncClient]]:
    """A first shard, a tail behind a line, and a client of their head."""
    (stage,) = fake_stages(TWO[0])
    async with serve_shard(stage) as first, serve_lined(counting_stage(*TWO[1])) as tail:
        tail.line.on_other = on_other
        async with serve_head([first.url, tail.url], route_poll_s=0.1) as (_, client):
            yield first, tail, client


# Before it is ready.


async def test_head_is_loading_while_a_shard_loads() -> None:
    """A shard that does not know itself yet: 503 `loading`, with how far it is; then ready."""
    loading = json.dumps(problems.to_problem(ModelLoading("loading: 10 of 100 bytes"))).encode()

    async def refuse(request: Delivery) -> Reply:
        del request
        return Reply(503, [(b"content-type", problems.MEDIA_TYPE.encode())], loading)

    async with _lined_tail(refuse) as (_, tail, client):
        await _comes_to(client, 503, "loading")
        await eventually(lambda: _names(client, "10 of 100 bytes"), within_s=10)
        tail.line.on_other = None
        await _comes_to(client, 200, "ready")


async def _names(client: httpx.AsyncClient, words: str) -> bool:
    return words in ((await _readyz(client))[2] or "")


@asynccontextmanager
async def _held() -> AsyncGenerator[tuple[asyncio.Event, OnRequest]]:
    """Probes that wait for the event; at the latest it is set at the end."""
    gate = asyncio.Event()

    async def hold(request: Delivery) -> Reply:
        if request.is_probe:
            await gate.wait()
        return await request.deliver()

    try:
        yield gate, hold
    finally:
        gate.set()


async def test_head_is_probing_while_a_token_is_on_its_way() -> None:
    """Shards that are well described are not ready before a token came back: 503 `probing`."""
    async with _held() as (gate, hold), _lined_tail(hold) as (_, _, client):
        reason = await _comes_to(client, 503, "probing")
        assert "no token went through" in reason
        gate.set()
        assert await _comes_to(client, 200, "ready") == ""


async def test_request_that_comes_while_probing_waits_for_the_token() -> None:
    """Nobody is refused for having come a moment early."""
    async with _held() as (gate, hold), _lined_tail(hold) as (_, tail, client):
        await _comes_to(client, 503, "probing")
        asked = asyncio.create_task(_chat(client))
        await asyncio.sleep(0.1)
        assert tail.line.n_steps == 0
        gate.set()
        assert _text(await asked) == TEXT


class BrokenStage(FakeStage):
    """Describes itself well and computes nothing."""

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        raise StageError(f"out of luck at {step.position}")


async def _garbage(request: Delivery) -> Reply:
    if request.is_probe:
        return Reply(200, [(b"content-type", b"text/plain")], b"hello")
    return await request.deliver()


async def _no_token(request: Delivery) -> Reply:
    if request.is_probe:
        return Reply(200, [(b"content-type", b"application/json")], b"{}")
    return await request.deliver()


async def _check_never_ready(client: httpx.AsyncClient, why: str) -> None:
    """Over many polls the head is not ready, refuses requests, and at some time says why."""
    reasons: list[str] = []
    for _ in range(20):
        status, state, reason = await _readyz(client)
        assert (status, state in {"loading", "probing"}) == (503, True)
        reasons.append(reason or "")
        await asyncio.sleep(0.025)
    assert any(why in reason for reason in reasons), set(reasons)
    refused = await _chat(client)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0


async def test_shard_that_fails_its_steps_never_becomes_ready() -> None:
    """A good description is no proof: while probes fail there is no route, and it is told why."""
    tail = BrokenStage(fake_facts(LayerSpan(*TWO[1]), 4, VOCAB_SIZE))
    async with serve_mesh([*fake_stages(TWO[0]), tail], route_poll_s=0.1) as mesh:
        await _check_never_ready(mesh.client, "out of luck at 0")
        await eventually(lambda: _holds_nothing(mesh.shards[0]), within_s=10)


@pytest.mark.parametrize("answer", [_garbage, _no_token])
async def test_shard_that_answers_no_token_never_becomes_ready(answer: OnRequest) -> None:
    """An answer without a token is not a token."""
    async with _lined_tail(answer) as (first, _, client):
        await _check_never_ready(client, "")
        await eventually(lambda: _holds_nothing(first), within_s=10)


@pytest.mark.parametrize("kv_cache", [True, False])
async def test_probe_leaves_no_session(*, kv_cache: bool) -> None:
    """After the proof no shard holds anything, with caches and without."""
    settings = shard_settings(kv_cache=kv_cache)
    async with serve_mesh(fake_stages(*TWO, TWO[0]), settings=settings) as mesh:
        await _comes_to(mesh.client, 200, "ready")
        for shard in mesh.shards:
            await eventually(lambda shard=shard: _holds_nothing(shard), within_s=10)


# After it was ready.


async def test_missing_standby_degrades_and_serves() -> None:
    """A standby that is gone: 200 `degraded`, named with the reason; requests are served."""
    async with serve_mesh(fake_stages(*TWO, TWO[0]), route_poll_s=0.1) as mesh:
        await _comes_to(mesh.client, 200, "ready")
        await mesh.shards[2].served.kill()
        reason = await _comes_to(mesh.client, 200, "degraded")
        assert mesh.shards[2].url in reason
        assert "not reachable" in reason
        assert _text(await _chat(mesh.client)) == TEXT


@dataclass
class Hanging:
    """Two shards that make a route, and a standby of the second that hangs in its probe."""

    good: LinedShard
    standby: LinedShard
    client: httpx.AsyncClient
    go_on: asyncio.Event


@asynccontextmanager
async def _hanging_standby() -> AsyncGenerator[Hanging]:
    (first_stage,) = fake_stages(TWO[0])
    async with (
        serve_shard(first_stage) as first,
        serve_lined(counting_stage(*TWO[1])) as good,
        serve_lined(counting_stage(*TWO[1])) as standby,
        _held() as (gate, hold),
    ):
        standby.line.on_other = hold
        urls = [first.url, good.url, standby.url]
        async with serve_head(urls, route_poll_s=0.1) as (_, client):
            try:
                await _comes_to(client, 200, "degraded")
                yield Hanging(good, standby, client, gate)
            finally:
                gate.set()  # before the head ends, which waits for its probes


async def test_standby_in_its_probe_degrades_and_serves() -> None:
    """A standby that hangs in its first step is named; requests are served without it."""
    async with _hanging_standby() as mesh:
        reason = (await _readyz(mesh.client))[2] or ""
        assert f"{mesh.standby.url}: no token went through it yet" in reason
        assert _text(await _chat(mesh.client)) == TEXT
        mesh.go_on.set()
        await _comes_to(mesh.client, 200, "ready")


async def test_standby_in_its_probe_holds_up_no_other_shard() -> None:
    """Beside a standby that hangs another shard is missed, and used again when it is back."""
    async with _hanging_standby() as mesh:
        await mesh.good.shard.served.kill()
        await _comes_to(mesh.client, 503, "degraded")
        (again,) = fake_stages(TWO[1])
        async with serve_shard(again, port=mesh.good.shard.served.port):
            await _comes_to(mesh.client, 200, "degraded")
            assert _text(await _chat(mesh.client)) == TEXT
            mesh.go_on.set()


async def test_request_waits_for_no_probe_but_that_of_its_route() -> None:
    """Beside a standby that hangs a request is served as soon as its own shards are proven."""
    async with _hanging_standby() as mesh, _held() as (gate, hold):
        await mesh.good.shard.served.kill()
        await _comes_to(mesh.client, 503, "degraded")
        port = mesh.good.shard.served.port
        probes: list[Delivery] = []

        async def note_and_hold(request: Delivery) -> Reply | None:
            probes.extend([request] if request.is_probe else [])
            return await hold(request)

        async with serve_lined(counting_stage(*TWO[1]), port=port) as again:
            again.line.on_other = note_and_hold

            async def is_probed() -> bool:
                return bool(probes)

            await eventually(is_probed, within_s=15)
            asked = asyncio.create_task(_chat(mesh.client))
            await asyncio.sleep(0.1)
            gate.set()
            released_at = perf_counter()
            assert _text(await asked) == TEXT
            waited_s = perf_counter() - released_at
            mesh.go_on.set()
        assert waited_s < 4


async def test_standby_in_its_probe_takes_nothing_over() -> None:
    """A session waits for its own shard to come back rather than try what no token went through."""
    async with _hanging_standby() as mesh, AsyncExitStack() as stack:
        steps = mesh.standby.shard.recorder.steps

        async def restart(step: Delivery) -> Reply | None:
            if step.n < 4:
                return await step.deliver()
            await mesh.good.shard.served.kill()
            (stage,) = fake_stages(TWO[1])
            again = serve_shard(stage, port=mesh.good.shard.served.port)
            await stack.enter_async_context(again)
            return None

        mesh.good.line.on_step = restart
        response = await _chat(mesh.client)
        mesh.go_on.set()
        assert _text(response) == TEXT
        assert steps == []


@pytest.mark.parametrize("asked", [True, False], ids=["seen-ready", "never-asked"])
async def test_route_that_broke_is_degraded_and_not_loading(*, asked: bool) -> None:
    """After having been ready a broken route is 503 `degraded` with the reason, ask who may."""
    async with serve_mesh(fake_stages(*TWO), route_poll_s=0.1) as mesh:
        if asked:
            await _comes_to(mesh.client, 200, "ready")
        assert _text(await _chat(mesh.client)) == TEXT
        await mesh.shards[1].served.kill()
        reason = await _comes_to(mesh.client, 503, "degraded")
        assert mesh.shards[1].url in reason


async def test_head_that_drains_is_not_ready() -> None:
    """A draining head is 503 `draining`, whatever its shards are, and alive."""
    async with serve_mesh(fake_stages(*TWO)) as mesh:
        await _comes_to(mesh.client, 200, "ready")
        await cast("FastAPI", mesh.head.server.config.app).state.drain()
        status, state, reason = await _readyz(mesh.client)
        assert (status, state) == (503, "draining")
        assert reason
        assert (await mesh.client.get("/livez")).status_code == 200


async def test_health_answers_while_a_stage_computes() -> None:
    """`/livez` of shard and head, and `/readyz`, do not wait for a step."""
    async with serve_mesh(slow_stages(*TWO, delay_s=0.3), route_poll_s=3600.0) as mesh:
        await _comes_to(mesh.client, 200, "ready")
        asked = asyncio.create_task(mesh.chat(spell(PROMPT), max_tokens=1))

        async def computes() -> bool:
            return (await mesh.usage())[1] == (1, 1)

        await eventually(computes, within_s=10)
        async with plain_client(mesh.shards[1].url) as shard:
            for client in (shard, mesh.client):
                assert (await client.get("/livez")).json() == {"status": "alive"}
                assert (await client.get("/readyz")).status_code == 200
        assert not asked.done()
        assert _text(await asked) == fake_text(PROMPT, 1)
