"""Steps for the store's state machine: which there may be, how they run, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from hypothesis import strategies as st

from meshnet.cache.entry import Lease
from meshnet.cache.store import SessionCacheStore
from meshnet.errors import CacheMiss, MeshError, QueueFull, SessionBusy, StaleEpoch
from meshnet.ids import SessionId
from tests.unit.cache.store_model import Outcome, Sent, TokenState

SESSIONS = [SessionId(name) for name in "abcde"]


class Ending(Enum):
    """How a lease is left."""

    COMMIT = auto()
    ERROR = auto()
    CANCEL = auto()
    ERROR_AFTER_COMMIT = auto()
    CANCEL_AFTER_COMMIT = auto()

    @property
    def commits(self) -> bool:
        return self not in {Ending.ERROR, Ending.CANCEL}


class StageFault(Exception):
    """A forward that failed."""


class Running:
    """A step in a task of its own; once it holds its lease it waits to be told how to end."""

    def __init__(self, store: SessionCacheStore[TokenState], sent: Sent) -> None:
        loop = asyncio.get_running_loop()
        self.sent = sent
        self.answer = object()
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        self.state: TokenState | None = None
        self._ending: asyncio.Future[Ending] = loop.create_future()
        self.task = asyncio.create_task(self._run(store))

    async def begun(self) -> Outcome:
        """Wait until it is known what became of it."""
        await asyncio.wait({self.task, self.outcome}, return_when=asyncio.FIRST_COMPLETED)
        if not self.outcome.done():
            await self.task
        return self.outcome.result()

    async def end(self, ending: Ending) -> None:
        """Leave the lease."""
        self._ending.set_result(ending)
        await asyncio.wait({self.task})
        self.state = None
        cancels = ending in {Ending.CANCEL, Ending.CANCEL_AFTER_COMMIT}
        assert self.task.cancelled() == cancels
        if not cancels:
            self.task.result()

    async def _run(self, store: SessionCacheStore[TokenState]) -> None:
        sent = self.sent
        lease = store.lease(
            sent.key,
            sent.ref,
            fresh=sent.ref.past_len == 0,
            need_bytes=sent.need_bytes,
            new_state=_no_memory if sent.hindrance == "memory" else TokenState,
            check=_no_place if sent.hindrance == "queue" else _is_well,
            fork_of=sent.fork_of,
        )
        try:
            async with lease as held:
                await self._step(held)
        except StageFault:
            pass
        except MemoryError:
            self.outcome.set_result(Outcome("MemoryError"))
        except MeshError as error:
            self.outcome.set_result(outcome_of(error))

    async def _step(self, lease: Lease[TokenState]) -> None:
        if lease.replay is not None:
            self.outcome.set_result(Outcome("replay", answer=lease.replay))
            return
        self.state = lease.state
        self.outcome.set_result(Outcome("lent", held=len(self.state.tokens)))
        ending = await self._ending
        # A step that fails has begun to write: what it wrote to must not be lent again.
        lease.state.tokens.extend(self.sent.tokens)
        if ending.commits:
            n_tokens, nbytes = len(self.sent.tokens), self.sent.answer_nbytes
            lease.commit(n_tokens=n_tokens, answer=self.answer, answer_nbytes=nbytes)
        if ending in {Ending.CANCEL, Ending.CANCEL_AFTER_COMMIT}:
            self.task.cancel()
            await asyncio.sleep(0)
        if ending in {Ending.ERROR, Ending.ERROR_AFTER_COMMIT}:
            raise StageFault


def outcome_of(error: MeshError) -> Outcome:
    held = error.members.get("held")
    match error:
        case CacheMiss():
            return Outcome(error.code, error.members["reason"], held=held)
        case StaleEpoch():
            return Outcome(error.code, error.members["expected"], held=held)
        case SessionBusy():
            return Outcome(error.code, held=held)
        case _:
            return Outcome(error.code)


def _no_memory() -> TokenState:
    raise MemoryError


def _no_place() -> None:
    raise QueueFull("too many steps are waiting")


def _is_well() -> None:
    pass


class Kind(Enum):
    """What is particular about a step."""

    PLAIN = auto()
    WITH_ANSWER = auto()
    WITHOUT_ID = auto()
    WITHOUT_EPOCH = auto()
    OTHER_LAYERS = auto()
    LARGER_THAN_ANNOUNCED = auto()
    QUEUE_FULL = auto()
    NO_MEMORY = auto()


@dataclass(frozen=True)
class Wish:
    """A step to be made, told by how it stands to what its session holds.

    Attributes:
        past: So many tokens away from the right position; None is position 0.
        epoch: So many from the lowest that is taken.
    """

    session: SessionId
    past: int | None
    epoch: int
    n_tokens: int
    kind: Kind


def _wishes(pasts: Sequence[int | None], epochs: Sequence[int]) -> st.SearchStrategy[Wish]:
    return st.builds(
        Wish,
        session=st.sampled_from(SESSIONS),
        past=st.sampled_from(pasts),
        epoch=st.sampled_from(epochs),
        n_tokens=st.integers(1, 4),
        kind=st.sampled_from([Kind.PLAIN] * 6 + [Kind.WITH_ANSWER] * 4 + list(Kind)),
    )


BEGINNINGS = _wishes([None], epochs=[0, 1, 1, -1])
NEXT = _wishes([0], epochs=[0, 0, 0, 0, 1, -1])
FORKS = _wishes([0], epochs=[0, 1, 1, 1, -1])
MISPLACED = _wishes([-1, 1, 3], epochs=[0, 0, 1])
ANY = _wishes([None, 0, 0, -1, 1], epochs=[0, 0, 0, 1, -1])
ENDINGS = st.sampled_from(Ending)
MAYBE_ENDINGS = st.sampled_from([Ending.COMMIT, Ending.COMMIT, Ending.COMMIT, Ending.COMMIT, None])
