from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import httpx
import pytest

from meshnet.errors import (
    CacheFull,
    CacheMiss,
    HopProtocolError,
    HopTimeout,
    HopUnreachable,
    InputsDropped,
    InvalidRequest,
    MeshError,
    ModelMismatch,
    QueueFull,
    RecoveryExhausted,
    SessionBusy,
    StageError,
    StaleEpoch,
)
from meshnet.generation import MAX_TOP_LOGPROBS, NO_CONTEXT, SamplingContext, TokenScore
from meshnet.head.call import Call, Trace
from meshnet.head.hop_session import HopSession
from meshnet.head.recovery import RecoveryLimits
from meshnet.ids import is_token
from meshnet.model.fake_stage import HIDDEN_SIZE, pick_token
from meshnet.topology import LayerSpan
from meshnet.wire.context import render_context
from meshnet.wire.frames import Frame
from meshnet.wire.messages import TailAnswer
from tests.unit.fakes import FakeLog, turn_the_loop
from tests.unit.head.making import (
    JSON,
    PROMPT,
    SAMPLING,
    SESSION,
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
)
from tests.unit.shard.making import hidden_of

WHOLE = {A: "0-4"}
TWINS = {A: "0-4", B: "0-4"}
EVICTED = CacheMiss("gone", reason="evicted", held=0)
# A prompt in two calls, and then a decode: what a hop was fed before the call that a test is about.
FED = [("prefill", 0, 2), ("prefill", 2, 1), ("decode", 3, 1)]


def call_of(past_len: int, ids: Sequence[int], *, hidden_states: bool = False) -> Call:
    """The next call of a session: a prefill up to the prompt's end, else a decode."""
    n = len(ids)
    frame = (
        Frame("float32", (1, n, HIDDEN_SIZE), hidden_of(ids))
        if hidden_states
        else Frame.of_token_ids(ids)
    )
    return Call("prefill" if past_len < len(PROMPT) else "decode", frame, past_len, SAMPLING)


async def run(
    mesh: Mesh, session: HopSession, past_len: int, *ids: int, hidden_states: bool = False
) -> Frame | TailAnswer:
    tries = mesh.kit.recovery.begin()
    return await session.step(call_of(past_len, ids, hidden_states=hidden_states), tries)


async def fed(mesh: Mesh, *, hidden_states: bool = False) -> HopSession:
    """A session that was fed the prompt and one token more."""
    session = mesh.session()
    for past_len, ids in ((0, [5, 6]), (2, [7]), (3, [8])):
        await run(mesh, session, past_len, *ids, hidden_states=hidden_states)
    return session


async def fifth(mesh: Mesh, session: HopSession) -> Frame | TailAnswer:
    """The call that the tests are about."""
    return await run(mesh, session, 4, 9)


RIGHT = says(*PROMPT, 8, 9)
"""What the model says after the fifth token, if nothing of what came before was lost or doubled."""


# --- what is sent ---


async def test_a_call_tells_which_session_and_whom_it_means() -> None:
    """A cached call carries session, epoch 1, the believed life and model, and the trace."""
    async with open_mesh({B: "2-4"}) as mesh:
        session = mesh.session(B, Trace("r-1", "00-trace"))
        await run(mesh, session, 0, 5, 6, hidden_states=True)
    (step,) = mesh[B].steps

    assert (step.session, step.epoch, step.boot) == (SESSION, 1, "b-1")
    assert (step.fingerprint, step.start_layer) == ("fake-1-2-4", 2)
    assert (step.request_id, step.traceparent) == ("r-1", "00-trace")
    assert (step.cache, step.past_len, step.shape, step.sampling) == (
        "prefill",
        0,
        (1, 2, 4),
        SAMPLING,
    )


async def test_every_call_has_an_id_of_its_own() -> None:
    """Step ids are tokens and do not repeat."""
    async with open_mesh(WHOLE) as mesh:
        await fed(mesh)
    ids = [step.step or "" for step in mesh[A].steps]

    assert (len(set(ids)), all(map(is_token, ids))) == (3, True)


async def test_a_stateless_call_is_of_no_epoch() -> None:
    """What keeps nothing needs no order; the whole sequence is all that is sent."""
    async with open_mesh(WHOLE) as mesh:
        session = mesh.session()
        call = Call("stateless", Frame.of_token_ids(PROMPT), 0, SAMPLING)
        told = [await session.step(call, mesh.kit.recovery.begin()) for _ in range(2)]

    assert (told, mesh[A].calls) == ([says(*PROMPT)] * 2, [("stateless", 0, 3)] * 2)
    assert (mesh[A].epochs, mesh.kit.budget.used_bytes) == ([0, 0], 0)


