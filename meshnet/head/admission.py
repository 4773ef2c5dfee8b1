"""Who waits, and who begins next: fair between callers, and within what the hops' caches hold.

Pure: it decides, and knows no task and no clock; `turns` does the waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from meshnet.errors import QueueFull
from meshnet.head.reservations import Reservations
from meshnet.topology import Hop, Route


def tokens_to_reserve(
    n_prompt: int, max_tokens: int, *, max_positions: int, open_answer_tokens: int
) -> int:
    """How many tokens of prompt and answer are reserved before a generation begins.

    Args:
        n_prompt: Tokens of the prompt.
        max_tokens: The most that the answer may have.
        max_positions: The context. An answer that may fill it, as one without a limit may, rarely
            does: reserved whole, a few would keep everybody else waiting.
        open_answer_tokens: Reserved for the answer then; it may grow on while there is room.
    """
    if n_prompt + max_tokens < max_positions:
        return n_prompt + max_tokens
    return n_prompt + min(max_tokens, open_answer_tokens)


@dataclass(eq=False, slots=True)
class Ticket:
    """One generation that waits or runs.

    Attributes:
        caller: Whose it is.
        n_tokens: Tokens that are reserved for prompt and answer.
        find_route: Where it would run now; told whether a hop has room. Raises MeshError.
        follows: It is of a request of which another generation came before it.
        route: Where it runs; None while it waits.
    """

    caller: str
    n_tokens: int
    find_route: Callable[[Callable[[Hop], bool]], Route]
    follows: bool = False
    route: Route | None = None


class Admission:
    """The generations of one model.

    A free place goes to the caller with the fewest running generations, of several such to the one
    whose last turn is the longest ago, and to the oldest generation of the caller's. If that one
    finds no room in the caches, no other goes before it, unless of a caller that comes before its
    own by this rule: so a big one is not overtaken for ever.

    Args:
        reservations: What is taken of the hops' caches.
        max_running: Generations at once.
        max_waiting: Generations of one caller that may wait. A request of several is taken as long
            as there is a place for one.
    """

    def __init__(self, reservations: Reservations, *, max_running: int, max_waiting: int) -> None:
        self._reservations = reservations
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._waiting: list[Ticket] = []
        self._running: Counter[str] = Counter()
        self._n_turns = 0
        self._last_turns: Counter[str] = Counter()

    @property
    def n_waiting(self) -> int:
        """Generations that wait."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Generations that run."""
        return self._running.total()

    def check_room(self, caller: str) -> None:
        """Find out whether one more could wait, where it would have to.

        Raises:
            QueueFull: The caller has too many waiting already.
        """
        if (self._waiting or self._is_full) and self._n_waiting(caller) >= self._max_waiting:
            raise self._queue_full(caller)

    def join(self, ticket: Ticket) -> None:
        """Let it wait, behind all others of its caller."""
        self._waiting.append(ticket)

    def check_place(self, ticket: Ticket) -> None:
        """Find out whether one that has joined may go on waiting, if it does.

        Raises:
            QueueFull: Its caller has too many waiting; it is to leave.
        """
        is_over = self._n_waiting(ticket.caller) > self._max_waiting
        if ticket.route is None and is_over and not ticket.follows:
            raise self._queue_full(ticket.caller)

    def next(self) -> Ticket | None:
        """Whose turn it is, if there is a place and somebody waits."""
        if self._is_full:
            return None
        return min(self._waiting, key=self._rank, default=None)

    def begin(self, ticket: Ticket) -> Route | None:
        """Let it run on the route it finds; None if there is no room, and it still waits.

        Raises:
            MeshError: It finds none, and still waits.
        """
        n_tokens = ticket.n_tokens
        route = ticket.find_route(lambda hop: self._reservations.has_room(hop, n_tokens))
        if not self._reservations.fits(route, n_tokens):
            return None
        self._reservations.reserve(route, n_tokens)
        self._waiting.remove(ticket)
        self._running[ticket.caller] += 1
        self._n_turns += 1
        self._last_turns[ticket.caller] = self._n_turns
        ticket.route = route
        return route

    def may_hold(self, ticket: Ticket, n_tokens: int) -> bool:
        """Whether one that runs may have so many tokens: more than were reserved if there is room.

        They are reserved then.
        """
        while ticket.n_tokens < n_tokens:
            if ticket.route is None or not self._reservations.grow(ticket.route):
                return False
            ticket.n_tokens += 1
        return True

    def leave(self, ticket: Ticket) -> None:
        """Forget one, whether it waits, runs or has left."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        elif ticket.route is not None:
            route, ticket.route = ticket.route, None
            self._running[ticket.caller] -= 1
            self._reservations.give_back(route, ticket.n_tokens)

    @property
    def _is_full(self) -> bool:
        return self.n_running >= self._max_running

    def _rank(self, ticket: Ticket) -> tuple[int, int]:
        return self._running[ticket.caller], self._last_turns[ticket.caller]

    def _n_waiting(self, caller: str) -> int:
        return sum(ticket.caller == caller for ticket in self._waiting)

    def _queue_full(self, caller: str) -> QueueFull:
        n_waiting = self._n_waiting(caller)
        return QueueFull(
            f"too many of your generations are waiting; allowed: {self._max_waiting}",
            value=n_waiting,
            allowed=self._max_waiting,
        )
