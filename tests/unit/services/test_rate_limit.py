from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from meshnet.errors import RateLimited
from services.head.rate_limit import RateLimit, parse


@dataclass
class WallClock:
    """The wall's clock, as `limits` reads it too."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    clock = WallClock()
    monkeypatch.setattr(time, "time", clock)
    return clock


async def refusal(limit: RateLimit) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        await limit.count()
    return caught.value


async def test_so_many_pass_and_the_next_is_told_when_to_come(clock: WallClock) -> None:
    """What is too much learns in how many whole seconds the oldest leaves the window."""
    limit = RateLimit("2/minute", clock=clock)
    await limit.count()
    clock.now += 10.5
    await limit.count()
    clock.now += 10

    error = await refusal(limit)
    assert error.members == {"retry_after_s": 40}
    assert error.message == "This key may be used for 2 per 1 minute; try again in 40 s"


async def test_the_window_moves(clock: WallClock) -> None:
    """After the time told one request passes, and no second one."""
    limit = RateLimit("2/minute", clock=clock)
    await limit.count()
    clock.now += 30
    await limit.count()
    clock.now += 31
    await limit.count()

    assert (await refusal(limit)).members == {"retry_after_s": 29}


async def test_a_refused_request_does_not_count(clock: WallClock) -> None:
    """Asking in vain does not put the next request off."""
    limit = RateLimit("1/minute", clock=clock)
    await limit.count()
    for _ in range(5):
        clock.now += 11
        await refusal(limit)
    clock.now += 6

    await limit.count()


async def test_it_is_a_second_at_least(clock: WallClock) -> None:
    """A wait of less than a second, or of none, is told as one."""
    limit = RateLimit("1/second", clock=clock)
    await limit.count()
    clock.now += 0.999

    assert (await refusal(limit)).members == {"retry_after_s": 1}
    clock.now += 0.001  # the window's very end belongs to it
    assert (await refusal(limit)).members == {"retry_after_s": 1}


async def test_two_limits_count_apart(clock: WallClock) -> None:
    """What one key uses up, another one has still."""
    first, second = RateLimit("1/minute", clock=clock), RateLimit("1/minute", clock=clock)
    await first.count()

    await second.count()


@pytest.mark.parametrize(
    ("text", "amount", "seconds"),
    [("60/minute", 60, 60), ("1 per 2 hours", 1, 7200), ("5/SECOND", 5, 1), ("9/day", 9, 86400)],
)
def test_a_limit_is_a_number_in_a_time(text: str, amount: int, seconds: int) -> None:
    """A number, and a unit or several."""
    limit = parse(text)

    assert (limit.amount, limit.get_expiry()) == (amount, seconds)


@pytest.mark.parametrize(
    "text",
    ["", "60", "minute", "60/fortnight", "-1/minute", "0/minute", "1/minute;2/day", "x" * 999],
)
def test_what_is_no_limit_is_refused(text: str) -> None:
    """The error repeats little of the text and says what is allowed."""
    with pytest.raises(ValueError, match="allowed: N/second") as caught:
        parse(text)
    assert len(str(caught.value)) < 220