CONTEXT = SamplingContext(generated_ids=(8, 8), logit_bias={3: 1.5}, allowed=b"\xff\x01")


async def test_a_context_follows_the_tensor() -> None:
    """Its length is in the headers; where there is none the body is the tensor alone."""
    async with open_mesh(WHOLE) as mesh:
        session = mesh.session()
        for context in (NO_CONTEXT, CONTEXT):
            call = Call("stateless", Frame.of_token_ids(PROMPT), 0, SAMPLING, context)
            await session.step(call, mesh.kit.recovery.begin())

    assert mesh[A].contexts == [b"", render_context(CONTEXT)]
    assert [step.context_bytes for step in mesh[A].steps] == [0, len(render_context(CONTEXT))]


@pytest.mark.parametrize(
    "failure",
    [refuses(EVICTED), breaks(httpx.ReadError("cut")), breaks(httpx.ReadTimeout(""), ran=True)],
    ids=["lost", "cut", "answer-lost"],
)
async def test_a_call_repeated_has_the_same_context(failure: Disturbance) -> None:
    """The tail is told the same, byte for byte; what is fed again before samples nothing."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [failure]
        call = Call("decode", Frame.of_token_ids([9]), 4, SAMPLING, CONTEXT)
        answer = await session.step(call, mesh.kit.recovery.begin())
    right = pick_token([*PROMPT, 8, 9], 64, SAMPLING, CONTEXT)
    told = [sent for sent in mesh[A].contexts if sent]

    assert (answer, told) == (TailAnswer(token_id=right), [render_context(CONTEXT)] * 2)


async def test_the_longest_scores_are_read() -> None:
    """An answer may be as long as the scores that were asked for can make it."""
    longest = TokenScore(
        token_id=2**31 - 1,
        logprob=-1234.5678901234567,
        top=((2**31 - 1, -1.2345678901234567e-100),) * MAX_TOP_LOGPROBS,
    )
    told = TailAnswer(prompt_scores=(longest,) * 1300)
    call = Call(
        "prefill", Frame.of_token_ids([1] * 1300), 0, SAMPLING, NO_CONTEXT.scoring([1] * 1300)
    )
    async with open_mesh(WHOLE) as mesh:
        response = httpx.Response(200, content=told.model_dump_json(), headers=JSON)
        mesh[A].disturbed = [answers(response)]
        answer = await mesh.session().step(call, mesh.kit.recovery.begin())

    assert len(response.content) > 2**20
    assert answer == told


async def test_cached_calls_are_timed() -> None:
    """Decodes are noted as such, and a next call gets its limit from what was measured."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        await fifth(mesh, session)
    times = mesh.kit.times.of(A)

    assert times is not None
    assert times.steps == 3  # two decodes, and a chunk of one token
    assert mesh[A].limits_s == [120.0, 120.0, 5.0, 5.0]


async def test_stateless_calls_are_not_timed() -> None:
    """A whole sequence says nothing of how long a step of few tokens takes."""
    async with open_mesh(WHOLE) as mesh:
        call = Call("stateless", Frame.of_token_ids([5]), 0, SAMPLING)
        await mesh.session().step(call, mesh.kit.recovery.begin())

    assert mesh.kit.times.of(A) is None


async def test_inputs_are_kept_while_the_session_is_open() -> None:
    """Four ids of four bytes take 16 bytes of the budget, and none after closing."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        open_bytes = mesh.kit.budget.used_bytes
        await session.close()

    assert (open_bytes, mesh.kit.budget.used_bytes) == (16, 0)


# --- the same step again ---


@pytest.mark.parametrize("ran", [True, False], ids=["ran", "did not run"])
@pytest.mark.parametrize(
    ("broken", "code"),
    [(httpx.ReadError("cut"), "hop_unreachable"), (httpx.ReadTimeout(""), "hop_timeout")],
    ids=["cut", "slow"],
)
async def test_an_unanswered_step_is_asked_again_by_its_id(
    broken: httpx.HTTPError, code: str, ran: bool
) -> None:
    """Whether it ran or not, the same id, epoch and position give the answer; it runs once."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [breaks(broken, ran=ran)]
        answer = await fifth(mesh, session)
    first, again = mesh[A].steps[3:]

    assert (answer, mesh[A].stage.computed) == (RIGHT, 5)
    assert (first.step, first.epoch, first.past_len) == (again.step, again.epoch, again.past_len)
    assert [failure.code for failure in mesh.noted] == [code]


