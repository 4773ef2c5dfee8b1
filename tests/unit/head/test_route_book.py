from __future__ import annotations

import pytest

from meshnet.errors import (
    Forbidden,
    HopProtocolError,
    HopUnreachable,
    InvalidRequest,
    MeshError,
    ModelLoading,
    RouteError,
)
from meshnet.head.route_book import PinnedShards
from meshnet.topology import Hop, HopSpec, LayerSpan
from tests.unit.fakes import FakeLog
from tests.unit.head.fleet import AWAY, HALVES, LOADING, Fleet
from tests.unit.head.making import A, B, C, D

# --- what is known ---


async def test_a_new_book_knows_its_shards_names_only() -> None:
    """Before anyone was asked every shard is listed as configured, as not asked yet."""
    fleet = Fleet(HALVES)

    assert [status.spec for status in fleet.book.status] == [HopSpec(A), HopSpec(B)]
    assert [type(status.error) for status in fleet.book.status] == [ModelLoading] * 2
    assert (fleet[A].asked, fleet[B].asked) == (0, 0)


async def test_refresh_asks_every_shard() -> None:
    """After a refresh each shard's description is known."""
    fleet = await Fleet(HALVES).asked()

    assert [(status.info, status.error) for status in fleet.book.status] == [
        (fleet[A].info, None),
        (fleet[B].info, None),
    ]


async def test_a_silent_shard_is_told_with_its_reason() -> None:
    """A shard that is away or loading has an error; the others are known all the same."""
    fleet = Fleet(HALVES | {C: "0-4"})
    fleet[A].failure, fleet[B].failure = AWAY, LOADING
    await fleet.asked()

    assert [type(status.error) for status in fleet.book.status] == [
        HopUnreachable,
        ModelLoading,
        type(None),
    ]


async def test_a_shard_that_went_is_not_listed_as_there() -> None:
    """Each refresh replaces what was known."""
    fleet = await Fleet(HALVES).asked()
    fleet[B].failure = AWAY
    await fleet.asked()

    assert [status.info is None for status in fleet.book.status] == [False, True]


async def test_a_shard_is_called_by_its_own_client() -> None:
    """The way to a shard leads there."""
    fleet = Fleet(HALVES)

    assert [fleet.book.client(at).endpoint for at in (A, B)] == [A, B]


async def test_a_description_that_lies_is_the_shards_fault() -> None:
    """A shard of an impossible span is not there."""
    fleet = Fleet(HALVES)
    fleet[B].lie = {"start_layer": 4}
    await fleet.asked()

    assert isinstance(fleet.status(B).error, HopProtocolError)


async def test_a_shard_of_another_protocol_is_refused() -> None:
    """A shard that speaks another version of the protocol is named, with both versions."""
    fleet = Fleet(HALVES)
    fleet[B].lie = {"protocol": 2}
    await fleet.asked()
    error = fleet.status(B).error

    assert error is not None
    assert error.members == {"field": "protocol", "value": 2, "allowed": 1, "endpoint": B}


# --- looking at one ---


async def test_a_look_tells_what_a_shard_is_now() -> None:
    """The hop that a look finds has the facts and the life of now, and the same first layer."""
    fleet = await Fleet({A: "0-4"}, [HopSpec(A, 1)]).asked()
    hop = fleet.hop(A)
    fleet.change(A, fingerprint="new")
    fleet[A].boot_id = "a-2"
    found = await fleet.book.look(hop)

    assert (found.layers, found.facts.fingerprint, found.boot_id) == (
        LayerSpan(1, 4),
        "new",
        "a-2",
    )


async def test_a_look_is_kept() -> None:
    """What a look found is known to the whole book."""
    fleet = await Fleet(HALVES).asked()
    fleet[A].boot_id = "a-2"
    await fleet.book.look(fleet.hop(A))
    info = fleet.status(A).info

    assert info is not None
    assert info.boot_id == "a-2"


async def test_a_look_at_a_silent_shard_raises_why() -> None:
    """Who looks at a shard that is away is told so, and what was known stays."""
    fleet = await Fleet(HALVES).asked()
    hop = fleet.hop(A)
    fleet[A].failure = AWAY
    with pytest.raises(HopUnreachable):
        await fleet.book.look(hop)

    assert fleet.status(A).info is not None


# --- set aside ---


