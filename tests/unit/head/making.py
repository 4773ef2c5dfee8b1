"""A head's parts, over hops that are functions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx

from meshnet.cache.policy import CacheLimits
from meshnet.cache.store import SessionCacheStore
from meshnet.errors import Draining, MeshError
from meshnet.generation import Sampling
from meshnet.head.background import Background
from meshnet.head.call import Trace
from meshnet.head.hop_client import HopClient, HopTimeouts
from meshnet.head.hop_session import HopSession
from meshnet.head.hop_times import HopTimesBook
from meshnet.head.pipeline import Pipeline, PipelineKit
from meshnet.head.prefixes import PrefixIndex
from meshnet.head.recovery import Recovery, RecoveryLimits
from meshnet.head.replay import InputLog, ReplayBudget, ReplayMode
from meshnet.head.request_times import RequestTimes
from meshnet.head.route_book import RouteBook
from meshnet.ids import BootId, SessionId
from meshnet.model.fake_stage import HIDDEN_SIZE, FakeStage, fake_facts, next_token
from meshnet.model.interface import CacheState, StageModel, StageOutput, StageStep
from meshnet.shard.compute import ComputeThread, Timed
from meshnet.shard.step_log import DecodeLog
from meshnet.shard.worker import ShardWorker
from meshnet.topology import Hop, HopSpec, LayerSpan, Route, ShardFacts, build_route, make_hop
from meshnet.wire import headers, problems
from meshnet.wire.frames import Frame, nbytes
from meshnet.wire.headers import StepHeaders
from meshnet.wire.messages import TailAnswer
from tests.unit.fakes import FakeClock, shard_info

A, B, C, D = "http://a", "http://b", "http://c", "http://d"
PROMPT = [5, 6, 7]
SESSION = SessionId("s")
SAMPLING = Sampling()
JSON = {"content-type": "application/json"}
LIMITS = RecoveryLimits(max_rebuilds=4, timeout_s=10, backoff_s=1, max_backoff_s=4)

Handler = Callable[[httpx.Request], Coroutine[None, None, httpx.Response]]
Run = Callable[[], Awaitable[httpx.Response]]
Disturbance = Callable[[Run], Coroutine[None, None, httpx.Response]]
"""What becomes of a step: it gets what would run it."""


def hop_client(endpoint: str, handler: Handler, timeouts: HopTimeouts | None = None) -> HopClient:
    """A client whose shard is `handler`."""
    http = httpx.AsyncClient(base_url=endpoint, transport=httpx.MockTransport(handler))
    return HopClient(endpoint, http, timeouts or HopTimeouts())


def problem(error: MeshError) -> httpx.Response:
    """What a shard answers that raised `error`."""
    return httpx.Response(error.status, json=problems.to_problem(error))


def hidden(n_tokens: int, **changed: str) -> httpx.Response:
    """What a hop that is no tail answers to so many tokens."""
    named = {headers.SHAPE: f"1,{n_tokens},{HIDDEN_SIZE}", headers.DTYPE: "float32", **changed}
    return httpx.Response(200, content=bytes(4 * HIDDEN_SIZE * n_tokens), headers=named)


def token(token_id: int | None) -> httpx.Response:
    """What a tail answers."""
    return httpx.Response(200, json={} if token_id is None else {"token_id": token_id})


def says(*ids: int) -> TailAnswer:
    """The fake model's answer to ids."""
    return TailAnswer(token_id=next_token(list(ids), 64))


# --- what becomes of a step ---


def well(run: Run) -> Coroutine[None, None, httpx.Response]:
    """Nothing is disturbed."""

    async def undisturbed() -> httpx.Response:
        return await run()

    return undisturbed()


def answers(response: httpx.Response) -> Disturbance:
    """The step is not run, and answered so."""

    async def answered(_: Run) -> httpx.Response:
        return response

    return answered


def refuses(error: MeshError) -> Disturbance:
    """The step is not run, and refused so."""
    return answers(problem(error))


def breaks(error: Exception, *, ran: bool = False) -> Disturbance:
    """No answer comes back; `ran` tells whether the step was run."""

    async def broken(run: Run) -> httpx.Response:
        if ran:
            await run()
        raise error

    return broken


def waits(gate: asyncio.Event, then: Disturbance = well) -> Disturbance:
    """Nothing happens before the gate is open."""

    async def waited(run: Run) -> httpx.Response:
        await gate.wait()
        return await then(run)

    return waited


