from __future__ import annotations

import pytest

from meshnet.head.reservations import Reservations
from tests.unit.head.making import A, B, route_over

SIZES = {"state_base_bytes": 10, "state_token_bytes": 2}
ROUTE = route_over([A, B], **SIZES, cache_bytes=50, max_sessions=3)
HOP = ROUTE.hops[0]


def test_a_session_is_counted_on_every_hop() -> None:
    """The base, and so much a token, on each; nothing once it is given back."""
    reservations = Reservations()
    reservations.reserve(ROUTE, 7)
    reserved = [reservations.nbytes(at) for at in (A, B)]
    reservations.give_back(ROUTE, 7)

    assert reserved == [24, 24]
    assert [reservations.nbytes(at) for at in (A, B)] == [0, 0]


@pytest.mark.parametrize(("n_tokens", "fits"), [(8, True), (9, False)])
def test_there_is_room_up_to_the_last_byte(n_tokens: int, fits: bool) -> None:
    """Beside 24 of 50 bytes there is room for 26."""
    reservations = Reservations()
    reservations.reserve(ROUTE, 7)

    assert reservations.has_room(HOP, n_tokens) is fits
    assert reservations.fits(ROUTE, n_tokens) is fits


def test_one_hop_without_room_is_enough() -> None:
    """A route has room where each of its hops has."""
    reservations = Reservations()
    reservations.reserve(route_over([B], **SIZES), 7)

    assert reservations.has_room(HOP, 20)
    assert not reservations.fits(ROUTE, 20)


def test_sessions_are_counted_too() -> None:
    """A shard holds so many sessions, however short."""
    reservations = Reservations()
    route = route_over([A], max_sessions=2)
    rooms: list[bool] = []
    for _ in range(3):
        rooms.append(reservations.fits(route, 1))
        reservations.reserve(route, 1)

    assert rooms == [True, True, False]


def test_a_hop_that_tells_no_sizes_is_not_counted() -> None:
    """Where nothing is known of a token's bytes, any number of them fits."""
    reservations = Reservations()
    route = route_over([A], cache_bytes=1)
    reservations.reserve(route, 10**6)

    assert (reservations.nbytes(A), reservations.fits(route, 10**6)) == (0, True)


def test_a_route_without_caches_takes_no_room() -> None:
    """Where no state is kept there is nothing to count, and always room."""
    reservations = Reservations()
    route = route_over([A], **SIZES, cache_bytes=1, kv_cache=False)
    reservations.reserve(route, 7)
    reservations.give_back(route, 7)

    assert (reservations.nbytes(A), reservations.fits(route, 7)) == (0, True)


def test_a_session_grows_while_there_is_room() -> None:
    """Token by token, up to the last byte; what it came to is given back."""
    reservations = Reservations()
    reservations.reserve(ROUTE, 7)
    grown = [reservations.grow(ROUTE) for _ in range(14)]
    most = reservations.nbytes(A)
    reservations.give_back(ROUTE, 20)

    assert grown == [True] * 13 + [False]
    assert (most, reservations.nbytes(A)) == (50, 0)


def test_a_session_grows_on_all_hops_or_none() -> None:
    """Where one hop has no room, nothing is counted on the others."""
    reservations = Reservations()
    reservations.reserve(ROUTE, 7)
    reservations.reserve(route_over([B], **SIZES), 8)

    assert not reservations.grow(ROUTE)
    assert reservations.nbytes(A) == 24


def test_without_caches_any_session_grows() -> None:
    """Nothing is counted."""
    reservations = Reservations()
    route = route_over([A], **SIZES, cache_bytes=1, kv_cache=False)

    assert (reservations.grow(route), reservations.nbytes(A)) == (True, 0)


def test_who_watches_is_told_of_room() -> None:
    """When something is given back, not when it is taken."""
    reservations = Reservations()
    free: list[int] = []
    reservations.watch(lambda: free.append(reservations.nbytes(A)))
    reservations.reserve(ROUTE, 7)
    reservations.reserve(ROUTE, 1)
    reservations.give_back(ROUTE, 7)

    assert free == [12]
