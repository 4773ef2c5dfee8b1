"""Any interleaving of steps, releases, cancellations and time leaves the store as the model says.

`make unit` runs the same few hundred histories every time. More, and others every time:

    .venv/bin/python -m tests.unit.cache.test_store_machine 20000
"""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from meshnet.cache import store as store_module
from meshnet.cache.entry import StepRef
from meshnet.cache.policy import CacheKey, CacheLimits
from meshnet.cache.store import CacheUsage, SessionCacheStore
from meshnet.errors import StaleEpoch
from meshnet.ids import SessionId, StepId
from tests.unit.cache.store_model import TOKEN_BYTES, Held, Outcome, Sent, StoreModel, TokenState
from tests.unit.cache.store_steps import (
    ANY,
    BEGINNINGS,
    ENDINGS,
    FORKS,
    MAYBE_ENDINGS,
    MISPLACED,
    NEXT,
    SESSIONS,
    Ending,
    Kind,
    Running,
    Wish,
    outcome_of,
)

TTL_S = 100.0
N_REMEMBERED = 4
"""Less than there are sessions, so that some are forgotten; the store itself has 1024."""

NOWHERE = 10_000
"""A position that no session reaches."""


class StoreMachine(RuleBasedStateMachine):
    """A store beside its model; each rule does the same to both and compares."""

    seen: ClassVar[Counter[str]] = Counter()
    """What became of steps, over all examples: what never happened was not tested."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.sent: list[Sent] = []
        self.open: list[Running] = []
        self.born: list[weakref.ref[TokenState]] = []

    @initialize(
        max_sessions=st.integers(2, 4),
        max_bytes=st.sampled_from([100, 200, 1000]),
    )
    def make(self, max_sessions: int, max_bytes: int) -> None:
        limits = CacheLimits(ttl_s=TTL_S, max_sessions=max_sessions, max_bytes=max_bytes)
        self.model = StoreModel(limits, N_REMEMBERED)
        self.store = SessionCacheStore[TokenState](limits, clock=lambda: self.model.now)

    # Steps.

    @rule(wish=BEGINNINGS, ending=MAYBE_ENDINGS)
    def begin(self, wish: Wish, ending: Ending | None) -> None:
        self._send(self._make(wish), ending)

    @rule(wish=NEXT, ending=MAYBE_ENDINGS)
    def go_on(self, wish: Wish, ending: Ending | None) -> None:
        self._send(self._make(wish), ending)

    @rule(
        wish=FORKS,
        number=st.integers(0, 4),
        short=st.integers(-1, 3),
        ending=MAYBE_ENDINGS,
    )
    def fork(self, wish: Wish, number: int, short: int, ending: Ending | None) -> None:
        """A session begins with another one's tokens, but for the last few."""
        there = [session for session in self.model.held if session != wish.session]
        candidates = there if there and number else SESSIONS  # mostly one that is held
        parent = candidates[(number + short) % len(candidates)]
        if parent != wish.session:
            held = self.model.held.get(parent)
            past_len = max(1, (len(held.tokens) if held else 2) - short)
            made = self._make(wish)
            need_bytes = made.need_bytes + TOKEN_BYTES * past_len
            ref = replace(made.ref, past_len=past_len)
            forked = replace(made, ref=ref, need_bytes=need_bytes, fork_of=parent)
            self.sent[-1] = forked
            self._send(forked, ending)

    @rule(wish=MISPLACED)
    def misplace(self, wish: Wish) -> None:
        self._send(self._make(wish), Ending.COMMIT)

    @rule(session=st.sampled_from(SESSIONS))
    def duplicate(self, session: SessionId) -> None:
        """The last step of a session, once more."""
        held = self.model.held.get(session)
        if held and held.last:
            self._send(held.last[0], Ending.COMMIT)

    @rule(session=st.sampled_from(SESSIONS), other=st.sampled_from(["past_len", "epoch", "layers"]))
    def reuse_id(self, session: SessionId, other: str) -> None:
        """The id of a session's last step, on what is another step."""
        held = self.model.held.get(session)
        if held and held.last:
            last = held.last[0]
            if other == "layers":
                key = replace(last.key, start_layer=2 - last.key.start_layer)
                self._send(replace(last, key=key), Ending.COMMIT)
            else:
                past_len = len(held.tokens) if other == "past_len" else last.ref.past_len
                epoch = last.ref.epoch + 1 if other == "epoch" else last.ref.epoch
                ref = replace(last.ref, past_len=past_len, epoch=epoch)
                self._send(replace(last, ref=ref), Ending.COMMIT)

    @rule(age=st.integers(0, 20), ending=MAYBE_ENDINGS)
    def come_late(self, age: int, ending: Ending | None) -> None:
        """Some old step, once more."""
        if self.sent:
            self._send(self.sent[-1 - age % len(self.sent)], ending)

    @rule(number=st.integers(0, 3), ending=ENDINGS)
    def end(self, number: int, ending: Ending) -> None:
        if self.open:
            self._end(self.open[number % len(self.open)], ending)

    @rule(first=ANY, second=st.one_of(st.none(), ANY), released=st.booleans(), ending=MAYBE_ENDINGS)
    def come_at_once(
        self, first: Wish, second: Wish | None, ending: Ending | None, *, released: bool
    ) -> None:
        """A step, and the same or another one, that wait together; or a release between them."""
        sent = self._make(first)
        other = sent if second is None else self._make(second)
        release = (sent.key.session, sent.ref.epoch) if released else None
        n_open = len(self.open)
        self.loop.run_until_complete(self._at_once(sent, release, other))
        for running in self.open[n_open:]:
            if ending is not None:
                self._end(running, ending)

    @rule(wish=ANY, its_turn_had_come=st.booleans())
    def cancel_waiting(self, wish: Wish, *, its_turn_had_come: bool) -> None:
        """A step that is cancelled before it got its lease did nothing."""
        cancelled = self._cancelled_in_the_queue(self._make(wish), its_turn_had_come)
        assert self.loop.run_until_complete(cancelled)

    # Whatever else happens.

    @rule(
        session=st.sampled_from(SESSIONS),
        epoch=st.one_of(st.none(), st.integers(-2, 1)),
        keep=st.booleans(),
    )
    def release(self, session: SessionId, epoch: int | None, *, keep: bool) -> None:
        wanted = 0 if epoch is None else max(0, self.model.lowest_epoch(session) + epoch)
        expected = self.model.release(session, wanted, keep=keep)
        released = self._released(session, wanted, keep=keep)
        assert self.loop.run_until_complete(released) == expected
        self.seen["kept"] += any(held.kept for held in self.model.held.values())

    @rule(seconds=st.sampled_from([TTL_S / 2, TTL_S, 2 * TTL_S]))
    def wait(self, seconds: float) -> None:
        self.model.now += seconds

    @rule()
    def sweep(self) -> None:
        expected = self.model.expire()
        assert self.loop.run_until_complete(self.store.sweep()) == expected

    @rule()
    def look(self) -> None:
        """What the store says of itself and of every session is so."""
        self.model.expire()
        self._check_usage()
        for session in SESSIONS:
            self._check_held(session)

    # What always holds.

    @invariant()
    def laws_hold(self) -> None:
        self.store.check_integrity()

    @invariant()
    def numbers_are_the_models(self) -> None:
        assert self.store.misses == self.model.misses
        assert self.store.drops == self.model.drops
        if not self.model.overdue():  # looking would drop them, and they shall stay for others
            self._check_usage()

    @invariant()
    def contents_are_the_models(self) -> None:
        for held in self.model.held.values():
            if held.state is not None:
                assert held.state.tokens == held.tokens

    def teardown(self) -> None:
        """Everything is closed: nothing is left."""
        try:
            if sys.exc_info()[0] is None:  # else this would hide what failed
                self._close_all()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()

    def _close_all(self) -> None:
        while self.open:
            self._end(self.open[0], list(Ending)[len(self.open) % len(Ending)])
        for session in SESSIONS:
            self.release(session, None, keep=False)
        self.store.check_integrity()
        assert self.loop.run_until_complete(self.store.usage()) == CacheUsage(0, 0, 0)
        assert asyncio.all_tasks(self.loop) == set()
        if any(state() for state in self.born):
            gc.collect()  # tracebacks may hold some for a while
        assert [state() for state in self.born if state()] == []
        self.seen["closed"] += 1

    def _make(self, wish: Wish) -> Sent:
        held = self.model.held.get(wish.session)
        length = len(held.tokens) if held else 0
        epoch = max(0, self.model.lowest_epoch(wish.session) + wish.epoch)
        number, kind = len(self.sent), wish.kind
        answer_nbytes = 3 if kind is Kind.WITH_ANSWER else 0
        nbytes = TOKEN_BYTES * wish.n_tokens + answer_nbytes
        sent = Sent(
            CacheKey(wish.session, 2 if kind is Kind.OTHER_LAYERS else 0, 4),
            StepRef(
                None if kind is Kind.WITHOUT_ID else StepId(f"step-{number}"),
                0 if wish.past is None else max(0, length + wish.past),
                0 if kind is Kind.WITHOUT_EPOCH else epoch,
            ),
            tuple(100 * number + i for i in range(wish.n_tokens)),
            nbytes // 2 if kind is Kind.LARGER_THAN_ANNOUNCED else nbytes,
            answer_nbytes,
            {Kind.QUEUE_FULL: "queue", Kind.NO_MEMORY: "memory"}.get(kind),
        )
        self.sent.append(sent)
        return sent

    def _send(self, sent: Sent, ending: Ending | None) -> None:
        async def begin() -> Running:
            running = Running(self.store, sent)
            await running.begun()
            return running

        self._tick()
        expected = self.model.begin(sent)
        running = self.loop.run_until_complete(begin())
        self._compare(running, expected)
        if expected.what == "lent" and ending is not None:
            self._end(running, ending)
        self._check_held(sent.key.session)

    async def _at_once(
        self, sent: Sent, release: tuple[SessionId, int] | None, other: Sent
    ) -> None:
        self._tick()
        releasing = None
        async with self.store._lock:  # pyright: ignore[reportPrivateUsage]  # for a queue before it
            first = Running(self.store, sent)
            await asyncio.sleep(0)
            if release is not None:
                releasing = asyncio.create_task(self._released(*release))
                await asyncio.sleep(0)
            second = Running(self.store, other)
            await asyncio.sleep(0)
        await first.begun()
        await second.begun()
        self._compare(first, self.model.begin(sent))
        if release is not None and releasing is not None:
            assert await releasing == self.model.release(*release, keep=False)
        self._compare(second, self.model.begin(other))

    async def _cancelled_in_the_queue(self, sent: Sent, its_turn_had_come: bool) -> bool:
        lock = self.store._lock  # pyright: ignore[reportPrivateUsage]  # for a queue before it
        await lock.acquire()
        running = Running(self.store, sent)
        await asyncio.sleep(0)
        if its_turn_had_come:
            lock.release()
            running.task.cancel()
        else:
            running.task.cancel()
            lock.release()
        await asyncio.wait({running.task})
        return running.task.cancelled()

    def _compare(self, running: Running, expected: Outcome) -> None:
        """What became of the step is what had to; a replay's answer is the very object."""
        outcome = running.outcome.result()
        assert outcome == expected
        reason = f" {expected.reason}" if expected.what == "cache_miss" else ""
        forked = " fork" if running.sent.fork_of else ""
        self.seen[f"{expected.what}{reason}"] += 1
        self.seen[f"{expected.what}{reason}{forked}"] += bool(forked)
        if expected.what != "lent":
            return
        held = self.model.held[running.sent.key.session]
        assert running.state is not None
        self._check_state(held, running.state)
        self.open.append(running)

    def _check_state(self, held: Held, state: TokenState) -> None:
        """A fresh step gets a new state, any other the one it had."""
        if held.state is None:
            held.state = state
            self.born.append(weakref.ref(state))
        assert state is held.state
        assert state.tokens == held.tokens

    def _end(self, running: Running, ending: Ending) -> None:
        self._tick()
        self.open.remove(running)
        self.loop.run_until_complete(running.end(ending))
        if ending.commits:
            self.model.commit(running.sent, running.answer)
        else:
            self.model.fail(running.sent)
        self.seen[f"left by {ending.name}"] += 1

    async def _released(
        self, session: SessionId, epoch: int, *, keep: bool = False
    ) -> int | Outcome:
        try:
            return await self.store.release(session, epoch, keep=keep)
        except StaleEpoch as error:
            return outcome_of(error)

    def _check_usage(self) -> None:
        held = self.model.held.values()
        n_kept = sum(one.kept for one in held)
        expected = CacheUsage(
            len(held) - n_kept,
            sum(not one.idle for one in held),
            sum(one.nbytes for one in held),
            n_kept,
        )
        assert self.loop.run_until_complete(self.store.usage()) == expected

    def _check_held(self, session: SessionId) -> None:
        """The store says of a session what the model does; who asks so changes nothing."""
        held = self.model.held.get(session)
        ref = StepRef(StepId("look"), NOWHERE, max(1, self.model.lowest_epoch(session)))
        key = held.key if held else CacheKey(session, 0, 4)
        expected = self.model.look(session)

        async def ask() -> Outcome:
            return await Running(self.store, Sent(key, ref, (), 0, 0)).begun()

        assert self.loop.run_until_complete(ask()) == expected

    def _tick(self) -> None:
        """No two things happen at the same time, so that it is known who is older."""
        self.model.now += 0.001


