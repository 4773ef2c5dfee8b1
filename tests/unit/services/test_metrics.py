from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import cast

from meshnet.errors import HopTimeout
from meshnet.generation import TokenEvent
from meshnet.head.admission import Admission, Ticket
from meshnet.head.reservations import Reservations
from services.head.metrics import HeadMetrics
from tests.unit.head.making import A, B, route_over

ROUTE = route_over([A], state_token_bytes=2)


async def events_of(
    events: Sequence[TokenEvent], closed: list[bool] | None = None
) -> AsyncGenerator[TokenEvent]:
    try:
        for event in events:
            yield event
    finally:
        if closed is not None:
            closed.append(True)


def values(metrics: HeadMetrics, name: str) -> dict[str, float]:
    """Each series of a name: its labels as they are written, and its value."""
    lines = metrics.render().decode().splitlines()
    rows = [line.removeprefix(name).rpartition(" ") for line in lines if line.startswith(name)]
    return {labels: float(value) for labels, _, value in rows}


def one(metrics: HeadMetrics, series: str) -> float:
    (value,) = values(metrics, series + " ").values()
    return value


async def test_a_generations_tokens_are_counted_for_its_model() -> None:
    """Tokens, the first one's time and those between, and how it ended."""
    metrics = HeadMetrics()
    events = [TokenEvent("a"), TokenEvent("b"), TokenEvent("", finish_reason="stop")]
    seen = [event async for event in metrics.observed(events_of(events), "m")]

    assert seen == events
    assert one(metrics, 'meshnet_head_tokens_total{model="m"}') == 3
    assert one(metrics, 'meshnet_head_time_to_first_token_seconds_count{model="m"}') == 1
    assert one(metrics, 'meshnet_head_inter_token_seconds_count{model="m"}') == 2
    generations = values(metrics, "meshnet_head_generations_total")
    assert generations == {'{model="m",outcome="stop"}': 1}


async def test_cached_tokens_are_counted() -> None:
    """Tokens of prompts that were not computed again, by model."""
    metrics = HeadMetrics()
    for n_cached in (40, 2):
        events = [TokenEvent("a", n_cached=n_cached), TokenEvent("b", finish_reason="stop")]
        async for _ in metrics.observed(events_of(events), "m"):
            pass

    assert one(metrics, 'meshnet_head_cached_tokens_total{model="m"}') == 42


async def test_scores_of_a_prompt_are_no_tokens() -> None:
    """A generation of nothing counts none."""
    metrics = HeadMetrics()
    nothing = TokenEvent("", finish_reason="length", n_tokens=0)
    async for _ in metrics.observed(events_of([nothing]), "m"):
        pass

    assert one(metrics, 'meshnet_head_tokens_total{model="m"}') == 0


async def test_a_generation_that_is_closed_early_is_aborted() -> None:
    """What is not read to its end is closed with its source."""
    metrics = HeadMetrics()
    closed: list[bool] = []
    observed = metrics.observed(events_of([TokenEvent("a"), TokenEvent("b")], closed), "m")
    await anext(observed)
    await observed.aclose()

    assert closed == [True]
    generations = values(metrics, "meshnet_head_generations_total")
    assert generations == {'{model="m",outcome="aborted"}': 1}


def test_running_and_waiting_are_told_as_they_are() -> None:
    """Asked when somebody looks."""
    admission = Admission(Reservations(), max_running=2, max_waiting=3)
    metrics = HeadMetrics()
    metrics.watch("m", admission)
    for _ in range(5):
        admission.join(Ticket("", 1, lambda _: ROUTE))
    for _ in range(2):
        admission.begin(cast("Ticket", admission.next()))

    assert one(metrics, 'meshnet_head_active{model="m"}') == 2
    assert one(metrics, 'meshnet_head_waiting{model="m"}') == 3


def test_what_is_reserved_is_told_of_each_hop() -> None:
    """Asked when somebody looks."""
    reservations = Reservations()
    metrics = HeadMetrics()
    metrics.watch_hops([A, B], reservations)
    reservations.reserve(ROUTE, 3)

    assert values(metrics, "meshnet_head_reserved_bytes{") == {f'hop="{A}"}}': 6, f'hop="{B}"}}': 0}


def test_what_is_noted_is_shown() -> None:
    """Refusals and rebuilds by their codes, and what was computed again."""
    metrics = HeadMetrics()
    metrics.count_refusal("x")
    metrics.count_rebuild(HopTimeout("late"))
    metrics.count_replay(7)

    assert one(metrics, 'meshnet_head_refusals_total{code="x"}') == 1
    assert one(metrics, 'meshnet_head_rebuilds_total{code="hop_timeout"}') == 1
    assert one(metrics, "meshnet_head_replayed_layer_tokens_total") == 7
