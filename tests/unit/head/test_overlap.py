"""A prompt's chunks on their way through the hops, several at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.errors import CacheMiss, HopProtocolError, MeshError, RecoveryExhausted, StageError
from meshnet.generation import Sampling
from meshnet.head.pipeline import Pipeline
from meshnet.head.recovery import RecoveryLimits
from meshnet.head.replay import ReplayMode
from meshnet.model.fake_stage import score_token
from tests.unit.fakes import turn_the_loop
from tests.unit.head.making import (
    SAMPLING,
    A,
    B,
    C,
    Disturbance,
    Mesh,
    answers,
    breaks,
    hidden,
    open_mesh,
    refuses,
    says,
    waits,
    well,
)

SPANS = {A: "0-1", B: "1-3", C: "3-4"}
PROMPT = list(range(20, 32))
"""Six chunks of two."""
EVICTED = CacheMiss("gone", reason="evicted", held=0)
ENOUGH = RecoveryLimits(max_rebuilds=100, timeout_s=1e6, backoff_s=1, max_backoff_s=4)


@asynccontextmanager
async def opened(
    *,
    max_bytes: int = 10**6,
    limits: RecoveryLimits = ENOUGH,
    replay: ReplayMode = "exact",
) -> AsyncGenerator[tuple[Mesh, Pipeline]]:
    """Three shards and a pipeline over them, in chunks of two tokens."""
    async with open_mesh(
        SPANS, max_bytes=max_bytes, limits=limits, replay=replay, chunk_tokens=2
    ) as mesh:
        yield mesh, mesh.pipeline(A, B, C)


def n_steps(mesh: Mesh) -> list[int]:
    return [len(mesh[at].steps) for at in (A, B, C)]


def positions(mesh: Mesh, endpoint: str) -> list[int]:
    return [step.past_len for step in mesh[endpoint].steps]


# --- what runs at once ---


async def test_a_hop_works_on_while_the_next_one_works() -> None:
    """While the second hop has the first chunk, the first hop goes on with those behind it."""
    gate = asyncio.Event()
    async with opened() as (mesh, pipeline):
        mesh[B].disturbed = [waits(gate)]
        prefill = asyncio.create_task(pipeline.prefill(PROMPT, SAMPLING))
        await turn_the_loop(100)
        meanwhile = n_steps(mesh)
        gate.set()
        answer = await prefill

    assert meanwhile[0] > meanwhile[1] == 1
    assert answer == says(*PROMPT)


async def test_few_results_pile_up() -> None:
    """Before a hop that is stuck one result waits, and the hop that has the next one waits."""
    gate = asyncio.Event()
    async with opened() as (mesh, pipeline):
        mesh[C].disturbed = [waits(gate)]
        prefill = asyncio.create_task(pipeline.prefill(PROMPT, SAMPLING))
        await turn_the_loop(200)
        meanwhile = n_steps(mesh)
        gate.set()
        await prefill

    assert meanwhile == [5, 3, 1]


async def test_every_hop_takes_the_chunks_in_order() -> None:
    """Each once, one after the other."""
    async with opened() as (mesh, pipeline):
        answer = await pipeline.prefill(PROMPT, SAMPLING)

    assert answer == says(*PROMPT)
    assert [positions(mesh, at) for at in (A, B, C)] == [[0, 2, 4, 6, 8, 10]] * 3


async def test_one_hop_has_one_chunk_at_a_time() -> None:
    """With nobody to overlap with, a chunk waits for the one before it."""
    gate = asyncio.Event()
    async with open_mesh({A: "0-4"}, chunk_tokens=2) as mesh:
        pipeline = mesh.pipeline(A)
        mesh[A].disturbed = [waits(gate)]
        prefill = asyncio.create_task(pipeline.prefill(PROMPT, SAMPLING))
        await turn_the_loop(100)
        meanwhile = len(mesh[A].steps)
        gate.set()

        assert (meanwhile, await prefill) == (1, says(*PROMPT))


# --- what is lost on the way ---


@pytest.mark.parametrize("nth", range(6))
@pytest.mark.parametrize("at", [A, B, C])
async def test_a_hop_that_loses_the_prompt_is_fed_alone(at: str, nth: int) -> None:
    """Whichever chunk it is at, the other hops are asked for each chunk once."""
    async with opened() as (mesh, pipeline):
        mesh[at].disturbed = [*[well] * nth, refuses(EVICTED)]
        answer = await pipeline.prefill(PROMPT, SAMPLING)

    assert answer == says(*PROMPT)
    assert [len(mesh[other].steps) for other in SPANS if other != at] == [6, 6]


FAULTS: list[Disturbance] = [
    well,
    well,
    refuses(EVICTED),
    refuses(CacheMiss("x", reason="length_mismatch", held=2)),
    breaks(httpx.ReadError("cut")),
    breaks(httpx.ReadError("cut"), ran=True),
    breaks(httpx.ReadTimeout(""), ran=True),
]


@given(
    faults=st.lists(st.lists(st.sampled_from(FAULTS), max_size=8), min_size=3, max_size=3),
    max_bytes=st.sampled_from([0, 30, 200, 10**6]),
    replay=st.sampled_from(["exact", "fast"]),
)
@settings(max_examples=60)
async def test_whatever_is_lost_the_answer_is_right(
    faults: list[list[Disturbance]], max_bytes: int, replay: ReplayMode
) -> None:
    """Calls cut or refused, states lost, inputs not kept: token and scores are the same."""
    async with opened(max_bytes=max_bytes, replay=replay) as (mesh, pipeline):
        for shard, some in zip(mesh.shards.values(), faults, strict=True):
            shard.disturbed = list(some)
        answer = await pipeline.prefill(PROMPT, Sampling(top_logprobs=2), score=True)
        await pipeline.close()

    assert answer.token_id == says(*PROMPT).token_id
    assert answer.prompt_scores == tuple(
        score_token(PROMPT[:i], PROMPT[i], 64, 2) for i in range(1, len(PROMPT))
    )
    assert mesh.kit.budget.used_bytes == 0


async def test_tries_are_counted_a_chunk() -> None:
    """A loss at each chunk is no failure."""
    limits = RecoveryLimits(max_rebuilds=1, timeout_s=10, backoff_s=1, max_backoff_s=4)
    async with opened(limits=limits) as (mesh, pipeline):
        for n_held in range(6):
            mesh[B].disturbed += [refuses(EVICTED), *[well] * n_held, well]
        answer = await pipeline.prefill(PROMPT, SAMPLING)

    assert answer == says(*PROMPT)


# --- the end, however it comes ---


async def after(mesh: Mesh, pipeline: Pipeline, gate: asyncio.Event) -> set[str]:
    """What is still running of a prefill that has ended, once its calls in flight have too."""
    gate.set()
    await turn_the_loop(100)
    await pipeline.close()
    await turn_the_loop(100)
    assert [(await shard.store.usage()).sessions for shard in mesh.shards.values()] == [0, 0, 0]
    return {task.get_name() for task in asyncio.all_tasks()} - {asyncio.current_task().get_name()}  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("at", "fault", "kind"),
    [
        (A, refuses(StageError("not finite")), StageError),
        (B, refuses(StageError("not finite")), StageError),
        (C, refuses(StageError("not finite")), StageError),
        (B, answers(hidden(1)), HopProtocolError),
        (C, answers(hidden(2)), HopProtocolError),
    ],
)
async def test_a_failure_is_raised_as_it_is(
    at: str, fault: Disturbance, kind: type[MeshError]
) -> None:
    """The hop's own error, at once: others that hang are not waited for, and leave nothing."""
    gate = asyncio.Event()
    async with opened() as (mesh, pipeline):
        for endpoint in SPANS:
            mesh[endpoint].disturbed = [well, well, waits(gate)]
        mesh[at].disturbed = [well, fault]
        with pytest.raises(kind) as caught:
            await pipeline.prefill(PROMPT, SAMPLING)
        left = await after(mesh, pipeline, gate)

    assert caught.value.members == {"endpoint": at}
    assert left == set()


