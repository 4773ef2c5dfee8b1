from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from meshnet.errors import (
    CacheFull,
    CacheMiss,
    Draining,
    InvalidRequest,
    MeshError,
    ModelMismatch,
    PayloadTooLarge,
    QueueFull,
    SessionBusy,
    StageError,
    StaleEpoch,
)
from meshnet.generation import Sampling, SamplingContext, TokenScore
from meshnet.ids import SessionId
from meshnet.model.fake_stage import FakeStage, fake_facts, next_token, pick_token, score_token
from meshnet.model.interface import CacheState, StageOutput, StageStep
from meshnet.shard.compute import Timed
from meshnet.topology import LayerSpan
from meshnet.wire.frames import Frame
from meshnet.wire.messages import TailAnswer
from tests.unit.fakes import FakeLog, turn_the_loop
from tests.unit.shard.making import MAX_STEP_TOKENS, Bench, hidden_of, open_bench

PROMPT = [5, 6, 7]
WHOLE = fake_facts(LayerSpan(0, 4))


class GateStage(FakeStage):
    """Stays in a step until it is let go."""

    def __init__(self) -> None:
        super().__init__(WHOLE)
        self._entered = threading.Event()
        self.open = threading.Event()
        self.ended = 0

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        self._entered.set()
        self.open.wait(10)
        output = super().run(step, state)
        self.ended += 1
        return output

    def close(self) -> None:
        self.open.clear()
        self._entered.clear()

    async def entered(self) -> None:
        await asyncio.to_thread(self._entered.wait, 10)


class CountingStage(FakeStage):
    """Counts its steps, and fails in the one it is told to."""

    def __init__(self, failing_step: int = 0) -> None:
        super().__init__(WHOLE)
        self.steps = 0
        self._failing_step = failing_step

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        output = super().run(step, state)  # a failing step has already written to the state
        self.steps += 1
        if self.steps == self._failing_step:
            raise StageError("not finite", position=step.position)
        return output


def says(*ids: int) -> TailAnswer:
    """The fake model's answer to ids."""
    return TailAnswer(token_id=next_token(list(ids), WHOLE.vocab_size))


# --- check() ---


@pytest.mark.parametrize(("span", "n_bytes"), [("0-4", 3 * 4), ("0-2", 3 * 4), ("2-4", 3 * 4 * 4)])
async def test_check_tells_the_bodys_length(span: str, n_bytes: int) -> None:
    """Three token ids are 12 bytes, three hidden states of four float32 are 48."""
    async with open_bench(span) as bench:
        assert bench.worker.check(bench.headers("prefill", 0, 3)) == n_bytes


async def test_check_counts_the_context() -> None:
    """The sampling context comes behind the tensor."""
    async with open_bench() as bench:
        step = bench.headers("prefill", 0, 3, context_bytes=100)

        assert bench.worker.check(step) == 3 * 4 + 100


LONGEST_CONTEXT = 2**16 + 16 * 32 + 64 // 4
"""Of a model of 32 positions and 64 tokens."""


@pytest.mark.parametrize(("positions", "longest"), [(32, LONGEST_CONTEXT), (10**7, 16 * 1024**2)])
async def test_a_context_is_no_longer_than_a_model_can_need(positions: int, longest: int) -> None:
    """The rule depends on the model's positions and vocabulary, up to the protocol's own limit."""
    async with open_bench(max_positions=positions) as bench:
        bench.worker.check(bench.headers("prefill", 0, 3, context_bytes=longest))
        with pytest.raises(PayloadTooLarge) as caught:
            bench.worker.check(bench.headers("prefill", 0, 3, context_bytes=longest + 1))

    assert caught.value.members == {
        "field": "X-Meshnet-Context-Bytes",
        "value": longest + 1,
        "allowed": longest,
    }


