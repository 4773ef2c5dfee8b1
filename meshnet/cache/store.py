"""The sessions' cache states on one shard: leased for a step, kept for the next one.

A state is opaque here: it has a size. What is in it, and how a step is run, is not known here.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Generic

from meshnet.cache.entry import Commit, Ended, Entry, Lease, StateT, StepRef
from meshnet.cache.policy import NOBODY_GOES, CacheKey, CacheLimits, Need, Plan, plan_room
from meshnet.errors import CacheFull, CacheMiss, MissReason, SessionBusy, StaleEpoch
from meshnet.ids import SessionId

Clock = Callable[[], float]
"""Seconds that never go back; the zero is of no meaning."""

REMEMBERED_SESSIONS: Final = 1024
"""How many ended sessions the store can still give a reason for, and refuse late steps of."""


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """What the store holds now.

    Attributes:
        sessions: Sessions held, leased ones included, kept ones not.
        leases: Sessions a step is using.
        cached_bytes: Bytes of states and stored answers, as of each session's last step.
        kept: Sessions that were closed, and are kept for forks.
    """

    sessions: int
    leases: int
    cached_bytes: int
    kept: int = 0


class SessionCacheStore(Generic[StateT]):
    """Cache states by session, within limits of time, number and bytes.

    A session holds one state at most: only a step at position 0 makes one, or a fork, and it
    replaces what there was. Whatever looks into the store drops first what has expired. What is
    held, and what running steps may add to it, never exceeds the limits.

    The lock is held to look and decide, never across a forward, and nothing awaits under it. So
    leaving a lease can do without: it is one synchronous block, which never meets a decision half
    made, and has no await at which a cancellation could part a step from its bookkeeping.

    Attributes:
        misses: Lookups that failed, by reason, since the store was made.
        drops: States the store gave up by itself, by reason (`expired`, `evicted`,
            `length_mismatch`), since it was made.
        n_forks: Sessions that began as forks, since it was made.
    """

    def __init__(self, limits: CacheLimits, *, clock: Clock) -> None:
        self.limits = limits
        self.misses: Counter[MissReason] = Counter()
        self.drops: Counter[MissReason] = Counter()
        self.n_forks = 0
        self._clock = clock
        self._lock = asyncio.Lock()
        self._entries: dict[SessionId, Entry[StateT]] = {}
        self._ended: OrderedDict[SessionId, Ended] = OrderedDict()

    @asynccontextmanager
    async def lease(
        self,
        key: CacheKey,
        step: StepRef,
        *,
        fresh: bool,
        need_bytes: int,
        new_state: Callable[[], StateT],
        check: Callable[[], None] = lambda: None,
        fork_of: SessionId | None = None,
    ) -> AsyncGenerator[Lease[StateT], None]:
        """Lend the session's state to one step.

        A step that was committed last is not run again: its lease carries the stored answer as
        `replay`, takes nothing and changes nothing. Any other lease must be committed; one left
        without, by an error or a cancellation, drops the session.

        Args:
            key: The session and the layers the step runs.
            step: The step's id and epoch, and the tokens it builds on.
            fresh: The step begins the session anew, at position 0: it gets an empty state, and
                what the session held before is dropped, under whichever layers. A guarded step
                does so in a new epoch only: in the old one it is late.
            need_bytes: How much the step is expected to add to the state and the stored answer.
                Reserved until the lease is left. A fork begins with nothing: all of it counts.
            new_state: Makes the empty state of a fresh step. If it raises, nothing is changed.
            check: Called before anything is given up for the step, and not for a replay. If it
                raises, nothing is changed.
            fork_of: The step begins the session anew, as a fresh one does, with a fork of the
                first tokens of this other session: as many as the step builds on. That one may be
                in a step, or kept.

        Raises:
            StaleEpoch: A newer epoch steers the session, or it was closed. Nothing was changed.
            SessionBusy: Another step of the session is running. Nothing was changed.
            CacheMiss: The state this step continues is not here. One of another length than that
                of an unguarded step was dropped; otherwise nothing was changed. So it is where
                there is nothing to fork, or no room for a fork beside what it is made of.
            CacheFull: There is no room, even without every session that no step is using.
                Nothing was changed.
        """
        async with self._lock:
            entry, lease = self._enter(
                key,
                step,
                fresh=fresh,
                need_bytes=need_bytes,
                new_state=new_state,
                check=check,
                fork_of=fork_of,
            )
        # Nothing awaits from here to the yield: no cancellation can fall between.
        try:
            yield lease
        finally:
            if lease.replay is None:
                self._leave(entry, step, lease.committed)

    async def look_up(self, key: CacheKey, step: StepRef) -> object | None:
        """What a step that is not to be run yet can be told already. Takes and changes nothing.

        Returns:
            The stored answer of the step that was committed last; None where there is none.

        Raises:
            StaleEpoch: As `lease`.
            CacheMiss: The step is guarded and late: in its own epoch the session has gone on.
        """
        async with self._lock:
            self._tidy()
            self._check_epoch(key.session, step.epoch)
            entry = self._entries.get(key.session)
            if entry is None:
                return None
            answer = entry.answer_to(key, step)
            is_passed = entry.knows_order_of(step) and step.past_len < entry.length
            if answer is None and is_passed:
                raise self._miss_length(entry, step)
            return answer

    async def release(self, session: SessionId, epoch: int = 0, *, keep: bool = False) -> int:
        """Free what the session holds; one in a running step goes when the step ends.

        What was kept is freed in any epoch: nobody steers it any more.

        Args:
            session: Which one.
            epoch: Steps of the session in this epoch and before, still on their way, are refused
                from now on. 0 frees whatever is held, in any epoch, and refuses nothing.
            keep: Keep the state for forks instead. No step continues it; it is the first to be
                evicted.

        Returns:
            How many states were freed or doomed; 0 when there was none, it was doomed before, or
            it is kept.

        Raises:
            StaleEpoch: A newer epoch steers the session. Nothing was changed.
        """
        async with self._lock:
            self._tidy()
            entry = self._entries.get(session)
            if entry is None:
                self._remember(session, "unknown", epoch + 1 if epoch else 0)
                return 0
            if entry.doomed:
                entry.close(epoch)
                return 0
            if epoch and not entry.kept:
                self._check_epoch(session, epoch)
            entry.close(epoch, keep=keep)
            if keep:
                return 0
            if not entry.leased:
                self._end(entry.key, "unknown")
            return 1

    async def sweep(self) -> int:
        """Drop what has expired, and say how many sessions that were."""
        async with self._lock:
            return len(self._tidy().expired)

    async def usage(self) -> CacheUsage:
        """What is held, less what has expired."""
        async with self._lock:
            self._tidy()
            held = self._entries.values()
            n_kept = sum(entry.kept for entry in held)
            return CacheUsage(
                sessions=len(held) - n_kept,
                leases=sum(entry.leased for entry in held),
                cached_bytes=sum(entry.nbytes for entry in held),
                kept=n_kept,
            )

    def check_integrity(self) -> None:
        """Check the store's own laws; for tests.

        Raises:
            AssertionError: One is broken, which is a fault of this module or of a state that
                changed outside its lease.
        """
        held = self._entries.values()
        used = sum(entry.nbytes + entry.reserved for entry in held)
        laws = {
            "entries stand under their session": all(
                entry.key.session == session for session, entry in self._entries.items()
            ),
            "sessions are within the limit": len(held) <= self.limits.max_sessions,
            "bytes and reservations are within the limit": used <= self.limits.max_bytes,
            "idle entries are as their last commit left them": all(
                entry.leased or entry.is_settled() for entry in held
            ),
            "what is held has not ended": not self._entries.keys() & self._ended.keys(),
            "memory of the ended is bounded": len(self._ended) <= REMEMBERED_SESSIONS,
        }
        broken = [law for law, holds in laws.items() if not holds]
        if broken:
            raise AssertionError(f"not so: {'; '.join(broken)}")

    # Everything below is synchronous, and so whole to whoever else runs in the loop.

    def _enter(
        self,
        key: CacheKey,
        step: StepRef,
        *,
        fresh: bool,
        need_bytes: int,
        new_state: Callable[[], StateT],
        check: Callable[[], None],
        fork_of: SessionId | None,
    ) -> tuple[Entry[StateT], Lease[StateT]]:
        self._tidy()
        self._check_epoch(key.session, step.epoch)
        entry = self._entries.get(key.session)
        if entry is not None:
            if entry.leased:
                raise SessionBusy(
                    f"another step of session {key.session} is running", held=entry.length
                )
            answer = entry.answer_to(key, step)
            if answer is not None:
                return entry, Lease(None, replay=answer)
        continued = None if entry is None or entry.kept else entry
        late = continued is not None and continued.knows_order_of(step)
        if fork_of is not None and not late:
            parent = self._find_parent(fork_of, key, step.past_len)
            check()
            entry = self._fork(parent, key, step.past_len, need_bytes)
        elif fresh and not late:
            check()
            plan = self._plan_for(key.session, need_bytes)
            entry = self._create(key, plan, new_state())
        else:
            entry = self._find(key, step)
            check()
            self._carry_out(self._plan_for(key.session, entry.nbytes + need_bytes))
        entry.begin(step.epoch, reserved=need_bytes)
        return entry, Lease(entry.state)

    def _check_epoch(self, session: SessionId, epoch: int) -> None:
        entry, ended = self._entries.get(session), self._ended.get(session)
        if entry is not None:
            lowest, held = entry.epoch, 0 if entry.kept else entry.length
        else:
            lowest, held = (0 if ended is None else ended.min_epoch), 0
        if epoch < lowest:
            raise StaleEpoch(
                f"session {session} takes epoch {lowest} and later, not {epoch}",
                expected=lowest,
                actual=epoch,
                held=held,
            )

    def _find_parent(self, session: SessionId, key: CacheKey, n_tokens: int) -> Entry[StateT]:
        """Whom to fork, so that `key` begins with so many tokens."""
        parent = self._entries.get(session)
        reason: MissReason
        if parent is None:
            reason = self._why_not_held(session)
        elif (parent.key.start_layer, parent.key.end_layer) != (key.start_layer, key.end_layer):
            reason = "route_mismatch"
        elif parent.length < n_tokens:
            reason = "length_mismatch"
        else:
            return parent
        raise self._miss(reason, f"no {n_tokens} tokens of session {session} are held: {reason}")

    def _fork(
        self, parent: Entry[StateT], key: CacheKey, n_tokens: int, need_bytes: int
    ) -> Entry[StateT]:
        parent.last_used = self._clock()  # before the plan: what is of use goes after what is not
        plan = self._plan_for(key.session, need_bytes)
        if parent.key in plan.evicted:
            raise self._miss("evicted", f"there is no room for a fork of {parent.key.session}")
        state = parent.state.fork(n_tokens)
        if state is None:
            raise self._miss(
                "length_mismatch", f"{parent.key.session} cannot be forked at {n_tokens} tokens"
            )
        self.n_forks += 1
        return self._create(key, plan, state, n_tokens)

    def _create(self, key: CacheKey, plan: Plan, state: StateT, length: int = 0) -> Entry[StateT]:
        entry = Entry(key, state, last_used=self._clock(), length=length)
        self._carry_out(plan)
        self._ended.pop(key.session, None)
        self._entries[key.session] = entry
        return entry

    def _find(self, key: CacheKey, step: StepRef) -> Entry[StateT]:
        entry = self._entries.get(key.session)
        if entry is None or entry.kept:
            reason = self._why_not_held(key.session)
            raise self._miss(reason, f"session {key.session} is not held here: {reason}")
        if entry.key != key:
            raise self._miss(
                "route_mismatch",
                f"session {key.session} is held for layers {_span(entry.key)}, not {_span(key)}",
            )
        if entry.length != step.past_len:
            raise self._miss_length(entry, step)
        return entry

    def _miss_length(self, entry: Entry[StateT], step: StepRef) -> CacheMiss:
        """The miss of a step at another position, which costs the session if it is unguarded."""
        session = entry.key.session
        where = f"session {session} held {entry.length} tokens, not {step.past_len}"
        if step.guarded:
            return self._miss("length_mismatch", where, held=entry.length)
        self._drop(entry.key, "length_mismatch")
        return self._miss("length_mismatch", f"{where}: dropped")

    def _why_not_held(self, session: SessionId) -> MissReason:
        ended = self._ended.get(session)
        return "unknown" if ended is None else ended.reason

    def _miss(self, reason: MissReason, message: str, *, held: int = 0) -> CacheMiss:
        self.misses[reason] += 1
        return CacheMiss(message, reason=reason, held=held)

    def _leave(self, entry: Entry[StateT], step: StepRef, commit: Commit | None) -> None:
        if commit is None or entry.doomed:
            # None of the reasons for a miss is the truth about these two.
            self._end(entry.key, "unknown")
            return
        entry.land(step, commit, self._clock())
        self._tidy()  # the state may have outgrown its reservation

    def _tidy(self) -> Plan:
        """Drop what has expired, and what is too much.

        Leased entries were admitted within the limits and keep their size until they land, so
        there always is a plan.
        """
        plan = self._plan(self._entries.values(), Need())
        self._carry_out(plan)
        return plan

    def _plan_for(self, session: SessionId, nbytes: int) -> Plan:
        """Who else goes, so that this session may have so many bytes in all."""
        others = [e for e in self._entries.values() if e.key.session != session]
        return self._plan(others, Need(sessions=1, nbytes=nbytes))

    def _plan(self, entries: Collection[Entry[StateT]], need: Need) -> Plan:
        if self._is_roomy(entries, need):
            return NOBODY_GOES
        views = [entry.view() for entry in entries]
        plan = plan_room(views, self.limits, need, now=self._clock())
        if plan is None:
            used = sum(view.nbytes for view in views)
            raise CacheFull(
                f"no room for a session of {need.nbytes} bytes besides {len(views)} others of "
                f"{used}: too many of them are in use, or the limits are too small",
                need=need.nbytes,
                used=used,
                limit=self.limits.max_bytes,
                sessions=len(views),
                max_sessions=self.limits.max_sessions,
            )
        return plan

    def _is_roomy(self, entries: Collection[Entry[StateT]], need: Need) -> bool:
        """Whether nobody has to go: so it is at nearly every step, and a plan takes its time."""
        limits, now = self.limits, self._clock()
        if any(not entry.leased and now - entry.last_used > limits.ttl_s for entry in entries):
            return False
        used = sum(entry.nbytes + entry.reserved for entry in entries)
        return (
            len(entries) + need.sessions <= limits.max_sessions
            and used + need.nbytes <= limits.max_bytes
        )

    def _carry_out(self, plan: Plan) -> None:
        for key in plan.expired:
            self._drop(key, "expired")
        for key in plan.evicted:
            self._drop(key, "evicted")

    def _drop(self, key: CacheKey, reason: MissReason) -> None:
        self.drops[reason] += 1
        self._end(key, reason)

    def _end(self, key: CacheKey, reason: MissReason) -> None:
        entry = self._entries.pop(key.session)
        self._remember(key.session, reason, entry.epoch)

    def _remember(self, session: SessionId, reason: MissReason, min_epoch: int) -> None:
        known = self._ended.pop(session, None)
        lowest = max(min_epoch, 0 if known is None else known.min_epoch)
        if reason == "unknown" and not lowest:
            return
        self._ended[session] = Ended(reason, lowest)
        if len(self._ended) > REMEMBERED_SESSIONS:
            self._ended.popitem(last=False)


def _span(key: CacheKey) -> str:
    return f"[{key.start_layer}, {key.end_layer})"