EVERYTHING = {
    "closed",
    "lent",
    "replay",
    "stale_epoch",
    "session_busy",
    "queue_full",
    "cache_full",
    "MemoryError",
    *(f"cache_miss {r}" for r in ("unknown", "expired", "evicted", "length_mismatch")),
    "cache_miss route_mismatch",
    "kept",
    "lent fork",
    "cache_full fork",
    *(f"cache_miss {r} fork" for r in ("unknown", "evicted", "length_mismatch", "route_mismatch")),
    *(f"left by {ending.name}" for ending in Ending),
}


@pytest.mark.timeout(600)  # for what hypothesis does to make a failure short
def test_any_interleaving_is_as_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lent, replayed, refused and dropped is what must be, and at the end nothing is left."""
    monkeypatch.setattr(store_module, "REMEMBERED_SESSIONS", N_REMEMBERED)
    StoreMachine.seen.clear()
    few_hundred = settings(
        max_examples=300, stateful_step_count=40, deadline=None, derandomize=True
    )
    run_state_machine_as_test(  # pyright: ignore[reportUnknownMemberType]
        StoreMachine, settings=few_hundred
    )
    print(f"\n{dict(StoreMachine.seen)}")  # noqa: T201  # figures for whoever runs with -s
    assert EVERYTHING - StoreMachine.seen.keys() == set()
    assert StoreMachine.seen.total() > 3000


if __name__ == "__main__":
    store_module.REMEMBERED_SESSIONS = N_REMEMBERED  # pyright: ignore[reportConstantRedefinition, reportAttributeAccessIssue]
    as_many_as_told = settings(
        max_examples=int(sys.argv[1]), stateful_step_count=60, deadline=None, database=None
    )
    run_state_machine_as_test(  # pyright: ignore[reportUnknownMemberType]
        StoreMachine, settings=as_many_as_told
    )