REFUSALS: list[tuple[str, dict[str, object], type[MeshError], Mapping[str, object]]] = [
    (
        "2-4",
        {"fingerprint": "other"},
        ModelMismatch,
        {"field": "X-Meshnet-Fingerprint", "expected": "other", "actual": "fake-1-2-4"},
    ),
    (
        "2-4",
        {"start_layer": 1},
        InvalidRequest,
        {"field": "X-Meshnet-Start-Layer", "value": 1, "allowed": "2 to 3"},
    ),
    (
        "2-4",
        {"start_layer": 4},
        InvalidRequest,
        {"field": "X-Meshnet-Start-Layer", "value": 4, "allowed": "2 to 3"},
    ),
    (
        "2-4",
        {"dtype": "bfloat16"},
        InvalidRequest,
        {"field": "X-Meshnet-Dtype", "value": "bfloat16", "allowed": "float32"},
    ),
    (
        "0-4",
        {"dtype": "float32"},
        InvalidRequest,
        {"field": "X-Meshnet-Dtype", "value": "float32", "allowed": "int32"},
    ),
    (
        "2-4",
        {"shape": (1, 3)},
        InvalidRequest,
        {"field": "X-Meshnet-Shape", "value": "1,3", "allowed": "1,TOKENS,4"},
    ),
    (
        "2-4",
        {"shape": (1, 3, 5)},
        InvalidRequest,
        {"field": "X-Meshnet-Shape", "value": "1,3,5", "allowed": "1,TOKENS,4"},
    ),
    (
        "2-4",
        {"shape": (2, 3, 4)},
        InvalidRequest,
        {"field": "X-Meshnet-Shape", "value": "2,3,4", "allowed": "1,TOKENS,4"},
    ),
    (
        "0-4",
        {"shape": (1, 3, 4)},
        InvalidRequest,
        {"field": "X-Meshnet-Shape", "value": "1,3,4", "allowed": "1,TOKENS"},
    ),
    (
        "0-4",
        {"shape": (1, 17)},
        PayloadTooLarge,
        {"field": "X-Meshnet-Shape", "value": 17, "allowed": 16},
    ),
    (
        "2-4",
        {"shape": (1, 2**31 - 1, 4)},
        PayloadTooLarge,
        {"field": "X-Meshnet-Shape", "value": 2**31 - 1, "allowed": 16},
    ),
    (
        "0-4",
        {"past_len": 30},
        InvalidRequest,
        {"field": "X-Meshnet-Past-Len", "value": 30, "allowed": "0 to 29"},
    ),
]


@pytest.mark.parametrize(
    ("span", "changed", "kind", "members"), REFUSALS, ids=[f"{r[0]} {r[1]}" for r in REFUSALS]
)
async def test_a_step_that_does_not_fit_is_refused(
    span: str, changed: dict[str, object], kind: type[MeshError], members: Mapping[str, object]
) -> None:
    """Before a byte of the body is read, the refusal names the header, its value and the rule."""
    async with open_bench(span) as bench:
        with pytest.raises(kind) as caught:
            bench.worker.check(bench.headers("prefill", 0, 3, **changed))

    assert (type(caught.value), caught.value.members) == (kind, members)


async def test_the_last_position_can_be_taken() -> None:
    """A step may end exactly at the model's last position."""
    async with open_bench(max_positions=32) as bench:
        assert bench.worker.check(bench.headers("prefill", 29, 3)) == 12


async def test_a_step_may_be_as_long_as_allowed() -> None:
    """The longest step that is not too long has max_step_tokens tokens."""
    async with open_bench() as bench:
        assert bench.worker.check(bench.headers("prefill", 0, MAX_STEP_TOKENS)) == 64


async def test_the_right_fingerprint_passes() -> None:
    """A head that believes in this model is served."""
    async with open_bench("2-4") as bench:
        assert bench.worker.check(bench.headers("prefill", 0, 3, fingerprint="fake-1-2-4")) == 48


@pytest.mark.parametrize(("mode", "past_len"), [("prefill", 0), ("decode", 3)])
async def test_a_step_for_another_life_misses(mode: str, past_len: int) -> None:
    """What the head fed the process before this one is gone; both lives are told."""
    async with open_bench() as bench:
        step = bench.headers("prefill", past_len, 3, cache=mode, boot="boot-0")
        with pytest.raises(CacheMiss) as caught:
            bench.worker.check(step)

    assert caught.value.members == {
        "reason": "restarted",
        "held": 0,
        "expected": "boot-0",
        "actual": "boot-1",
    }


@pytest.mark.parametrize("boot", [None, "boot-1"])
async def test_a_step_for_this_life_passes(boot: str | None) -> None:
    """A head that knows this life, or none in particular, is served."""
    async with open_bench() as bench:
        assert bench.worker.check(bench.headers("decode", 3, 1, boot=boot)) == 4


