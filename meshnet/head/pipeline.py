"""One session on one route: activations go from hop to hop, the tail's answer comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshnet.errors import HopProtocolError, InputsDropped
from meshnet.generation import NO_CONTEXT, Sampling, SamplingContext, TokenScore
from meshnet.head.background import Background
from meshnet.head.call import Call, Shards, Trace
from meshnet.head.hop_session import HopSession
from meshnet.head.hop_times import HopTimesBook
from meshnet.head.recovery import Recovery, Tries
from meshnet.head.replay import InputLog, ReplayBudget, ReplayMode
from meshnet.ids import SessionId, new_id
from meshnet.topology import Route
from meshnet.wire.frames import Frame
from meshnet.wire.headers import CacheMode
from meshnet.wire.messages import TailAnswer


@dataclass(frozen=True, slots=True)
class PipelineKit:
    """What all pipelines of a head share.

    Attributes:
        times: Where the hops' times are noted.
        recovery: How failures are met.
        budget: Room for the inputs that are kept.
        replay: How they are fed again.
        background: Where calls end that nobody waits for any more.
        prefill_chunk_tokens: The longest prefill step.
    """

    times: HopTimesBook
    recovery: Recovery
    budget: ReplayBudget
    replay: ReplayMode
    background: Background
    prefill_chunk_tokens: int


class Pipeline:
    """Runs steps of one session over a route; one step at a time.

    Args:
        route: The hops in order.
        shards: Who can take a hop's place.
        kit: What it shares with the other pipelines.
        trace: Sent with every step.
        session: None is a new one.
    """

    def __init__(
        self,
        route: Route,
        shards: Shards,
        kit: PipelineKit,
        trace: Trace,
        session: SessionId | None = None,
    ) -> None:
        self.session = session or SessionId(new_id())
        self._route = route
        self._kit = kit
        self._ids: list[int] = []
        self._hops = [
            HopSession(
                hop,
                self.session,
                shards=shards,
                log=InputLog(kit.budget, kit.replay),
                times=kit.times,
                background=kit.background,
                trace=trace,
            )
            for hop in route.hops
        ]

    @property
    def stateless(self) -> bool:
        """Whether some hop keeps no cache."""
        return self._route.stateless

    @property
    def max_step_tokens(self) -> int:
        """The longest step that every hop takes."""
        return self._route.max_step_tokens

    @property
    def background(self) -> Background:
        """Where to close it, so that a cancelled request cannot leave it open."""
        return self._kit.background

    async def prefill(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        context: SamplingContext = NO_CONTEXT,
        *,
        score: bool = False,
    ) -> TailAnswer:
        """Run a prompt, chunk by chunk; the tail samples after the last one only.

        Args:
            ids: The prompt.
            sampling: How the tail samples.
            context: What its answer depends on besides.
            score: Have every token but the first scored, in the answer's `prompt_scores`.

        Raises:
            MeshError: As `stateless_step`.
        """
        chunks = self._chunks(ids)
        scores: list[TokenScore] = []
        for chunk, following in pairwise(chunks):
            if score:
                known = NO_CONTEXT.scoring((*chunk[1:], following[0]))
                scored = await self._cached_step("prefill", chunk, sampling, known)
                scores.extend(scored.prompt_scores)
            else:
                await self._cached_step("prefill", chunk)
        if score:
            context = context.scoring(chunks[-1][1:])
        answer = await self._cached_step("prefill", chunks[-1], sampling, context)
        return answer.model_copy(update={"prompt_scores": (*scores, *answer.prompt_scores)})

    async def decode(
        self, token_id: int, sampling: Sampling, context: SamplingContext = NO_CONTEXT
    ) -> TailAnswer:
        """Run the last token. Raises as `stateless_step`."""
        return await self._cached_step("decode", [token_id], sampling, context)

    async def stateless_step(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        context: SamplingContext = NO_CONTEXT,
        *,
        score: bool = False,
    ) -> TailAnswer:
        """Run a whole sequence, of which nothing is kept.

        Raises:
            RecoveryExhausted: A hop or a state was lost and did not come back in time.
            MeshError: What a hop refused a step with.
        """
        context = context.scoring(ids[1:]) if score else context
        call = Call("stateless", Frame.of_token_ids(ids), 0, sampling, context)
        return await self._through(call, self._kit.recovery.begin())

    async def close(self) -> None:
        """Free the session on every hop; a hop that cannot be reached frees it by its TTL."""
        await asyncio.gather(*(hop.close() for hop in self._hops))

    async def _cached_step(
        self,
        mode: CacheMode,
        ids: Sequence[int],
        sampling: Sampling | None = None,
        context: SamplingContext = NO_CONTEXT,
    ) -> TailAnswer:
        """Run the tokens that come next, which every hop then holds."""
        tries = self._kit.recovery.begin()
        call = Call(mode, Frame.of_token_ids(ids), len(self._ids), sampling, context)
        anew = False
        while True:
            try:
                if anew:
                    await self._feed_anew(tries)
                answer = await self._through(call, tries)
            except InputsDropped as dropped:
                tries.count(dropped)
                anew = True
            else:
                self._ids.extend(ids)
                return answer

    async def _feed_anew(self, tries: Tries) -> None:
        """Prefill everything on all hops: one of them lost it, and what it was fed was not kept."""
        for hop in self._hops:
            hop.forget()
        past_len = 0
        for chunk in self._chunks(self._ids):
            await self._through(Call("prefill", Frame.of_token_ids(chunk), past_len), tries)
            past_len += len(chunk)
            tries.note_replay(len(chunk) * self._route.hops[0].facts.n_layers)

    async def _through(self, call: Call, tries: Tries) -> TailAnswer:
        """One step through every hop, first to last."""
        frame = call.frame
        *others, tail = self._hops
        for hop in others:
            result = await hop.step(Call(call.mode, frame, call.past_len), tries)
            frame = _as_hidden(result, call.frame.n_tokens, hop.hop.endpoint)
        answer = await tail.step(replace(call, frame=frame), tries)
        if not isinstance(answer, TailAnswer):
            endpoint = tail.hop.endpoint
            raise HopProtocolError(f"{endpoint} answered hidden states", endpoint=endpoint)
        return answer

    def _chunks(self, ids: Sequence[int]) -> list[Sequence[int]]:
        size = min(self._kit.prefill_chunk_tokens, self.max_step_tokens)
        return [ids[start : start + size] for start in range(0, len(ids), size)]


def _as_hidden(result: Frame | TailAnswer, n_tokens: int, endpoint: str) -> Frame:
    if not isinstance(result, Frame):
        raise HopProtocolError(f"{endpoint} answered as a tail", endpoint=endpoint)
    if result.n_tokens != n_tokens:
        raise HopProtocolError(
            f"{endpoint} answered {result.n_tokens} tokens to {n_tokens}", endpoint=endpoint
        )
    return result
