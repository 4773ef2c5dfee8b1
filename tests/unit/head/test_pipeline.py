from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.errors import CacheMiss, HopProtocolError, RecoveryExhausted, StageError
from meshnet.generation import (
    NO_CONTEXT,
    GenerationRequest,
    Sampling,
    SamplingContext,
    TokenEvent,
    TokenScore,
)
from meshnet.head.call import Trace
from meshnet.head.generator import Generator, TextModel
from meshnet.head.pipeline import Pipeline
from meshnet.head.recovery import RecoveryLimits
from meshnet.head.replay import ReplayMode
from meshnet.ids import is_token
from meshnet.model.fake_stage import next_token, pick_token, score_token
from meshnet.wire.context import parse_context
from tests.unit.fakes import FakeLog, turn_the_loop
from tests.unit.head.making import (
    PROMPT,
    SAMPLING,
    A,
    B,
    C,
    Disturbance,
    LiveShard,
    Mesh,
    answers,
    breaks,
    hidden,
    open_mesh,
    refuses,
    says,
    token,
    waits,
    well,
)
from tests.unit.head.telling import encode, spelling

SPANS = {A: "0-1", B: "1-3", C: "3-4"}
EVICTED = CacheMiss("gone", reason="evicted", held=0)


@asynccontextmanager
async def opened(
    *,
    max_bytes: int = 10**6,
    chunk_tokens: int = 512,
    limits: RecoveryLimits | None = None,
    replay: ReplayMode = "exact",
    trace: Trace | None = None,
    **changed: object,
) -> AsyncGenerator[tuple[Mesh, Pipeline]]:
    """Three shards and a pipeline over them."""
    async with open_mesh(
        SPANS,
        max_bytes=max_bytes,
        chunk_tokens=chunk_tokens,
        limits=limits or RecoveryLimits(max_rebuilds=4, timeout_s=10, backoff_s=1, max_backoff_s=4),
        replay=replay,
        **changed,
    ) as mesh:
        yield mesh, mesh.pipeline(A, B, C, trace=trace)


async def told(pipeline: Pipeline, n_tokens: int = 4) -> list[int]:
    """The prompt's continuation, token by token."""
    answer = await pipeline.prefill(PROMPT, SAMPLING)
    ids = [cast("int", answer.token_id)]
    while len(ids) < n_tokens:
        answer = await pipeline.decode(ids[-1], SAMPLING)
        ids.append(cast("int", answer.token_id))
    return ids


