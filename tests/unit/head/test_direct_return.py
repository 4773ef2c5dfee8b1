"""Over shards that push to each other without a socket between them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.errors import (
    CacheMiss,
    HopProtocolError,
    HopTimeout,
    HopUnreachable,
    InputMissing,
    InvalidRequest,
    MeshError,
    QueueFull,
    RecoveryExhausted,
    SessionBusy,
    StageError,
)
from meshnet.generation import SamplingContext
from meshnet.head.hop_client import HopAnswer
from meshnet.head.pipeline import Pipeline
from meshnet.head.recovery import RecoveryLimits
from meshnet.wire.messages import TailAnswer
from tests.unit.fakes import turn_the_loop
from tests.unit.head.making import (
    PROMPT,
    SAMPLING,
    A,
    B,
    C,
    D,
    Disturbance,
    Mesh,
    answers,
    breaks,
    hidden,
    refuses,
    says,
    token,
    waits,
    well,
)
from tests.unit.head.relaying import SPANS, Net, open_relay

HOPS = pytest.mark.parametrize("at", [A, B, C])
EVICTED = CacheMiss("gone", reason="evicted", held=0)


async def fed(mesh: Mesh, *endpoints: str) -> Pipeline:
    """A pipeline whose hops hold the prompt."""
    pipeline = mesh.pipeline(*(endpoints or (A, B, C)))
    await pipeline.prefill(PROMPT, SAMPLING)
    return pipeline


async def decode(pipeline: Pipeline, *ids: int) -> list[TailAnswer]:
    """Tokens one after the other."""
    return [await pipeline.decode(token_id, SAMPLING) for token_id in ids]


def right(*ids: int) -> list[TailAnswer]:
    """What the model says after each of these, if nothing was lost or doubled."""
    return [says(*PROMPT, *ids[: i + 1]) for i in range(len(ids))]


def n_relayed(net: Net, *endpoints: str) -> list[int]:
    """How many steps took part in direct return at each shard."""
    return [len(net.shards[at].relayed) for at in endpoints or (A, B, C)]


def n_computed(net: Net) -> list[int]:
    return [shard.stage.computed for shard in net.shards.values()]


# --- how a step goes ---


async def test_each_hop_pushes_to_the_next_and_the_tail_answers() -> None:
    """Ids, endpoints and lives make a chain; the step is run once at each hop."""
    async with open_relay() as (mesh, net):
        told = await decode(await fed(mesh), 8)
    (first,), (middle,), (tail,) = (shard.relayed for shard in net.shards.values())

    assert told == right(8)
    assert (first.input_id, first.push_to, first.push_boot) == (None, B, "b-1")
    assert (middle.input_id, middle.push_to, middle.push_boot) == (first.push_id, C, "c-1")
    assert (tail.input_id, tail.push_to, tail.push_boot) == (middle.push_id, None, None)
    assert (first.shape, middle.shape, tail.shape) == ((1, 1), (1, 1, 4), (1, 1, 4))
    assert (first.sampling, middle.sampling, tail.sampling) == (None, None, SAMPLING)
    assert n_computed(net) == [len(PROMPT) + 1] * 3
    assert mesh.noted == []


async def test_the_steps_are_there_before_anything_was_run() -> None:
    """All are sent at once; the first hop's answer is not waited for."""
    gate = asyncio.Event()
    async with open_relay() as (mesh, _):
        pipeline = await fed(mesh)
        mesh[A].disturbed = [waits(gate)]
        asked = asyncio.create_task(decode(pipeline, 8))
        await turn_the_loop()
        there = [len(mesh[at].steps) for at in (A, B, C)]
        gate.set()

        assert (there, await asked) == ([2, 2, 2], right(8))


async def test_what_a_sample_depends_on_goes_to_the_tail() -> None:
    """Its step has no tensor, and the context all the same."""
    context = SamplingContext(banned_ids=(says(*PROMPT, 8).token_id or 0,))
    async with open_relay() as (mesh, net):
        pipeline = await fed(mesh)
        told = await pipeline.decode(8, SAMPLING, context)

    assert net.shards[C].relayed[0].context_bytes > 0
    assert told != says(*PROMPT, 8)