async def test_a_shard_that_is_well_is_asked_again_at_once() -> None:
    """After a call was cut the shard is looked at; if it is well there is no pause."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        looks = mesh[A].looks
        mesh[A].disturbed = [breaks(httpx.ReadError("cut"))]
        await fifth(mesh, session)

    assert (mesh[A].looks - looks, mesh.clock.slept) == (1, [])


@pytest.mark.parametrize("busy", [SessionBusy("x", held=4), CacheFull("x"), QueueFull("x")])
async def test_waiting_for_its_turn_costs_no_try(busy: MeshError) -> None:
    """A shard that is busy is asked again after growing pauses, as often as there is time."""
    limits = RecoveryLimits(max_rebuilds=1, timeout_s=60, backoff_s=1, max_backoff_s=4)
    async with open_mesh(WHOLE, limits=limits) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [refuses(busy)] * 6
        answer = await fifth(mesh, session)

    assert (answer, len({step.step for step in mesh[A].steps[3:]})) == (RIGHT, 1)
    assert mesh.clock.slept == [1, 2, 4, 4, 4, 4]


async def test_a_shard_that_is_busy_for_ever_is_given_up() -> None:
    """Waiting for a turn ends with the time allowed."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [refuses(QueueFull("full"))] * 100
        with pytest.raises(RecoveryExhausted, match="full; it was not mended within 10 s"):
            await fifth(mesh, session)

    assert 10 < mesh.clock.now <= 10 + 4


# --- a state that was lost ---


async def test_a_lost_state_is_fed_again_in_the_same_calls() -> None:
    """A hop that lost the session gets its inputs again, call by call, in a higher epoch."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        await mesh[A].lose()
        answer = await fifth(mesh, session)
    lost, *again = mesh[A].steps[3:]

    assert (answer, [failure.code for failure in mesh.noted]) == (RIGHT, ["cache_miss"])
    assert mesh[A].calls[3:] == [
        ("decode", 4, 1),
        *(("prefill", past_len, n) for _, past_len, n in FED),
        ("decode", 4, 1),
    ]
    assert ([step.epoch for step in again], lost.epoch) == ([2] * 4, 1)
    assert (again[-1].step, len({step.step for step in again})) == (lost.step, 4)


async def test_a_recovery_is_told_apart_from_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was mended counts as one; all that came before its last try is recovery."""
    async with open_mesh(WHOLE) as mesh:
        monkeypatch.setattr("meshnet.head.hop_session.perf_counter", mesh.clock)
        session = await fed(mesh)
        mesh[A].disturbed = [refuses(QueueFull("full"))]
        await fifth(mesh, session)
    (sums,) = mesh.times.prefill.hops.values()

    assert (sums.steps, sums.recoveries) == (4, 1)
    last_step_ms = mesh.clock.now * 1000 - sums.recovery_ms
    assert 0 < last_step_ms <= sums.step_ms


async def test_a_step_that_fails_for_good_is_recovery_too() -> None:
    """What it took is told, though no step came of it."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [refuses(StageError("broken", position=4))]
        with pytest.raises(StageError):
            await fifth(mesh, session)
    (sums,) = mesh.times.prefill.hops.values()

    assert (sums.steps, sums.recoveries, sums.recovery_ms > 0) == (3, 1, True)


async def test_inputs_are_fed_again_without_sampling() -> None:
    """What the tail said the first time is not sampled again."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        await mesh[A].lose()
        await fifth(mesh, session)

    assert [step.sampling for step in mesh[A].steps[4:]] == [None, None, None, SAMPLING]


async def test_what_is_computed_again_is_told() -> None:
    """Layer-tokens are tokens times the layers of the hop."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        await mesh[A].lose()
        await fifth(mesh, session)

    assert mesh.replayed == [2 * 4, 1 * 4, 1 * 4]


async def test_a_state_lost_once_is_fed_again_at_once() -> None:
    """A first miss costs no pause."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [refuses(EVICTED)]
        await fifth(mesh, session)

    assert mesh.clock.slept == []