def right(n_tokens: int = 4, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What the fake model says after the prompt."""
    ids = list(prompt)
    for _ in range(n_tokens):
        ids.append(next_token(ids, 64))
    return ids[len(prompt) :]


def calls(mesh: Mesh) -> list[list[tuple[str, int, int]]]:
    return [shard.calls for shard in mesh.shards.values()]


# --- steps ---


async def test_a_step_goes_through_every_hop() -> None:
    """Ids go to the first hop, hidden states to the others, the tail's answer comes back."""
    async with opened() as (mesh, pipeline):
        answer = await pipeline.prefill(PROMPT, SAMPLING)
    steps = [mesh[at].steps[0] for at in (A, B, C)]

    assert answer == says(*PROMPT)
    assert [(step.dtype, step.shape) for step in steps] == [
        ("int32", (1, 3)),
        ("float32", (1, 3, 4)),
        ("float32", (1, 3, 4)),
    ]


async def test_only_the_tail_is_told_to_sample() -> None:
    """Sampling parameters are the tail's business."""
    async with opened() as (mesh, pipeline):
        await pipeline.prefill(PROMPT, SAMPLING)

    assert [mesh[at].steps[0].sampling for at in (A, B, C)] == [None, None, SAMPLING]


async def test_every_hop_gets_its_own_layer_and_fingerprint() -> None:
    """A hop is told where to start, and which model the head believes in."""
    async with opened() as (mesh, pipeline):
        await pipeline.prefill(PROMPT, SAMPLING)
    steps = [mesh[at].steps[0] for at in (A, B, C)]

    assert [(step.start_layer, step.fingerprint) for step in steps] == [
        (0, "fake-1-0-1"),
        (1, "fake-1-1-3"),
        (3, "fake-1-3-4"),
    ]


async def test_one_session_and_one_trace_over_all_hops() -> None:
    """All steps of a pipeline carry the same session, request id and trace."""
    async with opened(trace=Trace("r-1", "00-trace")) as (mesh, pipeline):
        await told(pipeline, 2)
    steps = [step for shard in mesh.shards.values() for step in shard.steps]

    assert {(s.session, s.request_id, s.traceparent) for s in steps} == {
        (pipeline.session, "r-1", "00-trace")
    }


async def test_two_pipelines_have_two_sessions() -> None:
    """A session is one generation's, and its id a token."""
    async with opened() as (mesh, pipeline):
        route = pipeline._route  # pyright: ignore[reportPrivateUsage]
        sessions = {Pipeline(route, mesh.book, mesh.kit, Trace()).session for _ in range(2)}

    assert (len(sessions), all(map(is_token, sessions))) == (2, True)


async def test_a_text_comes_step_by_step() -> None:
    """Each step continues where the last one ended, on every hop."""
    async with opened() as (mesh, pipeline):
        ids = await told(pipeline)

    assert (ids, calls(mesh)) == (
        right(),
        [[("prefill", 0, 3), ("decode", 3, 1), ("decode", 4, 1), ("decode", 5, 1)]] * 3,
    )


@pytest.mark.parametrize(
    ("n_prompt", "chunks"),
    [(1, [1]), (2, [2]), (3, [2, 1]), (4, [2, 2]), (5, [2, 2, 1])],
)
async def test_a_long_prompt_is_prefilled_in_chunks(n_prompt: int, chunks: list[int]) -> None:
    """Chunks are as long as allowed and follow each other; the answer is that of all of them."""
    prompt = list(range(n_prompt))
    async with opened(chunk_tokens=2) as (mesh, pipeline):
        answer = await pipeline.prefill(prompt, SAMPLING)

    assert answer == says(*prompt)
    assert calls(mesh) == [[("prefill", 2 * i, n) for i, n in enumerate(chunks)]] * 3


async def test_only_the_last_chunk_samples() -> None:
    """A chunk that is not the prompt's end asks the tail for nothing."""
    async with opened(chunk_tokens=2) as (mesh, pipeline):
        await pipeline.prefill(PROMPT, SAMPLING)

    assert [step.sampling for step in mesh[C].steps] == [None, SAMPLING]


async def test_a_chunk_is_no_longer_than_the_hops_take() -> None:
    """The least of the head's and the hops' limits counts."""
    async with opened(max_step_tokens=2) as (mesh, pipeline):
        await pipeline.prefill(PROMPT, SAMPLING)

    assert [n for _, _, n in mesh[A].calls] == [2, 1]


async def test_a_stateless_step_sends_the_whole_sequence() -> None:
    """Where nothing is kept every step has all tokens so far, and leaves nothing behind."""
    async with opened(kv_cache=False) as (mesh, pipeline):
        first = await pipeline.stateless_step(PROMPT, SAMPLING)
        second = await pipeline.stateless_step([*PROMPT, 9], SAMPLING)

    assert [first, second] == [says(*PROMPT), says(*PROMPT, 9)]
    assert calls(mesh) == [[("stateless", 0, 3), ("stateless", 0, 4)]] * 3


@pytest.mark.parametrize("kv_cache", [True, False])
async def test_a_pipeline_is_as_its_route(kv_cache: bool) -> None:
    """Whether steps are stateless and how long they may be is the route's to say."""
    async with opened(kv_cache=kv_cache, max_step_tokens=9) as (mesh, pipeline):
        assert (pipeline.stateless, pipeline.max_step_tokens) == (not kv_cache, 9)
        assert pipeline.background is mesh.background


async def test_a_refusal_ends_the_step() -> None:
    """A refusal that does not pass is raised, and hops behind that hop are not asked."""
    async with opened() as (mesh, pipeline):
        mesh[B].disturbed = [refuses(StageError("not finite"))]
        with pytest.raises(StageError) as caught:
            await pipeline.prefill(PROMPT, SAMPLING)

    assert caught.value.members == {"endpoint": B}
    assert [len(shard.steps) for shard in mesh.shards.values()] == [1, 1, 0]


@pytest.mark.parametrize(
    ("at", "answer", "fault"),
    [
        (A, token(7), "http://a answered as a tail"),
        (C, hidden(3), "http://c answered hidden states"),
        (A, hidden(1), "http://a answered 1 tokens to 3"),
        (B, hidden(4), "http://b answered 4 tokens to 3"),
    ],
)
async def test_a_hop_out_of_its_part_is_a_protocol_error(
    at: str, answer: httpx.Response, fault: str
) -> None:
    """Hidden states of as many tokens come from every hop but the tail, and never from it."""
    async with opened() as (mesh, pipeline):
        mesh[at].disturbed = [answers(answer)]
        with pytest.raises(HopProtocolError, match=fault) as caught:
            await pipeline.prefill(PROMPT, SAMPLING)

    assert caught.value.members == {"endpoint": at}


# --- what the tail's answer depends on besides, and scores ---

BIASED = SamplingContext(logit_bias={9: -1.5})
SCORING = Sampling(top_logprobs=2)


def scores_of(prompt: Sequence[int]) -> tuple[TokenScore, ...]:
    """What the fake model says of each token but the first."""
    return tuple(score_token(list(prompt[:i]), prompt[i], 64, 2) for i in range(1, len(prompt)))


def contexts(shard: LiveShard) -> list[SamplingContext]:
    return [parse_context(sent, vocab_size=64, n_tokens=512) for sent in shard.contexts]


@pytest.mark.parametrize("kv_cache", [True, False])
async def test_only_the_tail_is_told_the_context(kv_cache: bool) -> None:
    """Each step of the tail that picks a token has its context; no other hop and no chunk has."""
    async with opened(kv_cache=kv_cache, chunk_tokens=2) as (mesh, pipeline):
        if kv_cache:
            await pipeline.prefill(PROMPT, SAMPLING, BIASED)
            await pipeline.decode(9, SAMPLING, BIASED)
        else:
            await pipeline.stateless_step(PROMPT, SAMPLING, BIASED)

    assert contexts(mesh[A]) == contexts(mesh[B]) == [NO_CONTEXT] * len(mesh[A].steps)
    assert contexts(mesh[C]) == ([NO_CONTEXT, BIASED, BIASED] if kv_cache else [BIASED])


@pytest.mark.parametrize("n_prompt", [1, 2, 3, 4, 5])
async def test_a_prompt_is_scored_chunk_by_chunk(n_prompt: int) -> None:
    """Every token but the first is scored once, in order, also where a chunk ends before it."""
    prompt = [20 + i for i in range(n_prompt)]
    async with opened(chunk_tokens=2) as (mesh, pipeline):
        answer = await pipeline.prefill(prompt, SCORING, BIASED, score=True)
    *chunks, last = contexts(mesh[C])

    assert answer.prompt_scores == scores_of(prompt)
    assert answer.token_id == says(*prompt).token_id
    assert [context.next_ids for context in chunks] == [
        (prompt[i + 1], prompt[i + 2]) for i in range(0, 2 * len(chunks), 2)
    ]
    assert last == BIASED.scoring(prompt[2 * len(chunks) + 1 :])


async def test_a_whole_sequence_is_scored_at_once() -> None:
    """A stateless step tells what comes after all its tokens but the last."""
    async with opened(kv_cache=False) as (mesh, pipeline):
        answer = await pipeline.stateless_step(PROMPT, SCORING, BIASED, score=True)

    assert contexts(mesh[C]) == [BIASED.scoring([6, 7])]
    assert (answer.token_id, answer.prompt_scores) == (right(1)[0], scores_of(PROMPT))


async def test_scores_that_were_told_are_not_asked_for_again() -> None:
    """Where a hop is fed again between chunks, the tail scores each chunk once all the same."""
    prompt = list(range(20, 26))
    told = asyncio.Event()
    async with opened(max_bytes=0, chunk_tokens=2) as (mesh, pipeline):
        mesh[A].disturbed = [well, well, waits(told, refuses(EVICTED))]
        scoring = asyncio.create_task(pipeline.prefill(prompt, SCORING, score=True))
        await turn_the_loop(100)
        told.set()
        answer = await scoring

    assert answer.prompt_scores == scores_of(prompt)
    assert [context.next_ids for context in contexts(mesh[C])] == [
        (21, 22),
        (23, 24),
        (),
        (),
        (25,),
    ]


# --- what is lost ---


@pytest.mark.parametrize("at", [A, B, C])
async def test_a_hop_that_lost_the_session_is_fed_alone(at: str) -> None:
    """The other hops do not notice: they are asked for each step once."""
    async with opened() as (mesh, pipeline):
        first = await pipeline.prefill(PROMPT, SAMPLING)
        await mesh[at].lose()
        second = await pipeline.decode(cast("int", first.token_id), SAMPLING)
    n_steps = {shard.endpoint: len(shard.steps) for shard in mesh.shards.values()}

    assert [first.token_id, second.token_id] == right(2)
    assert n_steps == {A: 2, B: 2, C: 2} | {at: 4}


@pytest.mark.parametrize("at", [A, B, C])
async def test_without_room_for_inputs_all_hops_are_fed_anew(at: str) -> None:
    """What was not kept is made again from the ids, in a higher epoch on every hop."""
    async with opened(max_bytes=0) as (mesh, pipeline):
        first = await pipeline.prefill(PROMPT, SAMPLING)
        await mesh[at].lose()
        second = await pipeline.decode(cast("int", first.token_id), SAMPLING)
    again = [
        [
            (step.cache, step.past_len)
            for step in shard.steps[1:]
            if step.epoch > shard.steps[0].epoch
        ]
        for shard in mesh.shards.values()
    ]

    assert [first.token_id, second.token_id] == right(2)
    assert again == [[("prefill", 0), ("decode", 3)]] * 3


async def test_what_is_fed_anew_is_recovery() -> None:
    """The steps of the answer are counted once on each hop, whatever was computed again."""
    async with opened(max_bytes=0) as (mesh, pipeline):
        first = await pipeline.prefill(PROMPT, SAMPLING)
        pipeline.times.note_token()
        await mesh[B].lose()
        await pipeline.decode(cast("int", first.token_id), SAMPLING)
    prefill, decode = mesh.times.prefill.hops, mesh.times.decode.hops

    assert {endpoint: sums.steps for endpoint, sums in prefill.items()} == {A: 1, B: 1, C: 1}
    # A runs the step, which B then cannot take; and again when all were fed.
    assert {endpoint: sums.steps for endpoint, sums in decode.items()} == {A: 2, B: 1, C: 1}
    assert {endpoint: sums.recoveries for endpoint, sums in decode.items()} == {A: 1, B: 2, C: 1}


async def test_a_prompt_lost_between_its_chunks_is_fed_anew() -> None:
    """Also before the first token all that was prefilled comes again, in chunks."""
    async with opened(max_bytes=0, chunk_tokens=2) as (mesh, pipeline):
        mesh[B].disturbed = [well, well, refuses(EVICTED)]
        answer = await pipeline.prefill(list(range(6)), SAMPLING)

    assert answer == says(*range(6))
    assert [past_len for _, past_len, _ in mesh[A].calls] == [0, 2, 4, 0, 2, 4]


async def test_feeding_anew_samples_once() -> None:
    """While all hops are fed anew the tail samples nothing; it does at the step itself."""
    async with opened(max_bytes=0) as (mesh, pipeline):
        first = await pipeline.prefill(PROMPT, SAMPLING)
        await mesh[A].lose()
        await pipeline.decode(cast("int", first.token_id), SAMPLING)

    assert [step.sampling for step in mesh[C].steps] == [SAMPLING, None, SAMPLING]


async def test_feeding_anew_is_told() -> None:
    """The metrics hear of all layers' tokens, and of why."""
    async with opened(max_bytes=0) as (mesh, pipeline):
        first = await pipeline.prefill(PROMPT, SAMPLING)
        await mesh[A].lose()
        await pipeline.decode(cast("int", first.token_id), SAMPLING)

    assert sum(mesh.replayed) == 3 * 4
    assert [failure.code for failure in mesh.noted] == ["cache_miss", "inputs_dropped"]


async def test_feeding_anew_is_bounded() -> None:
    """A hop that loses whatever it is fed ends the step when the tries are used up."""
    async with opened(max_bytes=0) as (mesh, pipeline):
        first = await pipeline.prefill(PROMPT, SAMPLING)
        mesh[C].disturbed = [refuses(EVICTED)] * 100
        with pytest.raises(RecoveryExhausted):
            await pipeline.decode(cast("int", first.token_id), SAMPLING)

    assert len(mesh[C].steps) <= 1 + 5


async def test_after_feeding_anew_inputs_are_kept_again() -> None:
    """Room that has come meanwhile is used: the next loss is one hop's alone."""
    async with opened(max_bytes=0) as (mesh, pipeline):
        first = await pipeline.prefill(PROMPT, SAMPLING)
        mesh.kit.budget.max_bytes = 10**6
        await mesh[A].lose()
        second = await pipeline.decode(cast("int", first.token_id), SAMPLING)
        before = len(mesh[A].steps)
        await mesh[C].lose()
        third = await pipeline.decode(cast("int", second.token_id), SAMPLING)

    assert [answer.token_id for answer in (first, second, third)] == right(3)
    assert len(mesh[A].steps) == before + 1


@pytest.mark.parametrize("max_bytes", [0, 40, 100, 10**6])
async def test_the_budget_is_given_back(max_bytes: int) -> None:
    """After close() nothing is taken, whatever found room, was lost, and was fed again."""
    async with opened(max_bytes=max_bytes) as (mesh, pipeline):
        await told(pipeline, 2)
        await mesh[B].lose()
        await pipeline.decode(9, SAMPLING)
        used = mesh.kit.budget.used_bytes
        await pipeline.close()

    assert (used <= max_bytes, mesh.kit.budget.used_bytes) == (True, 0)


async def test_a_failure_that_costs_time_counts_over_all_hops() -> None:
    """The tries are one step's, not one hop's."""
    async with opened() as (mesh, pipeline):
        for at in (A, B, C):
            mesh[at].disturbed = [refuses(EVICTED)] * 2
        with pytest.raises(RecoveryExhausted, match="5 attempts failed"):
            await pipeline.prefill(PROMPT, SAMPLING)


async def test_tries_are_counted_a_step() -> None:
    """A loss at every step is no failure."""
    async with opened(limits=RecoveryLimits(max_rebuilds=1)) as (mesh, pipeline):
        answer = await pipeline.prefill(PROMPT, SAMPLING)
        ids = [cast("int", answer.token_id)]
        for _ in range(4):
            await mesh[B].lose()
            answer = await pipeline.decode(ids[-1], SAMPLING)
            ids.append(cast("int", answer.token_id))

    assert ids == right(5)


FAULTS: list[Disturbance] = [
    well,
    well,
    well,
    refuses(EVICTED),
    refuses(CacheMiss("x", reason="length_mismatch", held=3)),
    breaks(httpx.ReadError("cut")),
    breaks(httpx.ReadError("cut"), ran=True),
    breaks(httpx.ReadTimeout(""), ran=True),
    answers(httpx.Response(502, html="<html>")),
]


@given(
    faults=st.lists(st.lists(st.sampled_from(FAULTS), max_size=6), min_size=3, max_size=3),
    lost=st.lists(st.sampled_from(["lose", "restart", ""]), min_size=9, max_size=9),
    max_bytes=st.sampled_from([0, 30, 100, 10**6]),
    replay=st.sampled_from(["exact", "fast"]),
)
async def test_whatever_is_lost_the_text_is_right(
    faults: list[list[Disturbance]], lost: list[str], max_bytes: int, replay: ReplayMode
) -> None:
    """Calls cut or refused, states and lives lost: the ids are the same, no byte stays taken."""
    limits = RecoveryLimits(max_rebuilds=100, timeout_s=1e6, backoff_s=1, max_backoff_s=4)
    async with opened(max_bytes=max_bytes, chunk_tokens=2, limits=limits, replay=replay) as (
        mesh,
        pipeline,
    ):
        for shard, some in zip(mesh.shards.values(), faults, strict=True):
            shard.disturbed = list(some)
        answer = await pipeline.prefill(PROMPT, SAMPLING)
        ids = [cast("int", answer.token_id)]
        for step in range(3):
            for shard, deed in zip(mesh.shards.values(), lost[3 * step :], strict=False):
                if deed == "lose":
                    await shard.lose()
                elif deed == "restart":
                    shard.restart()
            answer = await pipeline.decode(ids[-1], SAMPLING)
            ids.append(cast("int", answer.token_id))
        await pipeline.close()

    assert (ids, mesh.kit.budget.used_bytes) == (right(), 0)


PENALISED = Sampling(frequency_penalty=0.2, repetition_penalty=1.5, top_logprobs=2)
BIAS = {9: -1.5, 30: 0.4}


def right_events(n_tokens: int) -> list[TokenEvent]:
    """What the fake model makes of the prompt with these penalties and this bias."""
    ids, events = list(PROMPT), list[TokenEvent]()
    for n_left in reversed(range(n_tokens)):
        context = SamplingContext(
            prompt_ids=tuple(PROMPT), generated_ids=tuple(ids[len(PROMPT) :]), logit_bias=BIAS
        )
        token_id = pick_token(ids, 64, PENALISED, context)
        score = score_token(ids, token_id, 64, 2)
        reason = None if n_left else "length"
        scores = () if events else scores_of(PROMPT)
        events.append(TokenEvent(f"<{token_id}>", token_id, reason, score, scores))
        ids.append(token_id)
    return events


@given(
    faults=st.lists(st.lists(st.sampled_from(FAULTS), max_size=6), min_size=3, max_size=3),
    lost=st.lists(st.sampled_from(["lose", "restart", ""]), min_size=18, max_size=18),
    max_bytes=st.sampled_from([0, 100, 10**6]),
)
@settings(max_examples=20)
async def test_whatever_is_lost_penalties_and_scores_are_right(
    faults: list[list[Disturbance]], lost: list[str], max_bytes: int
) -> None:
    """What depends on all tokens so far is the same, whichever hop lost its state, and when."""
    limits = RecoveryLimits(max_rebuilds=100, timeout_s=1e6, backoff_s=1, max_backoff_s=4)
    generator = Generator(TextModel(frozenset(), spelling, encode))
    request = GenerationRequest(tuple(PROMPT), 6, PENALISED, logit_bias=BIAS, score_prompt=True)
    async with opened(max_bytes=max_bytes, chunk_tokens=2, limits=limits) as (mesh, pipeline):
        for shard, some in zip(mesh.shards.values(), faults, strict=True):
            shard.disturbed = list(some)
        events: list[TokenEvent] = []
        async for event in generator.generate(request, lambda: pipeline):
            for shard, deed in zip(mesh.shards.values(), lost[3 * len(events) :], strict=False):
                if deed == "lose":
                    await shard.lose()
                elif deed == "restart":
                    shard.restart()
            events.append(event)

    assert events == right_events(6)


# --- cancellation, and close() ---


async def test_a_cancelled_step_asks_no_other_hop() -> None:
    """The caller ends at once, the hop call goes on, and what comes after it does not begin."""
    async with opened() as (mesh, pipeline):
        gate = asyncio.Event()
        mesh[B].disturbed = [waits(gate)]
        step = asyncio.create_task(pipeline.prefill(PROMPT, SAMPLING))
        await turn_the_loop()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        gate.set()

    assert [len(shard.steps) for shard in mesh.shards.values()] == [1, 1, 0]
    assert mesh[B].stage.computed == 3


async def test_close_frees_the_session_on_every_hop() -> None:
    """Each hop is told once, and holds nothing then."""
    async with opened() as (mesh, pipeline):
        await pipeline.prefill(PROMPT, SAMPLING)
        await pipeline.close()
        held = [(await shard.store.usage()).sessions for shard in mesh.shards.values()]

    assert ([shard.closed for shard in mesh.shards.values()], held) == ([[1]] * 3, [0, 0, 0])


async def test_close_before_any_step_frees_too() -> None:
    """A session of which no hop has heard is closed in the same way: that is idempotent."""
    async with opened() as (mesh, pipeline):
        await pipeline.close()

    assert [shard.closed for shard in mesh.shards.values()] == [[1]] * 3


async def test_close_does_not_wait_for_the_step_in_flight() -> None:
    """A step in flight is fenced by its epoch: what it would leave behind is not kept."""
    async with opened() as (mesh, pipeline):
        gate = asyncio.Event()
        mesh[B].disturbed = [waits(gate)]
        step = asyncio.create_task(pipeline.prefill(PROMPT, SAMPLING))
        await turn_the_loop()
        step.cancel()
        await pipeline.close()
        gate.set()
        await turn_the_loop()
        held = [(await shard.store.usage()).sessions for shard in mesh.shards.values()]

    assert held == [0, 0, 0]


async def test_a_hop_that_cannot_be_closed_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unreachable hop gets a log line, and every other hop is told."""
    log = FakeLog.instead_of("meshnet.head.hop_session._log", monkeypatch)
    async with opened() as (mesh, pipeline):
        mesh[B].away_until = 1e9
        await pipeline.close()

    assert [shard.closed for shard in mesh.shards.values()] == [[1], [], [1]]
    assert [(line["hop"], line["code"]) for line in log.lines] == [(B, "hop_unreachable")]
