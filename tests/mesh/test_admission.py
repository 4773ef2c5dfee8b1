"""Prompt and answer are counted against every hop's cache before they begin; callers take turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from meshnet.model.interface import StageModel
from services.head.api_keys import digest_of
from services.head.settings import ApiKeySetting
from tests.support.mesh import (
    CLUSTER_KEY,
    Mesh,
    body_of,
    fake_stages,
    fake_text,
    serve_head,
    serve_mesh,
    shard_settings,
    spell,
)
from tests.support.recorder import SeenStep
from tests.support.streams import eventually

pytestmark = pytest.mark.mesh

SPANS = ((0, 2), (2, 4))
PROMPT = [5, 6, 7, 8]
N_TOKENS = 16
TEXT = fake_text(PROMPT, N_TOKENS)
TOKEN_BYTES = 80
"""What a token takes at most of the first hop: 64 of state, 16 of the answer that is kept."""


@dataclass
class Held:
    """A mesh whose first hops are held until `go_on` is set.

    Attributes:
        order: The request ids of the sessions that began, first one first.
    """

    mesh: Mesh
    go_on: asyncio.Event
    order: list[str] = field(default_factory=list[str])

    def ask(
        self, key: str | None = None, prompt: list[int] = PROMPT, **parameters: object
    ) -> asyncio.Task[httpx.Response]:
        """A request that waits for its answer."""
        headers = {"x-request-id": f"from-{key}"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        body = body_of(spell(prompt), **{"max_tokens": N_TOKENS, **parameters})
        post = self.mesh.client.post("/v1/chat/completions", json=body, headers=headers)
        return asyncio.create_task(post)

    async def comes_to(self, running: int, waiting: int) -> None:
        """Wait until so many run, and so many wait."""

        async def is_so() -> bool:
            return await numbers(self.mesh, "active", "waiting") == [running, waiting]

        await eventually(is_so, within_s=10)


async def numbers(mesh: Mesh, *names: str) -> list[int]:
    """Metrics of the head, by their names' ends."""
    text = (await mesh.client.get("/metrics", headers=CLUSTER)).text
    rows = [line.rpartition(" ") for line in text.splitlines()]
    return [
        int(float(value))
        for name in names
        for series, _, value in rows
        if series.startswith(f"meshnet_head_{name}{{")
    ]


CLUSTER = {"authorization": f"Bearer {CLUSTER_KEY}"}


@asynccontextmanager
async def serve_held(
    n_tokens: int,
    stages: list[StageModel] | None = None,
    *,
    shard: dict[str, object] | None = None,
    **head: object,
) -> AsyncGenerator[Held]:
    """A mesh whose first hop has room for so many tokens, and its second one for more."""
    go_on = asyncio.Event()
    settings = shard_settings(**{"cache_max_bytes": n_tokens * TOKEN_BYTES, **(shard or {})})
    all_stages = stages or fake_stages(*SPANS)
    async with serve_mesh(all_stages, None, settings=settings, **head) as mesh:
        held = Held(mesh, go_on)

        async def hold(step: SeenStep) -> None:
            if step.past_len == 0:
                held.order.append(step.request)
            await go_on.wait()

        async def is_ready() -> bool:
            return (await mesh.client.get("/readyz")).json()["state"] == "ready"

        await eventually(is_ready, within_s=10)
        for one, stage in zip(mesh.shards, all_stages, strict=True):
            if stage.facts.span.start == 0:
                one.recorder.before_step = hold
        try:
            yield held
        finally:
            go_on.set()


