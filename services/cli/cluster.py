"""A cluster on this machine: some shards and a head, each a process of its own."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Final, Self

import httpx
from pydantic import ValidationError

from meshnet.topology import LayerSpan
from meshnet.wire.messages import ShardReadiness
from services.cli.errors import CliError
from services.cli.processes import STOP_LIMIT_S, ManagedProcess, describe_end
from services.cli.serving import GRACE_S, free_port

_POLL_S: Final = 0.1
_ASK_LIMIT_S: Final = 5.0
_FIRST_DELAY_S: Final = 0.5
_LONGEST_DELAY_S: Final = 30.0
_STEADY_S: Final = 60.0
"""A member that lived this long is started again without a longer delay."""
PROGRAM: Final = (sys.executable, "-m", "services.cli")
"""The command line itself."""


class ClusterError(CliError):
    """A member of the cluster ended or failed while it was loading."""


class ClusterWatcher:
    """Hears what happens in a cluster. This one does nothing."""

    def loading(self, name: str, readiness: ShardReadiness) -> None:
        """What a member says of itself while it loads; the last time, that it is ready."""

    def note(self, line: str) -> None:
        """Something that a person should know: a member ended and is started again."""


class Member(ManagedProcess):
    """A shard or the head.

    Attributes:
        url: Where it listens.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        env: Mapping[str, str],
        log_path: Path | None,
    ) -> None:
        rest = ("--port", str(port), "--stop-with-stdin")
        super().__init__(name, (*command, *rest), env=env, log_path=log_path)
        self.url = f"http://127.0.0.1:{port}"

    async def wait_ready(self, watcher: ClusterWatcher, limit_s: float) -> None:
        """Wait until it takes requests.

        Raises:
            ClusterError: It ended, says that it failed, or took longer than `limit_s`.
        """
        end = monotonic() + limit_s
        async with httpx.AsyncClient(trust_env=False, timeout=_ASK_LIMIT_S) as client:
            while True:
                readiness = await self._ask(client)
                if self.returncode is not None:
                    raise self._error(describe_end(self.returncode))
                if readiness is not None:
                    watcher.loading(self.name, readiness)
                    if readiness.state == "ready":
                        return
                    if readiness.state == "failed":
                        raise self._error(f"failed: {readiness.reason}")
                if monotonic() > end:
                    raise self._error(f"was not ready after {limit_s:g} s")
                await asyncio.sleep(_POLL_S)

    async def _ask(self, client: httpx.AsyncClient) -> ShardReadiness | None:
        try:
            answer = await client.get(f"{self.url}/readyz")
            return ShardReadiness.model_validate_json(answer.content)
        except (httpx.TransportError, ValidationError):  # it does not listen yet
            return None

    def _error(self, problem: str) -> ClusterError:
        return ClusterError(f"{self.name} {problem}", self.last_log_lines())


class LocalCluster:
    """Shards and a head on 127.0.0.1; `async with` starts them and waits until they are ready.

    Leaving it stops the head, then the shards. None of them outlives this process, even if that is
    killed. A member that ends in between is started again on its port, with a growing delay.

    Args:
        model: What both a head and a shard can load: a folder, or a Hugging Face id.
        spans: One shard each, first layers first.
        dtype: Of hidden states and caches; None is the shard's default.
        weights: How weights are kept; None is in the dtype.
        threads: Compute threads of each shard; None is torch's choice.
        port: The head's; 0 is a free one. Shards always take free ones.
        env: Further settings (`MESHNET_SHARD_*`, `MESHNET_HEAD_*`) of every member.
        log_dir: Where `head.log` and `shard-1.log`... are written; None is our own stderr.
        cluster_key: None makes a random one.
        restart: Whether a member that ends is started again.
        load_limit_s: How long loading may take.
        watcher: Hears what happens.
        program: What runs a member, instead of the command line; for tests.
    """

    def __init__(
        self,
        model: str,
        spans: Sequence[LayerSpan],
        *,
        dtype: str | None = None,
        weights: str | None = None,
        threads: int | None = None,
        port: int = 0,
        env: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
        cluster_key: str | None = None,
        restart: bool = True,
        load_limit_s: float = 900.0,
        watcher: ClusterWatcher | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.cluster_key = cluster_key or secrets.token_urlsafe(32)
        self._watcher = watcher or ClusterWatcher()
        self._restart = restart
        self._load_limit_s = load_limit_s
        self._supervisors: list[asyncio.Task[None]] = []
        drain = str(STOP_LIMIT_S - GRACE_S)  # a member is killed when the former are over
        keys = {
            "MESHNET_SHARD_DRAIN_TIMEOUT_S": drain,
            "MESHNET_HEAD_DRAIN_TIMEOUT_S": drain,
            "MESHNET_SHARD_CLUSTER_KEY": self.cluster_key,
            "MESHNET_HEAD_CLUSTER_KEY": self.cluster_key,
        }

        def member(name: str, port: int, *arguments: str) -> Member:
            log_path = log_dir / f"{name}.log" if log_dir else None
            return Member(name, (*program, *arguments), port, {**(env or {}), **keys}, log_path)

        given = {"--dtype": dtype, "--weights": weights, "--threads": threads}
        options = ["--model", model]
        for option, value in given.items():
            options += [] if value is None else [option, str(value)]
        self.shards: list[Member] = [
            member(f"shard-{i}", free_port(), "shard", "--layers", str(span), *options)
            for i, span in enumerate(spans, start=1)
        ]
        route = ",".join(shard.url for shard in self.shards)
        self.head = member("head", port or free_port(), "head", "--model", model, "--route", route)

    @property
    def head_url(self) -> str:
        """Where the head listens, without a path."""
        return self.head.url

    @property
    def base_url(self) -> str:
        """What OpenAI clients call the base URL."""
        return f"{self.head.url}/v1"

    @property
    def members(self) -> list[Member]:
        """The shards in the route's order, then the head."""
        return [*self.shards, self.head]

    async def __aenter__(self) -> Self:
        try:
            for member in self.members:
                await member.start()
            await self._wait_all_ready()
        except BaseException:
            await self._stop()
            raise
        if self._restart:
            self._supervisors = [asyncio.create_task(self._keep_up(m)) for m in self.members]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def wait_ready(self, member: Member) -> None:
        """Wait until `member`, started again, takes requests.

        Raises:
            ClusterError: It ended, failed, or took too long.
        """
        await member.wait_ready(self._watcher, self._load_limit_s)

    async def _wait_all_ready(self) -> None:
        """Wait for all; the first that fails ends the waiting."""
        waits = [asyncio.create_task(self.wait_ready(member)) for member in self.members]
        try:
            for done in asyncio.as_completed(waits):
                await done
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _keep_up(self, member: Member) -> None:
        """Start `member` again whenever it ends."""
        delay_s = _FIRST_DELAY_S
        while True:
            since = monotonic()
            code = await member.wait()
            if monotonic() - since > _STEADY_S:
                delay_s = _FIRST_DELAY_S
            self._watcher.note(f"{member.name} {describe_end(code)}; it is started again")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            await self._start_again(member)

    async def _start_again(self, member: Member) -> None:
        try:
            await member.start()
            await member.wait_ready(ClusterWatcher(), self._load_limit_s)
        except (ClusterError, OSError) as error:
            self._watcher.note(f"{member.name} did not come back: {error}")
            await member.stop()
        else:
            self._watcher.note(f"{member.name} is ready again")

    async def _stop(self) -> None:
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await self.head.stop()  # first, so that it never sees its shards go
        await asyncio.gather(*(shard.stop() for shard in self.shards))
