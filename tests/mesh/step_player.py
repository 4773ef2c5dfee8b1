"""Plays rounds of steps that meet at one shard, and knows what may come of them.

Token `i` of a session is fixed, so that every right step of it carries a piece of one history, at
whichever position and in whichever epoch; and the fake model's token is a digest of the whole
history. Steps that must never be run carry tokens that no history has.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from time import sleep
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from meshnet.model.fake_stage import FakeStage, fake_facts, next_token
from meshnet.model.interface import CacheState, StageOutput, StageStep
from meshnet.topology import LayerSpan
from services.shard.app import create_app
from tests.support.mesh import CLUSTER_KEY, VOCAB_SIZE, shard_settings
from tests.support.serving import Served, serve
from tests.support.steps import ShardClient, shard_client
from tests.support.streams import eventually

N_SLOTS = 3
N_SESSIONS = 3
STEP_S = 0.002
NOWHERE = 500
"""A position that no session reaches."""

_INTRUDERS_ID = 63
_FORKS_ID = 61
_FORBIDDEN_ID = 62
_IDS_A_SESSION = 16


class LoggingStage(FakeStage):
    """The whole fake model, a little slow; it notes what it ran."""

    def __init__(self) -> None:
        super().__init__(fake_facts(LayerSpan(0, 4), 4, VOCAB_SIZE))
        self.runs: list[tuple[int, list[int]]] = []

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        sleep(STEP_S)
        self.runs.append((step.position, step.frame.token_ids()))
        return super().run(step, state)


class InFlight:
    """Stands before an app and counts the requests that are in it."""

    def __init__(self, app: ASGIApp) -> None:
        self.n_requests = 0
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counted = scope["type"] == "http"
        self.n_requests += counted
        try:
            await self._app(scope, receive, send)
        finally:
            self.n_requests -= counted


@dataclass(frozen=True)
class WatchedShard:
    """A served shard, a client of it, and what is known of its inside.

    Attributes:
        boot_id: Which life of it this is.
    """

    served: Served
    client: ShardClient
    stage: LoggingStage
    in_flight: InFlight
    boot_id: str

    def has(self, client: tuple[str, int]) -> Callable[[], Awaitable[bool]]:
        """Whether it has the client's connection."""

        async def has() -> bool:
            return client in self._clients()

        return has

    def is_done_with(self, client: tuple[str, int]) -> Callable[[], Awaitable[bool]]:
        """Whether the connection is gone, and every request is done: one cannot be told apart."""

        async def is_done() -> bool:
            return client not in self._clients() and self.in_flight.n_requests == 0

        return is_done

    def _clients(self) -> set[tuple[str, int]]:
        connections: list[Any] = list(self.served.server.server_state.connections)
        return {connection.client for connection in connections}


@asynccontextmanager
async def serve_watched() -> AsyncGenerator[WatchedShard]:
    """Serve the whole fake model with room for few sessions."""
    stage = LoggingStage()
    settings = shard_settings(cache_max_sessions=N_SLOTS)
    in_flight = InFlight(create_app(settings, stage=stage))
    async with serve(in_flight) as served, shard_client(served.url) as client:
        boot_id = (await client.http.get("/v1/shard")).json()["boot_id"]
        yield WatchedShard(served, client, stage, in_flight, boot_id)


class Kind(Enum):
    """What is sent."""

    NEXT = auto()
    """The right step."""
    TWICE = auto()
    """The right step, two times at once."""
    AHEAD = auto()
    """The step after the right one."""
    LATE = auto()
    """A step that was sent before, the same again."""
    DROPPED = auto()
    """The right step, by a client that goes before it is answered."""
    TORN = auto()
    """The right step, by a client that goes before it has sent all."""
    ANEW = auto()
    """The whole history once more, in a higher epoch."""
    STALE = auto()
    """A step in an epoch that is over."""
    OTHER_LIFE = auto()
    """A step meant for another life of the shard."""
    CLOSE = auto()
    """The session's end, with its epoch."""
    FREE = auto()
    """The session's end, without."""
    INTRUDE = auto()
    """The first step of another session."""
    KEEP = auto()
    """The session's end, with its epoch; it is to be kept for forks."""
    FORK = auto()
    """The first step of another session, which begins with tokens of this one."""


