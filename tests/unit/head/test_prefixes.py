"""What a new session can begin with, of sessions that are told by their tokens only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.head.pipeline import Pipeline
from meshnet.head.prefixes import MIN_TOKENS, PrefixIndex, _n_common  # pyright: ignore[reportPrivateUsage]
from meshnet.ids import SessionId
from meshnet.model.fake_stage import next_token
from tests.unit.fakes import turn_the_loop
from tests.unit.head.making import SAMPLING, A, B, Mesh, breaks, open_mesh, waits, well

SPANS = {A: "0-2", B: "2-4"}
SHARED = [(5 * i + i // 7) % 60 for i in range(40)]
LONG = [*SHARED, *([61] * 10)]
"""Forty tokens that others begin with too, and ten of its own."""


@pytest.fixture
async def mesh() -> AsyncGenerator[Mesh]:
    async with open_mesh(SPANS, chunk_tokens=16) as mesh:
        yield mesh


def opened(mesh: Mesh, name: str) -> Pipeline:
    return mesh.pipeline(A, B, session=SessionId(name))


async def told(pipeline: Pipeline, prompt: Sequence[int], n_tokens: int = 3) -> int:
    """Answer a prompt rightly, and tell how much of it was not computed."""
    ids = list(prompt)
    answer = await pipeline.prefill(prompt, SAMPLING)
    for _ in range(n_tokens):
        ids.append(next_token(ids, 64))
        assert answer.token_id == ids[-1]
        answer = await pipeline.decode(ids[-1], SAMPLING)
    return pipeline.n_cached


async def ended(mesh: Mesh, name: str, prompt: Sequence[int]) -> int:
    """A whole session; how much of its prompt was not computed."""
    pipeline = opened(mesh, name)
    n_cached = await told(pipeline, prompt)
    await pipeline.close()
    return n_cached


def forks(mesh: Mesh, at: str = A) -> list[tuple[str | None, str | None, int]]:
    """Who began as a fork of whom, and with how many tokens."""
    return [(s.session, s.fork_of, s.past_len) for s in mesh[at].steps if s.fork_of]


# --- whose tokens ---


async def test_a_prompt_begins_with_what_an_ended_session_has(mesh: Mesh) -> None:
    """On every hop; only what differs is computed."""
    assert await ended(mesh, "one", LONG) == 0
    mesh[A].stage.computed = mesh[B].stage.computed = 0
    assert await ended(mesh, "two", [*SHARED, 1, 2]) == len(SHARED)

    assert forks(mesh, A) == forks(mesh, B) == [("two", "one", len(SHARED))]
    assert (mesh[A].stage.computed, mesh[B].stage.computed) == (5, 5)


async def test_a_prompt_begins_with_what_a_running_session_has(mesh: Mesh) -> None:
    """Both go on, each with its own tokens."""
    first, second = opened(mesh, "one"), opened(mesh, "two")
    assert await told(first, LONG) == 0
    assert await told(second, [*SHARED, 1]) == len(SHARED)
    answer = await first.decode(9, SAMPLING)

    ids = list(LONG)
    for _ in range(3):
        ids.append(next_token(ids, 64))
    assert answer.token_id == next_token([*ids, 9], 64)


async def test_the_next_turn_begins_with_prompt_and_answer(mesh: Mesh) -> None:
    """All of the conversation that was computed is there to be had."""
    ids = list(LONG)
    await ended(mesh, "one", ids)
    for _ in range(3):
        ids.append(next_token(ids, 64))

    assert await ended(mesh, "two", [*ids, 1, 2, 3]) == len(ids)


async def test_the_last_token_is_computed_always(mesh: Mesh) -> None:
    """The same prompt again: what follows its last token is not known."""
    await ended(mesh, "one", LONG)

    assert await ended(mesh, "two", LONG) == len(LONG) - 1


async def test_the_longest_beginning_is_taken(mesh: Mesh) -> None:
    """Of several sessions that begin alike."""
    await ended(mesh, "one", [*SHARED, 1, 1])
    await ended(mesh, "two", [*SHARED, 2, 2, 2])
    await ended(mesh, "three", [*SHARED, 3])
    await ended(mesh, "four", [*SHARED, 2, 2, 4])

    assert forks(mesh)[-1] == ("four", "two", len(SHARED) + 2)


async def test_a_short_beginning_is_computed(mesh: Mesh) -> None:
    """Fewer tokens than it is worth asking for."""
    await ended(mesh, "one", LONG)

    assert await ended(mesh, "two", [*LONG[: MIN_TOKENS - 1], 1]) == 0
    assert await ended(mesh, "three", [*LONG[:MIN_TOKENS], 1]) == MIN_TOKENS


async def test_a_scored_prompt_is_computed(mesh: Mesh) -> None:
    """Each of its tokens is scored by what was computed for the one before."""
    await ended(mesh, "one", LONG)
    pipeline = opened(mesh, "two")
    sampling = SAMPLING.model_copy(update={"top_logprobs": 0})
    answer = await pipeline.prefill(LONG, sampling, score=True)

    assert (len(answer.prompt_scores), pipeline.n_cached) == (len(LONG) - 1, 0)


async def test_without_reuse_nothing_is_kept() -> None:
    """Every prompt is computed, and every session closed."""
    async with open_mesh(SPANS) as mesh:
        prefixes = PrefixIndex(mesh.kit.budget, exact=True, reuse=False)
        mesh.kit = replace(mesh.kit, prefixes=prefixes)
        await ended(mesh, "one", LONG)
        assert await ended(mesh, "two", LONG) == 0
        usage = await mesh[A].store.usage()

    assert (usage.sessions, usage.kept, mesh.kit.budget.used_bytes) == (0, 0, 0)


async def test_another_life_of_a_shard_holds_nothing(mesh: Mesh) -> None:
    """Sessions of the life before are not asked for."""
    await ended(mesh, "one", LONG)
    mesh[B].restart()
    await mesh.book.refresh()

    assert await ended(mesh, "two", LONG) == 0
    assert forks(mesh) == []


@pytest.mark.parametrize(("replay", "n_cached"), [("exact", 32), ("fast", 40)])
async def test_exact_forks_in_bfloat16_begin_where_a_call_ended(replay: str, n_cached: int) -> None:
    """What is fed again after a loss must be so in the same calls, for the same bits."""
    mode = "exact" if replay == "exact" else "fast"
    async with open_mesh({A: "0-4"}, chunk_tokens=16, replay=mode, dtype="bfloat16") as mesh:
        for name, prompt in (("one", LONG), ("two", [*SHARED, 1])):
            pipeline = mesh.pipeline(A, session=SessionId(name))
            await pipeline.prefill(prompt, SAMPLING)

    assert pipeline.n_cached == n_cached


# --- what is lost ---


@pytest.mark.parametrize("at", [A, B])
async def test_a_hop_that_has_nothing_to_fork_is_fed(mesh: Mesh, at: str) -> None:
    """It alone; nothing is counted as a failure, and nothing as cached."""
    await ended(mesh, "one", LONG)
    await mesh[at].lose(SessionId("one"))
    for shard in mesh.shards.values():
        shard.stage.computed = 0
    assert await ended(mesh, "two", [*SHARED, 1]) == 0

    computed = {endpoint: shard.stage.computed for endpoint, shard in mesh.shards.items()}
    assert computed == {A: 4, B: 4} | {at: 4 + len(SHARED)}
    assert mesh.noted == []


async def test_what_a_hop_does_not_hold_is_asked_for_once(mesh: Mesh) -> None:
    """A kept session that some hop lost is dropped on the others."""
    await ended(mesh, "one", LONG)
    await mesh[B].lose(SessionId("one"))
    await ended(mesh, "two", [*SHARED, 1])
    await turn_the_loop()
    usage = await mesh[A].store.usage()

    assert usage.kept == 1
    assert await ended(mesh, "three", [*LONG, 1]) == len(SHARED)


async def test_a_running_session_that_a_hop_lost_stays_known(mesh: Mesh) -> None:
    """It will be fed, and others can begin with it then."""
    running = opened(mesh, "one")
    await told(running, LONG)
    await mesh[B].lose(SessionId("one"))
    assert await ended(mesh, "two", [*SHARED, 1]) == 0
    await running.decode(7, SAMPLING)

    assert await ended(mesh, "three", [*LONG, 1]) == len(LONG)


async def test_a_shard_restarted_unseen_is_found_out(mesh: Mesh) -> None:
    """It is looked at and fed, as after any restart."""
    await ended(mesh, "one", LONG)
    pipeline = opened(mesh, "two")
    mesh[A].restart()

    assert await told(pipeline, [*SHARED, 1]) == 0


@pytest.mark.parametrize("ran", [True, False])
async def test_a_forks_lost_answer_is_asked_for_again(mesh: Mesh, *, ran: bool) -> None:
    """By its id: forked once, whether or not it had been."""
    await ended(mesh, "one", LONG)
    mesh[B].disturbed = [breaks(httpx.ReadError("cut"), ran=ran)]
    assert await ended(mesh, "two", [*SHARED, 1]) == len(SHARED)

    assert mesh[B].store.n_forks == 1


async def test_a_fork_that_is_lost_is_fed_what_it_never_was(mesh: Mesh) -> None:
    """The inputs of its first tokens are those of the session that it began with."""
    await ended(mesh, "one", LONG)
    pipeline = opened(mesh, "two")
    await told(pipeline, [*SHARED, 1])
    for endpoint in (A, B):
        await mesh[endpoint].lose(SessionId("two"))
    ids = [*SHARED, 1]
    for _ in range(3):
        ids.append(next_token(ids, 64))
    answer = await pipeline.decode(7, SAMPLING)

    assert answer.token_id == next_token([*ids, 7], 64)
    lengths = [step.shape[1] for step in mesh[B].steps[-8:]]
    assert lengths == [16, 16, 8, 1, 1, 1, 1, 1]


async def test_a_fork_without_inputs_is_prefilled_anew_on_all_hops() -> None:
    """Where there was no room for them; the text is the same."""
    async with open_mesh(SPANS, max_bytes=0) as mesh:
        await ended(mesh, "one", LONG)
        await mesh[B].lose(SessionId("one"))
        assert await ended(mesh, "two", [*SHARED, 1]) == 0
        await ended(mesh, "three", LONG)
        assert await ended(mesh, "four", LONG) == len(LONG) - 1


# --- waiting for another prefill ---


async def test_prompts_at_once_are_computed_once(mesh: Mesh) -> None:
    """The second waits until the first has what both begin with, and goes on from there."""
    gate = asyncio.Event()
    mesh[B].disturbed = [waits(gate)]
    first = asyncio.create_task(told(opened(mesh, "one"), LONG))
    await turn_the_loop()
    others = [asyncio.create_task(told(opened(mesh, name), LONG)) for name in ("two", "three")]
    await turn_the_loop()
    assert {step.session for step in mesh[A].steps} == {"one"}
    gate.set()

    assert await asyncio.gather(first, *others) == [0, len(LONG) - 1, len(LONG) - 1]


async def test_a_prompt_waits_for_no_more_than_it_needs(mesh: Mesh) -> None:
    """The first chunks are enough, though the other one's prompt is longer."""
    gate = asyncio.Event()
    longer = [*SHARED, *([61] * 60)]
    mesh[B].disturbed = [well, well, well, waits(gate)]
    first = asyncio.create_task(told(opened(mesh, "one"), longer))
    second = asyncio.create_task(told(opened(mesh, "two"), [*SHARED, 1]))
    await asyncio.wait({second}, timeout=5)
    is_first_done = first.done()
    gate.set()

    assert await second == len(SHARED)
    assert not is_first_done
    await first


