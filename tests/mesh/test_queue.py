"""More requests than places: some wait, the next are told to come back, nobody is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import httpx
import openai
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from tests.support.mesh import Mesh, fake_stages, fake_text, serve_mesh, spell
from tests.support.recorder import SeenStep
from tests.support.streams import eventually

pytestmark = pytest.mark.mesh

PROMPT = [5, 6, 7, 8]
N_TOKENS = 20
TEXT = fake_text(PROMPT, N_TOKENS)


@dataclass
class Small:
    """A head with place for one generation, over a shard that is held until `go_on` is set."""

    mesh: Mesh
    go_on: asyncio.Event

    def ask(self, n_tokens: int = N_TOKENS) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.mesh.chat(spell(PROMPT), max_tokens=n_tokens))


@asynccontextmanager
async def serve_small(n_queued: int = 1) -> AsyncGenerator[Small]:
    """A small mesh, with place for so many that wait."""
    go_on = asyncio.Event()

    async def hold(step: SeenStep) -> None:
        del step
        await go_on.wait()

    async with serve_mesh(
        fake_stages((0, 4)), max_concurrent_requests=1, max_queued_requests=n_queued
    ) as mesh:
        mesh.shards[0].recorder.before_step = hold
        try:
            yield Small(mesh, go_on)
        finally:
            go_on.set()


async def counts(mesh: Mesh) -> tuple[int, int]:
    """Generations that run, and that wait."""
    text = (await mesh.client.get("/metrics")).text
    running, waiting = (
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(("meshnet_head_active{", "meshnet_head_waiting{"))
    )
    return int(running), int(waiting)


async def comes_to(mesh: Mesh, running: int, waiting: int) -> None:
    async def is_so() -> bool:
        return await counts(mesh) == (running, waiting)

    await eventually(is_so, within_s=10)


def text_in(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


async def test_one_runs_one_waits_and_the_third_is_refused() -> None:
    """The one that waits is served in its turn; the third is 503 with Retry-After, at once."""
    async with serve_small() as small:
        asked = [small.ask()]
        await comes_to(small.mesh, 1, 0)
        asked.append(small.ask())
        await comes_to(small.mesh, 1, 1)
        for stream in (False, True):
            refused = await small.mesh.chat(spell(PROMPT), stream=stream)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "server_overloaded")
            assert error["type"] == "server_error"
            assert int(refused.headers["retry-after"]) >= 1
        assert not any(request.done() for request in asked)
        assert len({step.session for step in small.mesh.shards[0].recorder.steps}) == 1
        small.go_on.set()
        assert [text_in(answer) for answer in await asyncio.gather(*asked)] == [TEXT, TEXT]
        await comes_to(small.mesh, 0, 0)
        assert text_in(await small.ask(1)) == fake_text(PROMPT, 1)


async def test_a_client_that_comes_again_is_served() -> None:
    """The official client waits as it is told, and gets its answer from a head that was full."""
    async with serve_small(0) as small:
        first = small.ask()
        await comes_to(small.mesh, 1, 0)
        http = DefaultAsyncHttpxClient(trust_env=False)
        async with AsyncOpenAI(
            base_url=f"{small.mesh.head.url}/v1", api_key="any", max_retries=5, http_client=http
        ) as client:

            async def ask(asker: AsyncOpenAI) -> str | None:
                answer = await asker.chat.completions.create(
                    model="fake",
                    messages=[{"role": "user", "content": spell(PROMPT)}],
                    max_tokens=2,
                    temperature=0,
                )
                return answer.choices[0].message.content

            with pytest.raises(openai.InternalServerError):
                await ask(client.with_options(max_retries=0))
            patient = asyncio.create_task(ask(client))
            await asyncio.sleep(0.2)
            assert not patient.done()
            small.go_on.set()
            assert await patient == fake_text(PROMPT, 2)
        assert text_in(await first) == TEXT


async def test_one_that_leaves_the_queue_makes_room() -> None:
    """A client that goes while it waits frees its place, and no shard ever hears of it."""
    async with serve_small() as small:
        first = small.ask()
        await comes_to(small.mesh, 1, 0)
        waiting = small.ask()
        await comes_to(small.mesh, 1, 1)
        waiting.cancel()
        await asyncio.wait({waiting})
        await comes_to(small.mesh, 1, 0)
        small.go_on.set()
        assert text_in(await first) == TEXT
        assert len({step.session for step in small.mesh.shards[0].recorder.steps}) == 1


async def test_one_that_leaves_its_place_gives_it_to_the_next() -> None:
    """A client that goes while its request runs lets the one that waits begin."""
    async with serve_small() as small:
        first = small.ask()
        await comes_to(small.mesh, 1, 0)
        waiting = small.ask()
        await comes_to(small.mesh, 1, 1)
        first.cancel()
        await asyncio.wait({first})
        small.go_on.set()
        assert text_in(await waiting) == TEXT
        await comes_to(small.mesh, 0, 0)


async def test_a_queue_of_none_refuses_at_once() -> None:
    """With no place to wait, what finds no place to run is refused."""
    async with serve_small(0) as small:
        first = small.ask()
        await comes_to(small.mesh, 1, 0)
        assert (await small.ask()).status_code == 503
        small.go_on.set()
        assert text_in(await first) == TEXT
        await comes_to(small.mesh, 0, 0)
        assert (await small.ask(1)).status_code == 200


async def test_a_bad_request_is_told_so_also_while_it_is_full() -> None:
    """What is wrong in itself is a 400 or 404, and no reason to come again."""
    async with serve_small(0) as small:
        first = small.ask()
        await comes_to(small.mesh, 1, 0)
        assert (await small.mesh.chat(spell(PROMPT), temperature=9)).status_code == 400
        assert (await small.mesh.chat(spell(PROMPT), model="nope")).status_code == 404
        small.go_on.set()
        assert text_in(await first) == TEXT


async def test_who_waits_when_the_head_drains_is_served() -> None:
    """What was taken is finished, in its turn too; what comes then is refused."""
    async with serve_small() as small:
        asked = [small.ask() for _ in range(2)]
        await comes_to(small.mesh, 1, 1)
        app = cast("FastAPI", small.mesh.head.server.config.app)
        drain = asyncio.create_task(app.state.drain())

        async def is_draining() -> bool:
            return (await small.mesh.client.get("/readyz")).json()["state"] == "draining"

        await eventually(is_draining, within_s=10)
        assert (await small.ask()).status_code == 503
        assert not drain.done()
        small.go_on.set()
        assert [text_in(answer) for answer in await asyncio.gather(*asked)] == [TEXT, TEXT]
        await asyncio.wait_for(drain, 5)
