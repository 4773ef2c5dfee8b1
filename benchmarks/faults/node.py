"""One shard process with the proxy in front of it, and what the harness does to it directly."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from time import monotonic
from typing import Final, Self

import httpx

from benchmarks.faults.proxy import Proxy
from meshnet.ids import SessionId, new_id
from meshnet.topology import LayerSpan
from meshnet.wire import headers
from meshnet.wire.frames import Frame, nbytes
from meshnet.wire.headers import StepHeaders
from meshnet.wire.messages import ShardInfo
from services.cli.cluster import PROGRAM, ClusterWatcher, Member
from services.cli.serving import free_port

MAX_SESSIONS: Final = 2
"""Of each shard: so few that two sessions more push out the request's own."""
LONG_TTL_S: Final = 600.0
SHORT_TTL_S: Final = 1.5
_OPTIONS: Final = ("--threads", "1")
_READY_LIMIT_S: Final = 90.0
_ASK_LIMIT_S: Final = 10.0
_POLL_S: Final = 0.05


class Node:
    """A shard that can be killed, stopped and made forget, as a context manager.

    Args:
        name: What people call it, and its log file.
        model: The model's folder.
        span: Its layers.
        key: The cluster key.
        log_dir: Where its log goes.

    Attributes:
        proxy: Where the head finds it.
    """

    def __init__(self, name: str, model: Path, span: LayerSpan, key: str, log_dir: Path) -> None:
        self.name = name
        self.proxy = Proxy(free_port())
        self._command = (*PROGRAM, "shard", "--layers", str(span), "--model", str(model), *_OPTIONS)
        self._key = key
        self._log_path = log_dir / f"{name}.log"
        self._ttl_s = LONG_TTL_S
        self._member: Member | None = None
        self._successor: tuple[Member, int] | None = None
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"},
            trust_env=False,
            timeout=_ASK_LIMIT_S,
            limits=httpx.Limits(max_keepalive_connections=0),  # it restarts between two calls
        )

    async def __aenter__(self) -> Self:
        await self.proxy.__aenter__()
        return self

    async def __aexit__(self, *ended: object) -> None:
        await self.kill()
        self._take_successor()
        await self.kill()
        await self._http.aclose()
        await self.proxy.__aexit__(*ended)

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.shard_port}"

    @property
    def is_alive(self) -> bool:
        """Whether the process is there, stopped or not."""
        return self._member is not None and self._member.returncode is None

    async def ensure(self, ttl_s: float) -> None:
        """Have it run with this time to live, and be ready.

        Raises:
            ClusterError: It ended, failed, or took too long.
        """
        if self._ttl_s != ttl_s:
            await self.kill()
            self._ttl_s = ttl_s
        self.resume()
        if not self.is_alive:
            self._take_successor()
        if not self.is_alive:
            await self.start()
        if self._member is not None:
            await self._member.wait_ready(ClusterWatcher(), _READY_LIMIT_S)

    async def start(self) -> None:
        """Start it on its port; it is not ready yet."""
        self._member = self._new_member(self.proxy.shard_port)
        await self._member.start()

    async def start_successor(self) -> None:
        """Start another process, which nobody finds before the next `ensure`: time is saved."""
        port = free_port()
        self._successor = (self._new_member(port), port)
        await self._successor[0].start()

    def _take_successor(self) -> None:
        if self._successor is not None:
            self._member, self.proxy.shard_port = self._successor
            self._successor = None

    def _new_member(self, port: int) -> Member:
        env = {
            "MESHNET_SHARD_CLUSTER_KEY": self._key,
            "MESHNET_SHARD_CACHE_MAX_SESSIONS": str(MAX_SESSIONS),
            "MESHNET_SHARD_CACHE_TTL_SECONDS": str(self._ttl_s),
        }
        return Member(self.name, self._command, port, env, self._log_path)

    async def kill(self) -> None:
        """End it as a crash would, and wait for that."""
        if self._member is not None and self.is_alive:
            self._member.kill()
            await self._member.wait()

    def stop(self) -> None:
        """Have it do nothing any more, without ending it; its port still takes connections."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Have it go on where it was stopped."""
        self._send(signal.SIGCONT)

    async def describe(self) -> ShardInfo:
        """What it says of itself, past the proxy."""
        answer = await self._http.get(f"{self._url}/v1/shard")
        return ShardInfo.model_validate_json(answer.raise_for_status().content)

    async def evict(self) -> None:
        """Have it lose its sessions to other ones, which are closed again."""
        info = await self.describe()
        sessions = [SessionId(f"evict-{new_id()}") for _ in range(MAX_SESSIONS)]
        for session in sessions:
            await self._prefill(session, info)
        for session in sessions:
            (await self._http.delete(f"{self._url}/v1/sessions/{session}")).raise_for_status()

    async def _prefill(self, session: SessionId, info: ShardInfo) -> None:
        if info.start_layer == 0:
            frame = Frame.of_token_ids([0])
        else:
            shape = (1, 1, info.hidden_size)
            frame = Frame(info.dtype, shape, bytes(nbytes(info.dtype, shape)))
        step = StepHeaders(
            session=session,
            cache="prefill",
            past_len=0,
            shape=frame.shape,
            dtype=frame.dtype,
            start_layer=info.start_layer,
        )
        answer = await self._http.post(
            f"{self._url}/v1/forward", content=frame.data, headers=headers.render(step)
        )
        answer.raise_for_status()

    def _send(self, number: signal.Signals) -> None:
        if self._member is not None and self.is_alive:
            self._member.send(number)


async def sessions_left(nodes: list[Node], within_s: float) -> list[str]:
    """The living shards that still hold sessions after so long, each with how many."""
    end = monotonic() + within_s
    while left := [text for text in await asyncio.gather(*map(_sessions_of, nodes)) if text]:
        if monotonic() > end:
            return left
        await asyncio.sleep(_POLL_S)
    return []


async def _sessions_of(node: Node) -> str:
    if not node.is_alive:
        return ""
    try:
        held = (await node.describe()).cache.sessions
    except httpx.ConnectError:  # it starts again, and holds nothing
        return ""
    except httpx.HTTPStatusError as error:
        is_loading = error.response.status_code == 503
        return "" if is_loading else f"{node.name}: {error}"
    except httpx.TransportError as error:
        return f"{node.name} does not say what it holds: {type(error).__name__}"
    return f"{node.name} holds {held}" if held else ""