async def test_nobody_waits_for_a_prefill_that_ended_early(mesh: Mesh) -> None:
    """A prompt whose other session was closed is computed."""
    gate = asyncio.Event()
    mesh[A].disturbed = [waits(gate)]
    first = opened(mesh, "one")
    running = asyncio.create_task(first.prefill(LONG, SAMPLING))
    await turn_the_loop()
    second = asyncio.create_task(told(opened(mesh, "two"), LONG))
    await turn_the_loop()
    running.cancel()
    closing = asyncio.create_task(first.close())
    gate.set()

    assert await second == 0
    await closing


# --- what is kept ---


async def test_a_session_with_little_is_not_kept(mesh: Mesh) -> None:
    """It would never be worth asking for."""
    await ended(mesh, "one", LONG[: MIN_TOKENS - 4])
    usage = await mesh[A].store.usage()

    assert (usage.sessions, usage.kept, mesh.kit.budget.used_bytes) == (0, 0, 0)


async def test_a_longer_session_takes_the_place_of_a_shorter_one(mesh: Mesh) -> None:
    """What begins with all of another's tokens is all that need be kept, on the hops too."""
    ids = list(LONG)
    for name in ("one", "two", "three"):
        await ended(mesh, name, ids)
        for _ in range(3):
            ids.append(next_token(ids, 64))
    await turn_the_loop()
    kept = [(await mesh[at].store.usage()).kept for at in (A, B)]

    assert kept == [1, 1]
    assert mesh.kit.budget.used_bytes == (len(LONG) + 9) * 20