async def test_a_shard_set_aside_is_not_used() -> None:
    """It is on no route, nobody's alternative, and its reason is told."""
    fleet = await Fleet(HALVES | {C: "0-2"}).proven()
    fleet.book.set_aside(C, HopUnreachable("cut"))

    assert (fleet.status(C).info, str(fleet.status(C).error)) == (None, "cut")
    fleet.book.set_aside(A, HopUnreachable("cut"))
    assert fleet.no_route().message == f"the hop {A} is not ready: cut"


async def test_a_shard_set_aside_is_not_asked_for_a_while() -> None:
    """Before its pause is over a refresh leaves it alone; then it is asked, and used again."""
    fleet = await Fleet(HALVES).asked()
    fleet.book.set_aside(A, HopUnreachable("cut"))
    await fleet.asked(later_s=0.2)
    before = (fleet[A].asked, fleet[B].asked)
    await fleet.asked(later_s=0.1)

    assert (before, fleet[A].asked, fleet.status(A).error) == ((1, 2), 2, None)


async def test_pauses_grow_up_to_a_limit() -> None:
    """Set aside again and again, a shard is asked after 0.25, 0.5, 1 ... 15 seconds."""
    fleet = Fleet({A: "0-4"})
    pauses: list[float] = []
    for _ in range(9):
        fleet.book.set_aside(A, HopUnreachable("cut"))
        pauses.append(fleet.status(A).ask_at - fleet.clock.now)
        fleet.clock.now = fleet.status(A).ask_at

    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 15, 15, 15]


async def test_a_pause_never_overflows() -> None:
    """However often a shard is set aside, its pause is a number of seconds."""
    fleet = Fleet({A: "0-4"})
    for _ in range(3000):
        fleet.clock.now = fleet.status(A).ask_at
        fleet.book.set_aside(A, HopUnreachable("cut"))

    assert fleet.status(A).ask_at - fleet.clock.now == 15.0


async def test_one_fault_that_many_sessions_meet_is_one() -> None:
    """All that a lost shard served set it aside at once; its first pause is the shortest."""
    fleet = await Fleet({A: "0-4"}).asked()
    for _ in range(16):
        fleet.book.set_aside(A, HopUnreachable("cut"))

    assert fleet.status(A).ask_at == 0.25


@pytest.mark.parametrize(("jitter", "pause_s"), [(0.0, 0.125), (0.5, 0.1875), (1.0, 0.25)])
async def test_pauses_are_jittered(jitter: float, pause_s: float) -> None:
    """A pause is between the half and the whole, so that heads do not come back together."""
    fleet = Fleet({A: "0-4"}, jitter=jitter)
    fleet.book.set_aside(A, HopUnreachable("cut"))

    assert fleet.status(A).ask_at == pause_s


async def test_a_shard_that_was_proven_begins_with_short_pauses() -> None:
    """Failures count in a row only; a token that went through ends the row."""
    fleet = await Fleet({A: "0-4"}).asked()
    for _ in range(5):
        fleet.book.set_aside(A, HopUnreachable("cut"))
        fleet.clock.now = fleet.status(A).ask_at
    await fleet.proven()
    fleet.book.set_aside(A, HopUnreachable("cut"))

    assert fleet.status(A).ask_at - fleet.clock.now == 0.25


async def test_a_shard_that_only_answered_has_longer_pauses() -> None:
    """A shard that can be asked and fails every token is probed less and less often."""
    fleet = await Fleet({A: "0-4"}).asked()
    for _ in range(5):
        fleet.book.set_aside(A, HopUnreachable("cut"))
        fleet.clock.now = fleet.status(A).ask_at
        await fleet.asked()

    assert fleet.status(A).failures == 5


