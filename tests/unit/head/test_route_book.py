from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import httpx
import pytest

from meshnet.errors import (
    Forbidden,
    HopProtocolError,
    HopUnreachable,
    InvalidRequest,
    ModelLoading,
    RouteError,
)
from meshnet.head.route_book import RouteBook
from meshnet.model.fake_stage import fake_facts
from meshnet.topology import HopSpec, LayerSpan, ShardFacts
from tests.unit.fakes import shard_info
from tests.unit.head.making import hop_client, problem

A, B, C = "http://a", "http://b", "http://c"
SPECS = [HopSpec(A), HopSpec(B)]


@dataclass
class FakeShard:
    """Describes itself, or is away or loading."""

    facts: ShardFacts
    state: str = "ready"
    asked: list[str] = field(default_factory=list[str])

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        if self.state == "away":
            raise httpx.ConnectError("refused")
        if request.url.path == "/readyz":
            return httpx.Response(200 if self.state == "ready" else 503, json={"state": self.state})
        if self.state == "ready":
            return httpx.Response(200, content=shard_info(self.facts).model_dump_json())
        return problem(ModelLoading("reading"))


class Mesh:
    """Shards of layers 0-2 and 2-4, and a spare one of 1-4 that no configured route uses."""

    def __init__(self, specs: list[HopSpec] | None = None) -> None:
        self.a = FakeShard(fake_facts(LayerSpan(0, 2)))
        self.b = FakeShard(fake_facts(LayerSpan(2, 4)))
        self.c = FakeShard(fake_facts(LayerSpan(1, 4)))
        shards = {A: self.a, B: self.b, C: self.c}
        clients = {endpoint: hop_client(endpoint, shard) for endpoint, shard in shards.items()}
        self.book = RouteBook(specs or SPECS, clients)


async def test_a_new_book_knows_its_hops_names_only() -> None:
    """Before anyone was asked every hop is listed in the route's order, as not asked yet."""
    mesh = Mesh()

    assert [status.spec for status in mesh.book.status] == SPECS
    assert [type(status.error) for status in mesh.book.status] == [ModelLoading] * 2
    assert (mesh.a.asked, mesh.b.asked) == ([], [])


async def test_refresh_asks_every_hop() -> None:
    """After a refresh each hop's description is known."""
    mesh = Mesh()
    await mesh.book.refresh()

    assert [(status.info, status.error) for status in mesh.book.status] == [
        (shard_info(mesh.a.facts), None),
        (shard_info(mesh.b.facts), None),
    ]


async def test_a_silent_hop_is_told_with_its_reason() -> None:
    """A hop that is away or loading has an error instead, and the others are known all the same."""
    mesh = Mesh([HopSpec(A), HopSpec(B), HopSpec(C)])
    mesh.a.state, mesh.b.state = "away", "loading"
    await mesh.book.refresh()

    assert [type(status.error) for status in mesh.book.status] == [
        HopUnreachable,
        ModelLoading,
        type(None),
    ]


async def test_a_hop_that_went_is_not_listed_as_there() -> None:
    """Each refresh replaces what was known."""
    mesh = Mesh()
    await mesh.book.refresh()
    mesh.b.state = "away"
    await mesh.book.refresh()

    assert [status.info is None for status in mesh.book.status] == [False, True]