_INTRUSIONS = (Kind.INTRUDE, Kind.FORK)
_CLOSINGS = {Kind.CLOSE, Kind.KEEP}


@dataclass(frozen=True)
class Action:
    """One client's act in a round.

    Attributes:
        after_ms: How long after the round's begin.
        nth: Chooses among several: which late step.
    """

    kind: Kind
    session: int
    n_tokens: int
    after_ms: int
    nth: int


@dataclass(frozen=True)
class Step:
    """One step of a session as it was sent."""

    session: int
    past_len: int
    n_tokens: int
    epoch: int
    step_id: str

    @property
    def ids(self) -> list[int]:
        return true_ids(self.session, self.past_len, self.past_len + self.n_tokens)


@dataclass
class Session:
    """What a client knows of its session.

    Attributes:
        held: Tokens the shard held after the last round.
        over: Steps of this epoch and before are refused.
    """

    number: int
    name: str
    epoch: int = 1
    held: int = 0
    over: int = 0
    sent: list[Step] = field(default_factory=list[Step])


def true_ids(session: int, start: int, end: int) -> list[int]:
    """Tokens `[start, end)` of a session's history."""
    return [session * _IDS_A_SESSION + (5 * i + i // 7) % _IDS_A_SESSION for i in range(start, end)]


def true_token(step: Step) -> int:
    """The answer to a right step."""
    return next_token(true_ids(step.session, 0, step.past_len + step.n_tokens), VOCAB_SIZE)


class Player:
    """Plays one example on a shard that serves many.

    Args:
        shard: The shard, and what watches it.
        example: Its number, which makes its sessions' names its own.
        seen: What became of steps, to be added to.
    """

    def __init__(self, shard: WatchedShard, *, example: int, seen: Counter[str]) -> None:
        self._shard = shard
        self._client = shard.client
        self._seen = seen
        self._name = f"e{example}"
        self._n_ids = 0
        self._intruders: list[str] = []
        self._sessions = [
            Session(number, f"{self._name}-{'abc'[number]}") for number in range(N_SESSIONS)
        ]
        self._actions: Sequence[Action] = []
        self._no_eviction = False

    async def play(self, rounds: Sequence[Sequence[Action]]) -> None:
        """All rounds; then every session goes on rightly, is closed, and nothing is left."""
        for actions in rounds:
            await self._round(actions)
        for name in self._intruders:
            assert (await self._client.close(name)).status_code == 204
        for session in self._sessions:
            await self._go_on_and_close(session)
        assert not any((await self._client.cache()).values())

    async def _round(self, actions: Sequence[Action]) -> None:
        """What is sent at once; then what was run is what is held."""
        n_held, n_runs = (await self._client.cache())["sessions"], len(self._shard.stage.runs)
        new = {action.session for action in actions if not self._sessions[action.session].held}
        self._actions = actions
        self._no_eviction = n_held + len(new) + self._count(*_INTRUSIONS) <= N_SLOTS
        await asyncio.gather(*(self._act(action) for action in actions))
        assert (await self._client.cache())["leases"] == 0
        runs = self._shard.stage.runs[n_runs:]
        assert all(_FORBIDDEN_ID not in ids for _, ids in runs)
        for session in self._sessions:
            await self._settle(session, runs)

    async def _settle(self, session: Session, runs: Sequence[tuple[int, list[int]]]) -> None:
        """What the shard holds is what it ran, each step once and in order."""
        length, n_begun = session.held, 0
        for position, ids in runs:
            if ids == true_ids(session.number, position, position + len(ids)):
                assert position in {0, length}
                n_begun += position == 0
                length = position + len(ids)
        kinds = self._kinds(session)
        session.epoch += bool(kinds & {Kind.ANEW, *_CLOSINGS})
        held = await self._held(session)
        assert held in {0, length}
        if self._is_lossless(session):
            assert held == length
            # A late step may begin it too: one of a higher epoch that was refused when it came.
            begins = [a for a in self._actions if a.kind in {Kind.ANEW, Kind.LATE}]
            n_may_begin = sum(action.session == session.number for action in begins)
            assert n_begun <= (session.held == 0) + n_may_begin
        session.held = held
        session.epoch += held == 0

    async def _held(self, session: Session) -> int:
        """What the shard says it holds; who asks so changes nothing."""
        ask = self._step(session, NOWHERE, 1)
        problem = await self._refused(await self._send(ask, ids=[_FORBIDDEN_ID]), "cache_miss")
        assert (problem["reason"] == "length_mismatch") == (problem["held"] > 0)
        return problem["held"]

    def _kinds(self, session: Session) -> set[Kind]:
        return {action.kind for action in self._actions if action.session == session.number}

    def _count(self, *kinds: Kind) -> int:
        return sum(action.kind in kinds for action in self._actions)

    def _is_lossless(self, session: Session) -> bool:
        """Whether nothing in the round can have taken the session's state."""
        return self._no_eviction and not self._kinds(session) & {Kind.FREE, *_CLOSINGS}

    # Acts. Which step is the right one, and the epoch, are as they were when the round began.

    async def _act(self, action: Action) -> None:
        session = self._sessions[action.session]
        acts = {
            Kind.NEXT: self._send_next,
            Kind.TWICE: self._send_twice,
            Kind.AHEAD: self._send_ahead,
            Kind.LATE: self._send_late,
            Kind.DROPPED: self._drop,
            Kind.TORN: self._drop,
            Kind.ANEW: self._send_anew,
            Kind.STALE: self._send_stale,
            Kind.OTHER_LIFE: self._send_to_other_life,
            Kind.CLOSE: self._close,
            Kind.FREE: self._close,
            Kind.INTRUDE: self._intrude,
            Kind.KEEP: self._close,
            Kind.FORK: self._fork,
        }
        await asyncio.sleep(action.after_ms / 1000)
        await acts[action.kind](session, action)

    async def _send_next(self, session: Session, action: Action) -> None:
        taken = await self._send_right(self._step(session, session.held, action.n_tokens))
        assert taken or self._kinds_of_others(action) or not self._is_lossless(session)

    async def _send_twice(self, session: Session, action: Action) -> None:
        step = self._step(session, session.held, action.n_tokens)
        taken = await asyncio.gather(self._send_right(step), self._send_right(step))
        assert any(taken) or self._kinds_of_others(action) or not self._is_lossless(session)

    async def _send_ahead(self, session: Session, action: Action) -> None:
        await self._send_right(self._step(session, session.held + action.n_tokens, 1))

    async def _send_late(self, session: Session, action: Action) -> None:
        if session.sent:
            await self._send_right(session.sent[-1 - action.nth % len(session.sent)])

    async def _send_anew(self, session: Session, action: Action) -> None:
        end = session.held + action.n_tokens
        await self._send_right(self._step(session, 0, end, epoch=session.epoch + 1))

    async def _send_stale(self, session: Session, action: Action) -> None:
        if session.over:
            past_len = session.held if action.nth % 2 else 0
            stale = self._step(session, past_len, 1, epoch=session.over)
            problem = await self._refused(
                await self._send(stale, ids=[_FORBIDDEN_ID]), "stale_epoch"
            )
            assert problem["expected"] > stale.epoch == problem["actual"]

    async def _send_to_other_life(self, session: Session, action: Action) -> None:
        step = self._step(session, session.held, action.n_tokens)
        answer = await self._send(step, ids=[_FORBIDDEN_ID] * step.n_tokens, boot="another-life")
        problem = await self._refused(answer, "cache_miss")
        assert (problem["reason"], problem["held"]) == ("restarted", 0)
        assert (problem["expected"], problem["actual"]) == ("another-life", self._shard.boot_id)

    async def _close(self, session: Session, action: Action) -> None:
        epoch = session.epoch if action.kind in _CLOSINGS else 0
        answer = await self._delete(session, epoch, keep=action.kind is Kind.KEEP)
        if answer.status_code == 204:
            session.over = max(session.over, epoch)
            self._seen[action.kind.name] += 1
        else:
            assert Kind.ANEW in self._kinds(session)
            await self._refused(answer, "stale_epoch")

    async def _intrude(self, session: Session, action: Action) -> None:
        del session, action
        name = f"{self._name}-x{len(self._intruders)}"
        self._intruders.append(name)
        answer = await self._client.step(name, "prefill", 0, [_INTRUDERS_ID])
        if answer.status_code != 200:
            self._check_refusal(answer.json(), None)

    async def _fork(self, session: Session, action: Action) -> None:
        """Whoever has the tokens answers from them, and nobody from others."""
        name = f"{self._name}-x{len(self._intruders)}"
        self._intruders.append(name)
        past_len = max(1, session.held - action.nth)
        fork: dict[str, str | bytes | None] = {"X-Meshnet-Fork-Of": session.name}
        ids = [_FORKS_ID] * action.n_tokens
        answer = await self._client.step(name, "prefill", past_len, ids, changed=fork)
        whole = [*true_ids(session.number, 0, past_len), *ids]
        if answer.status_code == 200:
            assert answer.json() == {"token_id": next_token(whole, VOCAB_SIZE)}
            self._seen["forked"] += 1
        else:
            assert answer.json()["code"] in {"cache_miss", "cache_full"}
            is_there = session.held and self._is_lossless(session)
            assert not is_there or Kind.ANEW in self._kinds(session)

    async def _drop(self, session: Session, action: Action) -> None:
        """Send a step or a part of it, and go; return when the shard is done with it."""
        step = self._step(session, session.held, action.n_tokens)
        whole = action.kind is Kind.DROPPED
        if whole:
            session.sent.append(step)
        request = self._request(session, step)
        _, writer = await asyncio.open_connection("127.0.0.1", self._shard.served.port)
        ours: tuple[str, int] = writer.get_extra_info("sockname")
        await eventually(self._shard.has(ours), within_s=10)
        writer.write(request if whole else request[:-1])
        await writer.drain()
        await asyncio.sleep(action.nth / 1000)
        if action.nth % 2:
            writer.transport.abort()
        writer.close()
        await eventually(self._shard.is_done_with(ours), within_s=10)
        self._seen[action.kind.name] += 1

    # Steps.

    def _step(
        self, session: Session, past_len: int, n_tokens: int, *, epoch: int | None = None
    ) -> Step:
        self._n_ids += 1
        step_id = f"{self._name}-{self._n_ids}"
        return Step(session.number, past_len, n_tokens, epoch or session.epoch, step_id)

    async def _send_right(self, step: Step) -> bool:
        """Send a step that carries what it should; whether it was taken."""
        session = self._sessions[step.session]
        if step not in session.sent:
            session.sent.append(step)
        answer = await self._send(step)
        if answer.status_code != 200:
            self._check_refusal(answer.json(), step)
            return False
        assert answer.json() == {"token_id": true_token(step)}
        session.over = max(session.over, step.epoch - 1)
        self._seen["replay" if answer.headers["x-meshnet-compute-ms"] == "0.000" else "run"] += 1
        return True

    async def _send(
        self, step: Step, *, ids: list[int] | None = None, boot: str | None = None
    ) -> httpx.Response:
        session = self._sessions[step.session]
        mode = "decode" if step.past_len else "prefill"
        changed: dict[str, str | bytes | None] = {
            "X-Meshnet-Step": step.step_id,
            "X-Meshnet-Epoch": str(step.epoch),
            "X-Meshnet-Boot": boot or self._shard.boot_id,
        }
        return await self._client.step(
            session.name, mode, step.past_len, ids or step.ids, changed=changed
        )

    async def _refused(self, answer: httpx.Response, code: str) -> dict[str, Any]:
        problem = answer.json()
        assert (answer.status_code, problem.get("code")) == (409, code)
        self._seen[f"{code} {problem.get('reason', '')}".strip()] += 1
        return problem

    def _check_refusal(self, problem: dict[str, Any], step: Step | None) -> None:
        """A step that carries what it should is refused for a reason that the round gives."""
        self._seen[f"{problem['code']} {problem.get('reason', '')}".strip()] += 1
        if step is None or problem["code"] == "cache_full":
            assert problem["code"] == "cache_full"
            n_sessions = len({action.session for action in self._actions})
            assert n_sessions + self._count(*_INTRUSIONS) > N_SLOTS
            return
        session = self._sessions[step.session]
        match problem["code"]:
            case "session_busy":
                n_acts = sum(action.session == step.session for action in self._actions)
                assert n_acts > 1 or Kind.TWICE in self._kinds(session)
            case "stale_epoch":
                assert problem["expected"] > step.epoch == problem["actual"]
                is_over = self._kinds(session) & {Kind.ANEW, *_CLOSINGS}
                assert step.epoch < session.epoch or is_over
            case _:
                assert problem["code"] == "cache_miss"
                assert problem["reason"] in {"unknown", "evicted", "length_mismatch"}
                assert (problem["reason"] == "length_mismatch") == (problem["held"] > 0)
                assert step.past_len != problem["held"]

    def _kinds_of_others(self, action: Action) -> set[Kind]:
        """What else the round does to the action's session."""
        others = [other for other in self._actions if other is not action]
        return {other.kind for other in others if other.session == action.session}

    async def _delete(self, session: Session, epoch: int, *, keep: bool = False) -> httpx.Response:
        headers = {"X-Meshnet-Epoch": str(epoch)} if epoch else {}
        headers |= {"X-Meshnet-Keep": "1"} if keep else {}
        return await self._client.http.delete(f"/v1/sessions/{session.name}", headers=headers)

    def _request(self, session: Session, step: Step) -> bytes:
        body = self._client.frame(step.ids)
        lines = (
            "POST /v1/forward HTTP/1.1",
            "Host: shard",
            f"Authorization: Bearer {CLUSTER_KEY}",
            f"X-Meshnet-Session: {session.name}",
            f"X-Meshnet-Cache: {'decode' if step.past_len else 'prefill'}",
            f"X-Meshnet-Past-Len: {step.past_len}",
            f"X-Meshnet-Shape: 1,{step.n_tokens}",
            "X-Meshnet-Dtype: int32",
            "X-Meshnet-Sampling: {}",
            f"X-Meshnet-Step: {step.step_id}",
            f"X-Meshnet-Epoch: {step.epoch}",
            f"X-Meshnet-Boot: {self._shard.boot_id}",
            f"Content-Length: {len(body)}",
            "\r\n",
        )
        return "\r\n".join(lines).encode() + body

    async def _go_on_and_close(self, session: Session) -> None:
        """The session's next right step is answered from its true history, and its end is one."""
        step = self._step(session, session.held, 2)
        n_runs = len(self._shard.stage.runs)
        for _ in range(2):
            answer = await self._send(step)
            assert (answer.status_code, answer.json()) == (200, {"token_id": true_token(step)})
        assert self._shard.stage.runs[n_runs:] == [(step.past_len, step.ids)]
        assert (await self._delete(session, session.epoch)).status_code == 204
        for late in (step, *session.sent[:2]):
            await self._refused(await self._send(late), "stale_epoch")
