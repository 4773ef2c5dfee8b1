"""Head and shards know each other: which model, which life of the process, who steers a session."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from meshnet.model.fake_stage import FakeStage, fake_facts, next_token
from meshnet.model.interface import StageModel
from meshnet.topology import LayerSpan
from services.head.settings import HopSetting
from tests.support.http import plain_client
from tests.support.mesh import (
    VOCAB_SIZE,
    Mesh,
    Shard,
    body_of,
    fake_stages,
    fake_text,
    get_shard,
    serve_head,
    serve_mesh,
    serve_shard,
    spell,
)
from tests.support.recorder import SeenStep
from tests.support.steps import ShardClient, shard_client
from tests.support.streams import DONE, eventually, open_stream, read_stream, text_of

pytestmark = pytest.mark.mesh

PROMPT = [5, 6, 7, 8]
N_TOKENS = 8
TEXT = fake_text(PROMPT, N_TOKENS)
SPANS = ((0, 2), (2, 4))


def _problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    problem = response.json()
    assert problem["code"] == code
    return problem


def _token(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["token_id"]


async def _serves(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200


# What a step says of the shard.


async def _boot_id(hop: ShardClient) -> str:
    return (await hop.http.get("/v1/shard")).json()["boot_id"]


@pytest.mark.parametrize(("mode", "past_len"), [("prefill", 0), ("prefill", 3), ("decode", 3)])
async def test_step_for_another_life_of_the_process_misses(mode: str, past_len: int) -> None:
    """A wrong boot id is a miss of reason `restarted` that names both, and changes nothing."""
    (stage,) = fake_stages((0, 4))
    async with serve_shard(stage) as shard, shard_client(shard.url) as hop:
        right = await _boot_id(hop)
        await hop.step("s", "prefill", 0, [5, 6, 7], changed={"X-Meshnet-Boot": right})
        missed = await hop.step("s", mode, past_len, [1, 2], changed={"X-Meshnet-Boot": "old"})
        problem = _problem(missed, 409, "cache_miss")
        assert (problem["reason"], problem["held"]) == ("restarted", 0)
        assert (problem["expected"], problem["actual"]) == ("old", right)
        following = await hop.step("s", "decode", 3, [1], changed={"X-Meshnet-Boot": right})
        assert _token(following) == next_token([5, 6, 7, 1], VOCAB_SIZE)


async def test_stateless_step_needs_no_boot_id() -> None:
    """A step that keeps nothing cannot have lost anything: its boot id is not compared."""
    (stage,) = fake_stages((0, 4))
    async with serve_shard(stage) as shard, shard_client(shard.url) as hop:
        answer = await hop.step("s", "stateless", 0, [5, 6], changed={"X-Meshnet-Boot": "old"})
        assert _token(answer) == next_token([5, 6], VOCAB_SIZE)


async def test_step_for_another_model_is_a_mismatch_before_it_is_a_miss() -> None:
    """A wrong fingerprint is told first, with both: feeding the state again would not help."""
    (stage,) = fake_stages((0, 4))
    changed: dict[str, str | bytes | None] = {
        "X-Meshnet-Fingerprint": "other",
        "X-Meshnet-Boot": "old",
    }
    async with serve_shard(stage) as shard, shard_client(shard.url) as hop:
        refused = await hop.step("s", "decode", 3, [1], changed=changed)
        problem = _problem(refused, 409, "model_mismatch")
        assert (problem["expected"], problem["actual"]) == ("other", stage.facts.fingerprint)


async def test_every_life_of_a_shard_has_another_boot_id() -> None:
    """A shard started again is another one, also on the same port."""
    stage, again = fake_stages((0, 4), (0, 4))
    async with serve_shard(stage) as shard, shard_client(shard.url) as hop:
        before, port = await _boot_id(hop), shard.served.port
    async with serve_shard(again, port=port) as shard, shard_client(shard.url) as hop:
        assert await _boot_id(hop) != before


# A shard that was restarted.


async def _restarted_misses(shard: Shard) -> float:
    async with plain_client() as client:
        lines = (await client.get(f"{shard.url}/metrics")).text.splitlines()
    name = 'meshnet_shard_refusals_total{code="cache_miss",reason="restarted"} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


async def _replace_before(
    stack: AsyncExitStack, mesh: Mesh, lost: int, stage: StageModel, past_len: int
) -> list[Shard]:
    """Kill a shard and serve `stage` on its port when the other one is asked for a position.

    Returns:
        Empty; then, the shard in its place.
    """
    found: list[Shard] = []
    old = mesh.shards[lost]

    async def restart(step: SeenStep) -> None:
        if step.past_len == past_len and not found:
            await old.served.kill()
            again = serve_shard(stage, port=old.served.port)
            found.append(await stack.enter_async_context(again))

    mesh.shards[1 - lost].recorder.before_step = restart
    return found


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("lost", [0, 1], ids=["first", "last"])
async def test_restart_between_two_steps_costs_no_text(*, lost: int, stream: bool) -> None:
    """A shard that was restarted unnoticed says so by its boot id, once; the text is the same."""
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(serve_mesh(fake_stages(*SPANS), route_poll_s=3600.0))
        await eventually(lambda: _serves(mesh.client), within_s=10)
        (stage,) = fake_stages(SPANS[lost])
        again = await _replace_before(stack, mesh, lost, stage, past_len=6)
        if stream:
            text = text_of(await read_stream(mesh.client, spell(PROMPT), max_tokens=N_TOKENS))
        else:
            answer = await mesh.chat(spell(PROMPT), max_tokens=N_TOKENS)
            text = answer.json()["choices"][0]["message"]["content"]
        assert text == TEXT
        assert await _restarted_misses(again[0]) == 1
        assert (await get_shard(again[0].url))["cache"]["sessions"] == 0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_restart_as_another_model_is_an_error_naming_both(*, stream: bool) -> None:
    """The answer ends in an error with the fingerprint that was and the one that is."""
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(
            serve_mesh(fake_stages(*SPANS), route_poll_s=3600.0, recovery_timeout_s=1.0)
        )
        await eventually(lambda: _serves(mesh.client), within_s=10)
        facts = fake_facts(LayerSpan(*SPANS[1]), 4, VOCAB_SIZE)
        other = FakeStage(replace(facts, fingerprint="another-2-4"))
        await _replace_before(stack, mesh, 1, other, past_len=6)
        if stream:
            events = await read_stream(mesh.client, spell(PROMPT), max_tokens=N_TOKENS)
            error = json.loads(events[-2])["error"]
            assert TEXT.startswith(text_of(events[:-2]))
            assert events[-1] == DONE
        else:
            refused = await mesh.chat(spell(PROMPT), max_tokens=N_TOKENS)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "shard_unavailable")
        assert facts.fingerprint in error["message"]
        assert "another-2-4" in error["message"]
        assert (await get_shard(mesh.shards[0].url))["cache"]["sessions"] == 0


# Who steers a session.


async def _intrude(shard: Shard, session: str, epoch: int) -> httpx.Response:
    """Begin a session anew on the tail, as another head would."""
    changed: dict[str, str | bytes | None] = {
        "X-Meshnet-Epoch": str(epoch),
        "X-Meshnet-Step": "intruder",
    }
    async with shard_client(shard.url, start_layer=2) as hop:
        return await hop.step(session, "prefill", 0, [1, 2], changed=changed)


async def test_older_head_of_a_session_is_told_and_gives_way() -> None:
    """Two heads on one session id: the newer epoch goes on undisturbed, the older one's ends."""
    async with serve_mesh(fake_stages(*SPANS)) as mesh:
        tail = mesh.shards[1]
        events: list[str] = []
        session = ""
        async with open_stream(mesh.client, spell(PROMPT), max_tokens=400) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == 4:
                    session = tail.recorder.steps[0].session
                    assert (await _intrude(tail, session, epoch=1000)).status_code == 200
        error = json.loads(events[-2])["error"]
        assert (error["type"], error["code"]) == ("server_error", "shard_unavailable")
        assert "takes epoch 1000 and later" in error["message"]
        assert tail.recorder.closed == [session]
        async with shard_client(tail.url, start_layer=2) as hop:
            changed: dict[str, str | bytes | None] = {"X-Meshnet-Epoch": "1000"}
            following = await hop.step(session, "decode", 2, [3], changed=changed)
        assert _token(following) == next_token([1, 2, 3], VOCAB_SIZE)


