from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from meshnet.errors import (
    Draining,
    HopUnreachable,
    MeshError,
    RecoveryExhausted,
    RouteError,
    StageError,
)
from meshnet.head.background import Background
from meshnet.head.readiness import Readiness, ReadyState
from meshnet.topology import Route
from tests.unit.fakes import turn_the_loop
from tests.unit.head.fleet import AWAY, HALVES, LOADING, Fleet
from tests.unit.head.making import A, B, C, D

TWICE = HALVES | {C: "0-2", D: "2-4"}


@dataclass
class Probe:
    """Runs nothing; notes the routes, and fails or hangs as told.

    Attributes:
        failures: What a probe through these shards fails with.
        hung: The shards through which no probe ends before the gate is open.
    """

    failures: dict[str, MeshError]
    routes: list[list[str]] = field(default_factory=list[list[str]])
    hung: set[str] = field(default_factory=set[str])
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, route: Route) -> None:
        endpoints = [hop.endpoint for hop in route.hops]
        self.routes.append(endpoints)
        if self.hung & set(endpoints):
            await self.gate.wait()
        for endpoint in endpoints:
            if endpoint in self.failures:
                raise self.failures[endpoint]


class Bench:
    """Readiness over shards that describe themselves."""

    def __init__(
        self, background: Background, spans: Mapping[str, str], failures: Mapping[str, MeshError]
    ) -> None:
        self.fleet = Fleet(spans)
        self.probe = Probe(dict(failures))
        self.readiness = Readiness(self.fleet.book, self.probe, background)

    @property
    def state(self) -> ReadyState:
        return self.readiness.state()

    async def poll(self, *, later_s: float = 0.0) -> None:
        """Ask the shards once, and let probes go as far as they can."""
        self.fleet.clock.now += later_s
        poll = asyncio.create_task(self.readiness.poll(3600))
        await turn_the_loop()
        poll.cancel()
        with suppress(asyncio.CancelledError):
            await poll


@asynccontextmanager
async def opened(
    spans: Mapping[str, str] = HALVES, failures: Mapping[str, MeshError] | None = None
) -> AsyncGenerator[Bench]:
    async with Background() as background:
        bench = Bench(background, spans, failures or {})
        yield bench
        bench.probe.gate.set()


# --- proof ---


async def test_a_route_is_proven_by_a_token() -> None:
    """Once a token went through, the route serves, and the next poll sends none."""
    async with opened() as bench:
        await bench.poll()
        state, n_probes = bench.state, len(bench.probe.routes)
        await bench.poll()

        assert state == ReadyState("ready", serves=True)
        assert bench.probe.routes == [[A, B]] * n_probes


async def test_standbys_are_proven_too() -> None:
    """Every shard that can be reached has had a token before it is needed."""
    async with opened(TWICE) as bench:
        await bench.poll()

        assert {at for route in bench.probe.routes for at in route} == {A, B, C, D}
        assert bench.state == ReadyState("ready", serves=True)


async def test_halves_are_proven_beside_a_whole() -> None:
    """Where one shard runs all layers, those that run a half are proven all the same."""
    async with opened({A: "0-4", B: "0-2", C: "2-4"}) as bench:
        await bench.poll()

        assert bench.state == ReadyState("ready", serves=True)


async def test_a_new_life_is_proven_anew() -> None:
    """A restarted shard serves once a token went through it."""
    async with opened() as bench:
        await bench.poll()
        n_probes = len(bench.probe.routes)
        bench.fleet[B].boot_id = "b-2"
        await bench.poll()

        assert bench.probe.routes[n_probes:] == [[A, B]]


async def test_a_half_of_a_new_life_is_proven_beside_a_whole() -> None:
    """Also where the whole is proven and idle, a restarted half gets its token."""
    async with opened({A: "0-4", B: "0-2", C: "2-4"}) as bench:
        await bench.poll()
        bench.fleet[C].boot_id = "c-2"
        await bench.poll()

        assert bench.state == ReadyState("ready", serves=True)


async def test_without_a_route_nothing_is_probed() -> None:
    """While layers are missing no shard is asked to compute."""
    async with opened() as bench:
        bench.fleet[B].failure = LOADING
        await bench.poll()

        assert (bench.probe.routes, bench.state.serves) == ([], False)


