"""The reference suite of the wire protocol: "Behaviours that must hold", against served apps.

Behaviours 4 to 6 also stand in the unit tests of the store and the log; 7 is in tests/e2e.
"""

from __future__ import annotations

import logging
from typing import cast

import httpx
import pytest

from meshnet.model.fake_stage import HIDDEN_SIZE
from tests.support.http import plain_client
from tests.support.mesh import (
    CLUSTER_KEY,
    Shard,
    fake_stages,
    fake_text,
    get_shard,
    number_tokenizer,
    serve_mesh,
    serve_shard,
    shard_settings,
    spell,
)
from tests.support.recorder import SeenStep

pytestmark = pytest.mark.mesh

PROMPT = [5, 6, 7, 8, 9, 10]


def _text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def _finish(response: httpx.Response) -> str:
    return response.json()["choices"][0]["finish_reason"]


async def test_tail_sees_prefill_then_decodes_and_the_session_is_released() -> None:
    """1. Three tokens of a six-token prompt are a prefill and two decodes of one session."""
    async with serve_mesh(fake_stages((0, 2), (2, 4))) as mesh:
        text = _text(await mesh.chat(spell(PROMPT), max_tokens=3))
        assert fake_text(PROMPT, 3) == text
        steps = mesh.shards[1].recorder.steps
        assert [step.mode for step in steps] == ["prefill", "decode", "decode"]
        h = HIDDEN_SIZE
        assert [f"1,6,{h}", f"1,1,{h}", f"1,1,{h}"] == [step.shape for step in steps]
        assert [step.past_len for step in steps] == [0, 6, 7]
        (session,) = {step.session for step in steps}
        assert [[session], [session]] == [shard.recorder.closed for shard in mesh.shards]
        assert await mesh.usage() == [(0, 0), (0, 0)]


@pytest.mark.parametrize("kv_cache", [True, False])
async def test_end_token_stops_at_that_step(*, kv_cache: bool) -> None:
    """2. An end-token id ends generation at its step, cached and stateless alike."""
    third = int(fake_text(PROMPT, 3).split("<")[-1][:-1])
    assert spell([third]) not in fake_text(PROMPT, 2)
    settings = shard_settings(kv_cache=kv_cache)
    tokenizer = number_tokenizer(end_token_ids=frozenset({third}))
    async with serve_mesh(fake_stages((0, 2), (2, 4)), tokenizer, settings=settings) as mesh:
        response = await mesh.chat(spell(PROMPT), max_tokens=8)
        assert _finish(response) == "stop"
        assert len(mesh.shards[1].recorder.steps) == 3
        assert response.json()["usage"]["completion_tokens"] == 3


async def test_miss_on_the_first_decode_is_rebuilt_under_the_same_session() -> None:
    """3. After a miss the tail sees prefill, decode, prefill, decode; the text is the same."""
    async with serve_mesh(fake_stages((0, 2), (2, 4))) as mesh:
        tail = mesh.shards[1]

        async def lose_first_decode(step: SeenStep) -> None:
            if len(tail.recorder.steps) == 2:
                await _delete_session(tail, step.session)

        tail.recorder.before_step = lose_first_decode
        text = _text(await mesh.chat(spell(PROMPT), max_tokens=2))
        assert fake_text(PROMPT, 2) == text
        steps = tail.recorder.steps
        assert [step.mode for step in steps] == ["prefill", "decode", "prefill", "decode"]
        assert [step.past_len for step in steps] == [0, 6, 0, 6]
        assert len({step.session for step in steps}) == 1


async def test_other_length_drops_the_entry_and_the_next_lookup_misses_too() -> None:
    """4. A step at another length is a miss that drops the state; the right length misses then."""
    (stage,) = fake_stages((2, 4))
    async with serve_shard(stage) as shard:
        await _step(shard, mode="prefill", past_len=0, n_tokens=4)
        problem = (await _step(shard, mode="decode", past_len=3)).json()
        assert (
            problem["code"],
            problem["reason"],
            problem["held"],
        ) == ("cache_miss", "length_mismatch", 0)
        again = await _step(shard, mode="decode", past_len=4)
        assert (again.status_code, again.json()["code"]) == (409, "cache_miss")


async def test_other_start_layer_misses() -> None:
    """4. State is keyed by the start layer: a step from another one is a route mismatch."""
    (stage,) = fake_stages((1, 4))
    async with serve_shard(stage) as shard:
        await _step(shard, mode="prefill", past_len=0, n_tokens=4, start_layer=1)
        response = await _step(shard, mode="decode", past_len=4, start_layer=2)
        assert (response.status_code, response.json()["reason"]) == (409, "route_mismatch")


