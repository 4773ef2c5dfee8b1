"""From a request to its tokens: prefill, decode, stop; and always clean up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from meshnet.errors import HopProtocolError
from meshnet.generation import GenerationRequest, SamplingContext, TokenEvent, is_allowed
from meshnet.head.pipeline import Pipeline
from meshnet.text.stop_strings import StopStrings
from meshnet.wire.messages import TailAnswer

ResultT = TypeVar("ResultT")


class Detokenizer(Protocol):
    """Turns ids into text as they come; see meshnet.text."""

    def push(self, token_id: int) -> str:
        """What became printable with this token."""
        ...

    def finish(self) -> str:
        """What was still held back."""
        ...


class NewDetokenizer(Protocol):
    """Makes one for each generation."""

    def __call__(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh stream, with or without control tokens in its text."""
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
    new_detokenizer: NewDetokenizer
    encode: Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Generator:
    """Runs generations over pipelines.

    Attributes:
        text: The tokenizer's part.
    """

    text: TextModel

    async def generate(
        self,
        request: GenerationRequest,
        open_pipeline: Callable[[], Pipeline],
        may_hold: Callable[[int], bool] = lambda _: True,
    ) -> AsyncGenerator[TokenEvent]:
        """Yield the generated tokens, the last event with a finish reason.

        The session is freed on every hop when the iterator ends, fails, or is closed.

        Args:
            request: What to generate.
            open_pipeline: Begins the session.
            may_hold: Whether the hops have room for so many tokens, prompt included; where they
                have not, the answer ends.

        Raises:
            InvalidRequest: The grammar is too costly to follow.
            RecoveryExhausted: A hop or a state was lost and did not come back in time.
            MeshError: What a hop refused a step with.
        """
        pipeline = open_pipeline()
        try:
            answer = _Answer(request, self.text, pipeline, may_hold)
            async with aclosing(answer.events()) as events:
                async for event in events:
                    yield event
        finally:
            await pipeline.background.finish(pipeline.close())