async def test_a_shard_that_fits_on_no_route_is_left_unproven() -> None:
    """What overlaps with all others is not probed, and does not keep the others from serving."""
    async with opened(HALVES | {C: "1-3"}) as bench:
        await bench.poll()

        assert C not in {at for route in bench.probe.routes for at in route}
        assert bench.state == ReadyState(
            "degraded", serves=True, reason=f"{C}: no token went through it yet"
        )


async def test_the_shard_that_failed_a_probe_is_set_aside() -> None:
    """The one that the failure names, whichever the probe was for; others wait for it."""
    async with opened(failures={B: StageError("not finite", endpoint=B)}) as bench:
        await bench.poll()

        assert bench.fleet.status(A).error is None
        assert str(bench.fleet.status(B).error) == "not finite"
        assert bench.state.serves is False


@pytest.mark.parametrize(
    "failure", [StageError("x"), RecoveryExhausted("x", endpoint=None)], ids=["no", "none"]
)
async def test_a_failure_that_names_nobody_is_of_the_shard_to_be_proven(
    failure: MeshError,
) -> None:
    """Somebody is to be left alone for a while, or every poll would probe."""
    async with opened({A: "0-4"}, {A: failure}) as bench:
        await bench.poll()

        assert bench.fleet.status(A).error is failure


async def test_one_failure_is_one_failure() -> None:
    """However many shards wait for the one that failed, its first pause is the shortest."""
    async with opened(TWICE, {B: StageError("x", endpoint=B)}) as bench:
        bench.probe.hung = {B}
        await bench.poll()
        bench.probe.gate.set()
        await turn_the_loop()

        assert bench.fleet.status(B).failures == 1


async def test_a_standby_goes_on_without_the_one_that_failed() -> None:
    """A shard that failed its probe is left out, and the route is proven without it."""
    async with opened(HALVES | {C: "0-2"}, {A: StageError("x", endpoint=A)}) as bench:
        await bench.poll()
        await bench.poll()

        assert bench.state == ReadyState("degraded", serves=True, reason=f"{A}: x")


async def test_a_failed_shard_is_probed_again_after_its_pause() -> None:
    """A shard whose probe failed once serves when it passes."""
    async with opened(failures={A: StageError("x", endpoint=A)}) as bench:
        await bench.poll()
        bench.probe.failures.clear()
        await bench.poll(later_s=0.1)
        before = bench.state.serves
        await bench.poll(later_s=1)

        assert (before, bench.state) == (False, ReadyState("ready", serves=True))


async def test_a_shard_that_hangs_in_its_probe_holds_up_no_other() -> None:
    """While one probe does not end, the others do, and the shards proven serve."""
    async with opened(TWICE) as bench:
        bench.probe.hung = {C}
        await bench.poll()

        assert bench.state.serves is True
        assert str(bench.state.reason).startswith(C)


async def test_a_shard_is_probed_once_at_a_time() -> None:
    """While a probe of a shard is on its way, polls begin no other one."""
    async with opened({A: "0-4"}) as bench:
        bench.probe.hung = {A}
        for _ in range(3):
            await bench.poll()

        assert bench.probe.routes == [[A]]


