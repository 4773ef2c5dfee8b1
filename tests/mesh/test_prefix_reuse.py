"""A prompt that begins as another one did is computed from there on only, and no text changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import pytest
from fastapi import FastAPI

from meshnet.model import loading
from meshnet.topology import LayerSpan
from tests.support.mesh import (
    Mesh,
    Shard,
    fake_stages,
    fake_text,
    get_shard,
    serve_mesh,
    shard_settings,
    spell,
)
from tests.support.recorder import SeenStep
from tests.support.steps import shard_client
from tests.support.streams import eventually
from tests.support.tiny import save_tiny

pytestmark = pytest.mark.mesh

SPANS = ((0, 2), (2, 4))
SHARED = [(7 * i + i // 5) % 59 + 1 for i in range(50)]
"""Without 0, which `generate` takes for padding."""
TRANSPORTS = pytest.mark.parametrize("transport", ["post", "stream"])


async def ask(mesh: Mesh, prompt: Sequence[int], n_tokens: int = 6, **changed: Any) -> Any:  # noqa: ANN401  # JSON
    response = await mesh.chat(spell(prompt), max_tokens=n_tokens, **changed)
    assert response.status_code == 200, response.text
    return response.json()


def texts(body: Any) -> list[str]:  # noqa: ANN401  # JSON
    return [choice["message"]["content"] for choice in body["choices"]]


def cached(body: Any) -> int:  # noqa: ANN401  # JSON
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


async def caches(mesh: Mesh) -> list[dict[str, int]]:
    return [(await get_shard(shard.url))["cache"] for shard in mesh.shards]


def computed(mesh: Mesh) -> list[int]:
    """Tokens in the prefills that each shard was asked for."""
    return [
        sum(
            int(step.shape.split(",")[1]) for step in shard.recorder.steps if step.mode == "prefill"
        )
        for shard in mesh.shards
    ]


@TRANSPORTS
async def test_the_same_beginning_is_computed_once(transport: str) -> None:
    """The second prompt costs its own tokens on every hop, told in the usage and the metrics."""
    async with serve_mesh(fake_stages(*SPANS), hop_transport=transport) as mesh:
        prompts = [[*SHARED, 1, 2, 3], [*SHARED, 4, 5]]
        bodies = [await ask(mesh, prompt) for prompt in prompts]
        assert [texts(body) for body in bodies] == [[fake_text(prompt, 6)] for prompt in prompts]
        assert [cached(body) for body in bodies] == [0, 50]
        assert computed(mesh) == [53 + 2, 53 + 2]
        assert await mesh.usage() == [(0, 0), (0, 0)]
        assert [cache["kept"] for cache in await caches(mesh)] == [2, 2]
        told = (await mesh.client.get("/metrics")).text
        assert 'meshnet_head_cached_tokens_total{model="fake"} 50.0' in told


async def test_completions_and_responses_tell_it_too() -> None:
    """Every endpoint says how much of a prompt was not computed."""
    async with serve_mesh(fake_stages(*SPANS)) as mesh:
        await ask(mesh, SHARED)
        common = {"model": "fake", "temperature": 0}
        body = common | {"prompt": spell([*SHARED, 1]), "max_tokens": 2}
        completion = (await mesh.client.post("/v1/completions", json=body)).json()
        body = common | {"input": spell([*SHARED, 2]), "max_output_tokens": 16}
        response = (await mesh.client.post("/v1/responses", json=body)).json()
        assert cached(completion) == 50
        assert response["usage"]["input_tokens_details"]["cached_tokens"] == 50


async def test_choices_of_one_request_compute_their_prompt_once() -> None:
    """The others begin with what the first one has; for the request it was computed."""
    async with serve_mesh(fake_stages(*SPANS)) as mesh:
        body = await ask(mesh, SHARED, n=3)
        assert texts(body) == [fake_text(SHARED, 6)] * 3
        assert computed(mesh) == [52, 52]
        assert cached(body) == 0


async def test_it_can_be_switched_off() -> None:
    """Then every prompt is computed, and nothing is kept."""
    async with serve_mesh(fake_stages(*SPANS), prefix_reuse=False) as mesh:
        assert [cached(await ask(mesh, SHARED)) for _ in range(2)] == [0, 0]
        assert computed(mesh) == [100, 100]
        assert [cache["kept"] for cache in await caches(mesh)] == [0, 0]


async def test_a_prefix_that_was_evicted_changes_no_text() -> None:
    """Where a hop has room for one session only it keeps none beside one that runs."""
    settings = shard_settings(cache_max_sessions=1)
    async with serve_mesh(fake_stages(*SPANS), settings=settings) as mesh:
        for number in range(4):
            prompt = [*SHARED, number]
            body = await ask(mesh, prompt)
            assert (texts(body), cached(body)) == ([fake_text(prompt, 6)], 0)
        assert [cache["kept"] for cache in await caches(mesh)] == [1, 1]


async def test_kept_sessions_never_keep_a_live_one_waiting() -> None:
    """The bytes' limit holds, whatever is kept, and each request finds all of its room."""
    settings = shard_settings(cache_max_bytes=20_000)
    async with serve_mesh(fake_stages(*SPANS), settings=settings) as mesh:
        for number in range(8):
            prompt = [number, *SHARED, number, *SHARED]
            body = await ask(mesh, prompt, 30)
            assert texts(body) == [fake_text(prompt, 30)]
            assert all(cache["cached_bytes"] <= 20_000 for cache in await caches(mesh))
        refusals = "meshnet_shard_refusals_total{"
        for shard in mesh.shards:
            told = (await mesh.client.get(f"{shard.url}/metrics")).text
            assert [line for line in told.splitlines() if line.startswith(refusals)] == []
            assert 'meshnet_shard_sessions_dropped{reason="evicted"}' in told


