"""Bounded recovery: what is lost is made again, a few times, with pauses, and then not any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from meshnet.errors import CacheMiss, HopUnreachable, MeshError, ModelLoading, RecoveryExhausted

_log = structlog.get_logger(__name__)

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    """How much one token may cost.

    Attributes:
        max_rebuilds: Attempts after the first.
        timeout_s: From the first failure to the last attempt, waiting for a lost hop included.
        backoff_s: The first pause; each next one is twice as long, with jitter.
        max_backoff_s: The longest pause.
    """

    max_rebuilds: int = 4
    timeout_s: float = 60.0
    backoff_s: float = 0.05
    max_backoff_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """Tries again what failed for a passing reason.

    Attributes:
        limits: When it stops.
        is_ready: Whether the hop at an endpoint takes steps.
        note: Told of every failure that is tried again.
        clock: Monotonic seconds.
        sleep: Waits so many seconds.
        jitter: A number in [0, 1), fresh at each call.
    """

    limits: RecoveryLimits
    is_ready: Callable[[str], Awaitable[bool]]
    note: Callable[[MeshError], None]
    clock: Callable[[], float]
    jitter: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(self, attempt: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Call `attempt` until it succeeds or a limit is reached.

        Raises:
            RecoveryExhausted: A limit was reached; the last failure is its cause.
            MeshError: `attempt` failed for a reason that trying again cannot mend.
        """
        deadline: float | None = None
        rebuilds = 0
        while True:
            try:
                return await attempt()
            except MeshError as error:
                if not _is_passing(error):
                    raise
                failure = error
            deadline = self.clock() + self.limits.timeout_s if deadline is None else deadline
            rebuilds += 1
            self.note(failure)
            _log.warning("recovering", code=failure.code, rebuild=rebuilds, **_short(failure))
            if rebuilds > self.limits.max_rebuilds:
                raise _exhausted(failure, f"{rebuilds} attempts failed") from failure
            if self.clock() > deadline:
                raise _exhausted(failure, f"more than {self.limits.timeout_s:g} s") from failure
            # A state lost once is rebuilt at once; whatever happens again gets a pause.
            if not (isinstance(failure, CacheMiss) and rebuilds == 1):
                await self.sleep(self._pause(rebuilds))
            await self._wait_for_hop(failure, deadline)

    async def _wait_for_hop(self, failure: MeshError, deadline: float) -> None:
        """Wait until a lost hop is back, so that no rebuild is spent on a hop that is not there."""
        endpoint = failure.members.get("endpoint")
        if not isinstance(failure, HopUnreachable | ModelLoading) or not isinstance(endpoint, str):
            return
        looks = 0
        while not await self.is_ready(endpoint):
            if self.clock() >= deadline:
                raise _exhausted(failure, f"it was not back after {self.limits.timeout_s:g} s")
            looks += 1
            await self.sleep(self._pause(looks))

    def _pause(self, nth: int) -> float:
        longest = min(self.limits.backoff_s * 2 ** min(nth - 1, 16), self.limits.max_backoff_s)
        return longest * (0.5 + self.jitter() / 2)


def _is_passing(error: MeshError) -> bool:
    return isinstance(error, CacheMiss) or error.retryable


def _exhausted(failure: MeshError, why: str) -> RecoveryExhausted:
    return RecoveryExhausted(
        f"{failure.message}; {why}", endpoint=failure.members.get("endpoint"), cause=failure.code
    )


def _short(failure: MeshError) -> dict[str, object]:
    return {k: v for k, v in failure.members.items() if k in {"endpoint", "reason", "held"}}
