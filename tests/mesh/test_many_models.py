"""Several models behind one head, each with its own shards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import httpx
import openai
import pytest
import pytest_asyncio
from fastapi import FastAPI
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from meshnet.model.fake_stage import FakeStage, fake_facts, next_token
from meshnet.topology import LayerSpan
from services.head.settings import HopSetting, ModelSetting
from tests.support.mesh import Shard, body_of, get_shard, serve_head, serve_shard, spell
from tests.support.recorder import SeenStep
from tests.support.serving import Served
from tests.support.streams import eventually, text_of

# One loop, and one mesh for the tests that leave it as it was.
pytestmark = [pytest.mark.mesh, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 6, 7, 8]
BIG, SMALL = 64, 32
"""Two models are told apart by their vocabularies: the fake's next token depends on it."""


def text_by(vocab_size: int, n_tokens: int = 8) -> str:
    """What the fake model of a vocabulary answers."""
    ids = list(PROMPT)
    for _ in range(n_tokens):
        ids.append(next_token(ids, vocab_size))
    return spell(ids[len(PROMPT) :])


@asynccontextmanager
async def serve_fakes(vocab_size: int, *spans: tuple[int, int]) -> AsyncGenerator[list[Shard]]:
    """Shards of one fake model."""
    async with AsyncExitStack() as stack:
        facts = [fake_facts(LayerSpan(a, b), 4, vocab_size) for a, b in spans]
        yield [await stack.enter_async_context(serve_shard(FakeStage(each))) for each in facts]


@dataclass
class Two:
    """A head of two models: `big` over two shards, `small` over one."""

    head: Served
    client: httpx.AsyncClient
    big: list[Shard]
    small: list[Shard]

    async def ask(self, model: str, **parameters: object) -> httpx.Response:
        body = body_of(spell(PROMPT), model=model, **parameters)
        return await self.client.post("/v1/chat/completions", json=body)

    async def readyz(self) -> tuple[int, str, str]:
        response = await self.client.get("/readyz")
        body: dict[str, str | None] = response.json()
        assert body.keys() == {"state", "reason"}
        return response.status_code, body["state"] or "", body["reason"] or ""

    async def comes_to(self, status: int, state: str) -> str:
        """Wait for a state; its reason."""

        async def is_there() -> bool:
            return (await self.readyz())[:2] == (status, state)

        await eventually(is_there, within_s=15)
        return (await self.readyz())[2]


@asynccontextmanager
async def serve_models(
    models: Mapping[str, Sequence[Shard]], n_at_once: int = 16, n_queued: int = 64
) -> AsyncGenerator[tuple[Served, httpx.AsyncClient]]:
    """A head of these models by their names, and its client."""
    told = tuple(
        ModelSetting(
            model=f"org/{name}", route=tuple(HopSetting(endpoint=shard.url) for shard in shards)
        )
        for name, shards in models.items()
    )
    async with serve_head(
        [],
        models=told,
        model=None,
        route=(),
        route_poll_s=0.1,
        max_concurrent_requests=n_at_once,
        max_queued_requests=n_queued,
    ) as served:
        yield served


@asynccontextmanager
async def serve_two(n_at_once: int = 16, n_queued: int = 64) -> AsyncGenerator[Two]:
    async with (
        serve_fakes(BIG, (0, 2), (2, 4)) as big,
        serve_fakes(SMALL, (0, 4)) as small,
        serve_models({"big": big, "small": small}, n_at_once, n_queued) as (head, client),
    ):
        yield Two(head, client, big, small)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two() -> AsyncGenerator[Two]:
    async with serve_two() as served:
        await served.comes_to(200, "ready")
        yield served


def text_in(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    body = response.json()
    return body["choices"][0]["message"]["content"]


async def test_each_model_answers_with_its_own_text(two: Two) -> None:
    """A request goes to the shards of the model that it names, and to no others."""
    assert text_by(BIG) != text_by(SMALL)
    for name, vocab_size, asked, spared in (
        ("big", BIG, two.big, two.small),
        ("small", SMALL, two.small, two.big),
    ):
        for shard in (*two.big, *two.small):
            shard.recorder.steps.clear()
        answer = await two.ask(name)
        assert (text_in(answer), answer.json()["model"]) == (text_by(vocab_size), name)
        assert all(shard.recorder.steps for shard in asked)
        assert not any(shard.recorder.steps for shard in spared)


async def test_each_model_streams_its_own_text(two: Two) -> None:
    """Streamed as in one piece."""
    for name, vocab_size in (("big", BIG), ("small", SMALL)):
        streamed = await two.ask(name, stream=True)
        lines = streamed.text.splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert text_of(events) == text_by(vocab_size)


async def test_models_are_listed_and_retrieved(two: Two) -> None:
    """Every model, in the order told; each by its id."""
    http = DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncOpenAI(
        base_url=f"{two.head.url}/v1", api_key="any", http_client=http
    ) as client:
        listed = await client.models.list()
        assert [model.id for model in listed.data] == ["big", "small"]
        assert (await client.models.retrieve("small")).id == "small"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_not_found(two: Two, *, stream: bool) -> None:
    """404 `model_not_found`, naming the ids that are served; a model's path is none of them."""
    for name in ("nope", "org/big", "BIG"):
        response = await two.ask(name, stream=stream)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "model_not_found")
        assert (error["type"], error["param"]) == ("invalid_request_error", "model")
        assert error["message"].endswith("allowed: big, small")
    http = DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncOpenAI(
        base_url=f"{two.head.url}/v1", api_key="any", http_client=http
    ) as client:
        with pytest.raises(openai.NotFoundError, match="allowed: big, small"):
            await client.models.retrieve("nope")


