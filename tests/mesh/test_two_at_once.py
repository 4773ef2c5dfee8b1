"""Several sessions at once: each has its own text, and too many are told to come again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise

import httpx
import pytest

from meshnet.model.fake_stage import next_token
from tests.support.mesh import (
    VOCAB_SIZE,
    Mesh,
    fake_stages,
    fake_text,
    serve_head,
    serve_mesh,
    serve_shard,
    shard_settings,
    spell,
)
from tests.support.recorder import SeenStep
from tests.support.stages import slow_stages
from tests.support.steps import shard_client
from tests.support.streams import eventually, read_stream, text_of

pytestmark = pytest.mark.mesh

SPANS = ((0, 2), (2, 4))


def _prompt(number: int) -> list[int]:
    """Of another length and content for each session."""
    return [number + 1] * (number + 2)


def _text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


async def _both_ways(mesh: Mesh, number: int, n_tokens: int) -> str:
    """A text, streamed by every other session."""
    prompt = spell(_prompt(number))
    if number % 2:
        return text_of(await read_stream(mesh.client, prompt, max_tokens=n_tokens))
    return _text(await mesh.chat(prompt, max_tokens=n_tokens))


@pytest.mark.parametrize("kv_cache", [True, False])
async def test_sessions_at_once_each_get_their_own_text(*, kv_cache: bool) -> None:
    """Eight sessions of other prompts get what each would get alone, with caches and without."""
    settings = shard_settings(kv_cache=kv_cache)
    stages = slow_stages(*SPANS, delay_s=0.001)
    async with serve_mesh(stages, settings=settings, prefill_chunk_tokens=3) as mesh:
        texts = await asyncio.gather(*(_both_ways(mesh, number, 20) for number in range(8)))
        assert [fake_text(_prompt(number), 20) for number in range(8)] == texts
        steps = mesh.shards[1].recorder.steps
        order = [step.session for step in steps]
        assert len(set(order)) == 8
        changes = sum(a != b for a, b in pairwise(order))
        assert changes > 8, "one after the other shows nothing"
        assert await mesh.usage() == [(0, 0), (0, 0)]


async def test_same_prompt_twice_at_once_is_two_sessions() -> None:
    """Two requests that are alike share nothing."""
    async with serve_mesh(fake_stages(*SPANS)) as mesh:
        texts = await asyncio.gather(*(_both_ways(mesh, 1, 20) for _ in range(4)))
        assert [fake_text(_prompt(1), 20)] * 4 == texts
        assert len({step.session for step in mesh.shards[0].recorder.steps}) == 4


async def test_sessions_that_evict_each_other_get_their_own_text() -> None:
    """With fewer cache slots than two heads use, states are lost and made again; no text is."""
    settings = shard_settings(cache_max_sessions=2)
    limits = {"max_rebuilds_per_token": 1000}
    stages = slow_stages(*SPANS, delay_s=0.001)
    async with serve_mesh(stages, None, settings=settings, **limits) as mesh:
        urls = [shard.url for shard in mesh.shards]
        async with serve_head(urls, None, **limits) as (head, client):
            meshes = (mesh, Mesh(head, mesh.shards, client))
            asked = [_both_ways(each, number, 6) for each in meshes for number in range(2)]
            texts = await asyncio.gather(*asked)
        assert [fake_text(_prompt(number), 6) for number in range(2)] * 2 == texts
        prefills = [s for s in mesh.shards[0].recorder.steps if s.mode == "prefill"]
        assert len(prefills) > 4
        assert await mesh.usage() == [(0, 0), (0, 0)]


async def test_one_heads_sessions_do_not_evict_each_other() -> None:
    """A head gives its shards no more sessions than they have slots: the others wait."""
    settings = shard_settings(cache_max_sessions=2)
    async with serve_mesh(slow_stages(*SPANS, delay_s=0.001), settings=settings) as mesh:
        texts = await asyncio.gather(*(_both_ways(mesh, number, 6) for number in range(5)))
        assert [fake_text(_prompt(number), 6) for number in range(5)] == texts
        prefills = [s for s in mesh.shards[0].recorder.steps if s.mode == "prefill"]
        assert len(prefills) == 5


# More than there is room for.


@asynccontextmanager
async def _full_mesh(n_places: int) -> AsyncGenerator[tuple[Mesh, asyncio.Event]]:
    """A head whose places are all taken, until the event is set, by requests it then answers."""
    go_on = asyncio.Event()

    async def hold(step: SeenStep) -> None:
        del step
        await go_on.wait()

    async with serve_mesh(
        fake_stages(*SPANS), max_concurrent_requests=n_places, max_queued_requests=0
    ) as mesh:
        mesh.shards[1].recorder.before_step = hold
        running = [asyncio.create_task(_both_ways(mesh, number, 5)) for number in range(n_places)]

        async def all_run() -> bool:
            return len(mesh.shards[1].recorder.steps) == n_places

        await eventually(all_run, within_s=10)
        try:
            yield mesh, go_on
        finally:
            go_on.set()
            texts = await asyncio.gather(*running)
        assert [fake_text(_prompt(number), 5) for number in range(n_places)] == texts


@pytest.mark.parametrize("stream", [False, True])
async def test_request_over_the_limit_is_a_503_and_touches_no_hop(*, stream: bool) -> None:
    """One request too many: a plain 503 `server_overloaded` with Retry-After, at once."""
    async with _full_mesh(2) as (mesh, _):
        n_asked = len(mesh.shards[0].recorder.steps)
        refused = await mesh.chat(spell(_prompt(5)), stream=stream)
        assert refused.status_code == 503
        assert refused.headers["content-type"] == "application/json"
        assert int(refused.headers["retry-after"]) > 0
        error = refused.json()["error"]
        assert {"message", "type", "param", "code"} == error.keys()
        assert (error["type"], error["code"]) == ("server_error", "server_overloaded")
        assert (len(mesh.shards[0].recorder.steps), mesh.shards[0].recorder.closed) == (n_asked, [])


async def test_place_is_free_again_when_a_request_has_ended() -> None:
    """A refused request is served when it comes again; those refused before took no place."""
    async with _full_mesh(2) as (mesh, go_on):
        refused = await asyncio.gather(*(mesh.chat(spell(_prompt(5))) for _ in range(5)))
        assert {response.status_code for response in refused} == {503}
        go_on.set()

        async def is_served() -> bool:
            return (await mesh.chat(spell(_prompt(5)), max_tokens=2)).status_code == 200

        await eventually(is_served, within_s=10)


async def test_step_over_a_shards_queue_is_refused_and_keeps_its_session() -> None:
    """With one step in the compute thread the next is 503 `queue_full`; tried again, it is run."""
    (stage,) = slow_stages((2, 4), delay_s=0.3)
    settings = shard_settings(max_queued_steps=1)
    async with (
        serve_shard(stage, settings=settings) as shard,
        shard_client(shard.url, start_layer=2) as hop,
    ):
        assert (await hop.step("kept", "prefill", 0, [1, 2])).status_code == 200
        running = asyncio.create_task(hop.step("other", "prefill", 0, [3]))

        async def runs() -> bool:
            return (await hop.cache())["leases"] == 1

        await eventually(runs, within_s=10)
        refused = await hop.step("kept", "decode", 2, [5])
        problem = refused.json()
        assert (refused.status_code, problem["code"], problem["retryable"]) == (
            503,
            "queue_full",
            True,
        )
        assert (await running).status_code == 200
        again = await hop.step("kept", "decode", 2, [5])
        assert next_token([1, 2, 5], VOCAB_SIZE) == again.json()["token_id"]


async def test_health_and_models_answer_while_the_head_is_full() -> None:
    """A full head is alive, ready and describes itself."""
    async with _full_mesh(1) as (mesh, _):
        for path in ("/livez", "/readyz", "/v1/models", "/v1/cluster", "/metrics"):
            assert (await mesh.client.get(path)).status_code == 200
