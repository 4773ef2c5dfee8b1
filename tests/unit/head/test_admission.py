from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import QueueFull, RouteError
from meshnet.head.admission import Admission, Ticket, tokens_to_reserve
from meshnet.head.reservations import Reservations
from meshnet.topology import Hop, Route
from tests.unit.head.making import A, B, route_over

CACHE_BYTES = 100
ROUTE = route_over([A, B], state_token_bytes=1, cache_bytes=CACHE_BYTES)


def find(has_room: Callable[[Hop], bool]) -> Route:
    del has_room
    return ROUTE


def ticket(caller: str = "", n_tokens: int = 1, *, follows: bool = False) -> Ticket:
    return Ticket(caller, n_tokens, find, follows)


@dataclass
class Line:
    """An admission, and all that began, in order."""

    max_running: int = 2
    max_waiting: int = 9
    reservations: Reservations = field(default_factory=Reservations)
    began: list[Ticket] = field(default_factory=list[Ticket])
    running: list[Ticket] = field(default_factory=list[Ticket])

    def __post_init__(self) -> None:
        self.admission = Admission(
            self.reservations, max_running=self.max_running, max_waiting=self.max_waiting
        )

    def join(self, *tickets: Ticket) -> None:
        """Let them wait, and begin what may begin."""
        for one in tickets:
            self.admission.join(one)
            self.go_on()

    def leave(self, one: Ticket) -> None:
        self.admission.leave(one)
        if one in self.running:
            self.running.remove(one)
        self.go_on()

    def go_on(self) -> None:
        while (one := self.admission.next()) is not None and self.admission.begin(one):
            self.began.append(one)
            self.running.append(one)


# --- whose turn it is ---


def test_a_free_place_is_taken_at_once() -> None:
    """So many run as may; the next one waits."""
    line = Line(max_running=2)
    tickets = [ticket() for _ in range(3)]
    line.join(*tickets)

    assert line.began == tickets[:2]
    assert (line.admission.n_running, line.admission.n_waiting) == (2, 1)


def test_where_nobody_waits_it_is_nobodys_turn() -> None:
    """A free place stays free."""
    assert Line().admission.next() is None


def test_of_one_callers_the_oldest_is_next() -> None:
    """They begin in the order they came."""
    line = Line(max_running=1)
    tickets = [ticket() for _ in range(4)]
    line.join(*tickets)
    for one in tickets:
        line.leave(one)

    assert line.began == tickets


def test_the_caller_with_the_fewest_running_is_next() -> None:
    """A caller that came first with many does not keep one with few waiting."""
    line = Line(max_running=2)
    many, few = [ticket("a") for _ in range(5)], ticket("b")
    line.join(*many, few)
    line.leave(many[0])

    assert line.began == [*many[:2], few]


def test_callers_with_as_many_running_take_turns() -> None:
    """The one whose last turn is the longest ago is next, whoever came first with many."""
    line = Line(max_running=1)
    many, few = [ticket("a") for _ in range(5)], [ticket("b") for _ in range(2)]
    line.join(*many, *few)
    while line.running:
        line.leave(line.running[0])

    assert line.began == [many[0], few[0], many[1], few[1], *many[2:]]


def test_of_callers_that_had_no_turn_the_oldest_is_next() -> None:
    """They begin in the order they came."""
    line = Line(max_running=1)
    first, a, b = ticket("c"), ticket("a"), ticket("b")
    line.join(first, b, a)
    line.leave(first)

    assert line.began == [first, b]


def test_who_leaves_the_line_is_passed_over() -> None:
    """One that waited and went is not begun, and counts no more; twice is once."""
    line = Line(max_running=1)
    first, gone, last = ticket(), ticket(), ticket()
    line.join(first, gone, last)
    line.leave(gone)
    line.leave(gone)
    line.leave(first)
    line.leave(first)

    assert line.began == [first, last]
    assert (line.admission.n_running, line.admission.n_waiting) == (1, 0)


# --- room in the caches ---