@TRANSPORTS
async def test_a_hop_lost_in_the_middle_is_fed_the_inherited_tokens(transport: str) -> None:
    """A fork whose hop is killed goes on at a standby, with the same text."""
    stages = fake_stages(*SPANS, SPANS[1])
    async with serve_mesh(stages, hop_transport=transport) as mesh:
        await ask(mesh, [*SHARED, 1])
        tails = mesh.shards[1:]
        used = next(tail for tail in tails if tail.recorder.steps)
        other = next(tail for tail in tails if tail is not used)

        async def kill_later(_: object) -> None:
            if len(mesh.shards[0].recorder.steps) > 12:
                await used.served.kill()

        mesh.shards[0].recorder.before_step = kill_later
        prompts = [[*SHARED, 2], [*SHARED, 3]]
        bodies = await asyncio.gather(*(ask(mesh, prompt, 20) for prompt in prompts))
        assert [texts(body) for body in bodies] == [[fake_text(prompt, 20)] for prompt in prompts]
        assert other.recorder.steps


async def test_a_draining_shard_does_not_wait_for_what_it_keeps() -> None:
    """Nobody will end those sessions."""
    async with serve_mesh(fake_stages(*SPANS)) as mesh:
        await ask(mesh, SHARED)
        assert [cache["kept"] for cache in await caches(mesh)] == [1, 1]
        app = cast("FastAPI", mesh.shards[0].recorder.app)
        await asyncio.wait_for(app.state.drain(), timeout=5)


@pytest.mark.parametrize("is_lost", [False, True], ids=["held", "lost"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
async def test_two_sessions_on_one_prefix_say_what_each_says_alone(
    tmp_path_factory: pytest.TempPathFactory, family: str, *, is_lost: bool
) -> None:
    """At once, in float32, on real layers: all keys kept, a window, and where no fork can be.

    Also where the tail loses each of them in the middle, and is fed what it never was fed.
    """
    folder = tmp_path_factory.mktemp(family)
    tiny = save_tiny(folder, family, 4, tied=False)
    stages = [
        loading.plan_stage(str(folder), LayerSpan(*span), "float32", n_threads=1).load()
        for span in SPANS
    ]
    prompts = [[*SHARED, number, number + 1] for number in range(1, 5)]
    async with serve_mesh(stages, prefill_chunk_tokens=16) as mesh:
        bodies = [await ask(mesh, prompts[0], 12)]
        if is_lost:
            mesh.shards[1].recorder.before_step = partial(_forget, mesh.shards[1])
        bodies += await asyncio.gather(*(ask(mesh, prompt, 12) for prompt in prompts[1:]))
        alone = [spell(tiny.greedy(prompt, 12)) for prompt in prompts]
        assert [texts(body) for body in bodies] == [[text] for text in alone]
        is_forked = family != "gemma2"
        assert [cached(body) for body in bodies] == [0, *([50 if is_forked else 0] * 3)]
        await eventually(lambda: _is_idle(mesh), within_s=5)


async def _forget(shard: Shard, step: SeenStep) -> None:
    if step.past_len == 57 and step.epoch == 1:
        async with shard_client(shard.url) as hop:
            await hop.close(step.session)


async def _is_idle(mesh: Mesh) -> bool:
    return await mesh.usage() == [(0, 0)] * len(mesh.shards)