async def test_a_stateless_step_is_for_any_life() -> None:
    """What needs nothing kept does not mind who ran before."""
    async with open_bench() as bench:
        assert bench.worker.check(bench.headers("stateless", 0, 3, boot="boot-0")) == 12


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_without_a_cache_only_stateless_steps_are_taken(mode: str) -> None:
    """A shard that keeps no cache refuses cached steps and names the mode it takes."""
    async with open_bench(kv_cache=False) as bench:
        bench.worker.check(bench.headers("stateless", 0, 3))
        with pytest.raises(InvalidRequest, match="keeps no cache") as caught:
            bench.worker.check(bench.headers("stateless", 1, 3, cache=mode))

    assert caught.value.members == {
        "field": "X-Meshnet-Cache",
        "value": mode,
        "allowed": "stateless",
    }


# --- step() ---


async def test_prefill_and_decode_see_the_whole_history() -> None:
    """The tail's token after a decode is that of prompt and decoded token together."""
    async with open_bench() as bench:
        first = await bench.cached("prefill", 0, PROMPT)
        second = await bench.cached("decode", 3, [9])

    assert [first.result, second.result] == [says(*PROMPT), says(*PROMPT, 9)]


async def test_a_hop_that_is_no_tail_answers_hidden_states() -> None:
    """A first hop turns ids into hidden states, one a token."""
    async with open_bench("0-2") as bench:
        done = await bench.cached("prefill", 0, PROMPT)

    assert done.result == Frame("float32", (1, 3, 4), hidden_of(PROMPT))


async def test_without_sampling_the_tail_samples_nothing() -> None:
    """A chunk that is not the last is kept, and answered by an empty answer."""
    async with open_bench() as bench:
        chunk = await bench.cached("prefill", 0, PROMPT, sampling=None)
        rest = await bench.cached("prefill", 3, [9])

    assert [chunk.result, rest.result] == [TailAnswer(), says(*PROMPT, 9)]


async def test_a_stateless_step_keeps_nothing() -> None:
    """The answer is that of the step's own tokens, and no session is held after it."""
    async with open_bench() as bench:
        done = await bench.cached("stateless", 0, PROMPT)
        held = await bench.held()

    assert (done.result, held) == (says(*PROMPT), (0, 0))


@pytest.mark.parametrize("mode", ["prefill", "stateless"])
async def test_a_lying_body_changes_nothing(mode: str) -> None:
    """A body of another length than its headers say is refused before a session is made."""
    async with open_bench() as bench:
        with pytest.raises(InvalidRequest, match="the body has 11 bytes"):
            await bench.worker.step(bench.headers("prefill", 0, 3, cache=mode), bytes(11))
        held = await bench.held()

    assert held == (0, 0)


@pytest.mark.parametrize("token_id", [-1, 64, 2**31 - 1])
async def test_a_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    """Ids are 0 to vocab_size - 1; another one is named and nothing is changed."""
    async with open_bench() as bench:
        with pytest.raises(InvalidRequest) as caught:
            await bench.cached("prefill", 0, [5, token_id])
        held = await bench.held()

    assert caught.value.members == {"field": "body", "value": token_id, "allowed": "0 to 63"}
    assert held == (0, 0)


async def test_the_tails_token_depends_on_the_context() -> None:
    """What the head sends with a step reaches the stage, and counts for this step only."""
    context = SamplingContext(generated_ids=(9,), logit_bias={40: 2.0})
    sampling = Sampling(frequency_penalty=0.5)
    async with open_bench() as bench:
        first = await bench.cached("prefill", 0, PROMPT, context, sampling=sampling)
        second = await bench.cached("decode", 3, [9])

    assert first.result == TailAnswer(token_id=pick_token(PROMPT, 64, sampling, context))
    assert (first.result == says(*PROMPT), second.result) == (False, says(*PROMPT, 9))


async def test_the_next_tokens_are_scored() -> None:
    """Where every token of a step has a next one, all are scored and none is picked."""
    context = SamplingContext(next_ids=(6, 7, 8))
    async with open_bench() as bench:
        done = await bench.cached("prefill", 0, PROMPT, context, sampling=SCORING)

    scores = [score_token([5, 6, 7][:i], i + 5, 64, 20) for i in (1, 2, 3)]
    assert done.result == TailAnswer(prompt_scores=tuple(scores))


BAD_CONTEXTS: list[tuple[bytes, str]] = [
    (b"{", "all of it"),
    (b'{"generated_ids":[64]}', "generated_ids: token id 64"),
    (b'{"next_ids":[1,2,3,4]}', "next_ids: 4"),
    (b'{"allowed":"eJwDAAAAAAE="}', "no token is left"),
]


