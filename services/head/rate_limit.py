"""How often a key may be used: so many requests in a moving window."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from time import time  # noqa: TID251  # the window's own clock, in `limits`, is the wall's

from limits import RateLimitItem, parse_many
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import MovingWindowRateLimiter

from meshnet.errors import RateLimited


class RateLimit:
    """Counts requests, and refuses those that are too many.

    Args:
        text: As `parse` takes it.
        clock: Seconds since 1970.
    """

    def __init__(self, text: str, *, clock: Callable[[], float] = time) -> None:
        self._limit = parse(text)
        self._window = MovingWindowRateLimiter(MemoryStorage())
        self._clock = clock

    async def count(self) -> None:
        """Count one request. A refused one is not counted.

        Raises:
            RateLimited: There were too many of late; says when the next may come.
        """
        if await self._window.hit(self._limit):
            return
        free_at = (await self._window.get_window_stats(self._limit)).reset_time
        wait_s = max(1, ceil(free_at - self._clock()))
        raise RateLimited(
            f"This key may be used for {self._limit}; try again in {wait_s} s",
            retry_after_s=wait_s,
        )


def parse(text: str) -> RateLimitItem:
    """The limit that `text` means, such as `60/minute` or `1000 per 2 hours`.

    Raises:
        ValueError: It means none, more than one, or one that lets nothing through.
    """
    try:
        (limit,) = parse_many(text)
    except ValueError as error:
        raise ValueError(f"{text[:100]!r} is no rate limit; allowed: {_ALLOWED}") from error
    if limit.amount < 1:
        raise ValueError(f"{text[:100]!r} lets no request through; allowed: {_ALLOWED}")
    return limit


_ALLOWED = "N/second, N/minute, N/hour or N/day, with N of 1 and more"