@pytest.mark.parametrize("epoch", [0, 1])
async def test_head_of_an_older_or_no_epoch_cannot_take_a_session_over(epoch: int) -> None:
    """Steps of the session's own epoch or an older one are refused, and disturb no stream."""
    async with serve_mesh(fake_stages(*SPANS)) as mesh:
        tail = mesh.shards[1]
        refused: list[httpx.Response] = []
        events: list[str] = []
        async with open_stream(mesh.client, spell(PROMPT), max_tokens=40) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == 4:
                    session = tail.recorder.steps[0].session
                    refused.append(await _intrude(tail, session, epoch))
        assert text_of(events) == fake_text(PROMPT, 40)
        assert refused[0].status_code == 409
        assert refused[0].json()["code"] in {"stale_epoch", "session_busy", "cache_miss"}


# Shards that do not belong together.


DIFFERENCES = [
    pytest.param({"revision": "mine"}, {"revision": "theirs"}, id="revision"),
    pytest.param(
        {"transformers_version": "5.24.0"},
        {"transformers_version": "5.25.1"},
        id="transformers_version",
    ),
    pytest.param({"weights": "file-aaaa"}, {"weights": "file-bbbb"}, id="weights"),
    pytest.param(
        {"layer_digests": ("d0", "d1", "d2-mine")},
        {"layer_digests": ("d2-theirs", "d3")},
        id="overlapping-layer",
    ),
]