async def test_a_state_lost_again_and_again_costs_pauses() -> None:
    """From the second miss of a step on there is a pause before the next try."""
    async with open_mesh(WHOLE) as mesh:
        session = mesh.session()
        mesh[A].disturbed = [refuses(EVICTED)] * 3
        answer = await run(mesh, session, 0, *PROMPT)

    assert (answer, mesh.clock.slept) == (says(*PROMPT), [1, 2])


async def test_misses_are_bounded() -> None:
    """A hop that always misses gets max_rebuilds tries more, and then the cause is raised."""
    async with open_mesh(WHOLE) as mesh:
        session = mesh.session()
        mesh[A].disturbed = [refuses(EVICTED)] * 100
        with pytest.raises(RecoveryExhausted, match="5 attempts failed") as caught:
            await run(mesh, session, 0, *PROMPT)

    assert (caught.value.members["cause"], len(mesh[A].steps)) == ("cache_miss", 5)


async def test_a_hop_goes_on_from_a_calls_end() -> None:
    """A hop that says it holds all up to a call's end is fed from there only."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        await mesh[A].hold(PROMPT)
        answer = await fifth(mesh, session)

    assert (answer, mesh[A].calls[4:]) == (RIGHT, [("prefill", 3, 1), ("decode", 4, 1)])


async def test_a_hop_that_holds_a_part_of_a_call_begins_anew() -> None:
    """A call's part would give other last digits, so such a hop is fed from position 0."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        await mesh[A].hold([5])
        answer = await fifth(mesh, session)

    assert (answer, mesh[A].calls[4]) == (RIGHT, ("prefill", 0, 2))


@pytest.mark.parametrize("held", ["3", None, -1, 3.0, 10**9], ids=repr)
async def test_whatever_is_claimed_to_be_held_the_hop_is_fed_right(held: object) -> None:
    """What is no number of tokens that was fed counts as nothing held."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [refuses(CacheMiss("x", reason="length_mismatch", held=held))]
        answer = await fifth(mesh, session)

    assert (answer, mesh[A].calls[4]) == (RIGHT, ("prefill", 0, 2))


async def test_a_feeding_whose_answer_was_lost_goes_on_behind_it() -> None:
    """What was applied unheard is found at its call's end, and is not computed twice."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        await mesh[A].lose()
        computed = mesh[A].stage.computed
        cut = breaks(httpx.ReadError("cut"), ran=True)
        mesh[A].disturbed = [refuses(EVICTED), cut]
        answer = await fifth(mesh, session)

    assert (answer, mesh[A].stage.computed - computed) == (RIGHT, 5)


async def test_a_state_lost_while_it_is_fed_again_is_fed_from_the_start() -> None:
    """A loss amid the feeding begins it anew, and the text is the same."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        await mesh[A].lose()
        mesh[A].disturbed = [refuses(EVICTED), refuses(EVICTED)]
        answer = await fifth(mesh, session)

    assert (answer, mesh[A].epochs) == (RIGHT, [1, 1, 1, 1, 2, 3, 3, 3, 3])


async def test_after_two_exact_tries_a_hop_is_fed_in_bulk() -> None:
    """Lost three times in one step, the state is fed in one call: it needs fewer to succeed."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        await mesh[A].lose()
        mesh[A].disturbed = [refuses(EVICTED)] * 3
        answer = await fifth(mesh, session)

    assert (answer, mesh[A].calls[3:]) == (
        RIGHT,
        [
            ("decode", 4, 1),
            ("prefill", 0, 2),
            ("prefill", 0, 2),
            ("prefill", 0, 4),
            ("decode", 4, 1),
        ],
    )


async def test_fast_feeds_in_bulk_at_once() -> None:
    """A head that is to be fast feeds all in one call."""
    async with open_mesh(WHOLE, replay="fast") as mesh:
        session = await fed(mesh)
        await mesh[A].lose()
        answer = await fifth(mesh, session)

    assert (answer, mesh[A].calls[4:]) == (RIGHT, [("prefill", 0, 4), ("decode", 4, 1)])


async def test_fast_goes_on_from_anywhere() -> None:
    """A head that is to be fast feeds only what the hop says it lacks."""
    async with open_mesh(WHOLE, replay="fast") as mesh:
        session = await fed(mesh)
        await mesh[A].hold([5])
        answer = await fifth(mesh, session)

    assert (answer, mesh[A].calls[4:]) == (RIGHT, [("prefill", 1, 3), ("decode", 4, 1)])