async def test_polling_refreshes_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every so many seconds each hop is asked, until the poll is cancelled."""
    mesh = Mesh()
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr("meshnet.head.route_book.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await mesh.book.poll(2.5)

    assert (pauses, len(mesh.a.asked)) == ([2.5] * 3, 3)


@pytest.mark.parametrize(
    ("state", "ready"), [("ready", True), ("loading", False), ("failed", False), ("away", False)]
)
async def test_a_hop_is_ready_when_it_says_so(state: str, ready: bool) -> None:
    """A hop that loads, failed or is away is not ready."""
    mesh = Mesh()
    mesh.a.state = state

    assert await mesh.book.is_ready(A) is ready


async def test_the_route_is_made_of_descriptions() -> None:
    """The configured hops in order, with what each said of itself."""
    mesh = Mesh()
    route = await mesh.book.ready_route()

    assert [(hop.endpoint, hop.facts) for hop in route.hops] == [
        (A, mesh.a.facts),
        (B, mesh.b.facts),
    ]


async def test_known_hops_are_not_asked_for_each_request() -> None:
    """While all hops are known, a route costs no call."""
    mesh = Mesh()
    for _ in range(3):
        await mesh.book.ready_route()

    assert (len(mesh.a.asked), len(mesh.b.asked)) == (1, 1)


async def test_a_hop_that_was_not_there_is_asked_again() -> None:
    """A hop that has come since the last refresh is found by the next request."""
    mesh = Mesh()
    mesh.b.state = "loading"
    with pytest.raises(RouteError):
        await mesh.book.ready_route()
    mesh.b.state = "ready"

    assert len((await mesh.book.ready_route()).hops) == 2


@pytest.mark.parametrize(
    ("state", "why"),
    [("away", "http://b is not ready: http://b is not reachable"), ("loading", "reading")],
)
async def test_a_hop_that_is_not_there_is_named(state: str, why: str) -> None:
    """Without one hop there is no route; the error names the hop and its reason."""
    mesh = Mesh()
    mesh.b.state = state
    with pytest.raises(RouteError, match=why) as caught:
        await mesh.book.ready_route()

    assert caught.value.members == {"endpoint": B}


async def test_hops_that_do_not_tile_make_no_route() -> None:
    """Overlapping hops without start layers are refused."""
    mesh = Mesh([HopSpec(A), HopSpec(C)])
    with pytest.raises(RouteError, match="twice"):
        await mesh.book.ready_route()


async def test_a_description_that_lies_is_the_hops_fault() -> None:
    """A hop of an impossible span is not there; nobody else's request is called wrong for it."""
    mesh = Mesh()

    async def lie(_: httpx.Request) -> httpx.Response:
        told = shard_info(mesh.b.facts).model_dump() | {"start_layer": 4}
        return httpx.Response(200, json=told)

    book = RouteBook(SPECS, {**mesh.book.clients, B: hop_client(B, lie)})
    with pytest.raises(RouteError) as caught:
        await book.ready_route()

    assert caught.value.members == {"endpoint": B}
    assert isinstance(book.status[1].error, HopProtocolError)


async def test_a_pinned_route_enters_where_it_says() -> None:
    """A caller may choose among the configured hops, and their start layers."""
    mesh = Mesh([HopSpec(A), HopSpec(B), HopSpec(C)])
    route = await mesh.book.pinned_route([HopSpec(A), HopSpec(C, 2)])

    assert [(hop.endpoint, hop.layers) for hop in route.hops] == [
        (A, LayerSpan(0, 2)),
        (C, LayerSpan(2, 4)),
    ]


@pytest.mark.parametrize("endpoint", ["http://169.254.169.254", C, "x" * 500, ""])
async def test_a_foreign_endpoint_is_forbidden(endpoint: str) -> None:
    """An endpoint outside the configured list is refused before any connection is made."""
    mesh = Mesh()
    with pytest.raises(Forbidden) as caught:
        await mesh.book.pinned_route([HopSpec(A), HopSpec(endpoint)])

    assert (caught.value.members["value"], caught.value.members["allowed"]) == (
        endpoint[:200],
        [A, B],
    )
    assert (mesh.a.asked, mesh.c.asked) == ([], [])


async def test_an_empty_pinned_route_is_no_route() -> None:
    """A route of no hops is refused, not taken for the configured one."""
    with pytest.raises(InvalidRequest, match="at least one hop"):
        await Mesh().book.pinned_route([])


async def test_a_pinned_route_tiles_too() -> None:
    """The same rules hold for a caller's route, and breaking them is the caller's mistake."""
    mesh = Mesh()
    mesh.b.facts = replace(mesh.b.facts, revision="other")
    with pytest.raises(InvalidRequest, match="another model") as caught:
        await mesh.book.pinned_route(SPECS)

    assert caught.value.members == {"field": "X-Meshnet-Route"}


async def test_a_hop_of_another_protocol_is_refused() -> None:
    """A shard that speaks another version of the protocol is named, with both versions."""
    mesh = Mesh()

    async def newer(request: httpx.Request) -> httpx.Response:
        del request
        info = shard_info(mesh.b.facts).model_copy(update={"protocol": 2})
        return httpx.Response(200, content=info.model_dump_json())

    book = RouteBook(SPECS, {**mesh.book.clients, B: hop_client(B, newer)})
    with pytest.raises(RouteError) as caught:
        await book.ready_route()

    assert caught.value.members == {"field": "protocol", "value": 2, "allowed": 1, "endpoint": B}
