"""From a request to its tokens: prefill, decode, stop; and always clean up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from meshnet.errors import HopProtocolError, QueueFull
from meshnet.generation import GenerationRequest, Sampling, TokenEvent
from meshnet.head.pipeline import Pipeline
from meshnet.wire.messages import TailAnswer


class Detokenizer(Protocol):
    """Turns ids into text as they come; see meshnet.text."""

    def push(self, token_id: int) -> str:
        """What became printable with this token."""
        ...

    def finish(self) -> str:
        """What was still held back."""
        ...


@dataclass(frozen=True, slots=True)
class TextModel:
    """What the generator needs to know of the tokenizer.

    Attributes:
        end_token_ids: Each of them ends a sequence.
        new_detokenizer: One for each generation.
        encode: Text to ids, without special tokens; for tails that answer text only.
    """

    end_token_ids: frozenset[int]
    new_detokenizer: Callable[[], Detokenizer]
    encode: Callable[[str], list[int]]


@dataclass
class _Sequence:
    """One generation's tokens, and whether the hops hold all of them but the last."""

    ids: list[int]
    stateless: bool
    is_held: bool = False


@dataclass
class Generator:
    """Runs generations over pipelines.

    Attributes:
        text: The tokenizer's part.
        max_concurrent: Generations at once; more are refused.
        active: Generations running.
        idle: Set while there is none.
    """

    text: TextModel
    max_concurrent: int
    active: int = field(default=0, init=False)
    idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self.idle.set()

    async def generate(
        self, request: GenerationRequest, open_pipeline: Callable[[], Pipeline]
    ) -> AsyncGenerator[TokenEvent]:
        """Yield the generated tokens, the last event with a finish reason.

        The session is freed on every hop when the iterator ends, fails, or is closed.

        Args:
            request: What to generate.
            open_pipeline: Begins the session; called once there is a place for the request.

        Raises:
            QueueFull: Too many generations run already; no hop was touched.
            RecoveryExhausted: A hop or a state was lost and did not come back in time.
            MeshError: What a hop refused a step with.
        """
        if self.active >= self.max_concurrent:
            raise QueueFull(
                f"{self.active} requests are running",
                value=self.active,
                allowed=self.max_concurrent,
            )
        self.active += 1
        self.idle.clear()
        try:
            pipeline = open_pipeline()
            try:
                async with aclosing(self._tokens(request, pipeline)) as events:
                    async for event in events:
                        yield event
            finally:
                await pipeline.background.finish(pipeline.close())
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()

    async def _tokens(
        self, request: GenerationRequest, pipeline: Pipeline
    ) -> AsyncGenerator[TokenEvent]:
        sequence = _Sequence(list(request.prompt_ids), pipeline.stateless)
        detokenizer = self.text.new_detokenizer()
        for n_generated in range(1, request.max_tokens + 1):
            answer = await self._next(pipeline, sequence, request.sampling)
            # A sequence that is sent whole may have outgrown what a step can carry.
            full = sequence.stateless and len(sequence.ids) >= pipeline.max_step_tokens
            is_last = full or n_generated == request.max_tokens
            event = self._take(answer, sequence, detokenizer, is_last=is_last)
            yield event
            if event.finish_reason is not None:
                return

    async def _next(
        self, pipeline: Pipeline, sequence: _Sequence, sampling: Sampling
    ) -> TailAnswer:
        """The answer after the sequence so far."""
        if sequence.stateless:
            return await pipeline.stateless_step(sequence.ids, sampling)
        if sequence.is_held:
            return await pipeline.decode(sequence.ids[-1], sampling)
        answer = await pipeline.prefill(sequence.ids, sampling)
        sequence.is_held = True
        return answer

    def _take(
        self,
        answer: TailAnswer,
        sequence: _Sequence,
        detokenizer: Detokenizer,
        *,
        is_last: bool,
    ) -> TokenEvent:
        """Extend the sequence by the tail's answer."""
        if answer.token_id is None:
            return self._take_text(answer, sequence, is_last=is_last)
        sequence.ids.append(answer.token_id)
        if answer.token_id in self.text.end_token_ids:
            return TokenEvent(detokenizer.finish(), answer.token_id, "stop")
        text = detokenizer.push(answer.token_id)
        if is_last:
            return TokenEvent(text + detokenizer.finish(), answer.token_id, "length")
        return TokenEvent(text, answer.token_id)

    def _take_text(self, answer: TailAnswer, sequence: _Sequence, *, is_last: bool) -> TokenEvent:
        """A tail of a mixed fleet that knows text only: no cache can be kept in step with it."""
        if answer.text is None:
            raise HopProtocolError("the tail answered neither a token nor text")
        sequence.stateless = True
        sequence.ids.extend(self.text.encode(answer.text))
        if not answer.text:
            return TokenEvent("", None, "stop")
        return TokenEvent(answer.text, None, "length" if is_last else None)
