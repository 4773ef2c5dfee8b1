"""From a request to its tokens: prefill, decode, recover, stop; and always clean up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from meshnet.errors import HopProtocolError, QueueFull
from meshnet.generation import GenerationRequest, Sampling, TokenEvent
from meshnet.head.background import Background
from meshnet.head.pipeline import Pipeline
from meshnet.head.recovery import Recovery
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
    """One generation's tokens, and how many of them every hop holds."""

    ids: list[int]
    stateless: bool
    held: int = 0


@dataclass
class Generator:
    """Runs generations over pipelines.

    Attributes:
        text: The tokenizer's part.
        recovery: What to do about lost hops and states.
        background: Where sessions are closed, so that a cancelled request cannot leave one open.
        prefill_chunk_tokens: The longest prefill step.
        max_concurrent: Generations at once; more are refused.
    """

    text: TextModel
    recovery: Recovery
    background: Background
    prefill_chunk_tokens: int
    max_concurrent: int
    active: int = field(default=0, init=False)

    async def generate(
        self, request: GenerationRequest, pipeline: Pipeline
    ) -> AsyncGenerator[TokenEvent]:
        """Yield the generated tokens, the last event with a finish reason.

        The session is freed on every hop when the iterator ends, fails, or is closed.

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
        try:
            async with aclosing(self._tokens(request, pipeline)) as events:
                async for event in events:
                    yield event
        finally:
            self.active -= 1
            await self.background.finish(pipeline.close())

    async def _tokens(
        self, request: GenerationRequest, pipeline: Pipeline
    ) -> AsyncGenerator[TokenEvent]:
        sequence = _Sequence(list(request.prompt_ids), pipeline.stateless)
        detokenizer = self.text.new_detokenizer()
        for n_generated in range(1, request.max_tokens + 1):
            answer = await self.recovery.run(
                lambda: self._attempt(pipeline, sequence, request.sampling)
            )
            is_last = n_generated == request.max_tokens
            event = self._take(answer, sequence, detokenizer, is_last=is_last)
            yield event
            if event.finish_reason is not None:
                return

    async def _attempt(
        self, pipeline: Pipeline, sequence: _Sequence, sampling: Sampling
    ) -> TailAnswer:
        """One try at the next token, from what the hops hold; nothing is held after a failure."""
        held, sequence.held = sequence.held, 0
        if sequence.stateless:
            return await pipeline.step("stateless", sequence.ids, 0, sampling)
        if held:
            answer = await pipeline.step("decode", sequence.ids[held:], held, sampling)
        else:
            answer = await self._prefill(pipeline, sequence.ids, sampling)
        sequence.held = len(sequence.ids)
        return answer

    async def _prefill(self, pipeline: Pipeline, ids: list[int], sampling: Sampling) -> TailAnswer:
        """Chunk by chunk; the tail samples after the last one only."""
        size = min(self.prefill_chunk_tokens, pipeline.max_step_tokens)
        last = (len(ids) - 1) // size * size
        for start in range(0, last, size):
            await pipeline.step("prefill", ids[start : start + size], start, None)
        return await pipeline.step("prefill", ids[last:], last, sampling)

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
