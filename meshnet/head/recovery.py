"""Bounded recovery: what is lost is made again, a few times, with pauses, and then not any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from meshnet.errors import (
    CacheFull,
    CacheMiss,
    HopProtocolError,
    InputsDropped,
    MeshError,
    ModelMismatch,
    QueueFull,
    RecoveryExhausted,
    RouteError,
    SessionBusy,
)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RecoveryLimits:
    """How much one step may cost, over all hops.

    Attributes:
        max_rebuilds: Tries after the first, those not counted that only waited for their turn.
        timeout_s: From the first failure to the last try, waiting for a lost hop included; feeding
            a hop again, which takes as long as it takes, is not.
        backoff_s: The first pause; each next one is twice as long, with jitter.
        max_backoff_s: The longest pause.
    """

    max_rebuilds: int = 4
    timeout_s: float = 60.0
    backoff_s: float = 0.05
    max_backoff_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """How failures are met.

    Attributes:
        limits: When it stops.
        note: Told of every failure that is tried again.
        note_replay: Told how many layer-tokens were computed again: tokens times layers.
        clock: Monotonic seconds.
        sleep: Waits so many seconds.
        jitter: A number in [0, 1), fresh at each call.
    """

    limits: RecoveryLimits
    note: Callable[[MeshError], None]
    note_replay: Callable[[int], None]
    clock: Callable[[], float]
    jitter: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def begin(self) -> Tries:
        """The tries of one step."""
        return Tries(self)


class Tries:
    """What the tries of one step have cost so far, and whether there may be another one."""

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._limits = recovery.limits
        self._ends_at: float | None = None
        self._rebuilds = 0
        self._pauses = 0

    @property
    def rebuilds(self) -> int:
        """Failures so far, those not counted that only waited for their turn."""
        return self._rebuilds

    def count(self, failure: MeshError) -> None:
        """Note a failure.

        Raises:
            RecoveryExhausted: A limit was reached; `failure` is its cause.
            MeshError: It is `failure` itself, and trying again cannot mend it.
        """
        if not is_passing(failure):
            raise failure
        if not isinstance(failure, SessionBusy | CacheFull | QueueFull):
            self._rebuilds += 1
        self._recovery.note(failure)
        members = {k: v for k, v in failure.members.items() if k in {"endpoint", "reason", "held"}}
        _log.warning("recovering", code=failure.code, rebuild=self._rebuilds, **members)
        if self._rebuilds > self._limits.max_rebuilds:
            raise _exhausted(failure, f"{self._rebuilds} attempts failed") from failure
        self._check_time(failure)

    async def pause(self, failure: MeshError) -> None:
        """Wait a while, each time longer.

        Raises:
            RecoveryExhausted: There is no time left; `failure` is its cause.
        """
        self._check_time(failure)
        longest = min(
            self._limits.backoff_s * 2 ** min(self._pauses, 16), self._limits.max_backoff_s
        )
        self._pauses += 1
        await self._recovery.sleep(longest * (0.5 + self._recovery.jitter() / 2))

    def note_replay(self, layer_tokens: int) -> None:
        """Note what was computed again: that is progress, and the time begins anew."""
        self._recovery.note_replay(layer_tokens)
        self._ends_at = None

    def _check_time(self, failure: MeshError) -> None:
        now = self._recovery.clock()
        if self._ends_at is None:
            self._ends_at = now + self._limits.timeout_s
        if now > self._ends_at:
            why = f"it was not mended within {self._limits.timeout_s:g} s"
            raise _exhausted(failure, why) from failure


def is_passing(failure: MeshError) -> bool:
    """Whether trying again may help."""
    passing = CacheMiss | InputsDropped | ModelMismatch | RouteError | HopProtocolError
    return failure.retryable or isinstance(failure, passing)


def _exhausted(failure: MeshError, why: str) -> RecoveryExhausted:
    return RecoveryExhausted(
        f"{failure.message}; {why}", endpoint=failure.members.get("endpoint"), cause=failure.code
    )
