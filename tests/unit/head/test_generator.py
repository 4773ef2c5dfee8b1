from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from meshnet.errors import CacheMiss, HopProtocolError, QueueFull, RecoveryExhausted, StageError
from meshnet.generation import GenerationRequest, Sampling, TokenEvent
from meshnet.head.background import Background
from meshnet.head.generator import Detokenizer, Generator, TextModel
from meshnet.head.hop_times import HopTimesBook
from meshnet.head.pipeline import Pipeline, Trace
from meshnet.head.recovery import Recovery, RecoveryLimits
from meshnet.wire.headers import CacheMode
from meshnet.wire.messages import TailAnswer
from tests.unit.fakes import FakeClock, turn_the_loop
from tests.unit.head.making import route_over

END = 99
SAMPLING = Sampling(temperature=0.5, seed=3)
PROMPT = (5, 6, 7)


class Spelling:
    """Writes 7 as "<7>"; 50 is half a character, which is written with what follows."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token_id: int) -> str:
        text, self._held = self._held, ""
        if token_id == 50:
            self._held = text + "~"
            return ""
        return f"{text}<{token_id}>"

    def finish(self) -> str:
        text, self._held = self._held, ""
        return text


def spelling() -> Detokenizer:
    return Spelling()


def encode(text: str) -> list[int]:
    return [int(part) for part in text.replace("<", "").split(">") if part]


@dataclass(frozen=True)
class Asked:
    mode: CacheMode
    ids: tuple[int, ...]
    past_len: int
    samples: bool


Answer = int | str | Exception | None


class FakePipeline(Pipeline):
    """Answers as told, one answer a step that samples; notes what it is asked.

    Attributes:
        fail_at: Raises these instead, by the number of the step.
        gate: Where a step waits, if it is closed.
    """

    def __init__(self, answers: Sequence[Answer], **changed: object) -> None:
        super().__init__(route_over(["http://a"], **changed), {}, HopTimesBook(), Trace())
        self._answers = iter(answers)
        self.asked: list[Asked] = []
        self.fail_at: dict[int, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = 0

    async def step(
        self, mode: CacheMode, ids: Sequence[int], past_len: int, sampling: Sampling | None
    ) -> TailAnswer:
        assert self.closed == 0
        assert sampling in (None, SAMPLING)
        self.asked.append(Asked(mode, tuple(ids), past_len, sampling is not None))
        await self.gate.wait()
        failure = self.fail_at.get(len(self.asked))
        if failure is not None:
            raise failure
        return self._answer(next(self._answers)) if sampling else TailAnswer()

    def _answer(self, answer: Answer) -> TailAnswer:
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            return TailAnswer(text=answer)
        return TailAnswer(token_id=answer)

    async def close(self) -> None:
        self.closed += 1


@dataclass
class Head:
    """A generator over pretended time."""

    background: Background
    sleep: Callable[[float], Awaitable[None]] = field(default_factory=lambda: FakeClock().sleep)

    def __post_init__(self) -> None:
        self.generator = Generator(
            TextModel(frozenset({END}), spelling, encode),
            Recovery(
                RecoveryLimits(max_rebuilds=2),
                is_ready=self._is_ready,
                note=lambda _: None,
                clock=FakeClock(),
                jitter=lambda: 0.0,
                sleep=self.sleep,
            ),
            self.background,
            prefill_chunk_tokens=512,
            max_concurrent=2,
        )

    def generate(
        self, pipeline: Pipeline, max_tokens: int = 8, prompt: tuple[int, ...] = PROMPT
    ) -> AsyncGenerator[TokenEvent]:
        return self.generator.generate(GenerationRequest(prompt, max_tokens, SAMPLING), pipeline)

    async def all(
        self, pipeline: Pipeline, max_tokens: int = 8, prompt: tuple[int, ...] = PROMPT
    ) -> list[TokenEvent]:
        return [event async for event in self.generate(pipeline, max_tokens, prompt)]

    async def _is_ready(self, endpoint: str) -> bool:
        del endpoint
        return True


@pytest.fixture
async def head() -> AsyncGenerator[Head]:
    async with Background() as background:
        yield Head(background)


def miss() -> CacheMiss:
    return CacheMiss("gone", reason="evicted", held=0)


# --- tokens ---


async def test_tokens_come_one_by_one(head: Head) -> None:
    """Each token is an event with its text; the last one allowed says length."""
    events = await head.all(FakePipeline([1, 2, 3]), max_tokens=3)

    assert events == [
        TokenEvent("<1>", 1),
        TokenEvent("<2>", 2),
        TokenEvent("<3>", 3, "length"),
    ]


async def test_a_token_is_yielded_before_the_next_is_asked_for(head: Head) -> None:
    """Streaming waits for nothing: one step was made when the first token is there."""
    pipeline = FakePipeline([1, 2, 3])
    async with aclosing(head.generate(pipeline)) as events:
        await anext(events)
        n_steps = len(pipeline.asked)

    assert n_steps == 1


async def test_nothing_asked_for_makes_no_step(head: Head) -> None:
    """With max_tokens 0 there is no event, and no hop computes."""
    pipeline = FakePipeline([1])

    assert (await head.all(pipeline, max_tokens=0), pipeline.asked) == ([], [])


async def test_the_end_token_ends(head: Head) -> None:
    """An end token is no text, says stop, and no step follows it."""
    pipeline = FakePipeline([1, END, 3])
    events = await head.all(pipeline)

    assert events == [TokenEvent("<1>", 1), TokenEvent("", END, "stop")]
    assert len(pipeline.asked) == 2


async def test_the_end_token_as_the_last_allowed_says_stop(head: Head) -> None:
    """A sequence that ended by itself just at the limit has ended by itself."""
    assert await head.all(FakePipeline([END]), max_tokens=1) == [TokenEvent("", END, "stop")]


@pytest.mark.parametrize(
    ("answers", "last"),
    [([50, END], TokenEvent("~", END, "stop")), ([1, 50], TokenEvent("~", 50, "length"))],
    ids=["stop", "length"],
)
async def test_half_a_character_at_the_end_is_written(
    head: Head, answers: list[Answer], last: TokenEvent
) -> None:
    """What the detokenizer holds back comes with the last event, whatever ends the text."""
    assert (await head.all(FakePipeline(answers), max_tokens=2))[-1] == last


async def test_half_a_character_waits(head: Head) -> None:
    """A token that makes no character yet is an event without text."""
    events = await head.all(FakePipeline([50, 1]), max_tokens=2)

    assert events == [TokenEvent("", 50), TokenEvent("~<1>", 1, "length")]


async def test_generations_do_not_share_a_detokenizer(head: Head) -> None:
    """What one generation holds back never shows in another one."""
    async with aclosing(head.generate(FakePipeline([50, 1]))) as first:
        await anext(first)
        second = await head.all(FakePipeline([2]), max_tokens=1)

    assert second == [TokenEvent("<2>", 2, "length")]


# --- steps ---


async def test_prefill_then_decodes(head: Head) -> None:
    """The prompt is one prefill; then each token is a decode at its position."""
    pipeline = FakePipeline([1, 2, 3])
    await head.all(pipeline, max_tokens=3)

    assert pipeline.asked == [
        Asked("prefill", PROMPT, 0, samples=True),
        Asked("decode", (1,), 3, samples=True),
        Asked("decode", (2,), 4, samples=True),
    ]


@pytest.mark.parametrize(
    ("n_prompt", "chunks"),
    [(1, [1]), (2, [2]), (3, [2, 1]), (4, [2, 2]), (5, [2, 2, 1])],
)
async def test_a_long_prompt_is_prefilled_in_chunks(
    head: Head, n_prompt: int, chunks: list[int]
) -> None:
    """Chunks are as long as allowed and follow each other; only the last one samples."""
    head.generator.prefill_chunk_tokens = 2
    prompt = tuple(range(n_prompt))
    pipeline = FakePipeline([1])
    await head.all(pipeline, max_tokens=1, prompt=prompt)
    asked = pipeline.asked

    assert [len(step.ids) for step in asked] == chunks
    assert tuple(i for step in asked for i in step.ids) == prompt
    assert [step.past_len for step in asked] == [2 * i for i in range(len(chunks))]
    assert [step.samples for step in asked] == [False] * (len(chunks) - 1) + [True]


async def test_a_chunk_is_no_longer_than_the_hops_take(head: Head) -> None:
    """The least of the head's and the hops' limits counts."""
    pipeline = FakePipeline([1], max_step_tokens=2)
    await head.all(pipeline, max_tokens=1)

    assert [len(step.ids) for step in pipeline.asked] == [2, 1]


async def test_a_route_without_caches_gets_whole_sequences(head: Head) -> None:
    """Every step is stateless and has all tokens so far, never a decode."""
    pipeline = FakePipeline([1, END], kv_cache=False)
    await head.all(pipeline)

    assert pipeline.asked == [
        Asked("stateless", PROMPT, 0, samples=True),
        Asked("stateless", (*PROMPT, 1), 0, samples=True),
    ]


# --- tails that know text only ---


async def test_a_text_only_tail_makes_the_rest_stateless(head: Head) -> None:
    """Its text is encoded into the sequence, no cache is trusted, and empty text is the end."""
    pipeline = FakePipeline(["<1>", "<2>", ""])
    events = await head.all(pipeline)

    assert events == [TokenEvent("<1>"), TokenEvent("<2>"), TokenEvent("", None, "stop")]
    assert pipeline.asked == [
        Asked("prefill", PROMPT, 0, samples=True),
        Asked("stateless", (*PROMPT, 1), 0, samples=True),
        Asked("stateless", (*PROMPT, 1, 2), 0, samples=True),
    ]


async def test_a_text_only_tail_is_limited_too(head: Head) -> None:
    """max_tokens counts its answers."""
    events = await head.all(FakePipeline(["<1>", "<2>", "<3>"]), max_tokens=2)

    assert events[-1] == TokenEvent("<2>", None, "length")


async def test_a_tail_that_says_nothing_is_a_protocol_error(head: Head) -> None:
    """Asked to sample, a tail answers a token or text."""
    pipeline = FakePipeline([None])
    with pytest.raises(HopProtocolError, match="neither"):
        await head.all(pipeline)

    assert pipeline.closed == 1


# --- recovery ---


async def test_a_lost_state_is_prefilled_again(head: Head) -> None:
    """After a miss all tokens so far are prefilled, and the text goes on as if nothing was."""
    pipeline = FakePipeline([1, 2, 3])
    pipeline.fail_at = {2: miss()}
    events = await head.all(pipeline, max_tokens=3)

    assert [event.token_id for event in events] == [1, 2, 3]
    assert pipeline.asked == [
        Asked("prefill", PROMPT, 0, samples=True),
        Asked("decode", (1,), 3, samples=True),
        Asked("prefill", (*PROMPT, 1), 0, samples=True),
        Asked("decode", (2,), 4, samples=True),
    ]


async def test_a_chunk_that_misses_begins_the_prefill_anew(head: Head) -> None:
    """A rebuild is from position 0 in chunks, whichever chunk was lost."""
    head.generator.prefill_chunk_tokens = 2
    pipeline = FakePipeline([1])
    pipeline.fail_at = {2: miss()}
    await head.all(pipeline, max_tokens=1)

    assert [(step.past_len, step.ids) for step in pipeline.asked] == [
        (0, (5, 6)),
        (2, (7,)),
        (0, (5, 6)),
        (2, (7,)),
    ]


async def test_rebuilds_are_counted_a_token(head: Head) -> None:
    """Each token may be rebuilt as often as allowed: a miss at every token is no failure."""
    pipeline = FakePipeline([1, 2, 3, 4])
    pipeline.fail_at = {step: miss() for step in (2, 4, 6)}

    assert len(await head.all(pipeline, max_tokens=4)) == 4


async def test_a_state_lost_for_good_ends_the_generation(head: Head) -> None:
    """When the rebuilds are used up the error is raised after the tokens that were there."""
    pipeline = FakePipeline([1, 2])
    pipeline.fail_at = {step: miss() for step in range(2, 10)}
    events = head.generate(pipeline)
    first = await anext(events)
    with pytest.raises(RecoveryExhausted):
        await anext(events)

    assert (first, len(pipeline.asked), pipeline.closed) == (TokenEvent("<1>", 1), 4, 1)


# --- the end of a generation, however it comes ---


async def test_success_closes_the_session(head: Head) -> None:
    """At its end the session is freed once, and the place too."""
    pipeline = FakePipeline([END])
    await head.all(pipeline)

    assert (pipeline.closed, head.generator.active) == (1, 0)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("failure", [StageError("x"), ValueError("x")], ids=["ours", "foreign"])
async def test_an_error_closes_the_session(head: Head, failure: Exception, nth: int) -> None:
    """A failed step, the first or a later one, is raised as it is and the session freed."""
    pipeline = FakePipeline([1, 2])
    pipeline.fail_at = {nth: failure}
    with pytest.raises(type(failure)) as caught:
        await head.all(pipeline)

    assert (caught.value, pipeline.closed, head.generator.active) == (failure, 1, 0)


async def test_a_reader_that_leaves_closes_the_session(head: Head) -> None:
    """aclose() after a token frees the session before it returns."""
    pipeline = FakePipeline([1, 2])
    events = head.generate(pipeline)
    await anext(events)
    await events.aclose()

    assert (pipeline.closed, head.generator.active) == (1, 0)


async def test_a_generation_never_begun_has_nothing_to_close(head: Head) -> None:
    """aclose() before the first token was asked for touches no hop and takes no place."""
    pipeline = FakePipeline([1])
    events = head.generate(pipeline)
    await events.aclose()

    assert (pipeline.asked, pipeline.closed, head.generator.active) == ([], 0, 0)


async def cancelled_in(head: Head, pipeline: FakePipeline, step: int) -> None:
    """Cancel the reader while the given step is running."""
    events = head.generate(pipeline)
    for _ in range(step - 1):
        await anext(events)
    pipeline.gate.clear()

    async def read() -> TokenEvent:
        return await anext(events)

    reader = asyncio.create_task(read())
    await turn_the_loop()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


@pytest.mark.parametrize("step", [1, 2], ids=["prefill", "decode"])
async def test_cancellation_closes_the_session(head: Head, step: int) -> None:
    """A reader cancelled before the first token, or later, leaves no session behind."""
    pipeline = FakePipeline([1, 2])
    await cancelled_in(head, pipeline, step)

    assert (len(pipeline.asked), pipeline.closed, head.generator.active) == (step, 1, 0)


async def test_cancellation_in_a_rebuilds_pause_closes_the_session() -> None:
    """A reader cancelled while the recovery pauses leaves no session behind."""
    pausing = asyncio.Event()

    async def sleep(_: float) -> None:
        pausing.set()
        await asyncio.Event().wait()

    pipeline = FakePipeline([1])
    pipeline.fail_at = {1: QueueFull("busy")}
    async with Background() as background:
        head = Head(background, sleep)
        reader = asyncio.create_task(head.all(pipeline))
        await pausing.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    assert (pipeline.closed, head.generator.active) == (1, 0)


class SlowToClose(FakePipeline):
    """Is closed when it is told so."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        super().__init__(answers)
        self.may_close = asyncio.Event()

    async def close(self) -> None:
        await self.may_close.wait()
        await super().close()


