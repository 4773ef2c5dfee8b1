"""Which sessions a new one may begin as a fork of: those whose tokens begin as its prompt does.

A fork is a quicker way of being fed. Whether a shard still holds what is to be forked is found out
by asking for it, so nothing here needs to be right about that (docs/adr/0024-prefix-reuse.md).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from meshnet.head.hop_session import HopSession
from meshnet.head.replay import ReplayBudget

MIN_TOKENS: Final = 32
"""Fewer are computed about as soon as forked."""


@dataclass(eq=False, slots=True)
class Source:
    """A session that others may begin as forks of.

    Attributes:
        hops: At each place of its route.
        ids: The tokens that every hop holds; there come to be more.
        prompt: The tokens that every hop will hold soon, while it is prefilled.
        is_kept: It has ended, and its hops were told to keep it.
    """

    hops: Sequence[HopSession]
    ids: list[int]
    prompt: Sequence[int] = ()
    is_kept: bool = False

    @property
    def endpoints(self) -> list[str]:
        """Of its hops."""
        return [hop.hop.endpoint for hop in self.hops]


class PrefixIndex:
    """The sessions of a head, live and kept, by their tokens and by who holds them.

    A kept one is dropped when another one has its tokens and more, when there are more on a route
    than its shards have places for, and when the budget needs room for the inputs of live ones:
    the least recently used first.

    Args:
        budget: Of inputs; it asks here when it has no room.
        exact: Where inputs are fed again in the original calls, for the same bits: then a fork
            begins where a call ended, unless in float32, where last digits change no text.
        reuse: False finds nothing, and keeps nothing.
    """

    def __init__(self, budget: ReplayBudget, *, exact: bool, reuse: bool = True) -> None:
        self._exact = exact
        self._reuse = reuse
        self._sources: list[Source] = []
        """The least recently used first."""
        self._progress = asyncio.Event()
        budget.make_room = self._give_up_one

    async def find(
        self, hops: Sequence[HopSession], prompt: list[int]
    ) -> tuple[Source, int] | None:
        """The longest beginning of a prompt that these hops hold: of whom, and how many tokens.

        The last token is never part of it: what follows it is to be computed. Where a session that
        is being prefilled will hold more soon, as another choice of the same request, it is waited
        for: that takes no longer than computing the same beside it.
        """
        wanted = prompt[:-1]
        while True:
            there = self._held_by(hops)
            held = [_n_common(one.ids, wanted) for one in there]
            soon = [_n_common(one.prompt, wanted) for one in there]
            settled = [now for now, then in zip(held, soon, strict=True) if then <= now]
            if max(soon, default=0) < max(settled, default=0) + MIN_TOKENS:
                break
            await self._progress.wait()
        n_tokens, source = max(zip(held, there, strict=True), key=itemgetter(0), default=(0, None))
        if source is None or (n_tokens := self._cut(source, n_tokens)) < MIN_TOKENS:
            return None
        self._touch(source)
        return source, n_tokens

    def begin(self, source: Source, prompt: Sequence[int]) -> None:
        """Note a session of which this prompt is being prefilled."""
        if self._reuse:
            source.prompt = list(prompt)
            self._sources.append(source)

    def note_progress(self, source: Source) -> None:
        """The hops hold more tokens of a session than before."""
        if len(source.ids) >= len(source.prompt):
            source.prompt = ()
        self._wake()

    def end(self, source: Source) -> bool:
        """Note that a session ends. Returns whether its hops are to keep it: it may be of use."""
        if source not in self._sources:
            return False
        self._sources.remove(source)
        self._wake()
        there = self._held_by(source.hops)
        is_known = any(_begins_with(other.ids, source.ids) for other in there)
        if is_known or len(source.ids) < MIN_TOKENS:
            return False
        for other in there:
            if other.is_kept and _begins_with(source.ids, other.ids):
                self._drop(other)
        source.prompt, source.is_kept = (), True
        self._sources.append(source)
        self._drop_too_many(source)
        return True

    def note_missing(self, source: Source) -> None:
        """Some hop does not hold a session any more; if nobody continues it, it is of no use."""
        if source.is_kept and source in self._sources:
            self._drop(source)

    def _drop_too_many(self, newest: Source) -> None:
        """Keep no more than the shards have places for; also what their lives before were given."""
        n_places = min(hop.hop.facts.max_sessions for hop in newest.hops)
        kept = [one for one in self._sources if one.is_kept and one.endpoints == newest.endpoints]
        for oldest in kept[: max(0, len(kept) - n_places)]:
            self._drop(oldest)

    def _held_by(self, hops: Sequence[HopSession]) -> list[Source]:
        """Sessions on the same lives of the same shards."""
        places = [hop.place for hop in hops]
        return [one for one in self._sources if [hop.place for hop in one.hops] == places]

    def _cut(self, source: Source, n_tokens: int) -> int:
        """How many of the first tokens a fork may have."""
        first = source.hops[0]
        if self._exact and first.hop.facts.dtype != "float32":
            return first.log.last_end(n_tokens)
        return n_tokens

    def _give_up_one(self) -> bool:
        """Make room for inputs; False where none are kept but of live sessions."""
        kept = (one for one in self._sources if one.is_kept and one.hops[0].log.nbytes)
        oldest = next(kept, None)
        if oldest is None:
            return False
        self._drop(oldest)
        return True

    def _drop(self, kept: Source) -> None:
        self._sources.remove(kept)
        for hop in kept.hops:
            hop.drop()

    def _touch(self, source: Source) -> None:
        self._sources.remove(source)
        self._sources.append(source)

    def _wake(self) -> None:
        """Let those look again who wait for a session to be prefilled."""
        self._progress.set()
        self._progress.clear()


def _n_common(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many of the first tokens are the same. By halves: slices are compared far quicker."""
    n_most = min(len(ids), len(others))
    return bisect_left(range(n_most), 1, key=lambda n: ids[: n + 1] != others[: n + 1])


def _begins_with(ids: list[int], first: list[int]) -> bool:
    return ids[: len(first)] == first