async def test_setting_aside_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that stays away has one line, not one a poll."""
    log = FakeLog.instead_of("meshnet.head.route_book._log", monkeypatch)
    fleet = Fleet({A: "0-4"})
    for _ in range(3):
        fleet.book.set_aside(A, HopUnreachable("cut"))
        fleet.clock.now = fleet.status(A).ask_at

    assert log.lines == [
        {"event": "shard set aside", "hop": A, "code": "hop_unreachable", "reason": "cut"}
    ]


# --- proof ---


async def test_a_shard_is_proven_by_a_token_in_this_life() -> None:
    """A new life of a shard is to be proven anew."""
    fleet = await Fleet(HALVES).proven()
    proven = [status.is_proven for status in fleet.book.status]
    fleet[B].boot_id = "b-2"
    await fleet.asked()

    assert (proven, [status.is_proven for status in fleet.book.status]) == (
        [True, True],
        [True, False],
    )
    assert [hop.endpoint for hop in fleet.book.unproven()] == [B]


async def test_a_shard_that_is_away_is_not_proven() -> None:
    """Proof is of a shard that is there."""
    fleet = await Fleet(HALVES).proven()
    fleet.book.set_aside(A, HopUnreachable("cut"))

    assert [status.is_proven for status in fleet.book.status] == [False, True]


async def test_a_shard_that_was_set_aside_is_proven_anew() -> None:
    """Whatever it was set aside for, a token is to go through it before it serves again."""
    fleet = await Fleet(HALVES).proven()
    fleet.book.set_aside(A, HopUnreachable("cut"))
    await fleet.asked(later_s=1)

    assert [hop.endpoint for hop in fleet.book.unproven()] == [A]


# --- routes ---


async def test_the_route_is_made_of_descriptions() -> None:
    """The shards in the order of their layers, with what each said of itself."""
    fleet = await Fleet({B: "2-4", A: "0-2"}).proven()

    assert [(hop.endpoint, hop.facts, hop.boot_id) for hop in fleet.book.route().hops] == [
        (A, fleet[A].facts, "a-1"),
        (B, fleet[B].facts, "b-1"),
    ]


async def test_a_route_costs_no_call() -> None:
    """What was asked once serves every request."""
    fleet = await Fleet(HALVES).proven()
    for _ in range(3):
        fleet.book.route()

    assert (fleet[A].asked, fleet[B].asked) == (1, 1)


async def test_a_route_needs_proof() -> None:
    """Shards that no token went through are not used for a request."""
    fleet = await Fleet(HALVES).asked()

    assert fleet.no_route().message == "no token went through the route yet"


async def test_an_unproven_standby_is_not_used() -> None:
    """Of two that run the same layers the proven one serves, though it is busier."""
    fleet = await Fleet(HALVES).proven()
    more = Fleet(HALVES | {C: "0-2"})
    await more.asked()
    more.book.mark_proven(fleet.book.route().hops)
    more.book.enter(A)

    assert more.route() == [A, B]


async def test_of_several_the_least_busy_serves() -> None:
    """Sessions of this head count first."""
    fleet = await Fleet(HALVES | {C: "0-2", D: "2-4"}).proven()
    fleet.book.enter(A)
    fleet.book.enter(D)

    assert fleet.route() == [C, B]


def anywhere(_: Hop) -> bool:
    return True


async def test_a_session_goes_where_there_is_room() -> None:
    """A shard with room for it is taken before one that is less busy."""
    fleet = await Fleet(HALVES | {C: "0-2", D: "2-4"}).proven()
    fleet.book.enter(C)
    route = fleet.book.route_for(10, lambda hop: hop.endpoint != A)

    assert [hop.endpoint for hop in route.hops] == [C, B]


async def test_a_session_without_room_anywhere_has_a_route_to_wait_for() -> None:
    """Where no shard has room now, the least busy is the one to wait for."""
    fleet = await Fleet(HALVES | {C: "0-2"}).proven()
    fleet.book.enter(A)
    route = fleet.book.route_for(10, lambda hop: not anywhere(hop))

    assert [hop.endpoint for hop in route.hops] == [C, B]


async def test_a_session_goes_where_it_can_be_held() -> None:
    """A shard whose whole cache is too small for it is no choice, however idle."""
    fleet = Fleet(HALVES | {C: "0-2"})
    fleet.change(A, state_token_bytes=1, cache_bytes=9)
    await fleet.proven()
    fleet.book.enter(C)

    assert [hop.endpoint for hop in fleet.book.route_for(9, anywhere).hops] == [A, B]
    assert [hop.endpoint for hop in fleet.book.route_for(10, anywhere).hops] == [C, B]


async def test_a_session_that_no_shard_can_hold_has_no_route() -> None:
    """Its length is told; where a shard is missing, that is."""
    fleet = Fleet(HALVES)
    fleet.change(A, state_token_bytes=1, cache_bytes=9)
    await fleet.proven()
    with pytest.raises(RouteError, match="no route can hold a session of 10 tokens now"):
        fleet.book.route_for(10, anywhere)
    fleet.book.set_aside(B, HopUnreachable("cut"))
    with pytest.raises(RouteError, match=f"{B} is not ready: cut"):
        fleet.book.route_for(10, anywhere)


async def test_the_widest_route_takes_the_longest_sequences() -> None:
    """Of standbys the one that can hold most, however busy."""
    fleet = Fleet(HALVES | {C: "0-2"})
    fleet.change(A, state_token_bytes=1, cache_bytes=9)
    await fleet.proven()
    fleet.book.enter(C)

    assert [hop.endpoint for hop in fleet.book.widest_route().hops] == [C, B]


async def test_sessions_of_others_count_too() -> None:
    """Where this head has as many sessions on both, the shard's own count decides."""
    fleet = Fleet(HALVES | {C: "0-2"})
    fleet[A].sessions = 3
    await fleet.proven()

    assert fleet.route() == [C, B]