async def test_inputs_are_kept_as_ever() -> None:
    """A hop that loses the session later is fed what the hop before it answered."""
    async with open_relay() as (mesh, net):
        pipeline = await fed(mesh)
        await decode(pipeline, 8, 9)
        await mesh[C].lose()
        told = await decode(pipeline, 3)
        await pipeline.close()

    assert told == right(8, 9, 3)[2:]
    assert n_computed(net)[:2] == [len(PROMPT) + 3] * 2
    assert mesh.kit.budget.used_bytes == 0


async def test_a_hops_time_begins_with_the_answer_of_the_hop_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its wait for its input is none of it."""
    noted: dict[str, HopAnswer] = {}
    gate, passed = asyncio.Event(), [0.0]
    monkeypatch.setattr("meshnet.head.hop_client.perf_counter", lambda: passed[0])
    async with open_relay() as (mesh, _):
        pipeline = await fed(mesh)

        def note(endpoint: str, _: int, answer: HopAnswer) -> None:
            noted[endpoint] = answer

        monkeypatch.setattr(mesh.kit.times, "note", note)
        mesh[A].disturbed = [waits(gate)]
        asked = asyncio.create_task(decode(pipeline, 8))
        await turn_the_loop()
        passed[0] = 5.0
        gate.set()
        await asked

    assert {at: answer.step_ms for at, answer in noted.items()} == {A: 5000, B: 0, C: 0}


# --- where there is none ---


async def test_one_hop_has_nobody_to_push_to() -> None:
    """A route of one goes as ever."""
    async with open_relay({A: "0-4"}) as (mesh, net):
        assert await decode(await fed(mesh, A), 8) == right(8)
        assert n_relayed(net, A) == [0]


@pytest.mark.parametrize("closed", [A, B, C])
async def test_all_hops_have_a_stream_or_none_is_used_so(closed: str) -> None:
    """A hop that is asked by POST is asked with its tensor."""
    async with open_relay() as (mesh, net):
        pipeline = await fed(mesh)
        net.closed.add(closed)

        assert await decode(pipeline, 8) == right(8)
        assert n_relayed(net) == [0, 0, 0]


async def test_a_shard_that_does_not_push_is_not_asked_to() -> None:
    """It says so of itself."""
    async with open_relay(push=False) as (mesh, net):
        assert await decode(await fed(mesh), 8) == right(8)
        assert n_relayed(net) == [0, 0, 0]


@pytest.mark.parametrize(("round_trip_s", "expected"), [(0.0009, 0), (0.001, 1)])
async def test_near_hops_go_by_the_head(round_trip_s: float, expected: int) -> None:
    """What is saved is less than what it costs."""
    async with open_relay(least_round_trip_s=0.001) as (mesh, net):
        net.round_trip_s = round_trip_s

        assert await decode(await fed(mesh), 8) == right(8)
        assert n_relayed(net) == [expected] * 3


async def test_a_hop_that_is_to_be_fed_first_is_not_begun_with() -> None:
    """Only one that holds what comes before the step, as far as is known."""
    async with open_relay() as (mesh, _):
        session = mesh.session(A)
        assert session.stream_for(0) is not None
        assert session.stream_for(3) is None


async def test_stateless_steps_go_by_the_head() -> None:
    """They are whole sequences."""
    async with open_relay() as (mesh, net):
        pipeline = mesh.pipeline(A, B, C)

        assert await pipeline.stateless_step(PROMPT, SAMPLING) == says(*PROMPT)
        assert n_relayed(net) == [0, 0, 0]


# --- what is lost on the way ---

FAULTS: dict[str, tuple[Disturbance, type[MeshError] | None]] = {
    "evicted": (refuses(EVICTED), CacheMiss),
    "other-length": (refuses(CacheMiss("x", reason="length_mismatch", held=2)), CacheMiss),
    "busy": (refuses(SessionBusy("x", held=3)), SessionBusy),
    "full": (refuses(QueueFull("x")), QueueFull),
    "cut-before": (breaks(httpx.ReadError("cut")), HopUnreachable),
    "cut-after": (breaks(httpx.ReadError("cut"), ran=True), HopUnreachable),
    "late": (breaks(httpx.ReadTimeout("")), HopTimeout),
    "late-after": (breaks(httpx.ReadTimeout(""), ran=True), HopTimeout),
    "no-input": (refuses(InputMissing("x")), None),
    "refused": (refuses(InvalidRequest("x", field="X-Meshnet-Push-To")), None),
    "no-answer-of-ours": (answers(httpx.Response(500)), HopProtocolError),
}


@HOPS
@pytest.mark.parametrize("fault", FAULTS)
async def test_what_fails_at_a_hop_goes_on_from_there(at: str, fault: str) -> None:
    """The hop is named, every hop runs each token once, and the text is right."""
    disturbance, noted = FAULTS[fault]
    async with open_relay() as (mesh, net):
        pipeline = await fed(mesh)
        mesh[at].disturbed = [disturbance]
        told = await decode(pipeline, 8, 9)

    assert told == right(8, 9)
    assert [type(failure) for failure in mesh.noted] == ([noted] if noted else [])
    assert all(failure.members["endpoint"] == at for failure in mesh.noted)
    fed_again = noted is CacheMiss
    assert n_computed(net) == [
        len(PROMPT) + 2 + (len(PROMPT) if fed_again and hop == at else 0) for hop in SPANS
    ]


@HOPS
async def test_a_step_that_cannot_be_mended_ends_it(at: str) -> None:
    """With the hop's own error, and nothing is left."""
    async with open_relay() as (mesh, _):
        pipeline = await fed(mesh)
        mesh[at].disturbed = [refuses(StageError("not finite"))]
        with pytest.raises(StageError) as caught:
            await decode(pipeline, 8)
        await turn_the_loop()

        assert caught.value.members == {"endpoint": at}
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@pytest.mark.parametrize(("at", "answer"), [(A, hidden(2)), (B, token(3)), (C, hidden(1))])
async def test_an_answer_of_another_kind_is_no_answer(at: str, answer: httpx.Response) -> None:
    """It is told of the hop that gave it."""
    async with open_relay() as (mesh, _):
        pipeline = await fed(mesh)
        mesh[at].disturbed = [answers(answer)]
        with pytest.raises(HopProtocolError) as caught:
            await decode(pipeline, 8)

    assert caught.value.members["endpoint"] == at