async def test_entry_older_than_the_ttl_is_gone_and_the_count_says_so() -> None:
    """5. After the TTL the shard holds no session, and its step is answered `expired`."""
    now = [0.0]
    (stage,) = fake_stages((2, 4))
    settings = shard_settings(cache_ttl_seconds=60)
    async with serve_shard(stage, settings=settings, clock=lambda: now[0]) as shard:
        await _step(shard, mode="prefill", past_len=0, n_tokens=4)
        assert (await get_shard(shard.url))["cache"]["sessions"] == 1
        now[0] = 61.0
        assert (await get_shard(shard.url))["cache"]["sessions"] == 0
        response = await _step(shard, mode="decode", past_len=4)
        assert (response.status_code, response.json()["reason"]) == (409, "expired")


async def test_touching_the_first_of_two_makes_the_second_the_victim() -> None:
    """5. With two slots the least recently used session goes, and knows that it was evicted."""
    (stage,) = fake_stages((2, 4))
    async with serve_shard(stage, settings=shard_settings(cache_max_sessions=2)) as shard:
        for session in ("a", "b"):
            await _step(shard, session=session, mode="prefill", past_len=0, n_tokens=4)
        await _step(shard, session="a", mode="decode", past_len=4)
        await _step(shard, session="c", mode="prefill", past_len=0, n_tokens=4)
        evicted = await _step(shard, session="b", mode="decode", past_len=4)
        assert (evicted.status_code, evicted.json()["reason"]) == (409, "evicted")
        assert (await _step(shard, session="a", mode="decode", past_len=5)).status_code == 200


async def test_decode_steps_are_logged_once_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    """6. Steps at 0, 1, 4.9, 5.5 and 6 s give lines with 1, none, none, 4, none steps."""
    now = [0.0]
    (stage,) = fake_stages((2, 4))
    with caplog.at_level(logging.INFO, logger="meshnet.shard.worker"):
        async with serve_shard(stage, clock=lambda: now[0]) as shard:
            await _step(shard, mode="prefill", past_len=0, n_tokens=4)
            await _step(shard, session="b", mode="prefill", past_len=0, n_tokens=4)
            for past_len, now[0] in enumerate((0.0, 1.0, 4.9, 5.5, 6.0), start=4):
                await _step(shard, mode="decode", past_len=past_len)
            await _step(shard, session="b", mode="decode", past_len=4)
    messages: list[object] = [record.msg for record in caplog.records]
    records = [cast("dict[str, object]", m) for m in messages if isinstance(m, dict)]
    lines = [record for record in records if record["event"] == "decode"]
    assert [(m["session_id"], m["steps"]) for m in lines] == [("a", 1), ("a", 4), ("b", 1)]


@pytest.mark.parametrize("chunk", [2, 512])
async def test_cached_and_stateless_generation_agree(*, chunk: int) -> None:
    """7. With caches, without, and in prefill chunks, the text is the same."""
    texts: list[str] = []
    for kv_cache in (True, False):
        settings = shard_settings(kv_cache=kv_cache)
        stages = fake_stages((0, 1), (1, 3), (3, 4))
        async with serve_mesh(stages, settings=settings, prefill_chunk_tokens=chunk) as mesh:
            texts.append(_text(await mesh.chat(spell(PROMPT))))
            modes = {step.mode for step in mesh.shards[2].recorder.steps}
            assert ({"prefill", "decode"} if kv_cache else {"stateless"}) == modes
    assert [fake_text(PROMPT, 8)] * 2 == texts


async def _delete_session(shard: Shard, session: str) -> None:
    async with plain_client(headers=_auth()) as client:
        assert (await client.delete(f"{shard.url}/v1/sessions/{session}")).status_code == 204


async def _step(
    shard: Shard,
    *,
    session: str = "a",
    mode: str,
    past_len: int,
    n_tokens: int = 1,
    start_layer: int = 2,
) -> httpx.Response:
    headers = {
        "x-meshnet-session": session,
        "x-meshnet-cache": mode,
        "x-meshnet-past-len": str(past_len),
        "x-meshnet-shape": f"1,{n_tokens},{HIDDEN_SIZE}",
        "x-meshnet-dtype": "float32",
        "x-meshnet-start-layer": str(start_layer),
    }
    body = bytes(4 * HIDDEN_SIZE * n_tokens)
    async with plain_client(headers=_auth()) as client:
        return await client.post(f"{shard.url}/v1/forward", content=body, headers=headers)


def _auth() -> dict[str, str]:
    return {"authorization": f"Bearer {CLUSTER_KEY}"}