@pytest.mark.parametrize("mode", ["prefill", "stateless"])
@pytest.mark.parametrize(("context", "fault"), BAD_CONTEXTS)
async def test_a_bad_context_changes_nothing(mode: str, context: bytes, fault: str) -> None:
    """A context that does not fit is refused before a session is made or touched."""
    stage = CountingStage()
    async with open_bench(stage=stage) as bench:
        step = bench.headers("prefill", 0, 3, cache=mode)
        with pytest.raises(InvalidRequest, match=fault) as caught:
            await bench.step(step, PROMPT, context)
        held = await bench.held()

    assert (caught.value.members["field"], held, stage.steps) == ("body", (0, 0), 0)


async def test_a_step_repeated_otherwise_is_answered_as_before() -> None:
    """Its id says which step it is; tensor, parameters and context are checked, not compared."""
    other = SamplingContext(logit_bias={40: 2.0}, next_ids=(1,))
    async with open_bench() as bench:
        first = await bench.cached("prefill", 0, PROMPT, step="p")
        again = await bench.cached("prefill", 0, [1, 2, 3], other, step="p", sampling=SCORING)
        with pytest.raises(InvalidRequest):
            await bench.step(bench.headers("prefill", 0, 3, step="p"), PROMPT, b"{")
        after = await bench.cached("decode", 3, [9])

    assert (first.result, again.result) == (says(*PROMPT), says(*PROMPT))
    assert after.result == says(*PROMPT, 9)


async def test_a_step_repeated_is_answered_and_not_run() -> None:
    """The same id at the same position gives the stored answer; nothing is applied twice."""
    stage = CountingStage()
    async with open_bench(stage=stage) as bench:
        await bench.cached("prefill", 0, PROMPT, step="p")
        first = await bench.cached("decode", 3, [9], step="d")
        again = await bench.cached("decode", 3, [9], step="d")
        after = await bench.cached("decode", 4, [8], step="e")

    assert (again.result, after.result, stage.steps) == (first.result, says(*PROMPT, 9, 8), 3)


async def test_a_repeated_frame_is_answered_too() -> None:
    """A hop which is no tail stores the hidden states it answered."""
    async with open_bench("0-2") as bench:
        first = await bench.cached("prefill", 0, PROMPT, step="p")
        again = await bench.cached("prefill", 0, PROMPT, step="p")

    assert (again.result, again.compute_ms) == (first.result, 0.0)


async def test_another_position_misses_and_drops() -> None:
    """A step at a position the shard does not hold gets 409 and the session is gone."""
    async with open_bench() as bench:
        await bench.cached("prefill", 0, PROMPT)
        with pytest.raises(CacheMiss) as caught:
            await bench.cached("decode", 5, [9])
        held = await bench.held()

    assert (caught.value.members, held) == ({"reason": "length_mismatch", "held": 0}, (0, 0))


async def test_a_late_step_leaves_the_session() -> None:
    """A step that tells its id and epoch gets 409 with what is held, and the session goes on."""
    async with open_bench() as bench:
        await bench.cached("prefill", 0, PROMPT, step="p", epoch=1)
        with pytest.raises(CacheMiss) as caught:
            await bench.cached("decode", 5, [9], step="d", epoch=1)
        done = await bench.cached("decode", 3, [9], step="e", epoch=1)

    assert caught.value.members == {"reason": "length_mismatch", "held": 3}
    assert done.result == says(*PROMPT, 9)


async def test_a_step_of_an_old_epoch_is_refused() -> None:
    """Who steered the session before is told that another one does."""
    async with open_bench() as bench:
        await bench.cached("prefill", 0, PROMPT, step="p", epoch=2)
        with pytest.raises(StaleEpoch):
            await bench.cached("decode", 3, [9], step="d", epoch=1)


async def test_an_unknown_session_misses() -> None:
    """A decode never makes a cache in silence."""
    async with open_bench() as bench:
        with pytest.raises(CacheMiss) as caught:
            await bench.cached("decode", 3, [9])

    assert caught.value.members["reason"] == "unknown"


async def test_another_start_layer_misses() -> None:
    """A session entered at layer 2 is not continued at layer 3."""
    async with open_bench("2-4") as bench:
        await bench.cached("prefill", 0, PROMPT)
        with pytest.raises(CacheMiss) as caught:
            await bench.cached("decode", 3, [9], start_layer=3)

    assert caught.value.members["reason"] == "route_mismatch"


