"""What the store must do, told a second time and plainly; the store is compared with it.

A state is a list of tokens here, so that a step which was lost, doubled or applied to another
session shows in what the state contains and not in its length only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from meshnet.cache.entry import StepRef
from meshnet.cache.policy import CacheKey, CacheLimits
from meshnet.errors import MissReason
from meshnet.ids import SessionId

TOKEN_BYTES = 10


class TokenState:
    """The tokens a session ran, ten bytes each."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def nbytes(self) -> int:
        return TOKEN_BYTES * len(self.tokens)

    def fork(self, n_tokens: int) -> TokenState | None:
        fork = TokenState()
        fork.tokens = self.tokens[:n_tokens]
        return fork


@dataclass(frozen=True)
class Sent:
    """One step as it was sent; sent again it is equal.

    Attributes:
        tokens: What it adds to the state.
        need_bytes: What it announces to add, which may be less than it does.
        hindrance: What keeps a step that fits from running: the queue, or the memory for a state.
        fork_of: The session whose first tokens it begins with.
    """

    key: CacheKey
    ref: StepRef
    tokens: tuple[int, ...]
    need_bytes: int
    answer_nbytes: int
    hindrance: str | None = None
    fork_of: SessionId | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        what: `lent`, `replay`, or the code of the error.
        held: Tokens the state held then, as far as it was told.
        answer: The stored answer of a replay, itself.
    """

    what: str
    reason: object = None
    held: object = None
    answer: object = None


@dataclass
class Held:
    """One session as it must be; `tokens` are those of committed steps.

    Attributes:
        state: The object that the store lent, to be lent again.
        reserved: What the running step announced, None while none runs.
        kept: It was closed, and is there to be forked.
        landed: A step was committed: what it takes was measured.
        last: The last step that was committed, and its answer.
    """

    key: CacheKey
    epoch: int
    last_used: float
    reserved: int | None = None
    tokens: list[int] = field(default_factory=list[int])
    state: TokenState | None = None
    doomed: bool = False
    kept: bool = False
    landed: bool = False
    last: tuple[Sent, object] | None = None

    @property
    def nbytes(self) -> int:
        answer_nbytes = self.last[0].answer_nbytes if self.last else 0
        return TOKEN_BYTES * len(self.tokens) + answer_nbytes if self.landed else 0

    @property
    def idle(self) -> bool:
        return self.reserved is None

    @property
    def room(self) -> int:
        return self.nbytes + (self.reserved or 0)


class StoreModel:
    """All sessions as they must be.

    Args:
        limits: The store's.
        n_remembered: How many ended sessions the store remembers.
    """

    def __init__(self, limits: CacheLimits, n_remembered: int) -> None:
        self.limits = limits
        self.now = 0.0
        self.held: dict[SessionId, Held] = {}
        self.misses: Counter[MissReason] = Counter()
        self.drops: Counter[MissReason] = Counter()
        self._ended: OrderedDict[SessionId, tuple[MissReason, int]] = OrderedDict()
        self._n_remembered = n_remembered

    def lowest_epoch(self, session: SessionId) -> int:
        """The lowest epoch that a step of the session may have."""
        held = self.held.get(session)
        return held.epoch if held else self._ended.get(session, ("unknown", 0))[1]

    def overdue(self) -> list[SessionId]:
        """Who is to be dropped for its age as soon as anybody looks, the oldest first."""
        by_age = sorted(self.held.items(), key=lambda item: item[1].last_used)
        return [s for s, h in by_age if h.idle and self.now - h.last_used > self.limits.ttl_s]

    def expire(self) -> int:
        """Somebody looks. Returns how many went."""
        overdue = self.overdue()
        for session in overdue:
            self._drop(session, "expired")
        return len(overdue)

    def begin(self, sent: Sent) -> Outcome:
        """A step asks for its session's state; one that is `lent` is to be ended."""
        self.expire()
        held = self.held.get(sent.key.session)
        lowest = self.lowest_epoch(sent.key.session)
        if sent.ref.epoch < lowest:
            n_held = len(held.tokens) if held and not held.kept else 0
            return Outcome("stale_epoch", lowest, held=n_held)
        if held and not held.idle:
            return Outcome("session_busy", held=len(held.tokens))
        if held and held.last and sent.ref.step_id is not None:
            last, answer = held.last
            if (last.key, last.ref) == (sent.key, sent.ref):
                return Outcome("replay", answer=answer)
        guarded = sent.ref.step_id is not None and sent.ref.epoch > 0
        goes_on = held is not None and not held.kept
        late = held is not None and goes_on and guarded and sent.ref.epoch == held.epoch
        if sent.fork_of is not None and not late:
            return self._fork(sent, sent.fork_of)
        if sent.ref.past_len == 0 and not late:
            return self._admit(sent, None)
        return self._continue(sent, guarded=guarded)

    def commit(self, sent: Sent, answer: object) -> None:
        """The lent state was extended, and its lease left."""
        held = self.held[sent.key.session]
        if held.doomed:
            self.fail(sent)
            return
        held.tokens += sent.tokens
        held.reserved, held.last, held.last_used = None, (sent, answer), self.now
        held.landed = True
        if held.kept:
            held.last = None
        self.expire()
        for session in self._victims(list(self.held), 0, 0) or []:
            self._drop(session, "evicted")

    def fail(self, sent: Sent) -> None:
        """A lease was left without a commit."""
        self._end(sent.key.session, "unknown")

    def release(self, session: SessionId, epoch: int, *, keep: bool) -> int | Outcome:
        """What a release gives: how many states went, or a refusal."""
        self.expire()
        held = self.held.get(session)
        closed = epoch + 1 if epoch else 0
        if held is None:
            self._remember(session, "unknown", closed)
            return 0
        if not held.doomed and not held.kept and epoch and epoch < held.epoch:
            return Outcome("stale_epoch", held.epoch, held=len(held.tokens))
        held.epoch = max(held.epoch, closed)
        if held.doomed:
            return 0
        held.kept = keep
        if keep:
            held.last = None if held.idle else held.last
            return 0
        held.doomed = True
        if held.idle:
            self._end(session, "unknown")
        return 1

    def look(self, session: SessionId) -> Outcome:
        """What a guarded step at a position that never fits is told. It changes nothing."""
        held = self.held.get(session)
        if held and not held.idle:
            return Outcome("session_busy", held=len(held.tokens))
        if held is None or held.kept:
            return self._miss(self._ended.get(session, ("unknown", 0))[0], 0)
        return self._miss("length_mismatch", len(held.tokens))

    def _fork(self, sent: Sent, of: SessionId) -> Outcome:
        parent, past_len = self.held.get(of), sent.ref.past_len
        if parent is None:
            return self._miss(self._ended.get(of, ("unknown", 0))[0], 0)
        if parent.key.start_layer != sent.key.start_layer:
            return self._miss("route_mismatch", 0)
        if len(parent.tokens) < past_len:
            return self._miss("length_mismatch", 0)
        if sent.hindrance == "queue":
            return Outcome("queue_full")
        parent.last_used = self.now
        others = [other for other in self.held if other != sent.key.session]
        victims = self._victims(others, 1, sent.need_bytes)
        if victims is None:
            return Outcome("cache_full")
        if of in victims:
            return self._miss("evicted", 0)
        for victim in victims:
            self._drop(victim, "evicted")
        fork = Held(sent.key, sent.ref.epoch, self.now, sent.need_bytes, parent.tokens[:past_len])
        self.held[sent.key.session] = fork
        self._ended.pop(sent.key.session, None)
        return Outcome("lent", held=past_len)

    def _continue(self, sent: Sent, *, guarded: bool) -> Outcome:
        session = sent.key.session
        held = self.held.get(session)
        if held is None or held.kept:
            return self._miss(self._ended.get(session, ("unknown", 0))[0], 0)
        if held.key != sent.key:
            return self._miss("route_mismatch", 0)
        if len(held.tokens) == sent.ref.past_len:
            return self._admit(sent, held)
        if guarded:
            return self._miss("length_mismatch", len(held.tokens))
        self._drop(session, "length_mismatch")
        return self._miss("length_mismatch", 0)

    def _admit(self, sent: Sent, held: Held | None) -> Outcome:
        """Lend, if there is room; `held` is what the step continues."""
        session = sent.key.session
        if sent.hindrance == "queue":
            return Outcome("queue_full")
        others = [other for other in self.held if other != session]
        need = sent.need_bytes + (held.nbytes if held else 0)
        victims = self._victims(others, 1, need)
        if victims is None:
            return Outcome("cache_full")
        if held is None and sent.hindrance == "memory":
            return Outcome("MemoryError")
        for victim in victims:
            self._drop(victim, "evicted")
        if held is None:
            held = self.held[session] = Held(sent.key, sent.ref.epoch, self.now)
            self._ended.pop(session, None)
        held.epoch, held.reserved = sent.ref.epoch, sent.need_bytes
        return Outcome("lent", held=len(held.tokens))

    def _victims(self, sessions: list[SessionId], n: int, nbytes: int) -> list[SessionId] | None:
        """Who of `sessions` goes, so that `n` more with `nbytes` fit.

        The longest idle first, but before all others those that are kept.
        """
        staying = {session: self.held[session] for session in sessions}
        idle = sorted(
            (s for s in staying if staying[s].idle),
            key=lambda s: (not staying[s].kept, staying[s].last_used),
        )
        victims: list[SessionId] = []
        while (
            len(staying) + n > self.limits.max_sessions
            or sum(held.room for held in staying.values()) + nbytes > self.limits.max_bytes
        ):
            if not idle:
                return None
            victims.append(idle.pop(0))
            del staying[victims[-1]]
        return victims

    def _miss(self, reason: MissReason, held: int) -> Outcome:
        self.misses[reason] += 1
        return Outcome("cache_miss", reason, held=held)

    def _drop(self, session: SessionId, reason: MissReason) -> None:
        self.drops[reason] += 1
        self._end(session, reason)

    def _end(self, session: SessionId, reason: MissReason) -> None:
        self._remember(session, reason, self.held.pop(session).epoch)

    def _remember(self, session: SessionId, reason: MissReason, lowest: int) -> None:
        _, known = self._ended.pop(session, ("unknown", 0))
        lowest = max(lowest, known)
        if reason == "unknown" and lowest == 0:
            return
        self._ended[session] = (reason, lowest)
        if len(self._ended) > self._n_remembered:
            self._ended.popitem(last=False)
