from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest
from starlette.requests import Request

from meshnet.errors import HopTimeout, InvalidRequest, MeshError
from meshnet.generation import TokenEvent
from meshnet.head.call import Trace
from meshnet.head.hop_client import HopAnswer
from meshnet.head.request_times import RequestTimes
from meshnet.wire.messages import TailAnswer
from services.cli.timing import PARTS, parse, token_times
from services.head.server_timing import logged, render, wants_timing
from tests.unit.fakes import FakeClock, FakeLog

A, B = "http://a:1", 'http://b"\\:2'
STEP = HopAnswer(TailAnswer(), step_ms=10.0, queue_ms=1.0, compute_ms=6.0, serialise_ms=0.5)


def asking(value: str | None) -> Request:
    headers = [] if value is None else [(b"x-meshnet-timing", value.encode())]
    return Request({"type": "http", "headers": headers})


def some_times(n_tokens: int, *, recovery_ms: float = 0.0) -> RequestTimes:
    """Those of an answer over two hops, of which the head takes 5 ms a token."""
    clock = FakeClock()
    times = RequestTimes(clock)
    clock.now += 0.001
    generation = times.begin()
    for _ in range(n_tokens):
        for endpoint in (A, B):
            generation.note_step(endpoint, STEP)
        clock.now += 0.025
        generation.note_token()
    if recovery_ms:
        clock.now += recovery_ms / 1000
        generation.note_recovery(B, recovery_ms)
    return times


@pytest.mark.parametrize(("value", "wants"), [(None, False), ("0", False), ("1", True)])
def test_who_asks_is_told(value: str | None, wants: bool) -> None:
    """Nobody is told without a word."""
    assert wants_timing(asking(value)) is wants


@pytest.mark.parametrize("value", ["", "yes", "2", "1, 1", "x" * 100])
def test_another_word_is_refused(value: str) -> None:
    """The error names the header, and what it may say."""
    with pytest.raises(InvalidRequest, match="is neither 0 nor 1") as refused:
        wants_timing(asking(value))

    assert refused.value.members == {
        "field": "X-Meshnet-Timing",
        "value": value[:20],
        "allowed": ["0", "1"],
    }


def test_the_header() -> None:
    """Metrics in W3C's form: a name, a duration, and more about it."""
    text = render(some_times(1))

    assert text == (
        'total;dur=26.000, wait;dur=1.000, hop-1;desc="http://a:1", '
        'hop-2;desc="http://b\\"\\\\:2", '
        "prefill;dur=25.000;tokens=1, prefill-head;dur=5.000, "
        "prefill-1;dur=10.000;steps=1, prefill-1-queue;dur=1.000, prefill-1-compute;dur=6.000, "
        "prefill-1-serialise;dur=0.500, prefill-1-wire;dur=2.500, "
        "prefill-2;dur=10.000;steps=1, prefill-2-queue;dur=1.000, prefill-2-compute;dur=6.000, "
        "prefill-2-serialise;dur=0.500, prefill-2-wire;dur=2.500"
    )


@pytest.mark.parametrize("recovery_ms", [0.0, 250.0])
def test_the_parts_add_up(recovery_ms: float) -> None:
    """Wait and phases are the total, head and hops are a phase, and a hop's parts are the hop."""
    metrics = parse(render(some_times(4, recovery_ms=recovery_ms)))
    ms = {name: float(told["dur"]) for name, told in metrics.items() if "dur" in told}

    assert ms["total"] == pytest.approx(ms["wait"] + ms["prefill"] + ms["decode"])
    for phase in ("prefill", "decode"):
        hops = [ms[f"{phase}-{i}"] for i in (1, 2)]
        assert ms[phase] == pytest.approx(ms[f"{phase}-head"] + sum(hops))
        for i in (1, 2):
            parts = [ms.get(f"{phase}-{i}-{part}", 0.0) for part in PARTS]
            assert ms[f"{phase}-{i}"] == pytest.approx(sum(parts))
    assert ms.get("decode-2-recovery", 0.0) == recovery_ms
    assert metrics["decode"]["tokens"] == metrics["decode-1"]["steps"] == "3"