async def test_a_session_that_another_one_has_whole_is_not_kept(mesh: Mesh) -> None:
    """The same prompt and answer twice are kept once."""
    await ended(mesh, "one", LONG)
    used_bytes = mesh.kit.budget.used_bytes
    await ended(mesh, "two", LONG)

    assert (await mesh[A].store.usage()).kept == 1
    assert mesh.kit.budget.used_bytes == used_bytes


async def test_no_more_are_kept_than_a_shard_has_places(mesh: Mesh) -> None:
    """The least recently used go; being forked is a use."""
    async with open_mesh(SPANS, max_sessions=2) as mesh:
        for number in range(2):
            await ended(mesh, f"{number}", [number, *LONG])
        await ended(mesh, "2", [0, *LONG, 9])
        await ended(mesh, "3", [1, *LONG, 9])
        await turn_the_loop()

        assert len(forks(mesh)) == 1
        assert (await mesh[A].store.usage()).kept == 2


async def test_what_a_shard_lost_in_a_restart_is_forgotten() -> None:
    """By and by, as others are kept: so that a head does not grow with its shards' restarts."""
    async with open_mesh(SPANS, max_sessions=2) as mesh:
        used_bytes: list[int] = []
        for number in range(5):
            await ended(mesh, f"{number}", [number, *LONG])
            used_bytes.append(mesh.kit.budget.used_bytes)
            mesh[B].restart()
            await mesh.book.refresh()

        assert used_bytes[1:] == [used_bytes[1]] * 4


