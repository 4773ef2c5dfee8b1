from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.cache.entry import Lease, StepRef
from meshnet.cache.policy import CacheKey, CacheLimits
from meshnet.cache.store import REMEMBERED_SESSIONS, CacheUsage, SessionCacheStore
from meshnet.errors import CacheFull, CacheMiss, MeshError, QueueFull, SessionBusy, StaleEpoch
from meshnet.ids import SessionId, StepId

TTL_S = 600.0
UNFORKABLE = 3
"""No state can be cut at so many tokens."""


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeState:
    """Ten bytes a token."""

    nbytes: int = 0

    def extend(self, n_tokens: int) -> None:
        self.nbytes += 10 * n_tokens

    def fork(self, n_tokens: int) -> FakeState | None:
        return None if n_tokens == UNFORKABLE else FakeState(10 * n_tokens)


def no_state() -> FakeState:
    raise MemoryError("no state can be made")


class Bench:
    """A store, its clock, and steps in one line."""

    def __init__(self, *, max_sessions: int = 2, max_bytes: int = 1000) -> None:
        self.clock = FakeClock()
        limits = CacheLimits(ttl_s=TTL_S, max_sessions=max_sessions, max_bytes=max_bytes)
        self.store: SessionCacheStore[FakeState] = SessionCacheStore(limits, clock=self.clock)

    async def step(
        self,
        session: str,
        past_len: int,
        n_tokens: int = 1,
        *,
        start_layer: int = 0,
        step_id: str | None = None,
        epoch: int = 0,
        answer: object = "answer",
        answer_nbytes: int = 0,
        need_bytes: int | None = None,
        check: Callable[[], None] = lambda: None,
        fork_of: str | None = None,
    ) -> object:
        """Run a whole step, a fresh one at position 0; gives the answer, a stored one too."""
        async with self.store.lease(
            key_of(session, start_layer),
            step_ref(past_len, step_id, epoch),
            fresh=past_len == 0,
            need_bytes=10 * n_tokens if need_bytes is None else need_bytes,
            new_state=FakeState,
            check=check,
            fork_of=None if fork_of is None else SessionId(fork_of),
        ) as lease:
            if lease.replay is not None:
                return lease.replay
            lease.state.extend(n_tokens)
            lease.commit(n_tokens=n_tokens, answer=answer, answer_nbytes=answer_nbytes)
        self.store.check_integrity()
        return answer

    async def guarded(
        self,
        past_len: int,
        n_tokens: int = 1,
        *,
        epoch: int = 1,
        step_id: str = "x",
        answer: object = "answer",
        start_layer: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> object:
        """Run a step of session a that tells its id and epoch."""
        return await self.step(
            "a",
            past_len,
            n_tokens,
            epoch=epoch,
            step_id=step_id,
            answer=answer,
            start_layer=start_layer,
            check=check,
        )

    async def look_up(self, past_len: int, *, step_id: str = "x", epoch: int = 1) -> object:
        """What a guarded step of session a can be told before it is run."""
        answer = await self.store.look_up(key_of("a"), step_ref(past_len, step_id, epoch))
        self.store.check_integrity()
        return answer

    async def late(self, past_len: int, *, epoch: int = 1, start_layer: int = 0) -> CacheMiss:
        """The miss of a guarded step."""
        with pytest.raises(CacheMiss) as caught:
            await self.guarded(past_len, epoch=epoch, step_id="late", start_layer=start_layer)
        return caught.value

    async def stale(self, past_len: int, *, epoch: int, session: str = "a") -> Mapping[str, object]:
        """What a step of an epoch that is over is told."""
        with pytest.raises(StaleEpoch) as caught:
            await self.step(session, past_len, epoch=epoch, step_id="stale" if epoch else None)
        return caught.value.members

    async def miss(self, session: str, past_len: int, *, start_layer: int = 0) -> object:
        """The reason why a step misses."""
        with pytest.raises(CacheMiss) as caught:
            await self.step(session, past_len, start_layer=start_layer)
        return caught.value.members["reason"]

    async def fork(
        self, session: str, of: str, past_len: int, *, epoch: int = 0, need_bytes: int | None = None
    ) -> object:
        """Run a step of one token that begins as a fork; gives why it misses, or None."""
        needed = 10 * (past_len + 1) if need_bytes is None else need_bytes
        step_id = "fork" if epoch else None
        try:
            await self.step(
                session, past_len, fork_of=of, need_bytes=needed, epoch=epoch, step_id=step_id
            )
        except CacheMiss as miss:
            self.store.check_integrity()
            return miss.members["reason"]
        return None

    async def keep(self, session: str, epoch: int = 0) -> int:
        """Close a session, and have it kept."""
        n_freed = await self.store.release(SessionId(session), epoch, keep=True)
        self.store.check_integrity()
        return n_freed

    async def holds(self, session: str, past_len: int) -> bool:
        """Whether a step at this position would find its state. Drops one of another length."""
        try:
            await self.step(session, past_len)
        except CacheMiss:
            return False
        return True

    def running(
        self, session: str, past_len: int = 0, *, need_bytes: int = 10, epoch: int = 0
    ) -> RunningStep:
        return RunningStep(self, session, past_len, need_bytes, epoch)


class RunningStep:
    """A step in a task of its own, held inside its lease until told how to end."""

    def __init__(
        self, bench: Bench, session: str, past_len: int, need_bytes: int, epoch: int
    ) -> None:
        self._bench = bench
        self._entered = asyncio.Event()
        self._finish = asyncio.Event()
        self.task = asyncio.create_task(self._run(session, past_len, need_bytes, epoch))

    async def _run(self, session: str, past_len: int, need_bytes: int, epoch: int) -> None:
        async with self._bench.store.lease(
            key_of(session),
            step_ref(past_len, "running" if epoch else None, epoch),
            fresh=past_len == 0,
            need_bytes=need_bytes,
            new_state=FakeState,
        ) as lease:
            self._entered.set()
            await self._finish.wait()
            lease.state.extend(1)
            lease.commit(n_tokens=1, answer="answer", answer_nbytes=0)

    async def __aenter__(self) -> RunningStep:
        await self._entered.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._finish.set()
        await asyncio.wait([self.task])


def key_of(session: str, start_layer: int = 0) -> CacheKey:
    return CacheKey(SessionId(session), start_layer, 4)


def step_ref(past_len: int, step_id: str | None = None, epoch: int = 0) -> StepRef:
    return StepRef(None if step_id is None else StepId(step_id), past_len, epoch)


def refuse() -> None:
    raise QueueFull("no place in the queue")


@pytest.fixture
def bench() -> Bench:
    return Bench()


class TestLookup:
    async def test_a_session_is_continued_step_by_step(self, bench: Bench) -> None:
        """A committed step is found by the next one, at the position that it left."""
        await bench.step("a", 0, 6)
        await bench.step("a", 6, 1)
        assert await bench.holds("a", 7)

    async def test_the_state_is_the_same_object(self, bench: Bench) -> None:
        """The next step gets the very state that the last one extended."""
        await bench.step("a", 0, 6)
        async with bench.store.lease(
            key_of("a"), step_ref(6), fresh=False, need_bytes=0, new_state=no_state
        ) as lease:
            assert lease.state.nbytes == 60

    async def test_a_session_never_seen_is_unknown(self, bench: Bench) -> None:
        """A step that continues nothing misses; it does not get an empty state."""
        assert await bench.miss("a", 6) == "unknown"

    async def test_a_miss_says_that_nothing_is_held(self, bench: Bench) -> None:
        """The error of a miss carries the tokens held: none."""
        with pytest.raises(CacheMiss) as caught:
            await bench.step("a", 6)
        assert caught.value.members == {"reason": "unknown", "held": 0}

    @pytest.mark.parametrize("past_len", [5, 7])
    async def test_another_length_misses(self, bench: Bench, past_len: int) -> None:
        """A step at a position that is not the state's length misses for its length."""
        await bench.step("a", 0, 6)
        assert await bench.miss("a", past_len) == "length_mismatch"

    async def test_another_length_drops(self, bench: Bench) -> None:
        """After a step of another length nothing is held."""
        await bench.step("a", 0, 6)
        await bench.miss("a", 7)
        assert await bench.store.usage() == CacheUsage(0, 0, 0)

    async def test_after_another_length_the_right_one_misses_too(self, bench: Bench) -> None:
        """A state that did not fit once is never used again, and the reason is remembered."""
        await bench.step("a", 0, 6)
        await bench.miss("a", 7)
        assert await bench.miss("a", 6) == "length_mismatch"

    async def test_another_start_layer_misses(self, bench: Bench) -> None:
        """A session held for other layers is not lent."""
        await bench.step("a", 0, 6)
        assert await bench.miss("a", 6, start_layer=2) == "route_mismatch"

    async def test_another_end_layer_misses(self, bench: Bench) -> None:
        """The end of the span belongs to the key as well."""
        await bench.step("a", 0, 6)
        other = CacheKey(SessionId("a"), 0, 3)
        with pytest.raises(CacheMiss, match=r"\[0, 4\), not \[0, 3\)"):
            async with bench.store.lease(
                other, step_ref(6), fresh=False, need_bytes=0, new_state=no_state
            ):
                pass

    async def test_another_start_layer_leaves_the_state(self, bench: Bench) -> None:
        """A step that came to the wrong layers does not harm those that are held."""
        await bench.step("a", 0, 6)
        await bench.miss("a", 6, start_layer=2)
        assert await bench.holds("a", 6)

    async def test_misses_are_counted_by_reason(self, bench: Bench) -> None:
        """Every miss adds one to its reason's count."""
        await bench.miss("a", 1)
        await bench.step("b", 0, 6)
        await bench.miss("b", 7)
        await bench.miss("b", 7)
        assert bench.store.misses == {"unknown": 1, "length_mismatch": 2}


class TestFresh:
    async def test_a_fresh_step_begins_with_an_empty_state(self, bench: Bench) -> None:
        """A second prefill at position 0 builds on nothing."""
        await bench.step("a", 0, 6)
        await bench.step("a", 0, 3)
        assert await bench.store.usage() == CacheUsage(1, 0, 30)

    async def test_a_fresh_step_replaces_other_layers(self, bench: Bench) -> None:
        """A session holds one state, that of its last prefill."""
        await bench.step("a", 0, 6)
        await bench.step("a", 0, 6, start_layer=2)
        assert await bench.miss("a", 6, start_layer=0) == "route_mismatch"

    async def test_a_fresh_step_forgets_how_the_session_ended(self, bench: Bench) -> None:
        """A reason belongs to the life of a session that it ended, not to the next."""
        await bench.step("a", 0, 6)
        await bench.miss("a", 7)
        await bench.step("a", 0, 6)
        await bench.store.release(SessionId("a"))
        assert await bench.miss("a", 6) == "unknown"

    async def test_a_state_that_cannot_be_made_changes_nothing(self, bench: Bench) -> None:
        """When the empty state fails, neither the session nor a victim was dropped."""
        await bench.step("a", 0, 6)
        await bench.step("b", 0, 6)
        with pytest.raises(MemoryError):
            async with bench.store.lease(
                key_of("c"), step_ref(0), fresh=True, need_bytes=0, new_state=no_state
            ):
                pass
        assert await bench.store.usage() == CacheUsage(2, 0, 120)


class TestReplay:
    async def test_the_same_step_gets_the_stored_answer(self, bench: Bench) -> None:
        """A repeat of the last step is answered as the first time."""
        await bench.step("a", 0, 6)
        await bench.step("a", 6, step_id="x", answer="first")
        assert await bench.step("a", 6, step_id="x", answer="second") == "first"

    async def test_the_same_first_step_gets_the_stored_answer(self, bench: Bench) -> None:
        """A repeated prefill at position 0 is not run again either."""
        await bench.step("a", 0, 6, step_id="x", answer="first")
        assert await bench.step("a", 0, 6, step_id="x", answer="second") == "first"

    async def test_a_replay_changes_nothing(self, bench: Bench) -> None:
        """After a repeat the session stands where the first run left it."""
        await bench.step("a", 0, 6)
        await bench.step("a", 6, step_id="x")
        await bench.step("a", 6, step_id="x")
        assert await bench.holds("a", 7)

    async def test_a_replay_needs_no_room(self) -> None:
        """A stored answer is given even where the step would not fit again."""
        bench = Bench(max_bytes=60)
        await bench.step("a", 0, 6, step_id="x")
        assert await bench.step("a", 0, 6, step_id="x", need_bytes=1000) == "answer"

    async def test_a_replay_lends_no_state(self, bench: Bench) -> None:
        """The state of a replay cannot be touched, and so not be committed to."""
        await bench.step("a", 0, 6, step_id="x")
        async with bench.store.lease(
            key_of("a"), step_ref(0, "x"), fresh=True, need_bytes=0, new_state=no_state
        ) as lease:
            with pytest.raises(RuntimeError, match="replay"):
                lease.commit(n_tokens=6, answer="again", answer_nbytes=0)

    async def test_another_id_is_another_step(self, bench: Bench) -> None:
        """A step with a new id at the old position is no repeat: the length is wrong."""
        await bench.step("a", 0, 6)
        await bench.step("a", 6, step_id="x")
        with pytest.raises(CacheMiss):
            await bench.step("a", 6, step_id="y")

    async def test_another_position_is_another_step(self, bench: Bench) -> None:
        """The id alone does not make a repeat."""
        await bench.step("a", 0, 6, step_id="x", answer="first")
        assert await bench.step("a", 6, step_id="x", answer="second") == "second"

    async def test_other_layers_are_another_step(self, bench: Bench) -> None:
        """An answer computed from other layers is not given."""
        await bench.step("a", 0, 6, step_id="x", answer="first")
        again = await bench.step("a", 0, 6, step_id="x", start_layer=2, answer="second")
        assert again == "second"

    async def test_a_step_without_id_is_never_a_repeat(self, bench: Bench) -> None:
        """Two steps without id are two steps."""
        await bench.step("a", 0, 6, answer="first")
        assert await bench.step("a", 0, 6, answer="second") == "second"

    async def test_a_session_expires_with_its_answer(self, bench: Bench) -> None:
        """A stored answer lives no longer than its state."""
        await bench.step("a", 0, 6, step_id="x", answer="first")
        bench.clock.now = TTL_S + 1
        assert await bench.step("a", 0, 6, step_id="x", answer="second") == "second"


class TestLookingUp:
    """A step whose input is not there yet."""

    async def test_a_step_that_was_run_has_its_answer(self, bench: Bench) -> None:
        """As a repeat of it has, but nobody needs to know what it was made of."""
        await bench.guarded(0, 6, answer="first")
        await bench.guarded(6, step_id="y", answer="second")
        assert await bench.look_up(6, step_id="y") == "second"

    @pytest.mark.parametrize(("past_len", "epoch"), [(6, 1), (7, 1), (5, 2), (6, 2)])
    async def test_a_step_that_may_be_run_has_none(
        self, bench: Bench, past_len: int, epoch: int
    ) -> None:
        """The next one, and any whose session may be fed before its input comes."""
        await bench.guarded(0, 6)
        assert await bench.look_up(past_len, step_id="y", epoch=epoch) is None

    async def test_nothing_is_known_of_a_session_that_is_not_here(self, bench: Bench) -> None:
        """It is no miss yet."""
        assert await bench.look_up(6) is None
        assert not bench.store.misses

    async def test_a_step_that_is_passed_is_late(self, bench: Bench) -> None:
        """Also while the next one is running; the session stays as it is."""
        await bench.guarded(0, 6)
        await bench.guarded(6, step_id="y")
        async with bench.running("a", 7, epoch=1):
            with pytest.raises(CacheMiss) as caught:
                await bench.look_up(5, step_id="w")
        assert caught.value.members == {"reason": "length_mismatch", "held": 7}
        assert await bench.guarded(8, step_id="z", answer="next") == "next"

    async def test_a_step_without_id_is_not_late(self, bench: Bench) -> None:
        """Its session would be given up for it; that is left to the step itself."""
        await bench.step("a", 0, 6)
        assert await bench.store.look_up(key_of("a"), step_ref(5)) is None
        assert await bench.holds("a", 6)

    async def test_a_step_of_a_closed_session_is_stale(self, bench: Bench) -> None:
        """It need not wait."""
        await bench.guarded(0, 6)
        await bench.store.release(SessionId("a"), 1)
        with pytest.raises(StaleEpoch):
            await bench.look_up(6)

    async def test_looking_up_is_no_use_of_a_session(self, bench: Bench) -> None:
        """It does not live longer for it."""
        await bench.guarded(0, 6, answer="first")
        bench.clock.now = TTL_S - 1
        assert await bench.look_up(0) == "first"
        bench.clock.now = TTL_S + 1
        assert await bench.look_up(0) is None


class TestBusy:
    @pytest.mark.parametrize("past_len", [0, 6, 9])
    async def test_one_step_at_a_time(self, bench: Bench, past_len: int) -> None:
        """While a step runs, any other of its session is told to wait."""
        await bench.step("a", 0, 6)
        async with bench.running("a", 6):
            with pytest.raises(SessionBusy):
                await bench.step("a", past_len)

    async def test_a_busy_session_is_unharmed(self, bench: Bench) -> None:
        """The step that runs ends as if nobody had asked."""
        await bench.step("a", 0, 6)
        async with bench.running("a", 6):
            with pytest.raises(SessionBusy):
                await bench.step("a", 9)
        assert await bench.holds("a", 7)

    async def test_a_retry_of_the_running_step_waits(self, bench: Bench) -> None:
        """A repeat is answered from the store only once its first run has ended."""
        await bench.step("a", 0, 6, step_id="x")
        async with bench.running("a", 6):
            with pytest.raises(SessionBusy):
                await bench.step("a", 0, 6, step_id="x")

    async def test_two_sessions_run_at_once(self, bench: Bench) -> None:
        """A lease is a session's own; another session does not wait for it."""
        async with bench.running("a"), bench.running("b"):
            assert await bench.store.usage() == CacheUsage(2, 2, 0)


class TestLeaving:
    async def test_an_error_drops_the_session(self, bench: Bench) -> None:
        """A step that failed leaves nothing behind, and no misleading reason."""
        await bench.step("a", 0, 6)
        with pytest.raises(ZeroDivisionError):
            async with bench.store.lease(
                key_of("a"), step_ref(6), fresh=False, need_bytes=0, new_state=no_state
            ):
                raise ZeroDivisionError
        assert await bench.miss("a", 6) == "unknown"

    async def test_a_cancellation_drops_the_session(self, bench: Bench) -> None:
        """A step cancelled within its lease takes the session with it."""
        await bench.step("a", 0, 6)
        async with bench.running("a", 6) as running:
            running.task.cancel()
        assert await bench.miss("a", 6) == "unknown"

    async def test_a_cancellation_is_accounted_for_at_once(self, bench: Bench) -> None:
        """The task that was cancelled has ended its lease by the time that it is done."""
        async with bench.running("a") as running:
            running.task.cancel()
            running.task.cancel()
            await asyncio.wait([running.task])
            assert await bench.store.usage() == CacheUsage(0, 0, 0)

    async def test_a_cancellation_after_the_commit_keeps_the_step(self, bench: Bench) -> None:
        """What was committed happened, though its answer never left: a retry will ask for it."""
        with contextlib.suppress(asyncio.CancelledError):
            async with bench.store.lease(
                key_of("a"), step_ref(0, "x"), fresh=True, need_bytes=60, new_state=FakeState
            ) as lease:
                lease.state.extend(6)
                lease.commit(n_tokens=6, answer="first", answer_nbytes=0)
                raise asyncio.CancelledError
        assert await bench.step("a", 0, 6, step_id="x", answer="second") == "first"

    async def test_a_commit_lands_when_the_lease_is_left(self, bench: Bench) -> None:
        """Within the lease the session is still in use, and its bytes are the old ones."""
        async with bench.store.lease(
            key_of("a"), step_ref(0), fresh=True, need_bytes=60, new_state=FakeState
        ) as lease:
            lease.state.extend(6)
            lease.commit(n_tokens=6, answer="answer", answer_nbytes=0)
            assert await bench.store.usage() == CacheUsage(1, 1, 0)

    async def test_the_answer_is_counted(self, bench: Bench) -> None:
        """Bytes of the last stored answer stand beside those of the state."""
        await bench.step("a", 0, 6, answer_nbytes=7)
        await bench.step("a", 6, 1, answer_nbytes=5)
        assert await bench.store.usage() == CacheUsage(1, 0, 75)


class TestTimeAndNumber:
    async def test_an_old_session_is_gone_and_the_count_says_so(self, bench: Bench) -> None:
        """An entry older than the TTL is no longer among the sessions."""
        await bench.step("a", 0, 6)
        bench.clock.now = TTL_S + 1
        assert await bench.store.usage() == CacheUsage(0, 0, 0)

    async def test_an_old_session_misses_as_expired(self, bench: Bench) -> None:
        """Who comes too late is told that it was time."""
        await bench.step("a", 0, 6)
        bench.clock.now = TTL_S + 1
        assert await bench.miss("a", 6) == "expired"

    async def test_a_session_as_old_as_the_ttl_is_held(self, bench: Bench) -> None:
        """The TTL itself is still within it."""
        await bench.step("a", 0, 6)
        bench.clock.now = TTL_S
        assert await bench.holds("a", 6)

    async def test_every_step_renews_the_time(self, bench: Bench) -> None:
        """Age counts from the last step, not from the first."""
        await bench.step("a", 0, 6)
        bench.clock.now = TTL_S
        await bench.step("a", 6)
        bench.clock.now = 2 * TTL_S
        assert await bench.holds("a", 7)

    async def test_a_running_step_does_not_expire(self, bench: Bench) -> None:
        """A forward longer than the TTL keeps its session, and its age begins at the end."""
        async with bench.running("a"):
            bench.clock.now = TTL_S + 1
            await bench.store.sweep()
        assert await bench.holds("a", 1)

    async def test_a_sweep_counts_the_expired(self, bench: Bench) -> None:
        """A sweep says how many sessions it dropped."""
        await bench.step("a", 0, 6)
        bench.clock.now = 1
        await bench.step("b", 0, 6)
        bench.clock.now = TTL_S + 1
        assert await bench.store.sweep() == 1

    async def test_the_first_touched_makes_the_second_the_victim(self, bench: Bench) -> None:
        """With two slots the session used longest ago makes room for a third."""
        await bench.step("a", 0, 6)
        bench.clock.now = 1
        await bench.step("b", 0, 6)
        bench.clock.now = 2
        await bench.step("a", 6)
        bench.clock.now = 3
        await bench.step("c", 0, 6)
        assert (await bench.miss("b", 6), await bench.holds("a", 7)) == ("evicted", True)

    async def test_a_leased_session_is_no_victim(self, bench: Bench) -> None:
        """The oldest session stays while a step of it runs; the next one goes."""
        await bench.step("a", 0, 6)
        bench.clock.now = 1
        await bench.step("b", 0, 6)
        async with bench.running("a", 6):
            await bench.step("c", 0, 6)
        assert await bench.miss("b", 6) == "evicted"

    async def test_drops_are_counted_by_reason(self, bench: Bench) -> None:
        """Every state the store gives up by itself adds one to its reason's count."""
        for session in "abc":
            await bench.step(session, 0, 6)
        await bench.miss("c", 7)
        bench.clock.now = TTL_S + 1
        await bench.store.sweep()
        assert bench.store.drops == {"evicted": 1, "length_mismatch": 1, "expired": 1}

    async def test_reasons_are_remembered_for_so_many(self) -> None:
        """The memory of ended sessions is bounded: the oldest becomes unknown."""
        bench = Bench(max_sessions=1)
        for i in range(REMEMBERED_SESSIONS + 2):
            await bench.step(f"s{i}", 0)
        assert (await bench.miss("s0", 1), await bench.miss("s1", 1)) == ("unknown", "evicted")


class TestBytes:
    async def test_the_least_recently_used_goes_for_bytes(self) -> None:
        """A step that needs more than is free takes it from the session used longest ago."""
        bench = Bench(max_sessions=9, max_bytes=100)
        for bench.clock.now, session in enumerate("abc"):
            await bench.step(session, 0, 3)
        await bench.step("c", 3, 2)
        assert (await bench.miss("a", 3), await bench.holds("b", 3)) == ("evicted", True)

    async def test_a_step_does_not_evict_its_own_session(self) -> None:
        """Room is made by others, even where the stepping session is the oldest."""
        bench = Bench(max_bytes=100)
        await bench.step("a", 0, 5)
        bench.clock.now = 1
        await bench.step("b", 0, 5)
        await bench.step("a", 5)
        assert await bench.holds("a", 6)

    async def test_a_fresh_step_uses_the_room_of_what_it_replaces(self) -> None:
        """The old state of the session does not count against its new one."""
        bench = Bench(max_bytes=100)
        await bench.step("a", 0, 5)
        await bench.step("b", 0, 5)
        await bench.step("b", 0, 5)
        assert await bench.holds("a", 5)

    async def test_room_is_reserved_while_a_step_runs(self) -> None:
        """Two steps at once cannot both be promised the last bytes."""
        bench = Bench(max_bytes=100)
        async with bench.running("a", need_bytes=60):
            with pytest.raises(CacheFull):
                await bench.step("b", 0, need_bytes=41)

    async def test_a_reservation_ends_with_its_lease(self) -> None:
        """What a step reserved and did not use is free afterwards."""
        bench = Bench(max_bytes=100)
        async with bench.running("a", need_bytes=60):
            pass
        await bench.step("b", 0, need_bytes=90)
        assert await bench.holds("a", 1)

    async def test_an_outgrown_reservation_is_paid_by_the_idle(self) -> None:
        """A state larger than announced pushes others out, so that the budget holds."""
        bench = Bench(max_bytes=100)
        await bench.step("a", 0, 5)
        bench.clock.now = 1
        await bench.step("b", 0, 6, need_bytes=0)
        assert await bench.miss("a", 5) == "evicted"

    async def test_a_state_above_the_budget_does_not_stay(self) -> None:
        """A state larger than the whole budget is evicted as soon as its step has ended."""
        bench = Bench(max_bytes=100)
        await bench.step("a", 0, 11, need_bytes=0)
        assert await bench.miss("a", 11) == "evicted"


class TestFull:
    async def test_all_slots_in_use_is_full(self, bench: Bench) -> None:
        """Where every session is leased, a new one finds no room."""
        async with bench.running("a"), bench.running("b"):
            with pytest.raises(CacheFull):
                await bench.step("c", 0)

    async def test_full_says_what_was_missing(self) -> None:
        """The error carries the bytes needed, those of others, and the limits."""
        bench = Bench(max_bytes=100)
        await bench.step("a", 0, 5)
        with pytest.raises(CacheFull) as caught:
            await bench.step("b", 0, need_bytes=101)
        assert caught.value.members == {
            "need": 101,
            "used": 50,
            "limit": 100,
            "sessions": 1,
            "max_sessions": 2,
        }

    async def test_full_evicts_nobody(self) -> None:
        """Where even all evictions would not suffice, there is none."""
        bench = Bench(max_sessions=3, max_bytes=100)
        await bench.step("a", 0, 3)
        async with bench.running("b", need_bytes=50):
            with pytest.raises(CacheFull):
                await bench.step("c", 0, need_bytes=51)
        assert await bench.holds("a", 3)

    async def test_full_keeps_the_session_that_wanted_more(self) -> None:
        """A step that found no room left its session as it was, to be tried again."""
        bench = Bench(max_bytes=100)
        await bench.step("a", 0, 5)
        with pytest.raises(CacheFull):
            await bench.step("a", 5, need_bytes=51)
        assert await bench.holds("a", 5)

    async def test_full_keeps_the_session_that_was_to_be_replaced(self) -> None:
        """A fresh step that found no room did not drop the old state."""
        bench = Bench(max_bytes=100)
        await bench.step("a", 0, 5)
        with pytest.raises(CacheFull):
            await bench.step("a", 0, need_bytes=101)
        assert await bench.holds("a", 5)


class TestRelease:
    async def test_a_released_session_is_gone(self, bench: Bench) -> None:
        """After a release nothing is held and nothing remembered."""
        await bench.step("a", 0, 6)
        await bench.store.release(SessionId("a"))
        assert await bench.miss("a", 6) == "unknown"

    async def test_a_release_says_what_it_freed(self, bench: Bench) -> None:
        """The first release frees one state, the second none."""
        await bench.step("a", 0, 6)
        freed = [await bench.store.release(SessionId("a")) for _ in range(2)]
        assert freed == [1, 0]

    async def test_a_release_frees_nothing_that_expired(self, bench: Bench) -> None:
        """A session that was over before its release counts as expired, not as freed."""
        await bench.step("a", 0, 6)
        bench.clock.now = TTL_S + 1
        assert await bench.store.release(SessionId("a")) == 0

    async def test_a_release_forgets_why_the_session_had_ended(self, bench: Bench) -> None:
        """A session closed after its expiry is not remembered as expired."""
        await bench.step("a", 0, 6)
        bench.clock.now = TTL_S + 1
        await bench.store.release(SessionId("a"))
        assert await bench.miss("a", 6) == "unknown"

    async def test_a_release_spares_the_others(self, bench: Bench) -> None:
        """Only the named session goes."""
        await bench.step("a", 0, 6)
        await bench.step("b", 0, 6)
        await bench.store.release(SessionId("a"))
        assert await bench.holds("b", 6)

    async def test_a_session_released_in_a_step_goes_with_it(self, bench: Bench) -> None:
        """Whatever the running step commits, its session is gone when it ends."""
        async with bench.running("a"):
            await bench.store.release(SessionId("a"))
        assert await bench.miss("a", 1) == "unknown"

    async def test_a_doomed_session_is_held_until_its_step_ends(self, bench: Bench) -> None:
        """A release takes no memory from under a running step, nor counts it as free."""
        async with bench.running("a"):
            await bench.store.release(SessionId("a"))
            assert await bench.store.usage() == CacheUsage(1, 1, 0)

    async def test_a_doomed_session_is_freed_once(self, bench: Bench) -> None:
        """The second release during a step has nothing left to do."""
        async with bench.running("a"):
            freed = [await bench.store.release(SessionId("a")) for _ in range(2)]
        assert freed == [1, 0]


class TestGuarded:
    @pytest.mark.parametrize(
        ("step_id", "epoch", "guarded"),
        [("x", 1, True), ("x", 0, False), (None, 1, False), (None, 0, False)],
    )
    async def test_a_step_is_guarded_by_its_id_and_epoch(
        self, step_id: str | None, epoch: int, guarded: bool
    ) -> None:
        """Either alone does not tell enough."""
        assert step_ref(0, step_id, epoch).guarded is guarded

    async def test_guarded_steps_continue_each_other(self, bench: Bench) -> None:
        """In order, steps of one epoch are taken as others are."""
        await bench.guarded(0, 6)
        await bench.guarded(6)
        assert await bench.guarded(7, answer="third") == "third"

    @pytest.mark.parametrize("past_len", [5, 7])
    async def test_a_late_or_early_step_is_told_what_is_held(
        self, bench: Bench, past_len: int
    ) -> None:
        """A guarded step at another length misses, and learns the length."""
        await bench.guarded(0, 6)
        assert (await bench.late(past_len)).members == {"reason": "length_mismatch", "held": 6}

    @pytest.mark.parametrize("past_len", [0, 5, 7])
    async def test_a_late_or_early_step_changes_nothing(self, bench: Bench, past_len: int) -> None:
        """The state goes on as if such a step had never come."""
        await bench.guarded(0, 6)
        await bench.late(past_len)
        assert await bench.guarded(6, answer="next") == "next"

    async def test_a_late_step_drops_nothing(self, bench: Bench) -> None:
        """It counts as a miss, and not as a state given up."""
        await bench.guarded(0, 6)
        await bench.late(7)
        assert (bench.store.misses, bench.store.drops) == ({"length_mismatch": 1}, {})

    async def test_a_first_step_that_comes_twice_is_late(self, bench: Bench) -> None:
        """In the entry's own epoch a step at position 0 does not begin the session anew."""
        await bench.guarded(0, 6)
        assert (await bench.late(0)).members == {"reason": "length_mismatch", "held": 6}

    async def test_a_first_step_at_other_layers_is_late_too(self, bench: Bench) -> None:
        """Whichever layers it is for, it does not replace what its epoch holds."""
        await bench.guarded(0, 6)
        assert (await bench.late(0, start_layer=2)).members["reason"] == "route_mismatch"

    async def test_a_first_step_of_a_higher_epoch_replaces(self, bench: Bench) -> None:
        """Who steers the session now may begin it anew."""
        await bench.guarded(0, 6)
        await bench.guarded(0, 3, epoch=2)
        assert await bench.store.usage() == CacheUsage(1, 0, 30)

    async def test_a_step_of_a_higher_epoch_may_go_on(self, bench: Bench) -> None:
        """Who steers the session now may also use what is held."""
        await bench.guarded(0, 6)
        await bench.guarded(6, epoch=2)
        assert await bench.guarded(7, epoch=2, answer="next") == "next"

    async def test_a_late_step_in_a_higher_epoch_changes_nothing(self, bench: Bench) -> None:
        """One that does not fit is told what is held, and raises no epoch."""
        await bench.guarded(0, 6)
        held = (await bench.late(7, epoch=2)).members["held"]
        assert (held, await bench.guarded(6, answer="next")) == (6, "next")

    async def test_a_repeat_in_its_epoch_is_answered(self, bench: Bench) -> None:
        """The same id, position and epoch is the same step."""
        await bench.guarded(0, 6, step_id="p", answer="first")
        assert await bench.guarded(0, 6, step_id="p", answer="second") == "first"

    async def test_a_repeat_in_another_epoch_is_another_step(self, bench: Bench) -> None:
        """What was answered to the one who steered before is not answered to the next."""
        await bench.guarded(0, 6, step_id="p", answer="first")
        assert await bench.guarded(0, 6, epoch=2, step_id="p", answer="second") == "second"

    async def test_a_session_that_is_not_held_misses_as_ever(self, bench: Bench) -> None:
        """Guarded or not, a step that continues nothing is told that nothing is held."""
        assert (await bench.late(6)).members == {"reason": "unknown", "held": 0}

    async def test_an_unguarded_step_still_drops(self, bench: Bench) -> None:
        """Whose order is not known is trusted: the state must be wrong."""
        await bench.step("a", 0, 6, step_id="x")
        with pytest.raises(CacheMiss, match="dropped"):
            await bench.step("a", 7, step_id="y")
        assert await bench.store.usage() == CacheUsage(0, 0, 0)

    async def test_a_busy_session_tells_what_is_held(self, bench: Bench) -> None:
        """Who has to wait learns how far the session had come."""
        await bench.guarded(0, 6)
        async with bench.running("a", 6, epoch=1):
            with pytest.raises(SessionBusy) as caught:
                await bench.guarded(6)
        assert caught.value.members == {"held": 6}


class TestEpochs:
    @pytest.mark.parametrize("past_len", [0, 6])
    async def test_a_lower_epoch_is_stale(self, bench: Bench, past_len: int) -> None:
        """A step of who steered before is refused, and told the epoch and what is held."""
        await bench.guarded(0, 6, epoch=2)
        assert await bench.stale(past_len, epoch=1) == {"expected": 2, "actual": 1, "held": 6}

    async def test_a_stale_step_changes_nothing(self, bench: Bench) -> None:
        """The session goes on in its epoch."""
        await bench.guarded(0, 6, epoch=2)
        await bench.stale(0, epoch=1)
        assert await bench.guarded(6, epoch=2, answer="next") == "next"

    async def test_nobody_in_particular_is_stale_too(self, bench: Bench) -> None:
        """A step without an epoch does not come between those who steer by epochs."""
        await bench.guarded(0, 6)
        assert await bench.stale(6, epoch=0) == {"expected": 1, "actual": 0, "held": 6}

    async def test_a_stale_step_meets_a_running_one(self, bench: Bench) -> None:
        """While a step of a newer epoch runs, an old one is stale, not told to wait."""
        async with bench.running("a", epoch=2):
            assert await bench.stale(0, epoch=1) == {"expected": 2, "actual": 1, "held": 0}

    async def test_a_running_step_of_an_older_epoch_is_waited_for(self, bench: Bench) -> None:
        """A newer epoch does not take the state from under a step."""
        async with bench.running("a", epoch=1):
            with pytest.raises(SessionBusy):
                await bench.guarded(0, epoch=2)

    async def test_an_evicted_session_remembers_its_epoch(self, bench: Bench) -> None:
        """What is lost is not begun by a step of before; its own epoch may begin it again."""
        await bench.guarded(0, 6, epoch=2)
        bench.clock.now = 1
        await bench.step("b", 0)
        await bench.step("c", 0)
        stale = await bench.stale(0, epoch=1)
        assert stale == {"expected": 2, "actual": 1, "held": 0}
        assert (await bench.late(6, epoch=2)).members["reason"] == "evicted"
        assert await bench.guarded(0, 6, epoch=2) == "answer"

    async def test_a_failed_step_leaves_its_epoch(self, bench: Bench) -> None:
        """After a forward that failed the epoch may begin anew, and no earlier one."""
        with pytest.raises(ZeroDivisionError):
            async with bench.store.lease(
                key_of("a"),
                step_ref(0, "x", 2),
                fresh=True,
                need_bytes=0,
                new_state=FakeState,
            ):
                raise ZeroDivisionError
        assert await bench.stale(0, epoch=1) == {"expected": 2, "actual": 1, "held": 0}
        assert await bench.guarded(0, epoch=2, answer="anew") == "anew"

    async def test_a_session_begun_again_has_its_own_epoch(self, bench: Bench) -> None:
        """What was remembered of its end does not stand beside what is held."""
        await bench.guarded(0, 6)
        await bench.store.release(SessionId("a"), 1)
        await bench.guarded(0, 6, epoch=5)
        assert await bench.stale(6, epoch=4) == {"expected": 5, "actual": 4, "held": 6}

    async def test_epochs_are_remembered_for_so_many(self, bench: Bench) -> None:
        """The memory of closed sessions is bounded: a late step of the oldest is taken again."""
        for i in range(REMEMBERED_SESSIONS + 1):
            await bench.store.release(SessionId(f"s{i}"), 1)
        assert await bench.step("s0", 0, epoch=1) == "answer"
        assert await bench.stale(0, epoch=1, session="s1") == {
            "expected": 2,
            "actual": 1,
            "held": 0,
        }


class TestFence:
    @pytest.mark.parametrize("past_len", [0, 6])
    async def test_a_step_of_a_closed_epoch_is_refused(self, bench: Bench, past_len: int) -> None:
        """What was on its way when the session was closed does not bring it back."""
        await bench.guarded(0, 6)
        await bench.store.release(SessionId("a"), 1)
        assert await bench.stale(past_len, epoch=1) == {"expected": 2, "actual": 1, "held": 0}

    async def test_a_session_never_seen_can_be_closed(self, bench: Bench) -> None:
        """A step that is overtaken by its session's end is refused when it comes."""
        freed = await bench.store.release(SessionId("a"), 1)
        assert (freed, await bench.stale(0, epoch=1)) == (
            0,
            {"expected": 2, "actual": 1, "held": 0},
        )

    async def test_a_closed_session_may_begin_in_a_later_epoch(self, bench: Bench) -> None:
        """A fence is against what was, not against what comes."""
        await bench.guarded(0, 6)
        await bench.store.release(SessionId("a"), 1)
        assert await bench.guarded(0, 6, epoch=2, answer="anew") == "anew"

    async def test_a_release_without_epoch_fences_nothing(self, bench: Bench) -> None:
        """Who frees in any epoch may go on in the same one."""
        await bench.guarded(0, 6)
        freed = await bench.store.release(SessionId("a"))
        assert (freed, await bench.guarded(0, 6, answer="anew")) == (1, "anew")

    async def test_a_release_of_before_is_stale(self, bench: Bench) -> None:
        """Who steered before cannot close what another one steers now."""
        await bench.guarded(0, 6, epoch=2)
        with pytest.raises(StaleEpoch) as caught:
            await bench.store.release(SessionId("a"), 1)
        assert caught.value.members == {"expected": 2, "actual": 1, "held": 6}
        assert await bench.guarded(6, epoch=2, answer="next") == "next"

    async def test_a_fence_is_not_lowered(self, bench: Bench) -> None:
        """Closed again under an older epoch, or under none, the session stays as it was closed."""
        await bench.store.release(SessionId("a"), 3)
        await bench.store.release(SessionId("a"), 1)
        await bench.store.release(SessionId("a"))
        assert await bench.stale(0, epoch=3) == {"expected": 4, "actual": 3, "held": 0}

    async def test_a_session_closed_in_a_step_is_fenced_when_it_ends(self, bench: Bench) -> None:
        """The running step ends, its state goes, and another of its epoch is refused."""
        async with bench.running("a", epoch=1):
            await bench.store.release(SessionId("a"), 1)
        assert await bench.stale(0, epoch=1) == {"expected": 2, "actual": 1, "held": 0}

    async def test_a_session_closed_in_a_step_is_fenced_at_once(self, bench: Bench) -> None:
        """While the step still runs, another one of its epoch is refused as well."""
        async with bench.running("a", epoch=1):
            await bench.store.release(SessionId("a"), 1)
            assert await bench.stale(0, epoch=1) == {"expected": 2, "actual": 1, "held": 0}

    async def test_a_doomed_session_can_be_fenced(self, bench: Bench) -> None:
        """Freed in a step under no epoch and then under one, it is fenced by the latter."""
        async with bench.running("a", epoch=1):
            freed = [await bench.store.release(SessionId("a"), epoch) for epoch in (0, 1)]
        assert (freed, (await bench.stale(0, epoch=1))["expected"]) == ([1, 0], 2)

    async def test_a_closed_session_misses_as_unknown(self, bench: Bench) -> None:
        """A later epoch that would continue it is told that nothing is held."""
        await bench.guarded(0, 6)
        await bench.store.release(SessionId("a"), 1)
        assert (await bench.late(6, epoch=2)).members == {"reason": "unknown", "held": 0}


class TestCheck:
    async def test_a_check_that_raises_begins_no_session(self, bench: Bench) -> None:
        """A fresh step that is refused leaves nothing, and nobody went for it."""
        await bench.step("b", 0, 6)
        await bench.step("c", 0, 6)
        with pytest.raises(QueueFull):
            await bench.guarded(0, 6, check=refuse)
        assert await bench.store.usage() == CacheUsage(2, 0, 120)

    async def test_a_check_that_raises_leaves_the_session(self, bench: Bench) -> None:
        """A step refused for another reason than its own can come again."""
        await bench.guarded(0, 6)
        with pytest.raises(QueueFull):
            await bench.guarded(6, check=refuse)
        assert await bench.guarded(6, answer="next") == "next"

    async def test_a_check_that_raises_replaces_nothing(self, bench: Bench) -> None:
        """What a fresh step of a new epoch would have replaced is held still."""
        await bench.guarded(0, 6)
        with pytest.raises(QueueFull):
            await bench.guarded(0, 6, epoch=2, check=refuse)
        assert await bench.guarded(6, answer="next") == "next"

    async def test_a_replay_is_not_checked(self, bench: Bench) -> None:
        """An answer that is stored needs no place in a queue."""
        await bench.guarded(0, 6, step_id="p", answer="first")
        assert await bench.guarded(0, 6, step_id="p", check=refuse) == "first"

    async def test_a_miss_is_told_before_a_check(self, bench: Bench) -> None:
        """A step that cannot be run need not wait to learn it."""
        with pytest.raises(CacheMiss):
            await bench.guarded(6, check=refuse)


async def test_integrity_notices_a_state_changed_outside_a_lease(bench: Bench) -> None:
    """A state whose size is not that of its last commit breaks the store's laws."""
    leases: list[Lease[FakeState]] = []
    async with bench.store.lease(
        key_of("a"), step_ref(0), fresh=True, need_bytes=0, new_state=FakeState
    ) as lease:
        leases.append(lease)
        lease.commit(n_tokens=1, answer="answer", answer_nbytes=0)
    leases[0].state.extend(1)
    with pytest.raises(AssertionError, match="as their last commit left them"):
        bench.store.check_integrity()


class TestForks:
    async def test_a_fork_goes_on_behind_what_it_has_of_another(self, bench: Bench) -> None:
        """It holds the first tokens, and its own; the other session goes on as before."""
        await bench.step("a", 0, 6)
        assert await bench.fork("b", "a", 4) is None
        assert await bench.holds("b", 5)
        assert await bench.holds("a", 6)
        assert bench.store.n_forks == 1

    async def test_a_session_in_a_step_can_be_forked(self, bench: Bench) -> None:
        """What it held before that step is there to be had."""
        await bench.step("a", 0, 6)
        async with bench.running("a", 6):
            assert await bench.fork("b", "a", 7) == "length_mismatch"
            assert await bench.fork("b", "a", 6) is None

    async def test_an_unknown_session_cannot_be_forked(self, bench: Bench) -> None:
        """The reason is the other session's."""
        assert await bench.fork("b", "a", 4) == "unknown"
        await bench.step("a", 0, 6)
        bench.clock.now = TTL_S + 1
        assert await bench.fork("b", "a", 4) == "expired"

    async def test_another_start_layer_cannot_be_forked(self, bench: Bench) -> None:
        """A state is of the layers that it was made for."""
        await bench.step("a", 0, 6, start_layer=2)
        assert await bench.fork("b", "a", 4) == "route_mismatch"

    async def test_a_state_that_cannot_be_cut_is_no_fork(self, bench: Bench) -> None:
        """Then nothing is changed: nobody goes for it."""
        await bench.step("a", 0, 6)
        await bench.step("b", 0, 6)
        bench.clock.now = 1
        assert await bench.fork("c", "a", UNFORKABLE) == "length_mismatch"
        assert await bench.store.usage() == CacheUsage(2, 0, 120)

    async def test_a_fork_replaces_what_its_session_held(self, bench: Bench) -> None:
        """As any step does that begins a session; a late one does not."""
        await bench.step("a", 0, 6)
        await bench.step("b", 0, 9, epoch=1, step_id="x")
        assert await bench.fork("b", "a", 4, epoch=1) == "length_mismatch"
        assert await bench.fork("b", "a", 4, epoch=2) is None
        assert await bench.store.usage() == CacheUsage(2, 0, 60 + 50)

    async def test_a_forks_step_is_replayed(self, bench: Bench) -> None:
        """Sent again it gets the stored answer, also when what was forked is gone."""
        await bench.step("a", 0, 6)
        await bench.fork("b", "a", 4, epoch=1)
        await bench.store.release(SessionId("a"))
        assert await bench.fork("b", "a", 4, epoch=1) is None
        assert bench.store.n_forks == 1

    async def test_a_refused_fork_makes_none(self, bench: Bench) -> None:
        """With the queue full nothing is made and nobody goes."""
        await bench.step("a", 0, 6)
        with pytest.raises(QueueFull):
            await bench.step("b", 4, fork_of="a", check=refuse)
        assert await bench.store.usage() == CacheUsage(1, 0, 60)

    async def test_a_fork_does_not_push_out_what_it_is_made_of(self) -> None:
        """Where both find no room, nothing is changed; the session can begin without."""
        bench = Bench(max_bytes=100)
        await bench.step("a", 0, 6)
        assert await bench.fork("b", "a", 4, need_bytes=50) == "evicted"
        assert await bench.store.usage() == CacheUsage(1, 0, 60)
        assert await bench.fork("b", "a", 3 + 1, need_bytes=40) is None

    async def test_what_is_forked_was_used(self, bench: Bench) -> None:
        """So that another session goes for the fork, though it was used later."""
        await bench.step("a", 0, 6)
        bench.clock.now = 1
        await bench.step("b", 0, 6)
        bench.clock.now = 2
        assert await bench.fork("c", "a", 4) is None
        assert await bench.miss("b", 6) == "evicted"

    async def test_a_fork_counts_whole(self) -> None:
        """Sharing lasts until it is written: what it comes to take is reserved before."""
        bench = Bench(max_sessions=9, max_bytes=110)
        await bench.step("a", 0, 6)
        async with bench.running("b", need_bytes=10):
            assert await bench.fork("c", "a", 4, need_bytes=50) == "evicted"


class TestKept:
    async def test_a_kept_session_can_be_forked(self, bench: Bench) -> None:
        """Closed it is no session any more, but its tokens are there."""
        await bench.step("a", 0, 6, answer_nbytes=7)
        assert await bench.keep("a") == 0
        assert await bench.store.usage() == CacheUsage(0, 0, 60, kept=1)
        assert await bench.fork("b", "a", 4) is None

    @pytest.mark.parametrize("epoch", [0, 1])
    async def test_nothing_continues_a_kept_session(self, bench: Bench, epoch: int) -> None:
        """Its next step is told what that of a closed one is, and the state stays."""
        step_id = "x" if epoch else None
        await bench.step("a", 0, 6, epoch=epoch, step_id=step_id)
        await bench.keep("a", epoch)
        if epoch:
            assert await bench.stale(6, epoch=epoch) == {"expected": 2, "actual": 1, "held": 0}
            assert (await bench.late(6, epoch=2)).members == {"reason": "unknown", "held": 0}
        else:
            assert await bench.miss("a", 6) == "unknown"
        assert (await bench.store.usage()).kept == 1

    async def test_a_kept_session_may_begin_anew(self, bench: Bench) -> None:
        """In a new epoch, as a closed one may; what was kept is replaced."""
        await bench.step("a", 0, 6, epoch=1, step_id="x")
        await bench.keep("a", 1)
        await bench.step("a", 0, 2, epoch=2, step_id="y")
        assert await bench.store.usage() == CacheUsage(1, 0, 20)

    async def test_a_kept_session_is_the_first_to_go(self) -> None:
        """Before any that somebody continues, however long that one was idle."""
        bench = Bench(max_sessions=2)
        await bench.step("a", 0, 6)
        bench.clock.now = 1
        await bench.step("b", 0, 6)
        await bench.keep("b")
        await bench.step("c", 0, 6)
        assert await bench.holds("a", 6)
        assert await bench.miss("b", 6) == "evicted"

    async def test_a_kept_session_expires(self, bench: Bench) -> None:
        """After the same time as others."""
        await bench.step("a", 0, 6)
        await bench.keep("a")
        bench.clock.now = TTL_S + 1
        assert await bench.store.usage() == CacheUsage(0, 0, 0)

    @pytest.mark.parametrize("epoch", [0, 1, 2])
    async def test_a_kept_session_can_be_freed(self, bench: Bench, epoch: int) -> None:
        """In any epoch: nobody steers it any more."""
        await bench.step("a", 0, 6, epoch=1, step_id="x")
        await bench.keep("a", 1)
        assert await bench.keep("a", 1) == 0
        assert await bench.store.release(SessionId("a"), epoch) == 1
        assert await bench.store.usage() == CacheUsage(0, 0, 0)

    async def test_a_session_closed_in_a_step_is_kept_with_that_steps_tokens(
        self, bench: Bench
    ) -> None:
        """It lands as always, and nobody waits for it."""
        await bench.step("a", 0, 6)
        async with bench.running("a", 6):
            await bench.keep("a")
            with pytest.raises(SessionBusy):
                await bench.step("a", 0)
        assert await bench.store.usage() == CacheUsage(0, 0, 70, kept=1)
        assert await bench.fork("b", "a", 7) is None

    async def test_what_was_to_be_kept_can_be_freed_in_the_same_step(self, bench: Bench) -> None:
        """The later word counts."""
        async with bench.running("a"):
            await bench.keep("a")
            assert await bench.store.release(SessionId("a")) == 1
            assert await bench.keep("a") == 0
        assert await bench.store.usage() == CacheUsage(0, 0, 0)

    async def test_nothing_is_kept_of_a_session_that_is_not_here(self, bench: Bench) -> None:
        """Its end is noted as any other."""
        assert await bench.keep("a", 1) == 0
        assert await bench.store.usage() == CacheUsage(0, 0, 0)
        assert (await bench.stale(0, epoch=1))["expected"] == 2


@dataclass(frozen=True)
class Visit:
    """What one task of the storm does: a step, held for so many turns of the loop, then an end."""

    session: str
    past_len: int
    start_layer: int
    step_id: str | None
    epoch: int
    need_bytes: int
    turns: int
    grows: int
    ending: str
    fork_of: str | None


visits = st.builds(
    Visit,
    session=st.sampled_from("abcd"),
    past_len=st.integers(0, 2),
    start_layer=st.sampled_from([0, 0, 0, 2]),
    step_id=st.sampled_from([None, "x", "y"]),
    epoch=st.sampled_from([0, 0, 1, 1, 2]),
    need_bytes=st.integers(0, 60),
    turns=st.integers(0, 4),
    grows=st.integers(0, 6),
    ending=st.sampled_from(["commit", "commit", "commit", "return", "raise"]),
    fork_of=st.sampled_from([None, None, *"abcd"]),
)
turns = st.tuples(
    st.sampled_from(["cancel", "cancel", "release", "keep", "sweep", "wait"]),
    st.integers(0, 19),
    st.sampled_from([0.0, 1.0, TTL_S]),
)


async def visit(store: SessionCacheStore[FakeState], plan: Visit) -> None:
    async with store.lease(
        key_of(plan.session, plan.start_layer),
        step_ref(plan.past_len, plan.step_id, plan.epoch),
        fresh=plan.past_len == 0,
        need_bytes=plan.need_bytes,
        new_state=FakeState,
        fork_of=SessionId(plan.fork_of) if plan.fork_of and plan.past_len else None,
    ) as lease:
        for _ in range(plan.turns):
            await asyncio.sleep(0)  # a turn of the loop, as a forward on another thread takes
        if lease.replay is not None:
            return
        lease.state.extend(plan.grows)
        if plan.ending == "raise":
            raise ZeroDivisionError
        if plan.ending == "commit":
            lease.commit(n_tokens=1, answer="answer", answer_nbytes=3)


@given(plans=st.lists(visits, max_size=20), storm=st.lists(turns, max_size=20))
async def test_a_storm_of_cancellations_leaves_the_store_whole(
    plans: list[Visit], storm: list[tuple[str, int, float]]
) -> None:
    """Whenever steps end or are cut off, the laws hold, and at the end no lease is left."""
    bench = Bench(max_sessions=3, max_bytes=100)
    tasks = [asyncio.create_task(visit(bench.store, plan)) for plan in plans]
    for deed, which, seconds in storm:
        bench.clock.now += seconds
        if deed == "cancel" and tasks:
            tasks[which % len(tasks)].cancel()
        elif deed in {"release", "keep"}:
            session, epoch = SessionId("abcd"[which % 4]), which // 4 % 3
            with contextlib.suppress(StaleEpoch):
                await bench.store.release(session, epoch, keep=deed == "keep")
        elif deed == "sweep":
            await bench.store.sweep()
        await asyncio.sleep(0)
        bench.store.check_integrity()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    bench.store.check_integrity()
    unforeseen = [
        end
        for end in ends
        if not isinstance(end, MeshError | ZeroDivisionError | asyncio.CancelledError | None)
    ]
    assert (unforeseen, (await bench.store.usage()).leases) == ([], 0)