async def test_a_failure_counts_as_a_try_and_names_the_hop() -> None:
    """A hop that fails without end ends the generation within its bounds."""
    limits = RecoveryLimits(max_rebuilds=2, timeout_s=10, backoff_s=1, max_backoff_s=4)
    async with open_relay(limits=limits) as (mesh, _):
        pipeline = await fed(mesh)
        mesh[B].disturbed = [refuses(EVICTED)] * 100
        with pytest.raises(RecoveryExhausted) as caught:
            await decode(pipeline, 8)

    assert caught.value.members["endpoint"] == B
    assert len(mesh.noted) == 3


@HOPS
async def test_a_restarted_shard_is_fed_again(at: str) -> None:
    """It is another life, which is pushed to and pushes from then on."""
    async with open_relay() as (mesh, net):
        pipeline = await fed(mesh)
        mesh[at].restart()
        first = await decode(pipeline, 8)
        mesh.clock.now += 0.25  # who pushed to the old one has said that it could not
        second = await decode(pipeline, 9)

        assert first + second == right(8, 9)
        assert n_relayed(net)[list(SPANS).index(at)] == 1


async def test_a_standby_takes_over() -> None:
    """A shard that is gone is replaced, and its successor takes part."""
    spans = {**SPANS, D: "1-3"}
    async with open_relay(spans) as (mesh, net):
        pipeline = await fed(mesh)
        mesh[B].away_until = 1e9
        told = await decode(pipeline, 8, 9)

        assert told == right(8, 9)
        assert n_relayed(net, A, C, D) == [2, 2, 1]


async def test_inputs_that_were_not_kept_are_prefilled_anew() -> None:
    """The whole route begins again, and then goes on directly."""
    async with open_relay(max_bytes=0) as (mesh, net):
        pipeline = await fed(mesh)
        mesh[B].disturbed = [refuses(EVICTED)]
        told = await decode(pipeline, 8, 9)

        assert told == right(8, 9)
        assert n_relayed(net)[2] >= 2