async def test_cancelled_again_while_closing_it_closes_all_the_same() -> None:
    """A reader cancelled twice leaves at once; closing goes on and is waited for at last."""
    pipeline = SlowToClose([1])
    async with Background() as background:
        head = Head(background)
        pipeline.gate.clear()
        reader = asyncio.create_task(head.all(pipeline))
        for _ in range(3):
            await turn_the_loop()
            reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        closed_with_the_reader = pipeline.closed
        pipeline.may_close.set()

    assert (closed_with_the_reader, pipeline.closed, head.generator.active) == (0, 1, 0)


# --- how many at once ---


async def test_too_many_generations_are_refused(head: Head) -> None:
    """Over the limit a generation is refused before any hop is touched."""
    running = [head.generate(FakePipeline([1, 2])) for _ in range(2)]
    for events in running:
        await anext(events)
    refused = FakePipeline([1])
    with pytest.raises(QueueFull) as caught:
        await head.all(refused)
    for events in running:
        await events.aclose()

    assert caught.value.members == {"value": 2, "allowed": 2}
    assert (refused.asked, refused.closed) == ([], 0)


@pytest.mark.parametrize("end", ["success", "cancellation"])
async def test_a_place_is_free_again(head: Head, end: str) -> None:
    """Whatever ends generations, as many as are allowed can run after them."""
    for _ in range(5):
        if end == "success":
            await head.all(FakePipeline([END]))
        else:
            await cancelled_in(head, FakePipeline([1]), 1)

    assert len(await head.all(FakePipeline([END]))) == 1
