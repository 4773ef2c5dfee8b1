"""The cluster under test: three shards, three standbys, a proxy before each, one head at a time.

The shards serve both fleets. The route of the cached fleet names the first three, that of the
standby fleet all six, shards of the same layers side by side.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from typing import Any, Final, Self

import httpx

from benchmarks.faults.baseline import Baseline, measure
from benchmarks.faults.matrix import HOPS, FleetName, HopName, Setup
from benchmarks.faults.node import LONG_TTL_S, SHORT_TTL_S, Node, sessions_left
from benchmarks.faults.question import ask
from meshnet.topology import even_spans
from services.cli.cluster import PROGRAM, ClusterError, Member
from services.cli.serving import free_port

N_LAYERS: Final = 30
STEP_TIMEOUT_S: Final = 20.0
_SETTLE_LIMIT_S: Final = 8.0
"""How soon after a reply every session and step must be gone; longer than the head's 5 s for a
DELETE."""
_HEAD_START_LIMIT_S: Final = 60.0
_HEAD_SEES_LIMIT_S: Final = 20.0
_ROUTE_POLL_S: Final = 0.3
_DIRECT_LIMIT_S: Final = 60.0
_FEW_TOKENS: Final = 4
_POLL_S: Final = 0.05

HeadKey = tuple[FleetName, float]


class FaultCluster:
    """As a context manager; `prepare` brings up what a cell needs.

    Args:
        model: The model's folder.
        log_dir: Where `head.log`, `first.log`, `first-standby.log`... are written.
        transport: How steps go from the head to the shards, `post` or `stream`.
        hop_return: Which way hidden states go, `star` or `direct`.
    """

    def __init__(
        self, model: Path, log_dir: Path, transport: str, hop_return: str = "star"
    ) -> None:
        self._model = model
        self._log_dir = log_dir
        self._transport = transport
        self._hop_return = hop_return
        self._key = secrets.token_urlsafe(32)
        spans = dict(zip(HOPS, even_spans(N_LAYERS, len(HOPS)), strict=True))

        def node(hop: HopName, suffix: str = "") -> Node:
            return Node(f"{hop}{suffix}", model, spans[hop], self._key, log_dir)

        self._primaries = {hop: node(hop) for hop in HOPS}
        self._standbys = {hop: node(hop, "-standby") for hop in HOPS}
        self._head: Member | None = None
        self._head_key: HeadKey | None = None
        self._baselines: dict[HeadKey, Baseline] = {}
        self._hopeless: dict[HeadKey, ClusterError] = {}
        self._stack = AsyncExitStack()

    @property
    def head_url(self) -> str:
        """Where the head of the last setup listens."""
        return "" if self._head is None else self._head.url

    @property
    def is_direct(self) -> bool:
        """Whether hidden states are to go from shard to shard."""
        return self._hop_return == "direct"

    @property
    def n_pushed(self) -> int:
        """How many tensors were pushed from shard to shard."""
        nodes = (*self._primaries.values(), *self._standbys.values())
        return sum(node.proxy.n_pushed for node in nodes)

    async def __aenter__(self) -> Self:
        for node in (*self._primaries.values(), *self._standbys.values()):
            await self._stack.enter_async_context(node)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop_head()
        await self._stack.aclose()

    def at(self, fleet: FleetName, hop: HopName) -> list[Node]:
        """The shards of a fleet that hold a hop's layers."""
        primary = [self._primaries[hop]]
        return primary if fleet == "cached" else [*primary, self._standbys[hop]]

    def nodes(self, fleet: FleetName) -> list[Node]:
        """The shards of a fleet, in the route's order."""
        return [node for hop in HOPS for node in self.at(fleet, hop)]

    async def prepare(self, setup: Setup) -> Baseline:
        """Have every shard of the fleet alive, ready and empty, and the head see them so.

        Raises:
            ClusterError: That could not be had.
        """
        key = (setup.fleet, setup.recovery_s)
        if key in self._hopeless:
            raise self._hopeless[key]
        expiring = self.at(setup.fleet, setup.expiring) if setup.expiring else []
        nodes = self.nodes(setup.fleet)
        ttls = {node: SHORT_TTL_S if node in expiring else LONG_TTL_S for node in nodes}
        await _ensure(ttls)
        await self._ensure_head(key, nodes)
        if await sessions_left(nodes, _SETTLE_LIMIT_S):  # the last cell's, which has failed by it
            await asyncio.gather(*(node.kill() for node in nodes))
            await _ensure(ttls)
            await self._ensure_head(key, nodes)
        if self.is_direct:
            await self._go_direct()
        return self._baselines[key]

    async def settle(self, fleet: FleetName) -> list[str]:
        """Wait until nothing is under way and no session is left; what is left after a while."""
        nodes = self.nodes(fleet)
        for node in nodes:
            node.proxy.clear()
            node.resume()
        if left := await sessions_left(nodes, _SETTLE_LIMIT_S):
            return left
        end = monotonic() + _SETTLE_LIMIT_S
        while any(node.proxy.in_flight for node in nodes):
            if monotonic() > end:
                return [f"{n.name} still has a step" for n in nodes if n.proxy.in_flight]
            await asyncio.sleep(_POLL_S)
        return await sessions_left(nodes, _SETTLE_LIMIT_S)  # a step may have come late

    async def _go_direct(self) -> None:
        """Ask until shards hand over to each other: a head leaves them alone after a failure.

        Before each request the head is given the time to see that all shards are idle: then it
        takes the first ones of its route, and the next request comes to those that this one found.

        Raises:
            ClusterError: They do not.
        """
        n_steps = (_FEW_TOKENS - 1) * (len(HOPS) - 1)
        n_pushed, end = 0, monotonic() + _DIRECT_LIMIT_S
        while n_pushed < n_steps:
            if monotonic() > end:
                raise ClusterError("shards do not hand over to each other")
            await asyncio.sleep(2 * _ROUTE_POLL_S)
            before = self.n_pushed
            await ask(self.head_url, "plain", limit_s=_DIRECT_LIMIT_S, n_tokens=_FEW_TOKENS)
            n_pushed = self.n_pushed - before
        await asyncio.sleep(2 * _ROUTE_POLL_S)

    async def _ensure_head(self, key: HeadKey, nodes: list[Node]) -> None:
        is_running = self._head is not None and self._head.returncode is None
        if is_running and self._head_key == key and await self._sees(nodes, _HEAD_SEES_LIMIT_S):
            return
        await self._stop_head()
        await self._start_head(key)
        try:
            await self._try_head(key, nodes)
        except ClusterError as error:  # it would be so again before every cell
            self._hopeless[key] = error
            raise

    async def _try_head(self, key: HeadKey, nodes: list[Node]) -> None:
        if not await self._sees(nodes, _HEAD_START_LIMIT_S):
            raise ClusterError(f"a new head does not see {len(nodes)} ready shards")
        if key not in self._baselines:
            self._baselines[key] = await measure(self.head_url)
        if len({baseline.text for baseline in self._baselines.values()}) > 1:
            raise ClusterError("the undisturbed text of two fleets differs")

    async def _start_head(self, key: HeadKey) -> None:
        fleet, recovery_s = key
        route = ",".join(node.proxy.url for node in self.nodes(fleet))
        command = (*PROGRAM, "head", "--model", str(self._model), "--route", route)
        env = {
            "MESHNET_HEAD_CLUSTER_KEY": self._key,
            "MESHNET_HEAD_RECOVERY_TIMEOUT_S": str(recovery_s),
            "MESHNET_HEAD_STEP_TIMEOUT_S": str(STEP_TIMEOUT_S),
            "MESHNET_HEAD_MIN_STEP_TIMEOUT_S": "2",
            "MESHNET_HEAD_CONNECT_TIMEOUT_S": "1",
            "MESHNET_HEAD_HOP_TRANSPORT": self._transport,
            "MESHNET_HEAD_HOP_RETURN": self._hop_return,
            "MESHNET_HEAD_DRAIN_TIMEOUT_S": "1",
            "MESHNET_HEAD_ROUTE_POLL_S": str(_ROUTE_POLL_S),
            "MESHNET_HEAD_PREFIX_REUSE": "false",  # every request is to have a whole prefill
        }
        self._head = Member("head", command, free_port(), env, self._log_dir / "head.log")
        self._head_key = key
        await self._head.start()

    async def _stop_head(self) -> None:
        if self._head is not None:
            await self._head.stop()
            self._head = None

    async def _sees(self, nodes: list[Node], within_s: float) -> bool:
        """Whether the head comes to know the present life of each of these shards as ready."""
        boot_ids = {(await node.describe()).boot_id for node in nodes}
        end = monotonic() + within_s
        async with httpx.AsyncClient(
            base_url=self.head_url, trust_env=False, timeout=within_s
        ) as client:
            while monotonic() < end:
                if await _ready_boot_ids(client) == boot_ids:
                    return True
                await asyncio.sleep(_POLL_S)
        return False


async def _ensure(ttls: dict[Node, float]) -> None:
    await asyncio.gather(*(node.ensure(ttl_s) for node, ttl_s in ttls.items()))


async def _ready_boot_ids(client: httpx.AsyncClient) -> set[str]:
    """The lives of the shards that a head takes for ready; none while it is not ready itself."""
    try:
        if (await client.get("/readyz")).status_code != 200:
            return set()
        hops: list[dict[str, Any]] = (await client.get("/v1/cluster")).json()["hops"]
    except httpx.TransportError:  # it does not listen yet
        return set()
    return {hop["boot_id"] for hop in hops if hop["state"] == "ready"}