class _Answer:
    """One answer as it grows: its tokens, its text, and what the tail must know for the next."""

    def __init__(
        self,
        request: GenerationRequest,
        text: TextModel,
        pipeline: Pipeline,
        may_hold: Callable[[int], bool],
    ) -> None:
        stopping, sampling = request.stopping, request.sampling
        self._request = request
        self._pipeline = pipeline
        self._may_hold = may_hold
        self._encode = text.encode
        self._detokenizer = text.new_detokenizer(skip_special_tokens=request.skip_special_tokens)
        self._stops = StopStrings(stopping.strings, keep=stopping.keep_string)
        self._constraint = request.grammar.new_constraint() if request.grammar else None
        ends = stopping.token_ids | text.end_token_ids
        self._banned_early = tuple(sorted(ends))
        # What follows a grammar's end is no part of it: there the end is the end.
        goes_on = stopping.ignore_end and self._constraint is None
        self._ends = stopping.token_ids if goes_on else ends
        repeats = sampling.repetition_penalty != 1
        self._steady = SamplingContext(
            prompt_ids=tuple(sorted(set(request.prompt_ids))) if repeats else (),
            logit_bias=dict(request.logit_bias),
        )
        self._ids = list(request.prompt_ids)
        self._n_taken = 0
        self._stateless = pipeline.stateless
        self._is_held = False
        """Whether the hops hold all tokens but the last."""

    async def events(self) -> AsyncGenerator[TokenEvent]:
        """One for each token; the last one has a finish reason."""
        answer = await self._next(score=self._request.score_prompt)
        event = self._take(answer) if self._request.max_tokens else _nothing(answer)
        event = replace(event, n_cached=self._pipeline.n_cached)
        while event.finish_reason is None:
            # The hops are to work on the next token while this one is written and sent.
            async with _begun(self._next()) as following:
                yield event
                answer = await following
            event = self._take(answer)
        yield event

    async def _next(self, *, score: bool = False) -> TailAnswer:
        """The tail's answer after the tokens so far."""
        context = await self._context()
        answer = await self._step(context, score=score)
        self._pipeline.times.note_token()
        self._check(answer, context, self._request.prompt_ids[1:] if score else ())
        return answer

    async def _step(self, context: SamplingContext, *, score: bool) -> TailAnswer:
        sampling = self._request.sampling
        if self._stateless:
            return await self._pipeline.stateless_step(self._ids, sampling, context, score=score)
        if self._is_held:
            return await self._pipeline.decode(self._ids[-1], sampling, context)
        answer = await self._pipeline.prefill(self._ids, sampling, context, score=score)
        self._is_held = True
        return answer

    async def _context(self) -> SamplingContext:
        """All that the next token depends on, besides the parameters and the model."""
        request, constraint = self._request, self._constraint
        changes: dict[str, object] = {}
        if request.sampling.penalised:
            changes["generated_ids"] = tuple(self._ids[len(request.prompt_ids) :])
        if self._n_taken < request.stopping.min_tokens and constraint is None:
            changes["banned_ids"] = self._banned_early
        if constraint is not None:
            # In a thread: a grammar can take its time, and the loop must not wait for it.
            changes["allowed"] = await asyncio.to_thread(constraint.allowed)
        return self._steady.model_copy(update=changes) if changes else self._steady

    def _check(
        self, answer: TailAnswer, context: SamplingContext, scored_ids: tuple[int, ...]
    ) -> None:
        """Whether the tail did all that it was asked: one of a mixed fleet may know less."""
        token_id, score, mask = answer.token_id, answer.score, context.allowed
        if scored_ids != tuple(known.token_id for known in answer.prompt_scores):
            raise HopProtocolError("the tail scored other tokens of the prompt than it was told to")
        if self._request.sampling.top_logprobs is not None and (
            score is None or score.token_id != token_id
        ):
            raise HopProtocolError("the tail does not tell how likely its token was")
        if mask is not None and (token_id is None or not is_allowed(mask, token_id)):
            raise HopProtocolError("the tail does not follow the grammar")

    def _take(self, answer: TailAnswer) -> TokenEvent:
        """Extend the answer by the tail's."""
        if answer.token_id is None:
            text, is_end = self._take_text(answer.text)
        else:
            text, is_end = self._take_token(answer.token_id)
        self._n_taken += 1
        is_last = self._n_taken == self._request.max_tokens or self._is_full()
        if is_end or is_last:
            text += self._detokenizer.finish()
        if self._n_taken > self._request.stopping.min_tokens:
            text = self._stops.push(text)
        is_end = is_end or self._stops.found
        if is_end or is_last:
            text += self._stops.finish()
        return TokenEvent(
            text,
            answer.token_id,
            finish_reason="stop" if is_end else "length" if is_last else None,
            score=answer.score,
            prompt_scores=answer.prompt_scores,
        )

    def _is_full(self) -> bool:
        """Whether there can be no step more: with the sequence as it is, and one token for it."""
        # A sequence that is sent whole may have outgrown what a step can carry.
        is_too_long = self._stateless and len(self._ids) > self._pipeline.max_step_tokens
        return is_too_long or not self._may_hold(len(self._ids) + 1)

    def _take_token(self, token_id: int) -> tuple[str, bool]:
        """What became printable with the token, and whether it is an end."""
        self._ids.append(token_id)
        if token_id in self._ends:
            return "", True
        if self._constraint is not None:
            self._constraint.accept(token_id)
        return self._detokenizer.push(token_id), False

    def _take_text(self, text: str | None) -> tuple[str, bool]:
        """From a tail of a mixed fleet that knows text only: no cache can be kept in step with it.

        The same as of a token: the text, and whether it is an end.
        """
        if text is None:
            raise HopProtocolError("the tail answered neither a token nor text")
        self._stateless = True
        self._ids.extend(self._encode(text))
        return text, not text


@asynccontextmanager
async def _begun(work: Coroutine[Any, Any, ResultT]) -> AsyncGenerator[asyncio.Task[ResultT]]:
    """A task that has begun; left before its end, it is cancelled, and has ended."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _nothing(answer: TailAnswer) -> TokenEvent:
    """The one event where no token was asked for; the tail picked one in vain."""
    return TokenEvent("", finish_reason="length", prompt_scores=answer.prompt_scores, n_tokens=0)