async def test_polling_refreshes_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every so many seconds each shard is asked, until the poll is cancelled."""
    async with opened() as bench:
        pauses: list[float] = []

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                raise asyncio.CancelledError

        monkeypatch.setattr("meshnet.head.readiness.asyncio.sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await bench.readiness.poll(2.5)

        assert (pauses, bench.fleet[A].asked) == ([2.5] * 3, 3)


# --- states ---


async def test_at_first_it_is_loading() -> None:
    """Before anyone was asked nothing is served, and the first shard is named."""
    async with opened() as bench:
        reason = f"the hop {A} is not ready: not asked yet"

        assert bench.state == ReadyState("loading", reason=reason)


async def test_while_a_shard_is_missing_it_is_loading() -> None:
    """Until the first route is complete, the missing shard is named."""
    async with opened() as bench:
        bench.fleet[B].failure = LOADING
        await bench.poll()

        assert bench.state == ReadyState("loading", reason=f"the hop {B} is not ready: reading")


async def test_while_a_token_is_on_its_way_it_is_probing() -> None:
    """All shards are there, and none is proven yet."""
    async with opened() as bench:
        bench.probe.hung = {A}
        await bench.poll()

        assert bench.state == ReadyState("probing", reason="no token went through the route yet")


async def test_a_shard_that_went_makes_it_degraded() -> None:
    """Once it was ready, a lost shard without another is told, and nothing is served."""
    async with opened() as bench:
        await bench.poll()
        bench.fleet[B].failure = AWAY
        await bench.poll()

        assert (bench.state.state, bench.state.serves) == ("degraded", False)
        assert f"the hop {B} is not ready" in str(bench.state.reason)


async def test_a_lost_standby_makes_it_degraded_and_it_serves() -> None:
    """What is left serves; the missing one is named."""
    async with opened(TWICE) as bench:
        await bench.poll()
        bench.fleet.book.set_aside(C, HopUnreachable("cut"))

        assert bench.state == ReadyState("degraded", serves=True, reason=f"{C}: cut")


async def test_a_draining_standby_makes_it_degraded() -> None:
    """A shard that is about to stop is named, and the others serve."""
    async with opened(TWICE) as bench:
        await bench.poll()
        bench.fleet[C].draining = True
        await bench.poll()

        assert bench.state == ReadyState("degraded", serves=True, reason=f"{C}: it is draining")


async def test_a_refused_shard_makes_it_degraded() -> None:
    """A standby of another model is named with what differs."""
    async with opened(HALVES | {C: "0-2"}) as bench:
        bench.fleet.change(C, revision="other")
        await bench.poll()

        assert (bench.state.state, bench.state.serves) == ("degraded", True)
        assert f"{C}: {C} serves another model than {A}: revision other" in str(bench.state.reason)


# --- requests ---


async def test_a_route_that_is_known_costs_no_call() -> None:
    """While there is a proven route, a request asks nobody."""
    async with opened() as bench:
        await bench.poll()
        route = await bench.readiness.route()

        assert ([hop.endpoint for hop in route.hops], bench.fleet[A].asked) == ([A, B], 1)


async def test_a_request_is_judged_by_the_widest_route() -> None:
    """Of two that run the same layers the one with more room says how long it may be."""
    async with opened(TWICE) as bench:
        bench.fleet.change(A, state_token_bytes=1, cache_bytes=9)
        await bench.poll()

        assert (await bench.readiness.route()).max_positions == 512


async def test_a_request_looks_for_a_route() -> None:
    """A shard that has come since the last poll is found, and proven, by the next request."""
    async with opened() as bench:
        route = await bench.readiness.route()

        assert [hop.endpoint for hop in route.hops] == [A, B]


async def test_a_request_waits_for_the_token_on_its_way() -> None:
    """A route that is about to be proven is worth a wait."""
    async with opened() as bench:
        bench.probe.hung = {A}
        request = asyncio.create_task(bench.readiness.route())
        await turn_the_loop()
        waits = not request.done()
        bench.probe.gate.set()
        route = await request

        assert (waits, [hop.endpoint for hop in route.hops]) == (True, [A, B])


async def test_a_request_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that hangs is waited for a while; then the request is refused."""
    monkeypatch.setattr("meshnet.head.readiness._PATIENCE_S", 0.0)
    async with opened() as bench:
        bench.probe.hung = {A}
        with pytest.raises(RouteError, match="no token went through the route yet"):
            await bench.readiness.route()


async def test_a_request_without_a_route_is_told_why() -> None:
    """Where a shard is not there, the request is told which."""
    async with opened() as bench:
        bench.fleet[B].failure = LOADING
        with pytest.raises(RouteError, match=f"{B} is not ready: reading"):
            await bench.readiness.route()


async def test_a_request_does_not_wait_where_nothing_is_probed() -> None:
    """With no shard there at all, the request is refused at once."""
    async with opened() as bench:
        for endpoint in (A, B):
            bench.fleet[endpoint].failure = LOADING
        with pytest.raises(RouteError, match=f"{A} is not ready: reading"):
            await bench.readiness.route()


async def test_a_draining_head_takes_no_request() -> None:
    """From then on it says so; before, it does not."""
    async with opened() as bench:
        await bench.poll()
        bench.readiness.check_admission()
        bench.readiness.drain()
        with pytest.raises(Draining):
            bench.readiness.check_admission()

        assert bench.state == ReadyState(
            "draining", reason="finishing its requests, taking no new one"
        )