class InlineCompute(ComputeThread):
    """Computes at once, on no thread."""

    def __init__(self) -> None:
        super().__init__(max_queued=1, max_batch=1)

    async def step(
        self,
        stage: StageModel,
        step: StageStep,
        state: CacheState | None = None,
        session: SessionId | None = None,
    ) -> Timed:
        del session
        return Timed(stage.run(step, state), 0.0, 0.0, batch_size=1)


class CountingStage(FakeStage):
    """Counts the tokens that it computes."""

    computed = 0

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        self.computed += step.frame.n_tokens
        return super().run(step, state)


class LiveShard:
    """A shard whose worker and store are real; its model is not, and it is called without HTTP.

    Attributes:
        facts: What the next life runs.
        away_until: Refuses connections before this time of the clock.
        draining: Says so, and begins no session.
        disturbed: What becomes of the next steps, first one first; those after them are run.
        steps: The steps asked for, in order; those it was away for too.
        contexts: What came behind their tensors.
        closed: The epochs it was told to close sessions under.
        limits_s: How long the head was ready to wait for each step.
    """

    def __init__(self, endpoint: str, facts: ShardFacts, clock: FakeClock) -> None:
        self.endpoint = endpoint
        self.facts = facts
        self.away_until = 0.0
        self.draining = False
        self.disturbed: list[Disturbance] = []
        self.steps: list[StepHeaders] = []
        self.contexts: list[bytes] = []
        self.closed: list[int] = []
        self.limits_s: list[float] = []
        self.looks = 0
        self._clock = clock
        self._lives = 0
        self.restart()

    def restart(self, *, away_s: float = 0.0) -> None:
        """Begin a new life, with nothing held."""
        self._lives += 1
        self.draining = False
        self.away_until = self._clock() + away_s
        self.stage = CountingStage(self.facts)
        limits = CacheLimits(ttl_s=600, max_sessions=4, max_bytes=10**6)
        self.store: SessionCacheStore[CacheState] = SessionCacheStore(limits, clock=self._clock)
        self._worker = ShardWorker(
            stage=self.stage,
            store=self.store,
            compute=InlineCompute(),
            decode_log=DecodeLog(self._clock),
            boot_id=BootId(self.boot_id),
            check_begin=self._check_begin,
            max_step_tokens=self.facts.max_step_tokens,
            kv_cache=self.facts.kv_cache,
        )

    @property
    def boot_id(self) -> str:
        return f"{self.endpoint[-1]}-{self._lives}"

    @property
    def calls(self) -> list[tuple[str, int, int]]:
        """Mode, position and length of each step asked for."""
        return [(step.cache, step.past_len, step.shape[1]) for step in self.steps]

    @property
    def epochs(self) -> list[int]:
        return [step.epoch for step in self.steps]

    def client(self) -> HopClient:
        return hop_client(self.endpoint, self)

    async def lose(self, session: SessionId = SESSION) -> None:
        """Hold nothing of a session any more."""
        await self.store.release(session)

    async def hold(self, ids: Sequence[int], *, epoch: int = 1) -> None:
        """Hold these tokens of the session, and nothing else of it; for a shard of layer 0."""
        await self.lose()
        frame = Frame.of_token_ids(ids)
        step = StepHeaders(
            session=SESSION, cache="prefill", shape=frame.shape, dtype="int32", epoch=epoch
        )
        await self._worker.step(step, frame.data)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/forward":
            step = headers.parse(request.headers)
            self.steps.append(step)
            self.contexts.append(request.content[nbytes(step.dtype, step.shape) :])
            self.limits_s.append(request.extensions["timeout"]["read"])
        if self._clock() < self.away_until:
            raise httpx.ConnectError("refused")
        try:
            return await self._answer(request)
        except MeshError as error:
            return problem(error)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            epoch = headers.parse_epoch(request.headers.get(headers.EPOCH))
            self.closed.append(epoch)
            session = SessionId(request.url.path.rpartition("/")[2])
            keep = headers.parse_keep(request.headers.get(headers.KEEP))
            await self._worker.close(session, epoch, keep=keep)
            return httpx.Response(204)
        if request.method == "GET":
            self.looks += 1
            info = shard_info(self.facts, self.boot_id, draining=self.draining)
            return httpx.Response(200, content=info.model_dump_json())
        step, body = self.steps[-1], request.content
        disturbance = self.disturbed.pop(0) if self.disturbed else well
        return await disturbance(lambda: self._run(step, body))

    def _check_begin(self) -> None:
        if self.draining:
            raise Draining("this shard takes no new session")

    async def _run(self, step: StepHeaders, body: bytes) -> httpx.Response:
        self._worker.check(step)
        done = await self._worker.step(step, body)
        if isinstance(done.result, TailAnswer):
            return httpx.Response(200, content=done.result.model_dump_json(), headers=JSON)
        named = {
            headers.SHAPE: headers.render_shape(done.result.shape),
            headers.DTYPE: done.result.dtype,
        }
        return httpx.Response(200, content=done.result.data, headers=named)