async def test_bulk_is_no_longer_than_the_shard_takes() -> None:
    """Calls in bulk are as long as the shard's longest step."""
    async with open_mesh(WHOLE, replay="fast", max_step_tokens=3) as mesh:
        session = await fed(mesh)
        await mesh[A].lose()
        answer = await fifth(mesh, session)

    assert (answer, mesh[A].calls[4:]) == (
        RIGHT,
        [("prefill", 0, 3), ("prefill", 3, 1), ("decode", 4, 1)],
    )


@pytest.mark.parametrize("replay", ["exact", "fast"])
async def test_a_later_hop_is_fed_its_hidden_states(replay: str) -> None:
    """A hop behind the first is fed what the hops before it said, which are not asked again."""
    async with open_mesh({A: "2-4"}, replay="fast" if replay == "fast" else "exact") as mesh:
        session = await fed(mesh, hidden_states=True)
        await mesh[A].lose()
        answer = await run(mesh, session, 4, 9, hidden_states=True)
    shapes = [step.shape for step in mesh[A].steps[4:-1]]

    assert answer == RIGHT
    assert shapes == ([(1, 4, 4)] if replay == "fast" else [(1, 2, 4), (1, 1, 4), (1, 1, 4)])


async def test_inputs_that_were_not_kept_are_told() -> None:
    """Where the budget had no room the hop cannot be fed alone, and the caller is told so."""
    async with open_mesh(WHOLE, max_bytes=15) as mesh:
        session = await fed(mesh)
        await mesh[A].lose()
        with pytest.raises(InputsDropped):
            await fifth(mesh, session)


async def test_forgetting_begins_anew() -> None:
    """After forget() nothing is kept, and a prefill at 0 in a higher epoch replaces the state."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        session.forget()
        kept = mesh.kit.budget.used_bytes
        answer = await run(mesh, session, 0, *PROMPT)

    assert (answer, kept, mesh[A].epochs) == (says(*PROMPT), 0, [1, 1, 1, 2])


# --- a shard that is gone, or another one ---


async def test_a_restarted_shard_is_found_and_fed() -> None:
    """A new life says that it is one; the head looks, and feeds it what the old one had."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].restart()
        answer = await fifth(mesh, session)
    told = [failure.members.get("reason") for failure in mesh.noted]

    assert (answer, told) == (RIGHT, ["restarted"])
    assert [step.boot for step in mesh[A].steps[3:]] == ["a-1"] + ["a-2"] * 4


@pytest.mark.parametrize("away_s", [1.0, 9.0])
async def test_a_shard_that_is_gone_is_waited_for(away_s: float) -> None:
    """While a shard is away it is looked for, which costs one try; back, it is fed again."""
    limits = RecoveryLimits(max_rebuilds=1, timeout_s=10, backoff_s=0.1, max_backoff_s=1)
    async with open_mesh(WHOLE, limits=limits) as mesh:
        session = await fed(mesh)
        mesh[A].restart(away_s=away_s)
        answer = await fifth(mesh, session)

    assert (answer, away_s <= mesh.clock.now <= away_s + 1) == (RIGHT, True)
    assert [failure.code for failure in mesh.noted] == ["hop_unreachable"]


async def test_looks_at_a_shard_are_paused() -> None:
    """The pauses between looks double up to a limit."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].restart(away_s=9)
        await fifth(mesh, session)

    assert mesh.clock.slept == [1, 2, 4, 4]


async def test_a_shard_that_was_away_and_held_on_goes_on() -> None:
    """Where only the network was away, the same life goes on with what it holds."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].away_until = 5.0
        answer = await fifth(mesh, session)

    assert (answer, mesh[A].calls[3:]) == (RIGHT, [("decode", 4, 1)] * 2)


async def test_a_shard_that_does_not_come_back_is_given_up() -> None:
    """Not back within the time, the shard ends the step; the cause and its name are told."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].away_until = 1e9
        with pytest.raises(RecoveryExhausted, match="not mended within 10 s") as caught:
            await fifth(mesh, session)

    assert caught.value.members == {"endpoint": A, "cause": "hop_unreachable"}
    assert 10 < mesh.clock.now <= 10 + 4


async def test_a_shard_of_another_model_is_refused() -> None:
    """A new life that runs something else does not go on; both fingerprints are told."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].facts = replace(mesh[A].facts, fingerprint="other")
        mesh[A].restart()
        with pytest.raises(ModelMismatch) as caught:
            await fifth(mesh, session)

    assert caught.value.members == {
        "expected": "fake-1-0-4",
        "actual": "other",
        "endpoint": A,
    }
    assert mesh.clock.slept == []