async def test_sessions_are_counted_in_and_out() -> None:
    """A session that left is counted no more."""
    fleet = Fleet(HALVES)
    fleet.book.enter(A)
    fleet.book.enter(A)
    fleet.book.leave(A)

    assert [fleet.book.sessions(at) for at in (A, B)] == [1, 0]


async def test_a_draining_shard_is_on_no_new_route() -> None:
    """A shard that is about to stop gets no new session; a standby takes its place."""
    fleet = Fleet(HALVES | {C: "0-2"})
    fleet[A].draining = True
    await fleet.proven()

    assert (fleet.route(), fleet.status(A).error) == ([C, B], None)


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (AWAY, "the hop http://b is not ready: http://b is not reachable: refused"),
        (LOADING, "the hop http://b is not ready: reading"),
    ],
    ids=["away", "loading"],
)
async def test_a_shard_that_is_not_there_is_named(failure: MeshError, why: str) -> None:
    """Without one shard there is no route; the error names it and its reason."""
    fleet = Fleet(HALVES)
    fleet[B].failure = failure
    await fleet.proven()
    error = fleet.no_route()

    assert (error.message, error.members) == (why, {"endpoint": B})


async def test_shards_that_do_not_tile_make_no_route() -> None:
    """Layers that nobody runs are told."""
    fleet = await Fleet({A: "0-2", C: "3-4"}).proven()

    assert "leaves a gap: layer 2 comes next" in fleet.no_route().message


async def test_layers_that_nobody_runs_are_told_though_there_is_a_standby() -> None:
    """Two shards of the first half make no second half, and that is what is told."""
    fleet = await Fleet({A: "0-2", C: "0-2"}).proven()

    assert "layers 2 to 3 are missing" in fleet.no_route().message


async def test_a_route_may_be_wanted_through_one_shard() -> None:
    """A shard that is to be proven is on the route, the others need no proof, nor be idle."""
    fleet = await Fleet(HALVES | {C: "0-2"}).asked()
    fleet.book.enter(C)
    route = fleet.book.route(through=fleet.hop(C))

    assert [hop.endpoint for hop in route.hops] == [C, B]


async def test_a_route_goes_through_the_shard_wanted_though_another_runs_more() -> None:
    """Where one shard runs all layers, a half is proven with the other half all the same."""
    fleet = await Fleet({A: "0-4", B: "0-2", C: "2-4"}).asked()
    route = fleet.book.route(through=fleet.hop(C))

    assert [hop.endpoint for hop in route.hops] == [B, C]


async def test_through_a_shard_that_fits_nowhere_there_is_no_route() -> None:
    """Nobody runs what comes before it: that is told, or a route without it is given."""
    fleet = await Fleet({A: "1-4", B: "2-4"}).asked()
    with pytest.raises(RouteError, match="gap"):
        fleet.book.route(through=fleet.hop(A))


# --- of one model ---


@pytest.mark.parametrize(
    ("field_name", "value"), [("revision", "other"), ("transformers_version", "9.9")]
)
async def test_a_shard_of_another_model_is_refused(field_name: str, value: str) -> None:
    """The first configured is right; of another one field and both values are told."""
    fleet = Fleet(HALVES)
    fleet.change(B, **{field_name: value})
    await fleet.proven()
    error = fleet.status(B).error

    assert error is not None
    assert (error.members["field"], error.members["value"], error.members["endpoint"]) == (
        field_name,
        value,
        B,
    )
    assert error.members["allowed"] == getattr(fleet[A].facts, field_name)


async def test_a_refused_shard_does_not_serve() -> None:
    """A standby of other weights is no standby; the rest serves."""
    fleet = Fleet(HALVES | {C: "0-2"})
    fleet.change(C, layer_digests=("fake-0", "other"))
    await fleet.proven()

    assert fleet.route() == [A, B]
    assert "digest of layer 1" in str(fleet.status(C).error)