async def test_kept_inputs_give_way_to_those_of_live_sessions() -> None:
    """The budget's room is a live session's first, and the kept one is dropped on the hops."""
    async with open_mesh(SPANS, max_bytes=2000) as mesh:
        await ended(mesh, "one", LONG)
        live = opened(mesh, "two")
        await told(live, [1, *LONG])
        await turn_the_loop()

        assert mesh.kit.budget.used_bytes == (len(LONG) + 4) * 20
        assert (await mesh[A].store.usage()).kept == 0
        await mesh[B].lose(SessionId("two"))
        mesh[A].stage.computed = 0
        await live.decode(3, SAMPLING)
        assert mesh[A].stage.computed == 1


async def test_a_hop_that_cannot_be_told_does_not_matter(mesh: Mesh) -> None:
    """A session that could not be closed is asked for in vain, once."""
    pipeline = opened(mesh, "one")
    await told(pipeline, LONG)
    await mesh[A].lose(SessionId("one"))
    mesh[A].away_until = mesh.clock() + 1
    await pipeline.close()
    mesh[A].away_until = 0.0

    assert await ended(mesh, "two", LONG) == 0
    assert await ended(mesh, "three", LONG) == len(LONG) - 1


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9))
def test_common_tokens_are_counted(ids: list[int], others: list[int]) -> None:
    """As many as there are before the first difference, or the end of either."""
    differ = [a != b for a, b in zip(ids, others, strict=False)]
    expected = differ.index(True) if any(differ) else min(len(ids), len(others))

    assert _n_common(ids, others) == expected