async def test_a_failed_forward_drops_the_session() -> None:
    """A state that may be half written is gone, and the next step misses."""
    async with open_bench(stage=CountingStage(failing_step=2)) as bench:
        await bench.cached("prefill", 0, PROMPT)
        with pytest.raises(StageError, match="not finite"):
            await bench.cached("decode", 3, [9])
        with pytest.raises(CacheMiss):
            await bench.cached("decode", 3, [9])


async def test_a_cancelled_step_is_waited_for_and_dropped() -> None:
    """The lease is held until the forward has ended; then the session is gone."""
    stage = GateStage()
    async with open_bench(stage=stage) as bench:
        step = asyncio.create_task(bench.cached("prefill", 0, PROMPT))
        await stage.entered()
        step.cancel()
        await turn_the_loop()
        meanwhile = await bench.held()
        stage.open.set()
        with pytest.raises(asyncio.CancelledError):
            await step
        after = await bench.held()

    assert (stage.ended, meanwhile, after) == (1, (1, 1), (0, 0))


async def test_two_steps_of_one_session_do_not_meet() -> None:
    """A step of a session in use is refused as busy, and the first one ends as it should."""
    stage = GateStage()
    async with open_bench(stage=stage) as bench:
        first = asyncio.create_task(bench.cached("prefill", 0, PROMPT))
        await stage.entered()
        with pytest.raises(SessionBusy):
            await bench.cached("prefill", 0, PROMPT)
        stage.open.set()
        done = await first

    assert done.result == says(*PROMPT)


async def test_a_full_queue_does_not_keep_an_answer_back() -> None:
    """A step that was run already is answered from the store, however many wait."""
    stage = GateStage()
    async with open_bench(stage=stage, max_queued=1) as bench:
        stage.open.set()
        first = await bench.cached("prefill", 0, PROMPT, session="other", step="p")
        stage.close()
        running = asyncio.create_task(bench.cached("prefill", 0, PROMPT))
        await stage.entered()
        again = await bench.cached("prefill", 0, PROMPT, session="other", step="p")
        stage.open.set()
        await running

    assert again.result == first.result


def not_now() -> None:
    raise Draining("no new session")


async def test_where_nothing_may_begin_a_first_step_is_refused() -> None:
    """A prefill at position 0 is refused, and nothing is held for it."""
    async with open_bench(check_begin=not_now) as bench:
        with pytest.raises(Draining):
            await bench.cached("prefill", 0, PROMPT)
        held = await bench.held()

    assert held == (0, 0)


async def test_where_nothing_may_begin_all_else_goes_on() -> None:
    """A session that is held, a repeat of its first step, and a stateless step are taken."""
    may_begin = [True]

    def check_begin() -> None:
        if not may_begin:
            not_now()

    async with open_bench(check_begin=check_begin) as bench:
        first = await bench.cached("prefill", 0, PROMPT, step="p")
        may_begin.clear()
        again = await bench.cached("prefill", 0, PROMPT, step="p")
        second = await bench.cached("decode", 3, [9])
        alone = await bench.cached("stateless", 0, PROMPT)

    assert (first.result, second.result) == (says(*PROMPT), says(*PROMPT, 9))
    assert (again.result, alone.result) == (first.result, first.result)


async def test_a_full_queue_refuses_the_step() -> None:
    """With too many steps waiting a step is refused as retryable, and its session is kept."""
    stage = GateStage()
    async with open_bench(stage=stage, max_queued=1) as bench:
        stage.open.set()
        await bench.cached("prefill", 0, PROMPT, session="other")
        stage.close()
        first = asyncio.create_task(bench.cached("prefill", 0, PROMPT))
        await stage.entered()
        with pytest.raises(QueueFull):
            await bench.cached("decode", len(PROMPT), PROMPT[:1], session="other")
        stage.open.set()
        await first
        held = await bench.held()

    assert held == (2, 0)


@pytest.mark.parametrize(
    ("span", "need"), [("0-4", 3 * 64), ("0-2", 3 * (64 + 16))], ids=["tail", "others"]
)
async def test_room_is_asked_for_the_state_and_the_answer(span: str, need: int) -> None:
    """A step needs 64 bytes a token of state and, unless it is the tail, the answer's besides."""
    async with open_bench(span, max_bytes=need) as bench:
        await bench.cached("prefill", 0, PROMPT)
    async with open_bench(span, max_bytes=need - 1) as bench:
        with pytest.raises(CacheFull) as caught:
            await bench.cached("prefill", 0, PROMPT)

    assert caught.value.members["need"] == need


