"""A prompt's chunks stream down the route: every hop works on another one at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from meshnet.errors import StageError
from meshnet.model.fake_stage import fake_facts
from meshnet.model.interface import CacheState, StageOutput, StageStep
from meshnet.topology import LayerSpan
from tests.support.flaky import CountingStage, Delivery, LinedShard, Reply, serve_lined
from tests.support.mesh import (
    VOCAB_SIZE,
    Mesh,
    fake_stages,
    fake_text,
    serve_head,
    serve_mesh,
    spell,
)
from tests.support.recorder import SeenStep
from tests.support.steps import shard_client
from tests.support.streams import eventually, open_stream, read_stream, text_of

pytestmark = pytest.mark.mesh

SPANS = ((0, 1), (1, 3), (3, 4))
CHUNK = 4
N_CHUNKS = 6
PROMPT = list(range(20, 20 + CHUNK * N_CHUNKS))
CHUNKS = [(start, f"1,{CHUNK}") for start in range(0, len(PROMPT), CHUNK)]
N_TOKENS = 5
TEXT = fake_text(PROMPT, N_TOKENS)


def prefills(steps: list[SeenStep]) -> list[tuple[int, str]]:
    """Position and number of tokens of each chunk that was asked for."""
    return [(s.past_len, ",".join(s.shape.split(",")[:2])) for s in steps if s.mode == "prefill"]


async def ask(client: httpx.AsyncClient, *, stream: bool = False) -> str:
    if stream:
        return text_of(await read_stream(client, spell(PROMPT), max_tokens=N_TOKENS))
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": spell(PROMPT)}],
        "temperature": 0,
        "max_tokens": N_TOKENS,
    }
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def holds_nothing(mesh: Mesh) -> bool:
    return await mesh.usage() == [(0, 0)] * len(mesh.shards)


# --- what runs at once ---


async def test_two_hops_work_at_once() -> None:
    """The second hop is in the first chunk while the first hop is in the second one."""
    working: set[int] = set()
    both = asyncio.Event()

    def meet(hop: int) -> Callable[[SeenStep], Awaitable[None]]:
        async def wait_for_other(step: SeenStep) -> None:
            working.add(hop)
            if len(working) == 2:
                both.set()
            if step.past_len == CHUNK * (1 - hop):
                await both.wait()
            working.discard(hop)

        return wait_for_other

    async with serve_mesh(fake_stages((0, 2), (2, 4)), prefill_chunk_tokens=CHUNK) as mesh:
        for hop, shard in enumerate(mesh.shards):
            shard.recorder.before_step = meet(hop)
        async with asyncio.timeout(20):
            assert await ask(mesh.client) == TEXT


async def test_few_chunks_are_ahead_of_a_slow_hop() -> None:
    """While the tail is stuck in the first chunk the others take some more, and then wait."""
    go_on = asyncio.Event()

    async def hold(step: SeenStep) -> None:
        del step
        await go_on.wait()

    async with serve_mesh(fake_stages(*SPANS), prefill_chunk_tokens=CHUNK) as mesh:
        mesh.shards[2].recorder.before_step = hold
        asked = asyncio.create_task(ask(mesh.client))

        async def counts_are(*expected: int) -> bool:
            return [len(shard.recorder.steps) for shard in mesh.shards] == list(expected)

        await eventually(lambda: counts_are(5, 3, 1), within_s=10)
        await asyncio.sleep(0.2)  # whoever went further would have
        assert await counts_are(5, 3, 1)
        go_on.set()
        assert await asked == TEXT


@pytest.mark.parametrize("n_hops", [1, 2, 3])
async def test_every_hop_gets_every_chunk_once_and_in_order(n_hops: int) -> None:
    """However many hops there are; and one at a time, or a shard would say `session_busy`."""
    spans = {1: ((0, 4),), 2: ((0, 2), (2, 4)), 3: SPANS}[n_hops]
    async with serve_mesh(fake_stages(*spans), prefill_chunk_tokens=CHUNK) as mesh:
        assert await ask(mesh.client) == TEXT
        assert [prefills(shard.recorder.steps) for shard in mesh.shards] == [CHUNKS] * n_hops
        assert await holds_nothing(mesh)


# --- faults in the middle of a prefill ---


@asynccontextmanager
async def serve_line(**head: object) -> AsyncGenerator[tuple[list[LinedShard], httpx.AsyncClient]]:
    """Three shards behind lines, and a client of the head over them, once it is ready."""
    stages = [CountingStage(fake_facts(LayerSpan(*span), 4, VOCAB_SIZE)) for span in SPANS]
    async with (
        serve_lined(stages[0]) as a,
        serve_lined(stages[1]) as b,
        serve_lined(stages[2]) as c,
    ):
        urls = [shard.url for shard in (a, b, c)]
        settings = {"prefill_chunk_tokens": CHUNK, "max_rebuilds_per_token": 100} | head
        async with serve_head(urls, None, **settings) as (_, client):

            async def is_ready() -> bool:
                return (await client.get("/readyz")).json()["state"] == "ready"

            await eventually(is_ready, within_s=10)
            yield [a, b, c], client


def at_step(
    n: int, deed: Callable[[Delivery], Awaitable[Reply | None]]
) -> Callable[..., Awaitable[Reply | None]]:
    """Do it at the nth step, and let the others through."""

    async def on_step(delivery: Delivery) -> Reply | None:
        return await deed(delivery) if delivery.n == n else await delivery.deliver()

    return on_step


async def lose_request(delivery: Delivery) -> None:
    """The connection breaks before the shard has seen the step."""
    del delivery


async def lose_answer(delivery: Delivery) -> None:
    """The connection breaks after the shard has run the step."""
    await delivery.deliver()


@pytest.mark.parametrize("replay_max_bytes", [2**20, 0])
@pytest.mark.parametrize("deed", [lose_request, lose_answer])
@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_chunk_lost_on_the_line_costs_no_text(
    hop: int, deed: Callable[[Delivery], Awaitable[None]], replay_max_bytes: int
) -> None:
    """Asked for again on any hop, while the others are at other chunks: the text is the same."""
    async with serve_line(replay_max_bytes=replay_max_bytes) as (shards, client):
        for n in (1, 3, N_CHUNKS):
            shards[hop].line.n_steps = 0
            shards[hop].line.on_step = at_step(n, deed)
            assert await ask(client) == TEXT


@pytest.mark.parametrize("replay_max_bytes", [2**20, 0])
@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_state_lost_between_chunks_costs_no_text(hop: int, replay_max_bytes: int) -> None:
    """The hop is fed again alone; where its inputs were not kept, all hops are fed anew."""
    async with serve_line(replay_max_bytes=replay_max_bytes) as (shards, client):
        shard = shards[hop]

        async def drop_state(step: SeenStep) -> None:
            if len(shard.shard.recorder.steps) == 4:
                async with shard_client(shard.url) as to_shard:
                    await to_shard.close(step.session)

        shard.shard.recorder.before_step = drop_state
        assert await ask(client, stream=True) == TEXT
        asked = [len(prefills(one.shard.recorder.steps)) for one in shards]
        if replay_max_bytes:
            alone = [N_CHUNKS] * 3
            alone[hop] = N_CHUNKS + 1 + 3  # what was lost is asked for again, after what it needs
            assert asked == alone
        else:
            assert min(asked) > N_CHUNKS


# --- the end, however it comes ---


class BreakingStage(CountingStage):
    """Fails in the third chunk."""

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        if step.position == 2 * CHUNK:
            raise StageError("this stage fails in the third chunk")
        return super().run(step, state)


@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_hop_that_fails_ends_it_with_its_own_error(hop: int) -> None:
    """The answer is an error, no hop is asked for more, and none keeps the session."""
    stages = fake_stages(*SPANS)
    stages[hop] = BreakingStage(stages[hop].facts)
    async with serve_mesh(stages, prefill_chunk_tokens=CHUNK) as mesh:
        answer = await mesh.chat(spell(PROMPT))
        assert answer.status_code == 500, answer.text
        await eventually(lambda: holds_nothing(mesh), within_s=10)
        asked = [len(shard.recorder.steps) for shard in mesh.shards]
        await asyncio.sleep(0.1)  # whatever was left running would ask
        assert [len(shard.recorder.steps) for shard in mesh.shards] == asked
        assert [len(shard.recorder.closed) for shard in mesh.shards] == [1, 1, 1]


@pytest.mark.parametrize("hop", [0, 1, 2])
async def test_a_client_that_leaves_in_a_prefill_leaves_nothing(hop: int) -> None:
    """Calls in flight end by themselves; no other begins, and every hop frees the session."""
    go_on, reached = asyncio.Event(), asyncio.Event()

    async def hold(step: SeenStep) -> None:
        if step.past_len == 2 * CHUNK:
            reached.set()
            await go_on.wait()

    async with serve_mesh(fake_stages(*SPANS), prefill_chunk_tokens=CHUNK) as mesh:
        mesh.shards[hop].recorder.before_step = hold

        async def leave_early() -> None:
            async with open_stream(mesh.client, spell(PROMPT), max_tokens=N_TOKENS) as events:
                async for _ in events:
                    pass

        asked = asyncio.create_task(leave_early())
        await reached.wait()
        asked.cancel()
        await asyncio.wait({asked})

        async def is_closed() -> bool:
            return [len(shard.recorder.closed) for shard in mesh.shards] == [1, 1, 1]

        await eventually(is_closed, within_s=10)
        n_asked = [len(shard.recorder.steps) for shard in mesh.shards]
        go_on.set()
        await eventually(lambda: holds_nothing(mesh), within_s=10)
        assert [len(shard.recorder.steps) for shard in mesh.shards] == n_asked
        assert await ask(mesh.client) == TEXT
