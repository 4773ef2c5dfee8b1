"""Hops that keep no cache and tails that know text only: slower, and the same text."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshnet.model.fake_stage import HIDDEN_SIZE, fake_facts, next_token
from meshnet.topology import LayerSpan
from services.head.probe import PROBE_PREFIX
from tests.support.mesh import (
    VOCAB_SIZE,
    Shard,
    fake_stages,
    fake_text,
    get_shard,
    number_tokenizer,
    serve_head,
    serve_shard,
    shard_settings,
    spell,
)
from tests.support.serving import serve
from tests.support.streams import read_stream, text_of

pytestmark = pytest.mark.mesh

PROMPT = [5, 6, 7, 8]


@asynccontextmanager
async def _mesh(
    spans: Sequence[tuple[int, int]], without_cache: int, **settings: object
) -> AsyncGenerator[tuple[list[Shard], httpx.AsyncClient]]:
    """A mesh whose hop number `without_cache` keeps none."""
    async with AsyncExitStack() as stack:
        shards = [
            await stack.enter_async_context(
                serve_shard(
                    stage,
                    settings=shard_settings(kv_cache=number != without_cache, **settings),
                )
            )
            for number, stage in enumerate(fake_stages(*spans))
        ]
        _, client = await stack.enter_async_context(serve_head([shard.url for shard in shards]))
        yield shards, client


async def _chat(client: httpx.AsyncClient, **parameters: object) -> httpx.Response:
    messages = [{"role": "user", "content": spell(PROMPT)}]
    body: dict[str, object] = {"model": "fake", "messages": messages, "max_tokens": 5}
    return await client.post("/v1/chat/completions", json=body | parameters)


def _choice(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize("without_cache", [0, 1, 2])
async def test_one_hop_without_a_cache_makes_every_step_a_whole_prefill(
    *, without_cache: int
) -> None:
    """Wherever the hop is: each step is stateless and whole on all hops, and the text the same."""
    async with _mesh([(0, 1), (1, 3), (3, 4)], without_cache) as (shards, client):
        assert fake_text(PROMPT, 5) == _choice(await _chat(client))["message"]["content"]
        assert fake_text(PROMPT, 5) == text_of(
            await read_stream(client, spell(PROMPT), max_tokens=5)
        )
        whole = [f"1,{n}" for n in range(len(PROMPT), len(PROMPT) + 5)] * 2
        for shard in shards:
            seen = shard.recorder.steps
            assert {(step.mode, step.past_len) for step in seen} == {("stateless", 0)}
            suffix = f",{HIDDEN_SIZE}" if seen[0].start_layer else ""
            assert [shape + suffix for shape in whole] == [step.shape for step in seen]
            cache = (await get_shard(shard.url))["cache"]
            assert cache == {"sessions": 0, "leases": 0, "cached_bytes": 0, "kept": 0}


async def test_without_caches_the_context_is_what_one_step_may_hold() -> None:
    """Where every step is a whole prefill, a longer text is refused before any hop is asked."""
    async with _mesh([(0, 2), (2, 4)], 1, max_step_tokens=8) as (shards, client):
        fits = await _chat(client, max_tokens=4)
        assert fake_text(PROMPT, 4) == _choice(fits)["message"]["content"]
        filled = await _chat(client, max_tokens=None)
        assert fake_text(PROMPT, 4) == _choice(filled)["message"]["content"]
        for shard in shards:
            shard.recorder.steps.clear()
        too_long = await _chat(client, max_tokens=5)
        assert too_long.status_code == 400
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        assert [shard.recorder.steps for shard in shards] == [[], []]


@dataclass
class TextTail:
    """A foreign tail of layers 2 and 3: it samples, decodes, and answers text, no token.

    Attributes:
        answers: Texts to give in place of the fake model's, where it is not None.
        modes: The mode and past length of each step.
    """

    end_after: int
    answer: dict[str, object] | None = None
    modes: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    closed: list[str] = field(default_factory=list[str])

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/shard", self._describe),
                Route("/v1/forward", self._forward, methods=["POST"]),
                Route("/v1/sessions/{session}", self._close, methods=["DELETE"]),
            ]
        )

    async def _describe(self, request: Request) -> Response:
        del request
        facts = asdict(fake_facts(LayerSpan(2, 4), 4, VOCAB_SIZE))
        limits = {"max_step_tokens": 64, "max_sessions": 1, "cache_ttl_s": 1, "cache_bytes": 1}
        use = {"sessions": 0, "leases": 0, "cached_bytes": 0, "kept": 0}
        own = {"boot_id": "1", "start_layer": 2, "end_layer": 4, "limits": limits, "cache": use}
        return JSONResponse({k: v for k, v in facts.items() if k != "span"} | own)

    async def _forward(self, request: Request) -> Response:
        headers = request.headers
        if self.answer is None and headers["x-meshnet-session"].startswith(PROBE_PREFIX):
            return JSONResponse({"text": spell([0])})
        self.modes.append((headers["x-meshnet-cache"], headers["x-meshnet-past-len"]))
        hidden = array("f", await request.body())
        ids = [int(value) for value in hidden[::HIDDEN_SIZE]]
        if self.answer is not None:
            return JSONResponse(self.answer)
        if len(self.modes) > self.end_after:
            return JSONResponse({"text": ""})
        return JSONResponse({"text": spell([next_token(ids, VOCAB_SIZE)])})

    async def _close(self, request: Request) -> Response:
        session = request.path_params["session"]
        if not session.startswith(PROBE_PREFIX):
            self.closed.append(session)
        return Response(status_code=204)


@asynccontextmanager
async def _mesh_with(tail: TextTail) -> AsyncGenerator[tuple[Shard, httpx.AsyncClient]]:
    (stage,) = fake_stages((0, 2))
    async with (
        serve_shard(stage) as first,
        serve(tail.app) as served,
        serve_head([first.url, served.url], number_tokenizer()) as (_, client),
    ):
        yield first, client


async def test_tail_that_answers_text_is_driven_stateless_and_ends_by_an_empty_text() -> None:
    """After its first answer every step is a whole prefill; an empty text is the end."""
    tail = TextTail(end_after=3)
    async with _mesh_with(tail) as (first, client):
        answer = await _chat(client)
        assert fake_text(PROMPT, 3) == _choice(answer)["message"]["content"]
        assert _choice(answer)["finish_reason"] == "stop"
        assert [("prefill", "0"), *[("stateless", "0")] * 3] == tail.modes
        assert [(step.mode, step.shape) for step in first.recorder.steps] == [
            ("prefill", "1,4"),
            ("stateless", "1,5"),
            ("stateless", "1,6"),
            ("stateless", "1,7"),
        ]
        assert tail.closed == first.recorder.closed
        assert (await get_shard(first.url))["cache"]["sessions"] == 0


async def test_tail_that_answers_text_ends_by_length_too() -> None:
    """`max_tokens` holds for a tail of text, streamed as well."""
    tail = TextTail(end_after=99)
    async with _mesh_with(tail) as (_, client):
        events = await read_stream(client, spell(PROMPT), max_tokens=3)
        assert fake_text(PROMPT, 3) == text_of(events)
        closing = json.loads(events[-2])["choices"][0]
        assert (closing["delta"], closing["finish_reason"]) == ({}, "length")
        assert len(tail.modes) == 3


async def test_tail_that_ends_at_once_gives_an_empty_answer() -> None:
    """An empty text as the first answer is an empty message that stopped, and no error."""
    async with _mesh_with(TextTail(end_after=0)) as (_, client):
        choice = _choice(await _chat(client))
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("answer", [{}, {"logits": [1, 2]}, {"token_id": "x"}, {"text": 7}])
async def test_tail_that_answers_neither_is_a_503_and_leaves_no_session(
    answer: dict[str, object],
) -> None:
    """A tail whose answers are none is never ready: a plain 503, and no session is begun."""
    tail = TextTail(end_after=0, answer=answer)
    async with _mesh_with(tail) as (first, client):
        response = await _chat(client, stream=True)
        assert response.status_code == 503
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "shard_unavailable")
        assert (tail.closed, first.recorder.steps) == ([], [])
        assert (await get_shard(first.url))["cache"]["sessions"] == 0