SCORING = Sampling(top_logprobs=20)


@pytest.mark.parametrize(
    ("sampling", "next_ids", "n_scores"),
    [
        (SCORING, (), 1),
        (SCORING, (6, 7), 3),
        (SCORING, (6, 7, 8), 3),
        (Sampling(), (6, 7), 2),
        (Sampling(top_logprobs=0), (), 1),
        (Sampling(), (), 0),
    ],
)
async def test_room_is_asked_for_scores_and_taken(
    sampling: Sampling, next_ids: tuple[int, ...], n_scores: int
) -> None:
    """3,400 bytes for each that the answer has: the prompt's, and that of the token picked."""
    need = 3 * 64 + 3400 * n_scores
    context = SamplingContext(next_ids=next_ids)
    async with open_bench(max_bytes=need - 1) as bench:
        with pytest.raises(CacheFull) as caught:
            await bench.cached("prefill", 0, PROMPT, context, sampling=sampling)
    async with open_bench(max_bytes=need) as bench:
        await bench.cached("prefill", 0, PROMPT, context, sampling=sampling)
        used = (await bench.store.usage()).cached_bytes

    assert (caught.value.members["need"], used) == (need, need)


def test_a_score_takes_no_more_than_is_counted() -> None:
    """The longest score, with twenty alternatives, in Python objects of its own."""
    numbers = iter(range(1000, 10**6))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = [
            TokenScore(
                token_id=next(numbers),
                logprob=-next(numbers) / 7,
                top=tuple((next(numbers), -next(numbers) / 7) for _ in range(20)),
            )
            for _ in range(500)
        ]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (after - before) / len(kept) < 3400


class HalfStage(FakeStage):
    """Says that its hidden states are of two bytes a number."""

    def __init__(self) -> None:
        super().__init__(replace(fake_facts(LayerSpan(0, 2)), dtype="bfloat16"))


async def test_the_answers_room_is_that_of_its_dtype() -> None:
    """Four numbers of two bytes are eight bytes a token."""
    async with open_bench(stage=HalfStage(), max_bytes=10) as bench:
        with pytest.raises(CacheFull) as caught:
            await bench.cached("prefill", 0, PROMPT)

    assert caught.value.members["need"] == 3 * (64 + 8)


class RecurrentStage(FakeStage):
    """Says that a state takes 100 bytes whatever its length, besides those of its tokens."""

    def state_nbytes(self, n_tokens: int) -> int:
        return 100 + super().state_nbytes(n_tokens)


async def test_a_new_state_asks_for_all_it_takes() -> None:
    """The first step needs room for what a state takes by itself, besides its tokens."""
    async with open_bench(stage=RecurrentStage(WHOLE), max_bytes=10) as bench:
        with pytest.raises(CacheFull) as caught:
            await bench.cached("prefill", 0, PROMPT)

    assert caught.value.members["need"] == 100 + 3 * 64


async def test_a_later_step_asks_for_its_tokens_only() -> None:
    """What the state takes by itself is not asked for a second time."""
    async with open_bench(stage=RecurrentStage(WHOLE), max_bytes=6 * 64) as bench:
        await bench.cached("prefill", 0, PROMPT)
        done = await bench.cached("prefill", 3, PROMPT)

    assert done.result == says(*PROMPT, *PROMPT)


async def decode_together(bench: Bench, stage: GateStage) -> list[Timed | BaseException]:
    """What two sessions get that decode while a prompt of a third one holds the thread."""
    stage.open.set()
    for session in ("a", "b"):
        await bench.cached("prefill", 0, PROMPT, session=session)
    stage.close()
    chunk = asyncio.create_task(bench.cached("prefill", 0, PROMPT))
    await stage.entered()
    decodes = [
        asyncio.create_task(bench.cached("decode", 3, [token_id], session=session))
        for session, token_id in (("a", 8), ("b", 9))
    ]
    await turn_the_loop()
    stage.open.set()
    await chunk
    return await asyncio.gather(*decodes, return_exceptions=True)