def _pair(ours: dict[str, Any], theirs: dict[str, Any]) -> list[StageModel]:
    """Stages of layers 0 to 2, and 2 and 3, of what may be two models."""
    return [
        FakeStage(replace(fake_facts(LayerSpan(*span), 4, VOCAB_SIZE), **changed))
        for span, changed in (((0, 3), ours), ((2, 4), theirs))
    ]


@asynccontextmanager
async def _pair_served(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> AsyncGenerator[tuple[list[Shard], httpx.AsyncClient]]:
    """Both of them behind a head, the second one entered where the first one ends."""
    async with AsyncExitStack() as stack:
        shards = [
            await stack.enter_async_context(serve_shard(stage)) for stage in _pair(ours, theirs)
        ]
        route = (
            HopSetting(endpoint=shards[0].url),
            HopSetting(endpoint=shards[1].url, start_layer=3),
        )
        _, client = await stack.enter_async_context(serve_head([], route=route))
        yield shards, client


@pytest.mark.parametrize(("ours", "theirs"), DIFFERENCES)
async def test_shards_that_differ_are_refused_naming_both_values(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Before any step: 503 and `/readyz` with the endpoint and the two values that differ."""
    async with _pair_served(ours, theirs) as (shards, client):
        body = body_of(spell(PROMPT), stream=True)
        refused = await client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 503, refused.text
        (mine,) = ours.values()
        (other,) = theirs.values()
        values = (mine, other) if isinstance(mine, str) else (mine[-1], other[0])
        for text in (
            refused.json()["error"]["message"],
            (await client.get("/readyz")).json()["reason"],
        ):
            assert shards[1].url in text
            for value in values:
                assert value in text
        assert [step for shard in shards for step in shard.recorder.steps] == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param({"weights": "file-aaaa"}, {"weights": "sample-bbbb"}, id="other-kind"),
        pytest.param({"weights": "file-aaaa"}, {"weights": None}, id="unknown"),
        pytest.param({}, {"layer_digests": ()}, id="no-digests"),
        pytest.param({"layer_digests": ("a", "b", "c")}, {"layer_digests": ("c", "d")}, id="equal"),
    ],
)
async def test_what_cannot_be_compared_does_not_part_shards(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Digests of different kinds, or missing ones, say nothing: the route is served."""
    async with _pair_served(ours, theirs) as (_, client):
        await eventually(lambda: _serves(client), within_s=10)
        answer = await client.post("/v1/chat/completions", json=body_of(spell(PROMPT)))
        assert answer.json()["choices"][0]["message"]["content"] == TEXT
