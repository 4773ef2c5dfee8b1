"""Token events to an answer, streamed or in one piece; how it looks is the writer's affair."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol

from meshnet.errors import MeshError
from meshnet.generation import TokenEvent
from meshnet.openai.choices import ChoiceEvents
from meshnet.openai.errors import ErrorBody, to_openai

Body = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One server-sent event: a body, or the word that ends a stream; some APIs name their kinds."""

    data: Body | str
    event: str | None = None


DONE: Final = Chunk("[DONE]")


class AnswerWriter(Protocol):
    """One answer in the making, in one API's shape."""

    def begin(self) -> Iterable[Chunk]:
        """What a stream opens with; called once, after the first token has come."""
        ...

    def take(self, index: int, event: TokenEvent) -> Iterable[Chunk]:
        """What one more token of a choice adds. To be read to its end."""
        ...

    def end(self) -> Iterable[Chunk]:
        """What a stream ends with after the last choice's last token."""
        ...

    def fail(self, error: ErrorBody) -> Iterable[Chunk]:
        """What a stream ends with instead."""
        ...

    def body(self) -> Body:
        """The answer in one piece, after the last token."""
        ...


async def stream_answer(
    events: ChoiceEvents, writer: AnswerWriter, *, request_id: str
) -> AsyncGenerator[Chunk]:
    """The chunks of a streamed answer.

    Nothing is yielded before the first token event is there: until then an error can still be
    answered with its own status. From the first chunk on it is one event in place of the closing
    chunk: most clients take a stream that just ends for a success.

    Args:
        events: Closed at the end, also when this generator is closed early.
        writer: A fresh one.
        request_id: What the client is told of an error of ours.

    Raises:
        MeshError: Before the first chunk.
        Exception: Before the first chunk or after the last one, if it is a fault of ours.
    """
    begun = False
    async with aclosing(_chunks(events, writer)) as chunks:
        try:
            async for chunk in chunks:
                begun = True
                yield chunk
        except Exception as error:
            if not begun:
                raise
            for chunk in writer.fail(to_openai(error, request_id=request_id).body):
                yield chunk
            if not isinstance(error, MeshError):
                raise


async def _chunks(events: ChoiceEvents, writer: AnswerWriter) -> AsyncGenerator[Chunk]:
    begun = False
    async with aclosing(events):
        async for index, event in events:
            if not begun:
                begun = True
                for chunk in writer.begin():
                    yield chunk
            for chunk in writer.take(index, event):
                yield chunk
    for chunk in writer.end():
        yield chunk


async def collect_answer(events: ChoiceEvents, writer: AnswerWriter) -> Body:
    """The answer in one piece.

    Args:
        events: Closed at the end.
        writer: A fresh one.

    Raises:
        MeshError: A generation failed; what was generated is lost.
    """
    async with aclosing(events):
        async for index, event in events:
            for _ in writer.take(index, event):
                pass
    return writer.body()
