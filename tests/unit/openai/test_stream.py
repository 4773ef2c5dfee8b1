from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator

import pytest

from meshnet.errors import HopUnreachable, MeshError, QueueFull
from meshnet.generation import TokenEvent
from meshnet.openai.choices import merge
from meshnet.openai.errors import ErrorBody
from meshnet.openai.stream import DONE, Body, Chunk, collect_answer, stream_answer
from tests.unit.openai.making import Generation, answer, indexed, of_one


class Writer:
    """Writes down what it is asked to."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, TokenEvent]] = []

    def begin(self) -> Iterator[Chunk]:
        yield Chunk("begin")

    def take(self, index: int, event: TokenEvent) -> Iterator[Chunk]:
        self.taken.append((index, event))
        if event.text:
            yield Chunk(f"{index}:{event.text}")
        if event.finish_reason:
            yield Chunk(f"{index}:{event.finish_reason}")

    def end(self) -> Iterator[Chunk]:
        yield DONE

    def fail(self, error: ErrorBody) -> Iterator[Chunk]:
        yield Chunk(dict(error), event="error")
        yield DONE

    def body(self) -> Body:
        return {"taken": self.taken}


class SilentWriter(Writer):
    """Has nothing to say of a beginning."""

    def begin(self) -> Iterator[Chunk]:
        return iter(())


def stream(
    events: AsyncGenerator[tuple[int, TokenEvent]], writer: Writer | None = None
) -> AsyncGenerator[Chunk]:
    return stream_answer(events, writer or Writer(), request_id="req_1")


def message(chunk: Chunk) -> object:
    assert isinstance(chunk.data, dict)
    return chunk.data["error"]


async def test_a_stream_is_beginning_tokens_end() -> None:
    """What the writer makes of the first event, of each event and of the end comes in order."""
    events = indexed(
        (0, TokenEvent("a", 10)),
        (1, TokenEvent("", 11)),
        (1, TokenEvent("b", 12, "stop")),
        (0, TokenEvent("", 13, "length")),
    )

    assert [chunk.data async for chunk in stream(events)] == [
        "begin",
        "0:a",
        "1:b",
        "1:stop",
        "0:length",
        "[DONE]",
    ]


async def test_nothing_is_sent_before_the_first_event() -> None:
    """The beginning comes with the first token event, not before it."""
    generation = Generation(*answer("ab"))
    chunks = stream(merge([generation.events()]))

    assert await anext(chunks) == Chunk("begin")
    assert generation.n_begun == 1
    await chunks.aclose()


async def test_an_error_before_the_first_event_is_raised() -> None:
    """While nothing is sent an error can still have its own status: it is raised."""
    with pytest.raises(QueueFull):
        await anext(stream(of_one([QueueFull("too many")])))


async def test_an_error_after_tokens_without_text_is_raised() -> None:
    """So it is as long as no chunk was made, whatever tokens there were."""
    events = of_one([TokenEvent("", 10), HopUnreachable("gone")])
    with pytest.raises(HopUnreachable):
        await anext(stream(events, SilentWriter()))


async def test_an_error_in_the_stream_is_the_writers_to_tell() -> None:
    """A lost shard is what the writer makes of it, and no error of ours."""
    events = of_one([TokenEvent("a", 10), HopUnreachable("shard 2 is gone")])
    *_, token, error, done = [chunk async for chunk in stream(events)]

    assert (token.data, error.event, done) == ("0:a", "error", DONE)
    assert message(error) == {
        "message": "shard 2 is gone",
        "type": "server_error",
        "param": None,
        "code": "shard_unavailable",
    }


async def test_a_fault_of_ours_is_told_and_then_raised() -> None:
    """A bug is told to the client without internals, and then goes on to the log."""
    chunks = stream(of_one([TokenEvent("a", 10), ZeroDivisionError("secret")]))
    *_, error, done = [await anext(chunks) for _ in range(4)]

    assert message(error) == {
        "message": "Internal error; the request's id is req_1",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert done == DONE
    with pytest.raises(ZeroDivisionError):
        await anext(chunks)


async def test_a_generation_that_just_ends_is_an_error() -> None:
    """Events that end without a finish reason are an error, streamed or not."""
    *_, error, done = [
        chunk async for chunk in stream(merge([Generation(*answer("ab")[:1]).events()]))
    ]

    assert (error.event, done) == ("error", DONE)
    with pytest.raises(MeshError, match="without a finish reason"):
        await collect_answer(merge([Generation(*answer("ab")[:1]).events()]), Writer())


@pytest.mark.parametrize("n_read", [1, 2, 3])
async def test_closing_the_stream_closes_the_generations(n_read: int) -> None:
    """A client that leaves early ends the generations, so that every hop is told."""
    generations = [Generation(*answer("abc")), Generation(*answer("abc"))]
    chunks = stream(merge([generation.events() for generation in generations]))
    for _ in range(n_read):
        await anext(chunks)
    assert [generation.is_open for generation in generations] == [True, True]
    await chunks.aclose()

    assert [generation.is_open for generation in generations] == [False, False]


async def test_a_body_is_what_the_writer_took() -> None:
    """In one piece the writer takes the same events, and then makes the body."""
    generations = [Generation(*answer("ab")), Generation(*answer("c"))]
    body = await collect_answer(
        merge([generation.events() for generation in generations]), writer := Writer()
    )

    assert body == {"taken": writer.taken}
    assert [event for index, event in writer.taken if index == 0] == answer("ab")
    assert [event for index, event in writer.taken if index == 1] == answer("c")


async def test_an_error_leaves_no_body() -> None:
    """A generation that fails half-way is its error, and closed."""
    generation = Generation(TokenEvent("a", 10), HopUnreachable("gone"))
    with pytest.raises(HopUnreachable):
        await collect_answer(merge([generation.events()]), Writer())

    assert not generation.is_open