OF_ANY_STEP = [disturbance for disturbance, noted in FAULTS.values() if noted is not None]
PAIRS = [(A, B), (B, C)]


@given(
    faults=st.lists(
        st.lists(st.sampled_from([well, well, well, *OF_ANY_STEP]), max_size=10),
        min_size=3,
        max_size=3,
    ),
    cut_off=st.sets(st.sampled_from(PAIRS)),
    max_bytes=st.sampled_from([0, 60, 10**6]),
)
@settings(max_examples=60, deadline=None)
async def test_whatever_is_lost_the_text_is_right(
    faults: list[list[Disturbance]], cut_off: set[tuple[str, str]], max_bytes: int
) -> None:
    """Steps cut or refused, shards that cannot reach each other, inputs not kept."""
    async with open_relay(max_bytes=max_bytes) as (mesh, net):
        pipeline = await fed(mesh)
        net.cut_off = cut_off
        for shard, some in zip(mesh.shards.values(), faults, strict=True):
            shard.disturbed = list(some)
        told = await decode(pipeline, 8, 9, 3, 4, 8, 9)
        await pipeline.close()

    assert told == right(8, 9, 3, 4, 8, 9)
    assert mesh.kit.budget.used_bytes == 0


# --- shards that cannot reach each other ---


async def test_what_was_not_pushed_goes_by_the_head() -> None:
    """The hop says so, nothing waits, and no failure is counted."""
    async with open_relay() as (mesh, net):
        pipeline = await fed(mesh)
        net.cut_off = {(A, B)}

        assert await decode(pipeline, 8) == right(8)
        assert (mesh.noted, n_computed(net)) == ([], [len(PROMPT) + 1] * 3)


async def test_a_pair_is_tried_again_after_growing_pauses() -> None:
    """And as soon as it is well, all is as before."""
    async with open_relay() as (mesh, net):
        pipeline = await fed(mesh)
        net.cut_off = {(B, C)}
        tried = await relayed_at(pipeline, mesh, net, [0, 0.2, 0.25, 0.7, 0.75, 1.8])
        net.cut_off.clear()
        again = await relayed_at(pipeline, mesh, net, [10, 10, 10])
        net.cut_off = {(B, C)}
        anew = await relayed_at(pipeline, mesh, net, [10, 10.2, 10.25])

    assert tried == [1, 0, 1, 0, 1, 1]
    assert again == [1, 1, 1]
    assert anew == [1, 0, 1]


async def relayed_at(pipeline: Pipeline, mesh: Mesh, net: Net, times: Sequence[float]) -> list[int]:
    """How many steps are begun at the first hop at these times."""
    counts: list[int] = []
    for now in times:
        mesh.clock.now = now
        before = len(net.shards[A].relayed)
        await pipeline.decode(8, SAMPLING)
        counts.append(len(net.shards[A].relayed) - before)
    return counts


async def test_what_is_pushed_and_never_comes_costs_a_time_out_and_a_long_pause() -> None:
    """The hop's own limit, from when it was its turn; it then gets its tensor from the head."""
    async with open_relay(step_limit_s=0.02) as (mesh, net):
        pipeline = await fed(mesh)
        net.losing = {(A, B)}
        told = await decode(pipeline, 8)
        tried = await relayed_at(pipeline, mesh, net, [10, 14.9, 15])

    assert told == right(8)
    assert [type(failure) for failure in mesh.noted[:1]] == [HopTimeout]
    assert net.given_up == [B, B]
    assert tried == [0, 0, 1]


# --- the end ---


@HOPS
async def test_a_cancelled_step_leaves_nothing(at: str) -> None:
    """Nobody waits for any hop, and closing the session is closing it everywhere."""
    gate = asyncio.Event()
    async with open_relay() as (mesh, net):
        pipeline = await fed(mesh)
        mesh[at].disturbed = [waits(gate)]
        asked = asyncio.create_task(decode(pipeline, 8))
        await turn_the_loop()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await pipeline.close()
        gate.set()
        await turn_the_loop()

        assert [(await shard.store.usage()).sessions for shard in net.shards.values()] == [0, 0, 0]
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