async def test_a_chunk_that_cannot_be_mended_ends_the_prefill() -> None:
    """A hop that loses whatever it is fed ends it when the tries are used up."""
    limits = RecoveryLimits(max_rebuilds=4, timeout_s=10, backoff_s=1, max_backoff_s=4)
    async with opened(max_bytes=0, limits=limits) as (mesh, pipeline):
        mesh[C].disturbed = [well, *[refuses(EVICTED)] * 100]
        with pytest.raises(RecoveryExhausted):
            await pipeline.prefill(PROMPT, SAMPLING)
        left = await after(mesh, pipeline, asyncio.Event())

    assert left == set()


@pytest.mark.parametrize("at", [A, B, C])
async def test_a_cancelled_prefill_leaves_nothing(at: str) -> None:
    """The calls in flight end by themselves, no other begins, and no hop keeps the session."""
    gate = asyncio.Event()
    async with opened() as (mesh, pipeline):
        mesh[at].disturbed = [well, waits(gate)]
        prefill = asyncio.create_task(pipeline.prefill(PROMPT, SAMPLING))
        await turn_the_loop(100)
        prefill.cancel()
        with pytest.raises(asyncio.CancelledError):
            await prefill
        asked = n_steps(mesh)
        left = await after(mesh, pipeline, gate)

    assert (n_steps(mesh), left) == (asked, set())