@pytest.mark.parametrize(
    "changed",
    [
        {"fingerprint": "other"},
        {"span": LayerSpan(1, 4), "layer_digests": (), "fingerprint": "other"},
    ],
    ids=["weights", "span"],
)
async def test_a_shard_of_another_model_is_replaced(changed: dict[str, object]) -> None:
    """Where another shard runs the right model, it goes on there."""
    async with open_mesh(TWINS) as mesh:
        session = await fed(mesh)
        mesh[A].facts = replace(mesh[A].facts, **changed)
        mesh[A].restart()
        answer = await fifth(mesh, session)

    assert (answer, session.hop.endpoint) == (RIGHT, B)


async def test_a_shard_that_refused_the_model_and_has_it_now_goes_on() -> None:
    """A fingerprint that was refused and is right when looked at is tried again."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [refuses(ModelMismatch("x", expected="a", actual="b"))]

        assert await fifth(mesh, session) == RIGHT


async def test_a_gone_shard_is_replaced_at_once() -> None:
    """Another shard of the same layers is fed what the lost one had, without a pause."""
    async with open_mesh(TWINS) as mesh:
        session = await fed(mesh)
        mesh[A].away_until = 1e9
        answer = await fifth(mesh, session)

    assert (answer, mesh.clock.slept, session.hop.endpoint) == (RIGHT, [], B)
    assert [n for _, _, n in mesh[B].calls] == [2, 1, 1, 1]
    assert (set(mesh[B].epochs), {step.boot for step in mesh[B].steps}) == ({2}, {"b-1"})


async def test_a_gone_shard_is_set_aside() -> None:
    """A shard that did not answer is used for nothing new."""
    async with open_mesh(TWINS) as mesh:
        session = await fed(mesh)
        mesh[A].away_until = 1e9
        await fifth(mesh, session)

    assert [status.info is None for status in mesh.book.status] == [True, False]


async def test_a_replaced_shard_is_told_to_close() -> None:
    """The session is closed at the old shard under the epoch it had there, and counted no more."""
    async with open_mesh(TWINS) as mesh:
        session = await fed(mesh)
        before = [mesh.book.sessions(endpoint) for endpoint in (A, B)]
        mesh[A].disturbed = [breaks(httpx.ReadTimeout(""))] * 2
        await fifth(mesh, session)
        after = [mesh.book.sessions(endpoint) for endpoint in (A, B)]

    assert (mesh[A].closed, mesh[B].closed) == ([1], [])
    assert (before, after) == ([1, 0], [0, 1])


async def test_a_step_that_was_late_at_a_replaced_shard_is_refused_there() -> None:
    """What was still on its way when the session moved finds the old shard closed to it."""
    async with open_mesh(TWINS) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [breaks(httpx.ReadTimeout(""))] * 2
        await fifth(mesh, session)
        late = mesh[A].steps[-1]
        with pytest.raises(StaleEpoch):
            await (
                mesh[A]
                .client()
                .step(late, Frame.of_token_ids([9]).data, limit_s=1, max_answer_bytes=1)
            )


async def test_a_shard_that_fails_while_it_seems_well_is_tried_once_more() -> None:
    """One failure is met at the same shard; after the second another one goes on."""
    async with open_mesh(TWINS) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [breaks(httpx.ReadTimeout(""))] * 9
        answer = await fifth(mesh, session)

    assert (answer, len(mesh[A].steps[3:]), session.hop.endpoint) == (RIGHT, 2, B)


async def test_a_shard_that_only_seemed_well_is_set_aside() -> None:
    """A shard that answers looks and no steps is left alone for a while by everyone."""
    async with open_mesh(TWINS) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [breaks(httpx.ReadTimeout(""))] * 9
        await fifth(mesh, session)

    assert [type(status.error) for status in mesh.book.status] == [HopTimeout, type(None)]


async def test_a_shard_that_seems_well_and_is_the_only_one_is_tried_to_the_end() -> None:
    """Without another shard all tries are spent on the one there is."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [breaks(httpx.ReadTimeout(""))] * 9
        with pytest.raises(RecoveryExhausted, match="5 attempts failed"):
            await fifth(mesh, session)

    assert len(mesh[A].steps[3:]) == 5


