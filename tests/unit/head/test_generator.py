from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import pytest

from meshnet.errors import HopProtocolError, QueueFull, RouteError, StageError
from meshnet.generation import GenerationRequest, Sampling, TokenEvent
from meshnet.head.background import Background
from meshnet.head.call import Trace
from meshnet.head.generator import Detokenizer, Generator, TextModel
from meshnet.head.hop_times import HopTimesBook
from meshnet.head.pipeline import Pipeline, PipelineKit
from meshnet.head.recovery import Recovery, RecoveryLimits
from meshnet.head.replay import ReplayBudget
from meshnet.head.route_book import RouteBook
from meshnet.topology import HopSpec
from meshnet.wire.messages import TailAnswer
from tests.unit.fakes import FakeClock, turn_the_loop
from tests.unit.head.making import A, route_over

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
    """What a pipeline was asked: the ids, and how."""

    what: str
    ids: tuple[int, ...]


Answer = int | str | Exception | None


class FakePipeline(Pipeline):
    """Answers as told, one answer a step; notes what it is asked.

    Attributes:
        fail_at: Raises these instead, by the number of the step.
        gate: Where a step waits, if it is closed.
    """

    def __init__(
        self, background: Background, answers: Sequence[Answer], **changed: object
    ) -> None:
        recovery = Recovery(
            RecoveryLimits(),
            note=lambda _: None,
            note_replay=lambda _: None,
            clock=FakeClock(),
            jitter=lambda: 0.0,
        )
        book = RouteBook([HopSpec(A)], {}, clock=FakeClock(), jitter=lambda: 0.0)
        kit = PipelineKit(HopTimesBook(), recovery, ReplayBudget(0), "exact", background, 512)
        super().__init__(route_over([A], **changed), book, kit, Trace())
        self._answers = iter(answers)
        self.asked: list[Asked] = []
        self.fail_at: dict[int, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = 0

    async def prefill(self, ids: Sequence[int], sampling: Sampling) -> TailAnswer:
        return await self._step("prefill", ids, sampling)

    async def decode(self, token_id: int, sampling: Sampling) -> TailAnswer:
        return await self._step("decode", [token_id], sampling)

    async def stateless_step(self, ids: Sequence[int], sampling: Sampling) -> TailAnswer:
        return await self._step("stateless", ids, sampling)

    async def _step(self, what: str, ids: Sequence[int], sampling: Sampling) -> TailAnswer:
        assert (self.closed, sampling) == (0, SAMPLING)
        self.asked.append(Asked(what, tuple(ids)))
        await self.gate.wait()
        failure = self.fail_at.get(len(self.asked))
        if failure is not None:
            raise failure
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            return TailAnswer(text=answer)
        return TailAnswer(token_id=answer)

    async def close(self) -> None:
        self.closed += 1


class Head:
    """A generator, and where its pipelines end."""

    def __init__(self, background: Background) -> None:
        self.background = background
        text = TextModel(frozenset({END}), spelling, encode)
        self.generator = Generator(text, max_concurrent=2)

    def pipeline(self, answers: Sequence[Answer], **changed: object) -> FakePipeline:
        return FakePipeline(self.background, answers, **changed)

    def generate(
        self, pipeline: Pipeline, max_tokens: int = 8, prompt: tuple[int, ...] = PROMPT
    ) -> AsyncGenerator[TokenEvent]:
        request = GenerationRequest(prompt, max_tokens, SAMPLING)
        return self.generator.generate(request, lambda: pipeline)

    async def all(
        self, pipeline: Pipeline, max_tokens: int = 8, prompt: tuple[int, ...] = PROMPT
    ) -> list[TokenEvent]:
        return [event async for event in self.generate(pipeline, max_tokens, prompt)]


@pytest.fixture
async def head() -> AsyncGenerator[Head]:
    async with Background() as background:
        yield Head(background)


# --- tokens ---


async def test_tokens_come_one_by_one(head: Head) -> None:
    """Each token is an event with its text; the last one allowed says length."""
    events = await head.all(head.pipeline([1, 2, 3]), max_tokens=3)

    assert events == [
        TokenEvent("<1>", 1),
        TokenEvent("<2>", 2),
        TokenEvent("<3>", 3, "length"),
    ]


async def test_a_token_is_yielded_before_the_next_is_asked_for(head: Head) -> None:
    """Streaming waits for nothing: one step was made when the first token is there."""
    pipeline = head.pipeline([1, 2, 3])
    async with aclosing(head.generate(pipeline)) as events:
        await anext(events)
        n_steps = len(pipeline.asked)

    assert n_steps == 1


async def test_nothing_asked_for_makes_no_step(head: Head) -> None:
    """With max_tokens 0 there is no event, and no hop computes."""
    pipeline = head.pipeline([1])

    assert (await head.all(pipeline, max_tokens=0), pipeline.asked) == ([], [])


async def test_the_end_token_ends(head: Head) -> None:
    """An end token is no text, says stop, and no step follows it."""
    pipeline = head.pipeline([1, END, 3])
    events = await head.all(pipeline)

    assert events == [TokenEvent("<1>", 1), TokenEvent("", END, "stop")]
    assert len(pipeline.asked) == 2


async def test_the_end_token_as_the_last_allowed_says_stop(head: Head) -> None:
    """A sequence that ended by itself just at the limit has ended by itself."""
    assert await head.all(head.pipeline([END]), max_tokens=1) == [TokenEvent("", END, "stop")]


@pytest.mark.parametrize(
    ("answers", "last"),
    [([50, END], TokenEvent("~", END, "stop")), ([1, 50], TokenEvent("~", 50, "length"))],
    ids=["stop", "length"],
)
async def test_half_a_character_at_the_end_is_written(
    head: Head, answers: list[Answer], last: TokenEvent
) -> None:
    """What the detokenizer holds back comes with the last event, whatever ends the text."""
    assert (await head.all(head.pipeline(answers), max_tokens=2))[-1] == last


async def test_half_a_character_waits(head: Head) -> None:
    """A token that makes no character yet is an event without text."""
    events = await head.all(head.pipeline([50, 1]), max_tokens=2)

    assert events == [TokenEvent("", 50), TokenEvent("~<1>", 1, "length")]


async def test_generations_do_not_share_a_detokenizer(head: Head) -> None:
    """What one generation holds back never shows in another one."""
    async with aclosing(head.generate(head.pipeline([50, 1]))) as first:
        await anext(first)
        second = await head.all(head.pipeline([2]), max_tokens=1)

    assert second == [TokenEvent("<2>", 2, "length")]


# --- steps ---


async def test_prefill_then_decodes(head: Head) -> None:
    """The prompt is one prefill; then each token is a decode."""
    pipeline = head.pipeline([1, 2, 3])
    await head.all(pipeline, max_tokens=3)

    assert pipeline.asked == [
        Asked("prefill", PROMPT),
        Asked("decode", (1,)),
        Asked("decode", (2,)),
    ]


async def test_a_route_without_caches_gets_whole_sequences(head: Head) -> None:
    """Every step is stateless and has all tokens so far, never a decode."""
    pipeline = head.pipeline([1, END], kv_cache=False)
    await head.all(pipeline)

    assert pipeline.asked == [Asked("stateless", PROMPT), Asked("stateless", (*PROMPT, 1))]


async def test_a_whole_sequence_ends_where_no_step_takes_it(head: Head) -> None:
    """Where every step is the whole sequence, the longest step ends the text, as its length."""
    pipeline = head.pipeline([1, 2, 3, 4], kv_cache=False, max_step_tokens=4)
    events = await head.all(pipeline)

    assert [event.finish_reason for event in events] == [None, "length"]


async def test_a_cached_sequence_may_be_longer_than_a_step(head: Head) -> None:
    """Where only new tokens are sent, the longest step limits nothing."""
    pipeline = head.pipeline([1, 2, 3, END], max_step_tokens=4)

    assert len(await head.all(pipeline)) == 4


# --- tails that know text only ---


async def test_a_text_only_tail_makes_the_rest_stateless(head: Head) -> None:
    """Its text is encoded into the sequence, no cache is trusted, and empty text is the end."""
    pipeline = head.pipeline(["<1>", "<2>", ""])
    events = await head.all(pipeline)

    assert events == [TokenEvent("<1>"), TokenEvent("<2>"), TokenEvent("", None, "stop")]
    assert pipeline.asked == [
        Asked("prefill", PROMPT),
        Asked("stateless", (*PROMPT, 1)),
        Asked("stateless", (*PROMPT, 1, 2)),
    ]


async def test_a_text_only_tail_is_limited_too(head: Head) -> None:
    """max_tokens counts its answers."""
    events = await head.all(head.pipeline(["<1>", "<2>", "<3>"]), max_tokens=2)

    assert events[-1] == TokenEvent("<2>", None, "length")


async def test_a_tail_that_says_nothing_is_a_protocol_error(head: Head) -> None:
    """Asked to sample, a tail answers a token or text."""
    pipeline = head.pipeline([None])
    with pytest.raises(HopProtocolError, match="neither"):
        await head.all(pipeline)

    assert pipeline.closed == 1


# --- the end of a generation, however it comes ---


async def test_success_closes_the_session(head: Head) -> None:
    """At its end the session is freed once, and the place too."""
    pipeline = head.pipeline([END])
    await head.all(pipeline)

    assert (pipeline.closed, head.generator.active) == (1, 0)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("failure", [StageError("x"), ValueError("x")], ids=["ours", "foreign"])
async def test_an_error_closes_the_session(head: Head, failure: Exception, nth: int) -> None:
    """A failed step, the first or a later one, is raised as it is and the session freed."""
    pipeline = head.pipeline([1, 2])
    pipeline.fail_at = {nth: failure}
    with pytest.raises(type(failure)) as caught:
        await head.all(pipeline)

    assert (caught.value, pipeline.closed, head.generator.active) == (failure, 1, 0)


async def test_a_reader_that_leaves_closes_the_session(head: Head) -> None:
    """aclose() after a token frees the session before it returns."""
    pipeline = head.pipeline([1, 2])
    events = head.generate(pipeline)
    await anext(events)
    await events.aclose()

    assert (pipeline.closed, head.generator.active) == (1, 0)


async def test_a_generation_never_begun_has_nothing_to_close(head: Head) -> None:
    """aclose() before the first token was asked for touches no hop and takes no place."""
    pipeline = head.pipeline([1])
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
    pipeline = head.pipeline([1, 2])
    await cancelled_in(head, pipeline, step)

    assert (len(pipeline.asked), pipeline.closed, head.generator.active) == (step, 1, 0)


class SlowToClose(FakePipeline):
    """Is closed when it is told so."""

    may_close: asyncio.Event

    async def close(self) -> None:
        await self.may_close.wait()
        await super().close()


async def test_cancelled_again_while_closing_it_closes_all_the_same() -> None:
    """A reader cancelled twice leaves at once; closing goes on and is waited for at last."""
    async with Background() as background:
        head = Head(background)
        pipeline = SlowToClose(background, [1])
        pipeline.may_close = asyncio.Event()
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


async def test_a_session_that_cannot_begin_takes_no_place(head: Head) -> None:
    """Where there is no route when the request's turn has come, that is raised, and it is over."""

    def no_route() -> Pipeline:
        raise RouteError("there is none")

    events = head.generator.generate(GenerationRequest(PROMPT, 8, SAMPLING), no_route)
    with pytest.raises(RouteError):
        await anext(events)

    assert (head.generator.active, head.generator.idle.is_set()) == (0, True)


# --- how many at once ---


async def test_too_many_generations_are_refused(head: Head) -> None:
    """Over the limit a generation is refused before any hop is touched."""
    running = [head.generate(head.pipeline([1, 2])) for _ in range(2)]
    for events in running:
        await anext(events)
    opened: list[str] = []

    def open_pipeline() -> Pipeline:
        opened.append("a session")
        return head.pipeline([1])

    refused = head.generator.generate(GenerationRequest(PROMPT, 8, SAMPLING), open_pipeline)
    with pytest.raises(QueueFull) as caught:
        await anext(refused)
    for events in running:
        await events.aclose()

    assert (caught.value.members, opened) == ({"value": 2, "allowed": 2}, [])


@pytest.mark.parametrize("end", ["success", "cancellation"])
async def test_a_place_is_free_again(head: Head, end: str) -> None:
    """Whatever ends generations, as many as are allowed can run after them."""
    for _ in range(5):
        if end == "success":
            await head.all(head.pipeline([END]))
        else:
            await cancelled_in(head, head.pipeline([1]), 1)

    assert len(await head.all(head.pipeline([END]))) == 1


async def test_it_is_idle_while_nothing_runs(head: Head) -> None:
    """Who waits for the running generations to end is told when the last one has."""
    idle = [head.generator.idle.is_set()]
    running = [head.generate(head.pipeline([1, 2])) for _ in range(2)]
    for events in running:
        await anext(events)
    idle.append(head.generator.idle.is_set())
    for events in running:
        await events.aclose()
        idle.append(head.generator.idle.is_set())

    assert idle == [True, False, False, True]


async def test_a_refused_generation_does_not_make_it_idle(head: Head) -> None:
    """Too many at once changes nothing for those that run."""
    running = [head.generate(head.pipeline([1, 2])) for _ in range(2)]
    for events in running:
        await anext(events)
    with pytest.raises(QueueFull):
        await head.all(head.pipeline([1]))
    idle = head.generator.idle.is_set()
    for events in running:
        await events.aclose()

    assert idle is False