async def test_sessions_that_wait_decode_together() -> None:
    """Each gets the answer of its own history out of one batch, and is kept."""
    stage = GateStage()
    async with open_bench(stage=stage, max_sessions=3) as bench:
        answers = await decode_together(bench, stage)
        held = await bench.held()

    results = [done.result for done in answers if isinstance(done, Timed)]
    assert results == [says(*PROMPT, 8), says(*PROMPT, 9)]
    assert (stage.batch_sizes, held) == ([2], (3, 0))


class HalfFailingStage(GateStage):
    """Fails in the token 9, which has then been written to the state."""

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        output = super().run(step, state)
        if 9 in step.frame.token_ids():
            raise StageError("not finite")
        return output


async def test_a_session_that_fails_in_a_batch_is_dropped_alone() -> None:
    """Its mate is answered, and both stand after it as after steps of their own."""
    stage = HalfFailingStage()
    async with open_bench(stage=stage, max_sessions=3) as bench:
        a, b = await decode_together(bench, stage)
        after = await bench.cached("decode", 4, [7], session="a")
        with pytest.raises(CacheMiss):
            await bench.cached("decode", 4, [7], session="b")

    assert isinstance(b, StageError)
    assert isinstance(a, Timed)
    assert (a.result, after.result) == (says(*PROMPT, 8), says(*PROMPT, 8, 7))


class BrokenBatchStage(GateStage):
    """Fails in every batch."""

    def run_batch(
        self, works: Sequence[tuple[StageStep, CacheState]]
    ) -> list[StageOutput | StageError]:
        super().run_batch(works)
        raise StageError("the forward failed")


async def test_a_batch_that_fails_drops_all_its_sessions() -> None:
    """Nobody knows which states are half written; a session that was not in it is kept."""
    stage = BrokenBatchStage()
    async with open_bench(stage=stage, max_sessions=3) as bench:
        failures = await decode_together(bench, stage)
        held = await bench.held()

    assert [type(failure) for failure in failures] == [StageError, StageError]
    assert held == (1, 0)


async def test_a_cancelled_step_that_waits_frees_its_lease() -> None:
    """It is not run; the session goes, as with every step that was not whole."""
    stage = GateStage()
    async with open_bench(stage=stage) as bench:
        stage.open.set()
        await bench.cached("prefill", 0, PROMPT)
        stage.close()
        running = asyncio.create_task(bench.cached("prefill", 0, PROMPT, session="other"))
        await stage.entered()
        waiting = asyncio.create_task(bench.cached("decode", 3, [9]))
        await turn_the_loop()
        before = await bench.held()
        waiting.cancel()
        await asyncio.wait({waiting})
        after = await bench.held()
        stage.open.set()
        await running

    assert (before, after, stage.batch_sizes) == ((2, 2), (1, 1), [])


# --- session_cost() ---


@pytest.mark.parametrize(("span", "cost"), [("0-4", 64), ("0-2", 64 + 16)], ids=["tail", "others"])
async def test_a_session_costs_its_state_and_its_last_answer(span: str, cost: int) -> None:
    """64 bytes a token, and 16 more where hidden states are answered: what the store counts."""
    async with open_bench(span) as bench:
        told = bench.worker.session_cost()
        await bench.cached("prefill", 0, PROMPT)
        used = (await bench.store.usage()).cached_bytes

    assert (told.base_bytes, told.token_bytes, used) == (0, cost, 3 * cost)


# --- close() ---


async def test_closing_frees_the_session_once() -> None:
    """The first close frees one state, the second none."""
    async with open_bench() as bench:
        await bench.cached("prefill", 0, PROMPT)
        closed = [await bench.worker.close(SessionId("s")) for _ in range(2)]
        held = await bench.held()

    assert (closed, held) == ([1, 0], (0, 0))


async def test_closing_under_an_epoch_refuses_what_is_late() -> None:
    """A step on its way when its session was closed does not bring it back."""
    async with open_bench() as bench:
        await bench.cached("prefill", 0, PROMPT, step="p", epoch=1)
        await bench.worker.close(SessionId("s"), 1)
        with pytest.raises(StaleEpoch):
            await bench.cached("prefill", 0, PROMPT, step="q", epoch=1)
        held = await bench.held()

    assert held == (0, 0)


async def test_closing_under_an_old_epoch_is_refused() -> None:
    """Who steered the session before does not close it for who does now."""
    async with open_bench() as bench:
        await bench.cached("prefill", 0, PROMPT, step="p", epoch=2)
        with pytest.raises(StaleEpoch):
            await bench.worker.close(SessionId("s"), 1)
        held = await bench.held()

    assert held == (1, 0)