def test_nothing_is_told_of_what_has_not_begun() -> None:
    """Before the first step there are no hops."""
    assert [*parse(render(RequestTimes(FakeClock())))] == ["total", "wait"]


def test_a_hop_that_has_no_part_in_a_phase_is_not_in_it() -> None:
    """A standby that came in later took no time of the prompt."""
    clock = FakeClock()
    times = RequestTimes(clock)
    generation = times.begin()
    for endpoint in (A, B):
        generation.note_step(endpoint, STEP)
        generation.note_token()
    metrics = parse(render(times))

    assert {"prefill-1", "decode-2"} <= metrics.keys()
    assert not {"prefill-2", "decode-1"} & metrics.keys()


# What a client makes of it.


def test_times_a_token() -> None:
    """Of several answers: of all their tokens but each one's first."""
    times = token_times([render(some_times(4)), render(some_times(2))])

    assert times is not None
    assert {*times.hops} == {A, B}
    assert times.hops[A] == pytest.approx(
        {"queue": 1.0, "compute": 6.0, "serialise": 0.5, "wire": 2.5, "recovery": 0.0}
    )
    assert (times.head_ms, times.all_ms) == (pytest.approx(5.0), pytest.approx(25.0))
    assert times.of_part("compute") == pytest.approx(12.0)


@pytest.mark.parametrize("texts", [[], [""], ["cache;hit, db;dur=5", "?"]])
def test_what_tells_nothing_of_tokens(texts: Sequence[str]) -> None:
    """Another server's header, or none, is no error."""
    assert token_times(texts) is None


# The log.


async def _events(error: MeshError | None) -> AsyncGenerator[tuple[int, TokenEvent]]:
    yield 0, TokenEvent("a")
    if error is not None:
        raise error


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> FakeLog:
    return FakeLog.instead_of("services.head.server_timing._log", monkeypatch)


async def test_a_line_at_the_end(log: FakeLog) -> None:
    """It says whose request it was, and in each phase what each hop took of it."""
    trace = Trace("r-1", times=some_times(3, recovery_ms=250.0))
    events = [event async for event in logged(_events(None), trace, "fake")]
    (line,) = log.lines
    step = {"queue_ms": 1.0, "compute_ms": 6.0, "serialise_ms": 0.5, "wire_ms": 2.5}

    assert events == [(0, TokenEvent("a"))]
    assert (line["request_id"], line["model"], line["complete"]) == ("r-1", "fake", True)
    assert (line["wait_ms"], line["total_ms"]) == (1.0, 326.0)
    assert line["prefill"] == {
        "tokens": 1,
        "total_ms": 25.0,
        "head_ms": 5.0,
        "hops": {endpoint: {"steps": 1, "total_ms": 10.0, **step} for endpoint in (A, B)},
    }
    two = {part: 2 * part_ms for part, part_ms in step.items()}
    assert line["decode"] == {
        "tokens": 2,
        "total_ms": 300.0,
        "head_ms": 10.0,
        "hops": {
            A: {"steps": 2, "total_ms": 20.0, **two},
            B: {"steps": 2, "total_ms": 270.0, **two, "recovery_ms": 250.0, "recoveries": 1},
        },
    }


async def test_a_failed_request_has_its_line_too(log: FakeLog) -> None:
    """Where the time went is asked most of what did not end well."""
    with pytest.raises(HopTimeout):
        async for _ in logged(_events(HopTimeout("late")), Trace(), "fake"):
            pass

    assert [line["complete"] for line in log.lines] == [False]


async def test_a_request_whose_client_left_has_one(log: FakeLog) -> None:
    """It is written when the events are closed, and they are closed with it."""
    inner = _events(None)
    async with aclosing(logged(inner, Trace(), "fake")) as events:
        await anext(events)

    assert [line["complete"] for line in log.lines] == [False]
    assert await anext(inner, None) is None