def text_in(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def error_in(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


def keys(*names: str) -> tuple[ApiKeySetting, ...]:
    return tuple(ApiKeySetting(name=name, sha256=digest_of(name)) for name in names)


# --- room ---


async def test_what_does_not_fit_beside_another_waits_for_it() -> None:
    """Of three that each take half of the cache two run at once; nobody's state is lost."""
    async with serve_held(2 * (4 + N_TOKENS)) as held:
        asked = [held.ask() for _ in range(3)]
        await held.comes_to(2, 1)
        held.go_on.set()
        assert [text_in(answer) for answer in await asyncio.gather(*asked)] == [TEXT] * 3
        steps = held.mesh.shards[0].recorder.steps
        assert [step.past_len for step in steps].count(0) == 3
        await held.comes_to(0, 0)
        assert await held.mesh.usage() == [(0, 0), (0, 0)]


async def test_one_byte_too_few_makes_it_wait() -> None:
    """Prompt and answer are counted to the last token."""
    async with serve_held(2 * (4 + N_TOKENS) - 1) as held:
        asked = [held.ask() for _ in range(2)]
        await held.comes_to(1, 1)
        held.go_on.set()
        assert [text_in(answer) for answer in await asyncio.gather(*asked)] == [TEXT] * 2


async def test_what_is_reserved_is_told() -> None:
    """On each hop, as long as the generation runs."""
    async with serve_held(100) as held:
        asked = held.ask()
        await held.comes_to(1, 0)
        told = await numbers(held.mesh, "reserved_bytes")
        held.go_on.set()
        assert text_in(await asked) == TEXT
        assert sorted(told) == [64 * (4 + N_TOKENS), 80 * (4 + N_TOKENS)]
        assert await numbers(held.mesh, "reserved_bytes") == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_can_never_fit_is_a_400(*, stream: bool) -> None:
    """It is told what is too long and what is allowed, and no shard hears of it."""
    async with serve_held(19) as held:
        error = error_in(await held.ask(stream=stream), 400)
        assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
        assert error["code"] == "context_length_exceeded"
        assert "is 19 tokens" in error["message"]
        assert "you asked for 20 tokens: 4 in the messages and 16 in the answer" in error["message"]
        too_long = await held.ask(prompt=[5] * 19, max_tokens=None)
        assert error_in(too_long, 400)["code"] == "context_length_exceeded"
        assert held.order == []
        held.go_on.set()
        assert text_in(await held.ask(max_tokens=15)) == fake_text(PROMPT, 15)


async def test_without_a_limit_it_gets_the_room_there_is() -> None:
    """Who says no length is served in a small cache too, up to what it holds."""
    async with serve_held(30) as held:
        held.go_on.set()
        answer = (await held.ask(max_tokens=None)).json()
        assert answer["choices"][0]["message"]["content"] == fake_text(PROMPT, 26)
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_several_without_a_limit_run_at_once() -> None:
    """Only a part is reserved for an answer that may fill the context; it ends where room does."""
    async with serve_held(60, open_answer_tokens=10) as held:
        asked = [held.ask(max_tokens=None) for _ in range(5)]
        await held.comes_to(4, 1)
        held.go_on.set()
        whole = fake_text(PROMPT, 56)
        for answer in await asyncio.gather(*asked):
            assert len(whole) >= len(text_in(answer)) >= len(fake_text(PROMPT, 10))
            assert whole.startswith(text_in(answer))
            assert answer.json()["choices"][0]["finish_reason"] == "length"
        steps = held.mesh.shards[0].recorder.steps
        assert [step.past_len for step in steps].count(0) == 5
        assert await numbers(held.mesh, "reserved_bytes") == [0, 0]


async def test_one_without_a_limit_goes_on_while_there_is_room() -> None:
    """What was reserved for it is no limit."""
    async with serve_held(60, open_answer_tokens=10) as held:
        held.go_on.set()
        assert text_in(await held.ask(max_tokens=None)) == fake_text(PROMPT, 56)


async def test_sessions_are_counted_too() -> None:
    """A shard that holds two sessions is given two at once."""
    async with serve_held(1000, shard={"cache_max_sessions": 2}) as held:
        asked = [held.ask() for _ in range(3)]
        await held.comes_to(2, 1)
        held.go_on.set()
        assert [text_in(answer) for answer in await asyncio.gather(*asked)] == [TEXT] * 3


async def test_without_caches_nothing_is_counted() -> None:
    """Where every step is the whole sequence, no room is needed between steps."""
    async with serve_held(20, shard={"kv_cache": False}) as held:
        asked = [held.ask() for _ in range(3)]
        await held.comes_to(3, 0)
        held.go_on.set()
        assert [text_in(answer) for answer in await asyncio.gather(*asked)] == [TEXT] * 3


async def test_choices_are_counted_each() -> None:
    """Two answers to one request take the room of two, and wait for each other if need be."""
    async with serve_held(30) as held:
        asked = held.ask(n=2)
        await held.comes_to(1, 1)
        held.go_on.set()
        choices = (await asked).json()["choices"]
        assert [choice["message"]["content"] for choice in choices] == [TEXT] * 2


async def test_a_standby_with_room_is_used() -> None:
    """One that finds no room at a shard goes to another one of the same layers."""
    async with serve_held(30, fake_stages(SPANS[0], SPANS[0], SPANS[1], SPANS[1])) as held:
        asked = [held.ask() for _ in range(2)]
        await held.comes_to(2, 0)
        held.go_on.set()
        assert [text_in(answer) for answer in await asyncio.gather(*asked)] == [TEXT] * 2
        assert [len(shard.recorder.steps) for shard in held.mesh.shards] == [N_TOKENS] * 4


async def test_a_pinned_route_is_counted_too() -> None:
    """A request on a route of its own takes room there, and waits for it."""
    async with serve_held(30) as held:
        pinned = json.dumps([{"endpoint": shard.url} for shard in held.mesh.shards])
        headers = CLUSTER | {"x-meshnet-route": pinned}
        body = body_of(spell(PROMPT), max_tokens=N_TOKENS)
        posts = [
            held.mesh.client.post("/v1/chat/completions", json=body, headers=headers)
            for _ in range(2)
        ]
        asked = [asyncio.create_task(post) for post in posts]
        await held.comes_to(1, 1)
        held.go_on.set()
        assert [text_in(answer) for answer in await asyncio.gather(*asked)] == [TEXT] * 2


# --- the queue ---


@pytest.mark.parametrize("stream", [False, True])
async def test_where_nobody_may_wait_it_is_refused(*, stream: bool) -> None:
    """What finds a free place but no room is 503 with Retry-After, if it may not wait."""
    async with serve_held(30, max_queued_requests=0) as held:
        first = held.ask()
        await held.comes_to(1, 0)
        refused = await held.ask(stream=stream)
        assert error_in(refused, 503)["code"] == "server_overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        held.go_on.set()
        assert text_in(await first) == TEXT


async def test_a_big_one_is_not_overtaken() -> None:
    """Small ones that came later, and would fit, wait until it has begun."""
    async with serve_held(40, api_keys=keys("first", "big", "small")) as held:
        asked = [held.ask("first")]
        await held.comes_to(1, 0)
        asked.append(held.ask("big", max_tokens=36))
        await held.comes_to(1, 1)
        asked += [held.ask("small", max_tokens=1) for _ in range(3)]
        await held.comes_to(1, 4)
        held.go_on.set()
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 200
        assert held.order[:2] == ["from-first", "from-big"]


async def test_a_big_one_that_leaves_lets_the_small_ones_begin() -> None:
    """A client that goes while it waits for room frees what waited behind it."""
    async with serve_held(40) as held:
        first = held.ask()
        await held.comes_to(1, 0)
        big = held.ask(max_tokens=36)
        await held.comes_to(1, 1)
        small = held.ask(max_tokens=1)
        await held.comes_to(1, 2)
        big.cancel()
        await asyncio.wait({big})
        await held.comes_to(2, 0)
        held.go_on.set()
        assert text_in(await small) == fake_text(PROMPT, 1)
        assert text_in(await first) == TEXT


async def test_a_key_that_asks_for_much_lets_another_one_in() -> None:
    """Keys take turns, though others of one key came before."""
    async with serve_held(1000, max_concurrent_requests=1, api_keys=keys("alice", "bob")) as held:
        asked = [held.ask("alice")]
        await held.comes_to(1, 0)
        asked += [held.ask("alice") for _ in range(4)]
        await held.comes_to(1, 4)
        asked.append(held.ask("bob"))
        await held.comes_to(1, 5)
        held.go_on.set()
        assert [text_in(answer) for answer in await asyncio.gather(*asked)] == [TEXT] * 6
        assert held.order.index("from-bob") == 1


async def test_the_key_with_fewer_running_is_next() -> None:
    """A place that is free again goes to the key that has none, not to the one that has one."""
    async with serve_held(1000, max_concurrent_requests=2, api_keys=keys("alice", "bob")) as held:
        asked = [held.ask("alice") for _ in range(2)]
        await held.comes_to(2, 0)
        asked += [held.ask("alice") for _ in range(2)]
        await held.comes_to(2, 2)
        asked.append(held.ask("bob"))
        await held.comes_to(2, 3)
        held.go_on.set()
        assert [text_in(answer) for answer in await asyncio.gather(*asked)] == [TEXT] * 5
        assert held.order[2] == "from-bob"


async def test_each_key_has_places_of_its_own_to_wait() -> None:
    """A key that floods the queue is refused, and another one is not."""
    async with serve_held(
        1000,
        max_concurrent_requests=1,
        max_queued_requests=2,
        api_keys=keys("alice", "bob"),
    ) as held:
        asked = [held.ask("alice")]
        await held.comes_to(1, 0)
        asked += [held.ask("alice") for _ in range(2)]
        await held.comes_to(1, 2)
        assert error_in(await held.ask("alice"), 503)["code"] == "server_overloaded"
        asked.append(held.ask("bob"))
        await held.comes_to(1, 3)
        held.go_on.set()
        assert [text_in(answer) for answer in await asyncio.gather(*asked)] == [TEXT] * 4


async def test_two_heads_do_not_count_each_other() -> None:
    """What another head reserved is not seen: there the shards evict, and no text is lost."""
    async with serve_held(30) as held:
        held.go_on.set()
        urls = [shard.url for shard in held.mesh.shards]
        async with serve_head(urls, max_rebuilds_per_token=1000) as (_, other):
            body = body_of(spell(PROMPT), max_tokens=N_TOKENS)
            answers = await asyncio.gather(
                held.ask(), other.post("/v1/chat/completions", json=body)
            )
        assert [text_in(answer) for answer in answers] == [TEXT] * 2