def test_what_does_not_fit_waits() -> None:
    """A free place is of no use without room for all tokens on every hop."""
    line = Line()
    first, second = ticket(n_tokens=60), ticket(n_tokens=41)
    line.join(first, second)
    waiting = line.admission.n_waiting
    line.leave(first)

    assert (waiting, line.began) == (1, [first, second])


def test_nobody_goes_before_one_that_waits_for_room() -> None:
    """Small ones that would fit wait behind the big one, which so gets its room."""
    line = Line(max_running=9)
    first, big, small = ticket(n_tokens=60), ticket("b", 90), ticket("c", 5)
    line.join(first, big, small)
    before = list(line.began)
    line.leave(first)

    assert (before, line.began) == ([first], [first, big, small])


def test_a_big_one_that_goes_lets_the_small_ones_begin() -> None:
    """What waited behind it waits no longer."""
    line = Line(max_running=9)
    first, big, small = ticket(n_tokens=60), ticket(n_tokens=90), ticket(n_tokens=5)
    line.join(first, big, small)
    line.leave(big)

    assert line.began == [first, small]


def test_what_is_reserved_is_given_back() -> None:
    """While it runs all its tokens are counted, and none afterwards."""
    line = Line()
    one = ticket(n_tokens=60)
    line.join(one)
    reserved = line.reservations.nbytes(A)
    line.leave(one)

    assert (reserved, line.reservations.nbytes(A)) == (60, 0)


def test_one_that_outgrows_its_reservation_goes_on_while_there_is_room() -> None:
    """Each token more is reserved too, and all of it given back."""
    line = Line()
    one, other = ticket(n_tokens=60), ticket(n_tokens=38)
    line.join(one, other)
    held = [line.admission.may_hold(one, n_tokens) for n_tokens in (60, 61, 62, 63)]
    reserved = line.reservations.nbytes(A)
    line.leave(other)
    goes_on = line.admission.may_hold(one, 100)
    line.leave(one)

    assert (held, goes_on) == ([True, True, True, False], True)
    assert (reserved, line.reservations.nbytes(A)) == (100, 0)


def test_one_that_does_not_run_may_hold_no_more() -> None:
    """Nothing is reserved for it."""
    one = ticket(n_tokens=60)

    assert not Line().admission.may_hold(one, 61)


def test_a_route_is_found_by_the_room_there_is() -> None:
    """Who looks for a route is told of each hop whether it has room for all tokens."""
    line = Line()
    rooms: list[bool] = []

    def find_and_note(has_room: Callable[[Hop], bool]) -> Route:
        rooms.append(has_room(ROUTE.hops[0]))
        return ROUTE

    line.join(ticket(n_tokens=60))
    line.join(Ticket("", 40, find_and_note), Ticket("", 1, find_and_note))

    assert rooms == [True]
    line.leave(line.running[0])
    assert rooms == [True, True]


def test_one_without_a_route_still_waits() -> None:
    """Why there is none is told; whoever asked decides."""
    line = Line()

    def find_none(has_room: Callable[[Hop], bool]) -> Route:
        raise RouteError("there is none")

    one = Ticket("", 1, find_none)
    line.admission.join(one)
    with pytest.raises(RouteError):
        line.admission.begin(one)

    assert (line.admission.n_waiting, line.admission.n_running) == (1, 0)


@pytest.mark.parametrize(
    ("max_tokens", "reserved"), [(0, 10), (50, 60), (89, 99), (90, 10 + 30), (20, 30)]
)
def test_an_answer_that_may_fill_the_context_is_reserved_in_part(
    max_tokens: int, reserved: int
) -> None:
    """Of any other all tokens are."""
    assert reserved == tokens_to_reserve(10, max_tokens, max_positions=100, open_answer_tokens=30)


def test_no_more_is_reserved_than_an_answer_may_have() -> None:
    """A small context is filled by fewer tokens than are reserved for a long answer."""
    assert tokens_to_reserve(90, 10, max_positions=100, open_answer_tokens=30) == 100


# --- how many may wait ---


