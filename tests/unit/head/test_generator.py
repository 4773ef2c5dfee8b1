from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from meshnet.errors import HopProtocolError, RouteError, StageError
from meshnet.generation import GenerationRequest, TokenEvent
from meshnet.head.background import Background
from meshnet.head.pipeline import Pipeline
from tests.unit.fakes import turn_the_loop
from tests.unit.head.telling import END, PROMPT, SAMPLING, Answer, Asked, FakePipeline, Head

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


async def test_where_nothing_is_to_be_generated_the_prompt_is_run(head: Head) -> None:
    """With max_tokens 0 there is one event without a token; what the tail picked is not told."""
    pipeline = head.pipeline([1])
    events = await head.all(pipeline, max_tokens=0)

    assert events == [TokenEvent("", None, "length", n_tokens=0)]
    assert (pipeline.asked, pipeline.closed) == ([Asked("prefill", PROMPT)], 1)


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


async def test_an_answer_ends_where_there_is_no_room(head: Head) -> None:
    """As its length, with what was held back, before a step that the hops could not hold."""
    pipeline = head.pipeline([1, 50, 3])
    asked: list[int] = []

    def may_hold(n_tokens: int) -> bool:
        asked.append(n_tokens)
        return n_tokens <= len(PROMPT) + 2

    request = GenerationRequest(PROMPT, 8, SAMPLING)
    generated = head.generator.generate(request, lambda: pipeline, may_hold)
    events = [event async for event in generated]

    assert events == [TokenEvent("<1>", 1), TokenEvent("~", 50, "length")]
    assert asked == [len(PROMPT) + 2, len(PROMPT) + 3]


async def test_at_its_last_token_an_answer_asks_for_no_room(head: Head) -> None:
    """No token comes after it."""
    request = GenerationRequest(PROMPT, 1, SAMPLING)
    pipeline, asked = head.pipeline([1]), list[int]()
    generated = head.generator.generate(request, lambda: pipeline, lambda n: not asked.append(n))

    assert ([event async for event in generated], asked) == ([TokenEvent("<1>", 1, "length")], [])


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
    """At its end the session is freed once."""
    pipeline = head.pipeline([END])
    await head.all(pipeline)

    assert pipeline.closed == 1


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("failure", [StageError("x"), ValueError("x")], ids=["ours", "foreign"])
async def test_an_error_closes_the_session(head: Head, failure: Exception, nth: int) -> None:
    """A failed step, the first or a later one, is raised as it is and the session freed."""
    pipeline = head.pipeline([1, 2])
    pipeline.fail_at = {nth: failure}
    with pytest.raises(type(failure)) as caught:
        await head.all(pipeline)

    assert (caught.value, pipeline.closed) == (failure, 1)


async def test_a_reader_that_leaves_closes_the_session(head: Head) -> None:
    """aclose() after a token frees the session before it returns."""
    pipeline = head.pipeline([1, 2])
    events = head.generate(pipeline)
    await anext(events)
    await events.aclose()

    assert pipeline.closed == 1


async def test_a_generation_never_begun_has_nothing_to_close(head: Head) -> None:
    """aclose() before the first token was asked for touches no hop."""
    pipeline = head.pipeline([1])
    events = head.generate(pipeline)
    await events.aclose()

    assert (pipeline.asked, pipeline.closed) == ([], 0)


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

    assert (len(pipeline.asked), pipeline.closed) == (step, 1)


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

    assert (closed_with_the_reader, pipeline.closed) == (0, 1)


async def test_a_session_that_cannot_begin_is_told(head: Head) -> None:
    """What keeps the session from beginning is raised as it is."""

    def no_route() -> Pipeline:
        raise RouteError("there is none")

    events = head.generator.generate(GenerationRequest(PROMPT, 8, SAMPLING), no_route)
    with pytest.raises(RouteError):
        await anext(events)