# --- log lines ---


async def run_some_steps(bench: Bench) -> None:
    await bench.cached("prefill", 0, PROMPT, request_id="r")
    for past_len, bench.clock.now in ((3, 0.0), (4, 1.0), (5, 5.5)):
        await bench.cached("decode", past_len, [9], request_id="r")
    await bench.cached("stateless", 0, PROMPT)


async def test_steps_are_logged_sparsely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill gets a line, decodes one in five seconds, with where they stand."""
    log = FakeLog.instead_of("meshnet.shard.worker._log", monkeypatch)
    async with open_bench() as bench:
        await run_some_steps(bench)
    told = [(x["event"], x["position"], x["n_tokens"], x["steps"]) for x in log.lines]

    assert told == [("prefill", 0, 3, None), ("decode", 3, 1, 1), ("decode", 5, 1, 3)]


async def test_lines_tell_who_but_not_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line has ids of request and session and the times, and nothing else: no token."""
    log = FakeLog.instead_of("meshnet.shard.worker._log", monkeypatch)
    async with open_bench() as bench:
        await run_some_steps(bench)
    names = {name for line in log.lines for name in line}

    assert {(x["session_id"], x["request_id"]) for x in log.lines} == {("s", "r")}
    assert names == {
        "event",
        "session_id",
        "request_id",
        "position",
        "n_tokens",
        "steps",
        "queue_ms",
        "compute_ms",
    }


async def test_a_closed_session_is_forgotten_by_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new session of the same id gets its first decode line at once."""
    log = FakeLog.instead_of("meshnet.shard.worker._log", monkeypatch)
    async with open_bench() as bench:
        for _ in range(2):
            await bench.cached("prefill", 0, PROMPT)
            await bench.cached("decode", 3, [9])
            await bench.worker.close(SessionId("s"))

    assert [line["steps"] for line in log.lines if line["event"] == "decode"] == [1, 1]


# --- direct return ---

PUSH = {"push_id": "p", "push_to": "http://b", "push_boot": "b-1"}


async def test_a_step_whose_input_is_pushed_has_no_tensor() -> None:
    """Its body is the context alone; its shape is checked as any."""
    async with open_bench("2-4") as bench:
        step = bench.headers("decode", 3, 1, input_id="i", context_bytes=7)
        assert bench.worker.check(step) == 7
        with pytest.raises(InvalidRequest) as caught:
            bench.worker.check(step.model_copy(update={"shape": (1, 1, 5)}))

    assert caught.value.members["field"] == "X-Meshnet-Shape"


async def test_a_step_that_was_run_is_recalled_without_its_input() -> None:
    """With nothing run and nothing waited for; of the next one nothing is known."""
    async with open_bench("2-4") as bench:
        await bench.cached("prefill", 0, PROMPT, step="0", epoch=1)
        done = await bench.cached("decode", 3, [9], step="1", epoch=1)
        again = bench.headers("decode", 3, 1, step="1", input_id="i", epoch=1)
        following = bench.headers("decode", 4, 1, step="2", input_id="j", epoch=1)

        recalled = await bench.worker.recall(again)
        assert recalled == Timed(done.result, 0.0, 0.0, batch_size=0)
        assert await bench.worker.recall(following) is None


async def test_the_tail_has_nobody_to_push_to() -> None:
    """What it puts out is the answer."""
    async with open_bench("2-4") as bench:
        with pytest.raises(InvalidRequest, match="tail") as caught:
            bench.worker.check(bench.headers("decode", 3, 1, **PUSH))

    assert caught.value.members == {
        "field": "X-Meshnet-Push-To",
        "value": "http://b",
        "allowed": None,
    }


@pytest.mark.parametrize(
    ("direct", "field", "value"),
    [({"input_id": "i"}, "X-Meshnet-Input-Id", "i"), (PUSH, "X-Meshnet-Push-Id", "p")],
)
async def test_a_shard_without_direct_return_refuses_it(
    direct: dict[str, object], field: str, value: str
) -> None:
    """By the header's name; everything else it takes."""
    async with open_bench("1-3") as bench:
        worker = replace(bench.worker, push=False)
        worker.check(bench.headers("decode", 3, 1))
        with pytest.raises(InvalidRequest) as caught:
            worker.check(bench.headers("decode", 3, 1, **direct))

    assert caught.value.members == {"field": field, "value": value, "allowed": None}