async def test_a_session_may_come_back() -> None:
    """Moved to another shard and back again, a session goes on; epochs only rise."""
    async with open_mesh(TWINS) as mesh:
        session = await fed(mesh)
        mesh[A].away_until = 1.0
        await fifth(mesh, session)
        mesh.clock.now = 20.0
        await mesh.book.refresh()
        mesh.book.mark_proven(mesh.book.unproven())
        mesh[B].away_until = 1e9
        answer = await run(mesh, session, 5, 4)

    assert (answer, session.hop.endpoint) == (says(*PROMPT, 8, 9, 4), A)
    assert mesh[A].epochs[-1] > mesh[B].epochs[-1] > mesh[A].epochs[0]


async def test_every_shard_gone_is_waited_for() -> None:
    """With all shards of a place away, the first that the polls find again goes on."""
    async with open_mesh(TWINS) as mesh:
        session = await fed(mesh)
        mesh[A].restart(away_s=5)
        mesh[B].restart(away_s=1e9)

        async def poll_meanwhile(seconds: float) -> None:
            await mesh.clock.sleep(seconds)
            await mesh.book.refresh()
            mesh.book.mark_proven(mesh.book.unproven())

        recovery = replace(mesh.kit.recovery, sleep=poll_meanwhile)
        answer = await session.step(call_of(4, [9]), recovery.begin())

    assert (answer, session.hop.endpoint) == (RIGHT, A)


async def test_a_draining_shard_is_left() -> None:
    """A shard that begins no session any more is replaced, though it is well."""
    async with open_mesh(TWINS) as mesh:
        session = mesh.session()
        mesh[A].draining = True
        answer = await run(mesh, session, 0, *PROMPT)

    assert (answer, session.hop.endpoint, mesh.clock.slept) == (says(*PROMPT), B, [])
    assert mesh.book.status[0].error is None


async def test_a_draining_shard_finishes_what_it_has() -> None:
    """A session that a draining shard holds goes on there."""
    async with open_mesh(TWINS) as mesh:
        session = await fed(mesh)
        mesh[A].draining = True
        answer = await fifth(mesh, session)

    assert (answer, session.hop.endpoint) == (RIGHT, A)


async def test_a_draining_shard_without_another_is_waited_for() -> None:
    """Where no other shard is, the next life of the draining one goes on."""
    async with open_mesh(WHOLE) as mesh:
        session = mesh.session()
        mesh[A].draining = True
        sleep = mesh.clock.sleep

        async def restart_meanwhile(seconds: float) -> None:
            await sleep(seconds)
            if mesh.clock.now > 5 and mesh[A].draining:
                mesh[A].restart()

        recovery = replace(mesh.kit.recovery, sleep=restart_meanwhile)
        call = call_of(0, PROMPT)
        answer = await session.step(call, recovery.begin())

    assert (answer, session.hop.boot_id) == (says(*PROMPT), "a-2")


async def test_a_shard_that_drains_for_ever_is_given_up() -> None:
    """A draining shard that is not restarted in time ends the step."""
    async with open_mesh(WHOLE) as mesh:
        session = mesh.session()
        mesh[A].draining = True
        with pytest.raises(RecoveryExhausted) as caught:
            await run(mesh, session, 0, *PROMPT)

    assert caught.value.members["cause"] == "draining"


