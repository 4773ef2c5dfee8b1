"""One session on one route: activations go from hop to hop, the tail's answer comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from meshnet.errors import HopProtocolError, MeshError
from meshnet.generation import Sampling
from meshnet.head.hop_client import HopAnswer, HopClient
from meshnet.head.hop_times import HopTimesBook
from meshnet.ids import SessionId, new_id
from meshnet.topology import Hop, Route
from meshnet.wire.frames import Frame
from meshnet.wire.headers import CacheMode, StepHeaders
from meshnet.wire.messages import TailAnswer

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Trace:
    """What ties the logs of all hops to one request."""

    request_id: str | None = None
    traceparent: str | None = None


class Pipeline:
    """Runs steps of one session over a route; one step at a time.

    Args:
        route: The hops in order.
        clients: A client for every endpoint of the route.
        times: Where the hops' times are noted.
        trace: Sent with every step.
    """

    def __init__(
        self, route: Route, clients: Mapping[str, HopClient], times: HopTimesBook, trace: Trace
    ) -> None:
        self.session = SessionId(new_id())
        self._route = route
        self._clients = clients
        self._times = times
        self._trace = trace
        self._in_flight: asyncio.Task[HopAnswer] | None = None

    @property
    def stateless(self) -> bool:
        """Whether some hop keeps no cache."""
        return self._route.stateless

    @property
    def max_step_tokens(self) -> int:
        """The longest step that every hop takes."""
        return self._route.max_step_tokens

    async def step(
        self, mode: CacheMode, ids: Sequence[int], past_len: int, sampling: Sampling | None
    ) -> TailAnswer:
        """Run one step through every hop.

        Args:
            mode: How the hops treat their caches.
            ids: The tokens of this step, at least one.
            past_len: Tokens that every hop already holds.
            sampling: How the tail samples; None for a chunk after which nothing is sampled.

        Raises:
            MeshError: A hop failed or refused; hops before it have taken the step.
        """
        frame = Frame.of_token_ids(ids)
        *others, tail = self._route.hops
        for hop in others:
            result = await self._hop_step(hop, mode, frame, past_len, None)
            if not isinstance(result, Frame):
                raise HopProtocolError(f"{hop.endpoint} answered as a tail", endpoint=hop.endpoint)
            if result.n_tokens != len(ids):
                raise HopProtocolError(
                    f"{hop.endpoint} answered {result.n_tokens} tokens to {len(ids)}",
                    endpoint=hop.endpoint,
                )
            frame = result
        answer = await self._hop_step(tail, mode, frame, past_len, sampling)
        if not isinstance(answer, TailAnswer):
            raise HopProtocolError(
                f"{tail.endpoint} answered hidden states", endpoint=tail.endpoint
            )
        return answer

    async def close(self) -> None:
        """Free the session on every hop; a hop that cannot be reached frees it by its TTL.

        Waits for a step in flight first: closed before it, the hop would make the session anew.
        """
        if self._in_flight is not None:
            await asyncio.wait({self._in_flight})
        await asyncio.gather(*(self._close_on(hop.endpoint) for hop in self._route.hops))

    async def _hop_step(
        self,
        hop: Hop,
        mode: CacheMode,
        frame: Frame,
        past_len: int,
        sampling: Sampling | None,
    ) -> Frame | TailAnswer:
        step = StepHeaders(
            session=self.session,
            cache=mode,
            past_len=past_len,
            shape=frame.shape,
            dtype=frame.dtype,
            start_layer=hop.layers.start,
            fingerprint=hop.facts.fingerprint,
            step=new_id(),
            sampling=sampling,
            request_id=self._trace.request_id,
            traceparent=self._trace.traceparent,
        )
        # Law 7: cancelling inside an httpx call can leak a place in its pool for good, so the call
        # goes on, and ends by its own time-outs.
        self._in_flight = asyncio.create_task(self._clients[hop.endpoint].step(step, frame.data))
        self._in_flight.add_done_callback(_take_note)
        answer = await asyncio.shield(self._in_flight)
        if mode == "decode":
            self._times.note(hop.endpoint, answer)
        return answer.result

    async def _close_on(self, endpoint: str) -> None:
        try:
            await self._clients[endpoint].close_session(self.session)
        except MeshError as error:
            _log.warning(
                "session not closed",
                session_id=self.session,
                hop=endpoint,
                code=error.code,
                reason=error.message,
            )


def _take_note(task: asyncio.Task[HopAnswer]) -> None:
    """Look at the outcome, lest the loop warns of one that nobody waited for."""
    if not task.cancelled():
        task.exception()