async def test_those_that_serve_say_which_model() -> None:
    """A shard configured first that comes back with another model does not outvote the others."""
    fleet = await Fleet(HALVES).proven()
    fleet.change(A, revision="new")
    fleet[A].boot_id = "a-2"
    await fleet.asked()
    fleet.book.unproven()

    assert f"{A} serves another model than" in str(fleet.status(A).error)
    assert fleet.status(B).error is None


async def test_those_that_served_say_which_model_while_one_of_them_is_there() -> None:
    """Also a standby of the layers that are gone must be of the model that served there."""
    fleet = Fleet(HALVES | {C: "0-2"})
    fleet[C].failure = AWAY
    await fleet.proven()
    fleet[A].failure, fleet[C].failure = AWAY, None
    fleet.change(C, layer_digests=("fake-0", "other"))
    await fleet.asked(later_s=1)

    assert fleet.book.unproven() == []
    assert "digest of layer 1" in str(fleet.status(C).error)


async def test_a_whole_new_model_is_taken() -> None:
    """When none of those that served is left, the first configured says which model."""
    fleet = await Fleet(HALVES).proven()
    for endpoint in (A, B):
        fleet.change(endpoint, revision="new")
        fleet[endpoint].boot_id = f"{endpoint[-1]}-2"
    await fleet.proven()

    assert fleet.route() == [A, B]


async def test_a_refused_shard_that_is_right_now_serves() -> None:
    """An error of the past does not stay."""
    fleet = Fleet(HALVES)
    fleet.change(B, revision="other")
    await fleet.proven()
    fleet.change(B, revision="fake-1")
    await fleet.proven()

    assert (fleet.route(), fleet.status(B).error) == ([A, B], None)


async def test_one_process_under_two_names_is_refused() -> None:
    """Two endpoints of one life are one shard, which can be nobody's standby but its own."""
    fleet = Fleet(HALVES | {C: "0-2"})
    fleet[C].boot_id = "a-1"
    await fleet.proven()
    error = fleet.status(C).error

    assert error is not None
    assert error.message == f"{C} is the same process as {A}"
    assert error.members == {
        "field": "boot_id",
        "value": "a-1",
        "allowed": "each shard once",
        "endpoint": C,
    }


# --- alternatives ---


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"max_step_tokens": 32},
        {"max_positions": 1000},
        {"fingerprint": "other"},
        {"model": "/elsewhere"},
    ],
    ids=str,
)
async def test_a_shard_of_the_same_layers_can_take_over(changed: dict[str, object]) -> None:
    """Whatever else it can, and whatever it is called."""
    fleet = Fleet(HALVES | {C: "0-2"})
    fleet.change(A, max_step_tokens=16)
    fleet.change(C, **{"max_step_tokens": 16, **changed})
    await fleet.asked()

    assert fleet.alternative() == C


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_cache": False},
        {"max_step_tokens": 16},
        {"max_positions": 100},
        {"layer_digests": ("fake-0", "other")},
        {"revision": "other"},
        {"span": LayerSpan(0, 3), "layer_digests": ()},
        {"span": LayerSpan(1, 2), "layer_digests": ()},
    ],
    ids=str,
)
async def test_a_shard_that_could_not_go_on_is_no_alternative(changed: dict[str, object]) -> None:
    """Other layers, another model, no cache, or less than the session may come to need."""
    fleet = Fleet(HALVES | {C: "0-2"})
    fleet.change(C, **changed)
    await fleet.asked()

    assert fleet.alternative() is None


async def test_an_alternative_is_compared_with_the_session_it_takes_over() -> None:
    """A session of a model that the configured shards left is taken over by none of them."""
    fleet = await Fleet(HALVES | {C: "0-2"}).asked()
    hop = fleet.hop(A)
    for at in (A, B, C):
        fleet.change(at, revision="new")
    await fleet.proven()

    assert fleet.book.alternative(hop) is None


async def test_the_least_busy_alternative_is_taken() -> None:
    """Of several that could go on, the one with fewer sessions does."""
    fleet = await Fleet(HALVES | {C: "0-2", D: "0-2"}).asked()
    fleet.book.enter(C)

    assert fleet.alternative() == D


async def test_a_shard_that_no_token_went_through_is_no_alternative() -> None:
    """It may hang in its first step, and a running session would hang with it."""
    fleet = await Fleet(HALVES | {C: "0-2"}).asked()
    hop = fleet.hop(A)
    fleet.book.mark_proven([hop])

    assert fleet.book.alternative(hop) is None


