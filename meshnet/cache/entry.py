"""What the store keeps of one session, and how it lends it: steps, leases, entries.

All of it is synchronous and knows nothing of limits or of other sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from meshnet.cache.policy import CacheKey, EntryView
from meshnet.errors import MissReason
from meshnet.ids import StepId


class Forkable(Protocol):
    """What the store needs of a state."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory the state holds now."""
        ...

    def fork(self, n_tokens: int) -> Self | None:
        """A state of the first `n_tokens` tokens; None where it cannot be had.

        A step may be extending this one meanwhile, in another thread.
        """
        ...


StateT = TypeVar("StateT", bound=Forkable)


@dataclass(frozen=True, slots=True)
class StepRef:
    """Which step this is; one that is equal in all three is the same step again.

    Attributes:
        step_id: None for a step that cannot be told from another, and so is never replayed.
        past_len: Tokens the state must already hold.
        epoch: Who steers the session, and since when; the higher one wins. 0 is nobody in
            particular.
    """

    step_id: StepId | None
    past_len: int
    epoch: int = 0

    @property
    def guarded(self) -> bool:
        """Whether the step tells enough for its order to be known.

        The position of a guarded step that does not fit is the step's fault (it is late, or
        doubled), not the state's. See ADR 0011.
        """
        return self.step_id is not None and self.epoch > 0


@dataclass(frozen=True, slots=True)
class Commit:
    """What a step left: how many tokens more, the answer to a repeat, and what both take."""

    n_tokens: int
    answer: object
    answer_nbytes: int
    state_nbytes: int


class Lease(Generic[StateT]):
    """Exclusive use of one session's state for one step, or the answer to a step repeated.

    Attributes:
        replay: The answer stored when this step was first run, else None. Where it is set there
            is nothing to run and no state is lent.
        committed: What `commit` recorded; the store reads it when the lease is left.
    """

    def __init__(self, state: StateT | None, *, replay: object | None = None) -> None:
        self._state = state
        self.replay = replay
        self.committed: Commit | None = None

    @property
    def state(self) -> StateT:
        """The session's state; the step mutates it.

        Raises:
            RuntimeError: The lease is a replay.
        """
        if self._state is None:
            raise RuntimeError("a replay lends no state: the step was already run")
        return self._state

    def commit(self, *, n_tokens: int, answer: object, answer_nbytes: int) -> None:
        """Declare the step whole. The store takes it over when the lease is left.

        Args:
            n_tokens: How many tokens the step added to the state.
            answer: What a repeat of this step is to be answered; not None.
            answer_nbytes: Bytes of memory the stored answer takes.

        Raises:
            RuntimeError: The lease is a replay. Nothing was changed.
        """
        self.committed = Commit(n_tokens, answer, answer_nbytes, self.state.nbytes)


@dataclass(slots=True)
class Entry(Generic[StateT]):
    """One session's state; `nbytes` is measured at each commit, `reserved` is what a step may add.

    A doomed entry was released during a step and goes with the end of its lease. A kept one was
    closed, and is there to be forked: no step continues it.
    """

    key: CacheKey
    state: StateT
    last_used: float
    epoch: int = 0
    length: int = 0
    nbytes: int = 0
    reserved: int = 0
    leased: bool = False
    doomed: bool = False
    kept: bool = False
    last_step: StepRef | None = None
    last_commit: Commit | None = None

    def view(self) -> EntryView:
        """The entry as the policy sees it."""
        nbytes = self.nbytes + self.reserved
        return EntryView(self.key, nbytes, self.last_used, self.leased, self.kept)

    def answer_to(self, key: CacheKey, step: StepRef) -> object | None:
        """The stored answer, where `step` is the one that was committed last."""
        if step.step_id is None or self.last_commit is None:
            return None
        return self.last_commit.answer if (self.key, self.last_step) == (key, step) else None

    def knows_order_of(self, step: StepRef) -> bool:
        """Whether a step that is not at the end of the state is late, rather than another's."""
        return step.guarded and step.epoch == self.epoch

    def begin(self, epoch: int, reserved: int) -> None:
        """Lend the state to a step."""
        self.epoch = epoch
        self.leased = True
        self.reserved = reserved

    def close(self, epoch: int, *, keep: bool = False) -> None:
        """Refuse steps up to this epoch from now on, if one is given; doomed while leased.

        Args:
            epoch: The last one that is refused; 0 is none.
            keep: Keep the state, also that of a step that is running, for forks.
        """
        if epoch:
            self.epoch = max(epoch + 1, self.epoch)
        self.kept = keep
        self.doomed = self.leased and not keep
        if keep and not self.leased:
            self._forget_answer()

    def land(self, step: StepRef, commit: Commit, now: float) -> None:
        """Take the state back from a step that was whole."""
        self.leased = False
        self.reserved = 0
        self.length += commit.n_tokens
        self.nbytes = commit.state_nbytes + commit.answer_nbytes
        self.last_used = now
        self.last_step = step
        self.last_commit = commit
        if self.kept:
            self._forget_answer()

    def is_settled(self) -> bool:
        """Whether an idle entry is as its last commit left it."""
        answer_nbytes = self.last_commit.answer_nbytes if self.last_commit else 0
        return (
            self.kept == (self.last_commit is None)
            and self.nbytes == self.state.nbytes + answer_nbytes
            and self.reserved == 0
            and not self.doomed
        )

    def _forget_answer(self) -> None:
        """Nobody repeats a step of a session that is closed."""
        self.last_step = self.last_commit = None
        self.nbytes = self.state.nbytes


@dataclass(frozen=True, slots=True)
class Ended:
    """What is known of a session that is no longer held.

    Attributes:
        reason: Why a step that continues it misses.
        min_epoch: The lowest epoch that may still begin or continue it.
    """

    reason: MissReason
    min_epoch: int