def test_over_the_bound_there_is_no_room_to_wait() -> None:
    """So many of a caller may wait; the next one is told how many, and that it may come again."""
    line = Line(max_running=1, max_waiting=2)
    line.join(ticket(), ticket())
    line.admission.check_room("")
    line.join(ticket())
    with pytest.raises(QueueFull) as caught:
        line.admission.check_room("")

    assert (caught.value.members, caught.value.retryable) == ({"value": 2, "allowed": 2}, True)


def test_each_caller_has_places_of_its_own() -> None:
    """One that fills its places takes none of another's."""
    line = Line(max_running=1, max_waiting=1)
    line.join(ticket("a"), ticket("a"))
    with pytest.raises(QueueFull):
        line.admission.check_room("a")
    line.admission.check_room("b")


def test_without_places_to_wait_a_free_place_is_taken() -> None:
    """Where nobody may wait, one that need not is welcome."""
    line = Line(max_running=1, max_waiting=0)
    line.admission.check_room("")
    one = ticket()
    line.join(one)
    line.admission.check_place(one)
    with pytest.raises(QueueFull):
        line.admission.check_room("")


def test_one_that_would_wait_without_a_place_is_told() -> None:
    """Whatever it would wait for: here room in the caches."""
    line = Line(max_waiting=1)
    tickets = [ticket(n_tokens=60) for _ in range(3)]
    line.join(*tickets[:2])
    line.admission.check_place(tickets[1])
    line.join(tickets[2])
    with pytest.raises(QueueFull):
        line.admission.check_place(tickets[2])


def test_a_request_waits_as_a_whole() -> None:
    """What follows another generation of its request needs no place of its own."""
    line = Line(max_running=1, max_waiting=1)
    first, second, third = ticket(), ticket(), ticket(follows=True)
    line.join(first, second, third)
    line.admission.check_place(third)

    assert line.admission.n_waiting == 2


# --- whatever comes and goes ---

CALLERS = "abc"
ARRIVALS = st.tuples(st.sampled_from(CALLERS), st.integers(1, CACHE_BYTES))


@given(
    st.lists(ARRIVALS | st.integers(0, 9), max_size=60),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_the_limits_hold(
    events: list[tuple[str, int] | int], max_running: int, max_waiting: int
) -> None:
    """Never more bytes, running or waiting than allowed; and who waits, waits for somebody."""
    line = Line(max_running, max_waiting)
    there: list[Ticket] = []
    for event in events:
        if isinstance(event, tuple):
            there.append(ticket(*event))
            line.join(there[-1])
            try:
                line.admission.check_place(there[-1])
            except QueueFull:
                line.leave(there.pop())
        elif there:
            line.leave(there.pop(event % len(there)))
        waiting = Counter(one.caller for one in there if one.route is None)
        assert line.reservations.nbytes(A) == sum(one.n_tokens for one in line.running)
        assert line.reservations.nbytes(A) <= CACHE_BYTES
        assert len(line.running) <= max_running
        assert max(waiting.values(), default=0) <= max_waiting
        assert line.running or not waiting
    while line.running:
        line.leave(line.running[0])

    assert line.admission.n_waiting == 0


@given(
    st.lists(ARRIVALS, max_size=12),
    ARRIVALS,
    st.lists(ARRIVALS, min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_nobody_waits_for_ever(
    before: list[tuple[str, int]],
    late: tuple[str, int],
    stream: list[tuple[str, int]],
    max_running: int,
) -> None:
    """However many come after it, and however small, it waits for those before it only."""
    line = Line(max_running)
    line.join(*(ticket(*one) for one in before))
    waits = ticket(*late)
    line.join(waits)
    n_ended = 0
    while waits not in line.began:
        line.leave(line.running[0])
        n_ended += 1
        line.join(*(ticket(*one) for one in stream))

    # For each of its caller's that came before it, and for itself, what runs ends, and each of the
    # other callers has a turn at most.
    assert n_ended <= (len(before) + 1) * (2 * max_running + len(CALLERS))