@dataclass
class Mesh:
    """Shards, and a head's parts over them. Time is pretended.

    Attributes:
        noted: The failures that were tried again.
        replayed: Layer-tokens computed again.
        times: Where the time of its sessions goes.
    """

    shards: Mapping[str, LiveShard]
    clock: FakeClock
    book: RouteBook
    background: Background
    replay: ReplayMode = "exact"
    max_bytes: int = 10**6
    limits: RecoveryLimits = LIMITS
    chunk_tokens: int = 512
    noted: list[MeshError] = field(default_factory=list[MeshError])
    replayed: list[int] = field(default_factory=list[int])
    known: dict[str, Hop] = field(default_factory=dict[str, Hop])
    times: RequestTimes = field(default_factory=RequestTimes)

    def __post_init__(self) -> None:
        budget = ReplayBudget(self.max_bytes)
        self.kit = PipelineKit(
            times=HopTimesBook(),
            recovery=Recovery(
                self.limits,
                note=self.noted.append,
                note_replay=self.replayed.append,
                clock=self.clock,
                jitter=lambda: 1.0,
                sleep=self.clock.sleep,
            ),
            budget=budget,
            replay=self.replay,
            prefixes=PrefixIndex(budget, exact=self.replay == "exact"),
            background=self.background,
            prefill_chunk_tokens=self.chunk_tokens,
        )

    def __getitem__(self, endpoint: str) -> LiveShard:
        return self.shards[endpoint]

    def hop(self, endpoint: str) -> Hop:
        """The shard as a hop, as it was found last; all that were found are proven."""
        new = self.book.unproven()
        self.known |= {hop.endpoint: hop for hop in new}
        self.book.mark_proven(new)
        return self.known[endpoint]

    def session(self, endpoint: str = A, trace: Trace | None = None) -> HopSession:
        """The session at the place of one shard."""
        return HopSession(
            self.hop(endpoint),
            SESSION,
            shards=self.book,
            log=InputLog(self.kit.budget, self.kit.replay),
            times=self.kit.times,
            background=self.background,
            trace=trace or Trace(),
            spent=self.times.begin(),
        )

    def pipeline(
        self, *endpoints: str, trace: Trace | None = None, session: SessionId = SESSION
    ) -> Pipeline:
        """A session over the shards of these endpoints."""
        route = build_route([self.hop(endpoint) for endpoint in endpoints])
        return Pipeline(route, self.book, self.kit, trace or Trace(times=self.times), session)


@asynccontextmanager
async def open_mesh(
    spans: Mapping[str, str],
    kind: type[LiveShard] = LiveShard,
    /,
    *,
    replay: ReplayMode = "exact",
    max_bytes: int = 10**6,
    limits: RecoveryLimits = LIMITS,
    chunk_tokens: int = 512,
    **changed: object,
) -> AsyncGenerator[Mesh]:
    """Shards of a model of four layers, by endpoint and span, that were all asked once."""
    clock = FakeClock()
    shards = {
        endpoint: kind(endpoint, replace(fake_facts(LayerSpan.parse(span)), **changed), clock)
        for endpoint, span in spans.items()
    }
    book = RouteBook(
        [HopSpec(endpoint) for endpoint in spans],
        {endpoint: shard.client() for endpoint, shard in shards.items()},
        clock=clock,
        jitter=lambda: 0.0,
    )
    await book.refresh()
    async with Background() as background:
        yield Mesh(shards, clock, book, background, replay, max_bytes, limits, chunk_tokens)


def route_over(endpoints: Sequence[str], **changed: object) -> Route:
    """A route of so many hops, a layer each."""
    n = len(endpoints)
    facts = [replace(fake_facts(LayerSpan(i, i + 1), n), **changed) for i in range(n)]
    specs = [HopSpec(endpoint) for endpoint in endpoints]
    return build_route([make_hop(*pair) for pair in zip(specs, facts, strict=True)])