async def test_a_shard_is_no_alternative_to_itself() -> None:
    """Another one is another endpoint."""
    fleet = await Fleet(HALVES).asked()

    assert fleet.alternative() is None


@pytest.mark.parametrize("what", ["aside", "draining"])
async def test_a_shard_that_takes_nothing_new_is_no_alternative(what: str) -> None:
    """One that is set aside or draining does not take over."""
    fleet = Fleet(HALVES | {C: "0-2"})
    fleet[C].draining = what == "draining"
    await fleet.asked()
    if what == "aside":
        fleet.book.set_aside(C, HopUnreachable("cut"))

    assert fleet.alternative() is None


async def test_a_shard_entered_later_may_take_over() -> None:
    """What counts is the layers that are run, not those that are held."""
    fleet = await Fleet(
        {A: "0-2", B: "2-4", C: "1-4"}, [HopSpec(A), HopSpec(B), HopSpec(C, 2)]
    ).asked()

    assert fleet.alternative(B) == C


# --- pinned routes ---


async def test_a_pinned_route_enters_where_it_says() -> None:
    """A caller may choose among the configured shards, and their start layers."""
    fleet = Fleet(HALVES | {C: "1-4"})
    route = await fleet.book.pinned_route([HopSpec(A), HopSpec(C, 2)])

    assert [(hop.endpoint, hop.layers, hop.boot_id) for hop in route.hops] == [
        (A, LayerSpan(0, 2), "a-1"),
        (C, LayerSpan(2, 4), "c-1"),
    ]


async def test_a_pinned_route_of_known_shards_costs_no_call() -> None:
    """Shards that are there are not asked again."""
    fleet = await Fleet(HALVES).asked()
    await fleet.book.pinned_route([HopSpec(A), HopSpec(B)])

    assert (fleet[A].asked, fleet[B].asked) == (1, 1)


@pytest.mark.parametrize("endpoint", ["http://169.254.169.254", D, "x" * 500, ""])
async def test_a_foreign_endpoint_is_forbidden(endpoint: str) -> None:
    """An endpoint outside the configured list is refused before any connection is made."""
    fleet = Fleet(HALVES)
    with pytest.raises(Forbidden) as caught:
        await fleet.book.pinned_route([HopSpec(A), HopSpec(endpoint)])

    assert (caught.value.members["value"], caught.value.members["allowed"]) == (
        endpoint[:200],
        [A, B],
    )
    assert fleet[A].asked == 0


async def test_a_pinned_shard_that_is_away_is_named() -> None:
    """What is wrong with it is the shard's fault, not the caller's."""
    fleet = Fleet(HALVES)
    fleet[B].failure = AWAY
    with pytest.raises(RouteError, match=f"{B} is not ready: {B} is not reachable") as caught:
        await fleet.book.pinned_route([HopSpec(A), HopSpec(B)])

    assert caught.value.members == {"endpoint": B}


async def test_a_pinned_shard_that_drains_is_named() -> None:
    """It begins no session, so that the caller is told at once."""
    fleet = Fleet(HALVES)
    fleet[B].draining = True
    with pytest.raises(RouteError, match=f"{B} is draining"):
        await fleet.book.pinned_route([HopSpec(A), HopSpec(B)])


async def test_an_empty_pinned_route_is_no_route() -> None:
    """A route of no shards is refused, not taken for the head's own."""
    with pytest.raises(InvalidRequest, match="at least one hop"):
        await Fleet(HALVES).book.pinned_route([])


async def test_a_pinned_route_is_of_one_model_too() -> None:
    """The same rules hold for a caller's route, and breaking them is the caller's mistake."""
    fleet = Fleet(HALVES)
    fleet.change(B, revision="other")
    with pytest.raises(InvalidRequest, match="another model") as caught:
        await fleet.book.pinned_route([HopSpec(A), HopSpec(B)])

    assert caught.value.members == {"field": "X-Meshnet-Route"}


async def test_on_a_pinned_route_nobody_takes_over() -> None:
    """A caller who chose the shards gets these or none; all else is the book's."""
    fleet = await Fleet(HALVES | {C: "0-2"}).asked()
    pinned = PinnedShards(fleet.book)
    hop = fleet.hop(A)
    pinned.enter(A)

    assert (pinned.alternative(hop), fleet.alternative()) == (None, C)
    assert (await pinned.look(hop), pinned.client(A).endpoint) == (hop, A)
    assert fleet.book.sessions(A) == 1