async def test_a_model_that_is_down_leaves_the_other_alone() -> None:
    """Its requests are 503 `shard_unavailable`, the other's are served, `/readyz` says which."""
    async with serve_two() as two:
        await two.comes_to(200, "ready")
        await two.big[1].served.kill()
        reason = await two.comes_to(200, "degraded")
        assert reason.startswith("big: ")
        assert two.big[1].url in reason
        assert "small" not in reason
        refused = await two.ask("big")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (503, "shard_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert text_in(await two.ask("small")) == text_by(SMALL)


async def test_a_head_is_not_ready_when_no_model_is() -> None:
    """With every model down: 503, and a reason for each."""
    async with serve_two() as two:
        await two.comes_to(200, "ready")
        await two.big[0].served.kill()
        await two.small[0].served.kill()
        reason = await two.comes_to(503, "degraded")
        big, small = reason.split("; small: ")
        assert two.big[0].url in big
        assert two.small[0].url in small


async def test_a_head_that_drains_drains_every_model() -> None:
    """No model takes a new request, and the readiness says so."""
    async with serve_two() as two:
        await two.comes_to(200, "ready")
        await cast("FastAPI", two.head.server.config.app).state.drain()
        assert (await two.readyz())[:2] == (503, "draining")
        for name in ("big", "small"):
            refused = await two.ask(name)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_overloaded"


async def test_hops_are_listed_with_their_model(two: Two) -> None:
    """`/v1/cluster` has every shard, and which model it is configured for."""
    hops: list[dict[str, Any]] = (await two.client.get("/v1/cluster")).json()["hops"]
    assert [(hop["served_model_name"], hop["endpoint"], hop["state"]) for hop in hops] == [
        ("big", two.big[0].url, "ready"),
        ("big", two.big[1].url, "ready"),
        ("small", two.small[0].url, "ready"),
    ]


async def test_numbers_are_told_apart_by_model() -> None:
    """Tokens and generations are counted for the model that made them."""
    async with serve_two() as two:
        await two.ask("big", max_tokens=3)
        await two.ask("small", max_tokens=5)
        lines = (await two.client.get("/metrics")).text.splitlines()
        for line in (
            'meshnet_head_tokens_total{model="big"} 3.0',
            'meshnet_head_tokens_total{model="small"} 5.0',
            'meshnet_head_generations_total{model="big",outcome="length"} 1.0',
            'meshnet_head_active{model="small"} 0.0',
        ):
            assert line in lines


async def test_a_full_model_leaves_the_other_alone() -> None:
    """Each model has its own places: while one's are taken, the other's requests are served."""
    async with serve_two(n_at_once=1, n_queued=0) as two:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def hold(step: SeenStep) -> None:
            del step
            begun.set()
            await go_on.wait()

        two.big[0].recorder.before_step = hold
        running = asyncio.create_task(two.ask("big"))
        await begun.wait()
        full = await two.ask("big")
        assert full.json()["error"]["code"] == "server_overloaded"
        assert text_in(await two.ask("small")) == text_by(SMALL)
        go_on.set()
        assert text_in(await running) == text_by(BIG)


async def test_two_names_may_share_shards() -> None:
    """One endpoint under two ids: both are served, and nothing is left on the shard."""
    async with (
        serve_fakes(BIG, (0, 4)) as shards,
        serve_models({"one": shards, "two": shards}) as (_, client),
    ):
        for name in ("one", "two"):
            body = body_of(spell(PROMPT), model=name)
            answer = await client.post("/v1/chat/completions", json=body)
            assert (text_in(answer), answer.json()["model"]) == (text_by(BIG), name)

        async def is_empty() -> bool:
            return (await get_shard(shards[0].url))["cache"]["sessions"] == 0

        await eventually(is_empty, within_s=10)
