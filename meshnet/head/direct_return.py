"""Direct return: a step is sent to all hops at once, and its hidden states go from hop to hop.

So a token over n hops costs n + 1 legs in place of 2n. It is a quicker first try and no more: what
a hop does not do so it is asked for as ever, under the same step id. Nothing of recovery is known
here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from meshnet.errors import HopTimeout, InputMissing, InvalidRequest
from meshnet.head.attempt import Attempt, Handover
from meshnet.head.call import Call
from meshnet.head.hop_client import HopAnswer
from meshnet.head.hop_session import HopSession
from meshnet.ids import new_id
from meshnet.transport.hop_stream import HopStream

HopReturn = Literal["auto", "star", "direct"]
"""Which way hidden states go: by the head (`star`), or from hop to hop (`direct`) wherever all hops
of a route can; `auto` does so where the hops are not next door."""

FAR_S: Final = 0.001
"""A round trip from which on `auto` goes direct: each hop after the first saves half of it, and
costs 0.1 to 0.3 ms of processor besides, which on one machine all hops share (ADR 0023)."""

_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 15.0

_Pair = tuple[str, str]
"""The endpoints of a hop and of the one after it."""


@dataclass(frozen=True, slots=True)
class _Pause:
    """A pair is left alone for a while.

    Attributes:
        ends_at: Until this time of the clock.
        next_s: The next pause, if nothing is handed over in between.
    """

    ends_at: float
    next_s: float


class DirectReturn:
    """Which hops can hand over to which, as far as was found out.

    Args:
        clock: Monotonic seconds.
        least_round_trip_s: Hops that are nearer than this, on an average, go by the head.
    """

    def __init__(self, clock: Callable[[], float], least_round_trip_s: float = 0.0) -> None:
        self._clock = clock
        self._least_round_trip_s = least_round_trip_s
        self._pauses: dict[_Pair, _Pause] = {}

    @contextmanager
    def attempts(self, hops: Sequence[HopSession], call: Call) -> Generator[list[Attempt | None]]:
        """Send a step to all hops, if all of them can; leave what still waits at the block's end.

        Args:
            hops: First to last; each is to be asked in turn, with its attempt.
            call: The tail's, but for its input: the frame is the first hop's.

        Yields:
            One a hop; None where there is none.
        """
        begun = self._begin(hops, call)
        if not begun:
            yield [None] * len(hops)
            return
        try:
            yield [*begun]
        finally:
            for attempt in begun:
                attempt.cancel()
            for giver, taker in pairwise(begun):
                self._note(giver, taker)

    def _begin(self, hops: Sequence[HopSession], call: Call) -> list[Attempt]:
        """The attempts; none where not all of the hops can."""
        if len(hops) == 1 or call.mode != "decode" or self._is_paused(hops):
            return []
        found = [hop.stream_for(call.past_len) for hop in hops]
        streams = [stream for stream in found if stream is not None]
        if len(streams) < len(hops) or not self._is_worth_it(streams):
            return []
        return _send(hops, call, streams)

    def _is_worth_it(self, streams: Sequence[HopStream]) -> bool:
        round_trips = [stream.round_trip_s for stream in streams]
        return sum(round_trips) / len(round_trips) >= self._least_round_trip_s

    def _is_paused(self, hops: Sequence[HopSession]) -> bool:
        pauses = [
            self._pauses.get((giver.hop.endpoint, taker.hop.endpoint))
            for giver, taker in pairwise(hops)
        ]
        return any(pause is not None and self._clock() < pause.ends_at for pause in pauses)

    def _note(self, giver: Attempt, taker: Attempt) -> None:
        """Learn from what came of a step at two hops."""
        pair, gave, took = (giver.endpoint, taker.endpoint), giver.outcome, taker.outcome
        if isinstance(took, HopAnswer):
            self._pauses.pop(pair, None)
        elif isinstance(gave, InvalidRequest) or isinstance(
            took, InputMissing | HopTimeout | InvalidRequest
        ):
            self._pause(pair, _LONGEST_PAUSE_S)  # each of these may have cost a hop's whole limit
        elif isinstance(gave, HopAnswer) and not gave.pushed:
            self._pause(pair, _FIRST_PAUSE_S)

    def _pause(self, pair: _Pair, at_least_s: float) -> None:
        before = self._pauses.get(pair)
        pause_s = max(at_least_s, before.next_s if before else 0.0)
        next_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._pauses[pair] = _Pause(self._clock() + pause_s, next_s)


def _send(hops: Sequence[HopSession], call: Call, streams: Sequence[HopStream]) -> list[Attempt]:
    """Send a step to two hops or more, over a stream to each."""
    call_before_tail = Call(call.mode, call.frame, call.past_len)
    attempts: list[Attempt] = []
    before: Attempt | None = None
    input_id: str | None = None
    for (giver, taker), stream in zip(pairwise(hops), streams, strict=False):
        push_id = new_id()
        handover = Handover(input_id, push_id, taker.hop.endpoint, taker.hop.boot_id)
        before = giver.begin(call_before_tail, handover, stream, before)
        attempts.append(before)
        input_id = push_id
    return [*attempts, hops[-1].begin(call, Handover(input_id), streams[-1], before)]
