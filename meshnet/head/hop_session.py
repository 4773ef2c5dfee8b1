"""One session at one place of its route: whoever serves it, it has been fed what it needs.

The place outlives the shard there. A shard that lost the session is fed again, alone; one that is
gone is waited for, or another one that runs the same layers takes its place. The hops before and
after do not notice.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from time import perf_counter
from typing import cast

import structlog

from meshnet.errors import (
    CacheFull,
    CacheMiss,
    Draining,
    InputMissing,
    InputsDropped,
    InvalidRequest,
    MeshError,
    ModelMismatch,
    QueueFull,
    RouteError,
    SessionBusy,
)
from meshnet.head.attempt import Attempt, Handover
from meshnet.head.background import Background
from meshnet.head.call import Call, Shards, Trace
from meshnet.head.hop_client import HopAnswer, HopClient
from meshnet.head.hop_times import HopTimesBook
from meshnet.head.recovery import Tries, is_passing
from meshnet.head.replay import InputLog
from meshnet.head.request_times import GenerationTimes
from meshnet.ids import SessionId, StepId
from meshnet.topology import Hop, LayerSpan
from meshnet.transport.hop_stream import HopStream
from meshnet.wire.context import render_context
from meshnet.wire.frames import Dtype, Frame, nbytes
from meshnet.wire.headers import StepHeaders
from meshnet.wire.messages import TailAnswer

_log = structlog.get_logger(__name__)

_TRIES_AT_ONE_SHARD = 1
"""After more failures of a step another shard is preferred, also if this one says it is well."""

_EXACT_TRIES = 2
"""After more failures in one step, over all hops, a hop is fed again in bulk."""

_SCORE_BYTES = 1024
"""The most that a scored token takes in a tail's answer: its own number and 20 others."""