async def test_a_shard_that_speaks_no_protocol_is_asked_again() -> None:
    """A page of a proxy's before a shard that is well is a failure that passes."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [answers(httpx.Response(502, html="<html>"))]

        assert await fifth(mesh, session) == RIGHT


@pytest.mark.parametrize(
    "failure",
    [StageError("x"), InvalidRequest("x"), StaleEpoch("x")],
    ids=lambda error: error.code,
)
async def test_what_does_not_pass_is_raised(failure: MeshError) -> None:
    """What another try cannot mend is raised as it is, after one try."""
    async with open_mesh(TWINS) as mesh:
        session = await fed(mesh)
        mesh[A].disturbed = [refuses(failure)]
        with pytest.raises(type(failure)):
            await fifth(mesh, session)

    assert (len(mesh[A].steps[3:]), mesh.clock.slept, mesh.noted) == (1, [], [])


async def test_an_answer_longer_than_a_hops_is_not_read() -> None:
    """What is longer than the hidden states of the step, and than JSON can be, is refused."""
    async with open_mesh({A: "0-2"}) as mesh:
        mesh[A].disturbed = [answers(hidden(2**18))] * 9
        with pytest.raises(RecoveryExhausted) as caught:
            await run(mesh, mesh.session(), 0, *PROMPT)

    assert caught.value.members["cause"] == HopProtocolError.code


# --- the end ---


async def test_closing_frees_the_session_under_its_epoch() -> None:
    """The shard is told once, with the epoch of the last steps, and counts no session more."""
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        await mesh[A].lose()
        await fifth(mesh, session)
        await session.close()
        held = (await mesh[A].store.usage()).sessions

    assert (mesh[A].closed, held, mesh.book.sessions(A)) == ([2], 0, 0)


async def test_a_shard_that_cannot_be_closed_gets_a_log_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shard that is away frees the session by itself; here a line tells why it was not told."""
    log = FakeLog.instead_of("meshnet.head.hop_session._log", monkeypatch)
    async with open_mesh(WHOLE) as mesh:
        session = await fed(mesh)
        mesh[A].away_until = 1e9
        await session.close()

    assert [(line["event"], line["hop"], line["code"]) for line in log.lines] == [
        ("session not closed", A, "hop_unreachable")
    ]


async def test_a_cancelled_step_leaves_the_call_going() -> None:
    """The caller ends at once; the hop call goes on to its answer."""
    async with open_mesh(WHOLE) as mesh:
        gate = asyncio.Event()
        mesh[A].disturbed = [waits(gate)]
        step = asyncio.create_task(run(mesh, mesh.session(), 0, *PROMPT))
        await turn_the_loop()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        before = mesh[A].stage.computed
        gate.set()

    assert (before, mesh[A].stage.computed) == (0, 3)


async def test_a_cancelled_step_keeps_no_input() -> None:
    """What was not answered to the session takes no room in the budget."""
    async with open_mesh(WHOLE) as mesh:
        gate = asyncio.Event()
        mesh[A].disturbed = [waits(gate)]
        step = asyncio.create_task(run(mesh, mesh.session(), 0, *PROMPT))
        await turn_the_loop()
        step.cancel()
        gate.set()

    assert mesh.kit.budget.used_bytes == 0


async def test_a_late_step_does_not_bring_a_closed_session_back() -> None:
    """A step still on its way when its session is closed is refused, and nothing is held."""
    async with open_mesh(WHOLE) as mesh:
        gate = asyncio.Event()
        session = mesh.session()
        mesh[A].disturbed = [waits(gate)]
        step = asyncio.create_task(run(mesh, session, 0, *PROMPT))
        await turn_the_loop()
        step.cancel()
        await session.close()
        gate.set()
        await turn_the_loop()
        held = (await mesh[A].store.usage()).sessions

    assert (held, mesh[A].stage.computed) == (0, 0)


async def test_nobody_is_warned_of_a_call_that_failed_unheard() -> None:
    """A call that fails after its caller was cancelled is no unhandled error of the loop."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    async with open_mesh(WHOLE) as mesh:
        gate = asyncio.Event()
        mesh[A].disturbed = [waits(gate, refuses(HopUnreachable("gone")))]
        step = asyncio.create_task(run(mesh, mesh.session(), 0, *PROMPT))
        await turn_the_loop()
        step.cancel()
        await turn_the_loop()
        gate.set()
        await turn_the_loop()
    del step, mesh
    await turn_the_loop()

    assert complaints == []


async def test_a_call_cancelled_elsewhere_cancels_the_step() -> None:
    """Where the loop itself cancels a hop call, as at its end, the step is cancelled with it."""

    async def cancelled(_: object) -> httpx.Response:
        raise asyncio.CancelledError

    async with open_mesh(WHOLE) as mesh:
        mesh[A].disturbed = [cancelled]
        with pytest.raises(asyncio.CancelledError):
            await run(mesh, mesh.session(), 0, *PROMPT)


async def test_the_least_busy_shard_takes_over() -> None:
    """Of several others the one that serves fewer sessions goes on."""
    async with open_mesh(TWINS | {C: "0-4"}) as mesh:
        session = await fed(mesh)
        mesh.book.enter(B)
        mesh[A].away_until = 1e9
        await fifth(mesh, session)

    assert session.hop.endpoint == C