class HopSession:
    """One session at one place of its route; one call at a time.

    Args:
        hop: Who serves it at first.
        session: Its id, the same on every hop.
        shards: Who else could.
        log: Where its inputs are kept.
        times: Where the shards' times are noted, and the limits come from.
        background: Where calls end that nobody waits for any more.
        trace: Sent with every step.
        spent: Where it is noted what each step took.

    Attributes:
        n_forked: Tokens that it began with as a fork; 0 where it was fed them.
    """

    def __init__(
        self,
        hop: Hop,
        session: SessionId,
        *,
        shards: Shards,
        log: InputLog,
        times: HopTimesBook,
        background: Background,
        trace: Trace,
        spent: GenerationTimes,
    ) -> None:
        self.hop = hop
        self.log = log
        self.n_forked = 0
        self._session = session
        self._shards = shards
        self._fork_of: SessionId | None = None
        self._times = times
        self._background = background
        self._trace = trace
        self._spent = spent
        self._step_numbers = count(1)
        self._epoch = 1
        self._held = 0
        self._is_known = True
        shards.enter(hop.endpoint)

    @property
    def place(self) -> tuple[str, str, LayerSpan, str]:
        """What is the same where one session can be forked into another."""
        hop = self.hop
        return hop.endpoint, hop.boot_id, hop.layers, hop.facts.fingerprint

    def stream_for(self, past_len: int) -> HopStream | None:
        """The stream over which a cached call at this position can be begun, if it can be."""
        is_in_step = self._is_known and self._held == past_len
        return self._client.stream if is_in_step and self.hop.facts.push else None

    def begin(
        self, call: Call, handover: Handover, stream: HopStream, before: Attempt | None
    ) -> Attempt:
        """Send a cached call before its turn; `step` is to be given the attempt then.

        Args:
            call: Its frame is the input, or where another hop pushes that, of as many tokens.
            handover: Where the input comes from, and where the output goes.
            stream: See `stream_for`.
            before: The attempt of the hop that pushes the input.
        """
        facts, n_tokens = self.hop.facts, call.frame.n_tokens
        step_id, context = self._new_step_id(), render_context(call.context)
        changes: dict[str, object] = asdict(handover)
        body = call.frame.data + context
        if handover.input_id is not None:
            changes |= {"shape": (1, n_tokens, facts.hidden_size), "dtype": facts.dtype}
            body = context
        step = self._headers(call, step_id, len(context)).model_copy(update=changes)
        sent = self._background.start(self._client.step_on(stream, step, body, None))
        limit_s = self._times.limit_s(self.hop.endpoint, n_tokens)
        return Attempt(step_id, self.hop.endpoint, sent, stream, limit_s, before)

    async def step(
        self, call: Call, tries: Tries, attempt: Attempt | None = None
    ) -> Frame | TailAnswer:
        """Run one call, whatever is lost meanwhile.

        The call is repeated under the same step id, so that a shard which has run it already
        answers what it answered then.

        Args:
            call: What to run.
            tries: What its failures may cost.
            attempt: What `begin` has returned, if it was called for this call.

        Raises:
            RecoveryExhausted: A limit of `tries` was reached.
            InputsDropped: The session was lost here, and so were the inputs to feed it again.
            MeshError: The hop refused or failed in a way that trying again cannot mend.
        """
        step_id = self._new_step_id() if attempt is None else attempt.step_id
        started_at = perf_counter()
        try:
            answer = await self._try(call, step_id, tries, attempt)
        except MeshError as error:
            answer = await self._try_again(call, step_id, tries, error, started_at)
        self._spent.note_step(self.hop.endpoint, answer)
        self._note_taken(call)
        return answer.result

    def fork(self, other: HopSession, n_tokens: int) -> None:
        """Begin with the first tokens of another session at the same place.

        If the shard cannot fork that one, this one is fed them, as after a loss.
        """
        self._fork_of = other._session
        self._held = n_tokens
        self.log.begin_as(other.log, n_tokens)

    def forget(self) -> None:
        """Begin anew: nothing is held, and no input is kept."""
        self._lose(0)
        self.log.clear()

    async def close(self, *, keep: bool = False) -> None:
        """Free the session; a shard that cannot be reached does it by its time to live.

        Args:
            keep: Have it kept for forks instead, and keep its inputs, until it is dropped.
        """
        if not keep:
            self.log.clear()
        self._shards.leave(self.hop.endpoint)
        await self._close_at(self.hop.endpoint, self._epoch, keep=keep)

    def drop(self) -> None:
        """Free a session that was kept, and its inputs."""
        self.log.clear()
        self._background.start(self._close_at(self.hop.endpoint, self._epoch))

    @property
    def _client(self) -> HopClient:
        return self._shards.client(self.hop.endpoint)

    def _new_step_id(self) -> StepId:
        """An id of its own in this session at this place, which is all that a shard compares."""
        return StepId(str(next(self._step_numbers)))

    def _note_taken(self, call: Call) -> None:
        if call.mode != "stateless":
            self.log.add(call.past_len, call.frame)
            self._held = call.past_len + call.frame.n_tokens
            if self._fork_of is not None:
                self._fork_of, self.n_forked = None, call.past_len

    async def _try(
        self, call: Call, step_id: StepId, tries: Tries, attempt: Attempt | None = None
    ) -> HopAnswer:
        """Run one call once, at a hop that has what it builds on."""
        if not self._is_known:
            self._take(await self._look())
        if call.mode != "stateless":
            await self._catch_up(call.past_len, tries)
        return await self._ask(call, step_id, attempt)

    async def _try_again(
        self, call: Call, step_id: StepId, tries: Tries, failure: MeshError, started_at: float
    ) -> HopAnswer:
        """Run one call that failed until it does not; all but the last try is noted as recovery."""
        n_failures, step_ms = 0, 0.0
        try:
            while True:
                if not self._was_no_fork(failure):
                    n_failures += 1
                    at_one_shard = n_failures <= _TRIES_AT_ONE_SHARD
                    await self._mend(failure, tries, at_one_shard=at_one_shard)
                try:
                    answer = await self._try(call, step_id, tries)
                except MeshError as error:
                    failure = error
                else:
                    step_ms = answer.step_ms
                    return answer
        finally:
            lost_ms = (perf_counter() - started_at) * 1000 - step_ms
            self._spent.note_recovery(self.hop.endpoint, lost_ms)

    async def _catch_up(self, past_len: int, tries: Tries) -> None:
        """Feed the hop what it lacks of the tokens before `past_len`."""
        if self._held == past_len:
            return
        layers, largest = len(self.hop.layers), self.hop.facts.max_step_tokens
        # What is lost again while it is fed again needs fewer calls more than the same last digits.
        in_bulk = tries.rebuilds > _EXACT_TRIES
        for fed in self.log.replay(self._held, past_len, largest, in_bulk=in_bulk):
            await self._send(Call("prefill", fed.frame, fed.past_len), self._new_step_id())
            self._held = fed.end
            tries.note_replay(fed.frame.n_tokens * layers)

    def _was_no_fork(self, failure: MeshError) -> bool:
        """Whether the shard had nothing to fork. Then it is fed: nothing of this one was lost."""
        if self._fork_of is None or not isinstance(failure, CacheMiss):
            return False
        self._is_known = failure.members.get("reason") != "restarted"
        self._lose(0)
        return True

    async def _mend(self, failure: MeshError, tries: Tries, *, at_one_shard: bool) -> None:
        """Make the next try worth it."""
        if isinstance(failure, InputsDropped):
            raise failure  # feeding this hop alone cannot help; the pipeline feeds all of them
        tries.count(failure)
        match failure:
            case CacheMiss():
                self._is_known = failure.members.get("reason") != "restarted"
                self._lose(_held(failure))
                if tries.rebuilds > 1:
                    await tries.pause(failure)
            case SessionBusy() | CacheFull() | QueueFull():
                await tries.pause(failure)
            case _:
                prefer_other = isinstance(failure, Draining) or not at_one_shard
                self._take(await self._find(failure, tries, prefer_other=prefer_other))

    async def _find(self, failure: MeshError, tries: Tries, *, prefer_other: bool) -> Hop:
        """Who goes on: the same shard if it is well, else another; waits while there is none."""
        while True:
            other = self._shards.alternative(self.hop) if prefer_other else None
            if other is not None:
                if not isinstance(failure, Draining):
                    self._shards.set_aside(self.hop.endpoint, failure)
                return other
            try:
                found = await self._look()
            except MeshError as error:
                self._shards.set_aside(self.hop.endpoint, error)
                other = self._shards.alternative(self.hop)
                if other is not None:
                    return other
                if not is_passing(error) or isinstance(error, ModelMismatch | RouteError):
                    raise
            else:
                if not isinstance(failure, Draining) or found.boot_id != self.hop.boot_id:
                    return found
            await tries.pause(failure)

    async def _look(self) -> Hop:
        """The shard as it is now, which must run what it ran."""
        found = await self._shards.look(self.hop)
        expected, actual = self.hop.facts.fingerprint, found.facts.fingerprint
        if expected != actual:
            raise ModelMismatch(
                f"{found.endpoint} runs {actual} now, not {expected}",
                expected=expected,
                actual=actual,
                endpoint=found.endpoint,
            )
        return found

    def _take(self, found: Hop) -> None:
        """Go on with the shard as it was found."""
        self._is_known = True
        if found.endpoint != self.hop.endpoint:
            _log.warning("hop replaced", session_id=self._session, hop=found.endpoint)
            self._background.start(self._close_at(self.hop.endpoint, self._epoch))
            self._shards.leave(self.hop.endpoint)
            self._shards.enter(found.endpoint)
        if (found.endpoint, found.boot_id) != (self.hop.endpoint, self.hop.boot_id):
            self._lose(0)
        self.hop = found

    def _lose(self, held: int) -> None:
        """The hop holds so much only. Steps still on their way there are of an old epoch now."""
        self._epoch += 1
        self._fork_of, self.n_forked = None, 0
        self._held = self.log.usable(held)

    async def _ask(self, call: Call, step_id: StepId, attempt: Attempt | None) -> HopAnswer:
        """The answer to what was begun; where that came to nothing, or there is none, to a call."""
        if attempt is not None:
            with suppress(InputMissing, InvalidRequest):  # of the way that the input was to come
                answer = await attempt.answer()
                self._times.note(self.hop.endpoint, call.frame.n_tokens, answer)
                return answer
        return await self._send(call, step_id)

    def _headers(self, call: Call, step_id: StepId, n_context: int) -> StepHeaders:
        hop = self.hop
        return StepHeaders(
            session=self._session,
            cache=call.mode,
            past_len=call.past_len,
            shape=call.frame.shape,
            dtype=call.frame.dtype,
            start_layer=hop.layers.start,
            fingerprint=hop.facts.fingerprint,
            step=step_id,
            epoch=self._epoch if call.mode != "stateless" else 0,
            boot=hop.boot_id or None,
            fork_of=self._fork_of,
            sampling=call.sampling,
            context_bytes=n_context,
            request_id=self._trace.request_id,
            traceparent=self._trace.traceparent,
        )

    async def _send(self, call: Call, step_id: StepId) -> HopAnswer:
        hop, facts = self.hop, self.hop.facts
        context = render_context(call.context)
        n_tokens = call.frame.n_tokens
        sent = self._client.step(
            self._headers(call, step_id, len(context)),
            call.frame.data + context,
            limit_s=self._times.limit_s(hop.endpoint, n_tokens),
            max_answer_bytes=max(
                nbytes(cast("Dtype", facts.dtype), (n_tokens, facts.hidden_size)),
                _SCORE_BYTES * len(call.context.next_ids),
            ),
        )
        # Law 7: cancelling inside an httpx call can leak a place in its pool for good, so the call
        # goes on, and ends by its own limits.
        answer: HopAnswer = await asyncio.shield(self._background.start(sent))
        if call.mode != "stateless":
            self._times.note(hop.endpoint, n_tokens, answer)
        return answer

    async def _close_at(self, endpoint: str, epoch: int, *, keep: bool = False) -> None:
        try:
            await self._shards.client(endpoint).close_session(self._session, epoch, keep=keep)
        except MeshError as error:
            _log.warning(
                "session not closed",
                session_id=self._session,
                hop=endpoint,
                code=error.code,
                reason=error.message,
            )


def _held(failure: CacheMiss) -> int:
    """What the shard says that it holds; it may say anything."""
    held = failure.members.get("held")
    return held if isinstance(held, int) and held > 0 else 0
