"""Several heads over the same shards, so that ways to drive them can be compared in turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.bench.delay import Delay, delayed
from benchmarks.bench.sides import REUSE_VARIABLE, Endpoint, open_endpoint
from benchmarks.bench.workload import Workload
from meshnet.topology import even_spans
from services.cli.cluster import PROGRAM, ClusterWatcher, LocalCluster, Member
from services.cli.serving import free_port

_START_LIMIT_S: Final = 120.0

Ways = Mapping[str, Mapping[str, str]]
"""Settings of a head (`MESHNET_HEAD_*`), by the name of the way to drive shards."""


@asynccontextmanager
async def heads(
    work: Workload, n_shards: int, weights: str, ways: Ways, delay: Delay | None = None
) -> AsyncGenerator[dict[str, Endpoint]]:
    """Shards of one thread each, and a head for each way, as processes. Every prompt is computed.

    Args:
        work: Whose model.
        n_shards: How many.
        weights: The format of the weights, one of `sides.DTYPES`.
        ways: One head each.
        delay: If given, whoever goes to a shard goes through a proxy that keeps everything back.

    Raises:
        ClusterError: They do not start.
    """
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory()))
        cluster = LocalCluster(  # its own head has nothing to do
            str(work.model),
            even_spans(work.n_layers, n_shards),
            weights=weights,
            threads=1,
            log_dir=logs,
            restart=False,
        )
        await stack.enter_async_context(cluster)
        urls = [shard.url for shard in cluster.shards]
        if delay is not None:
            urls = [
                await stack.enter_async_context(delayed(delay, int(url.rpartition(":")[2])))
                for url in urls
            ]
        started: dict[str, Endpoint] = {}
        for way, settings in ways.items():
            own = {"MESHNET_HEAD_CLUSTER_KEY": cluster.cluster_key, REUSE_VARIABLE: "false"}
            env = {**own, **settings}
            head = await stack.enter_async_context(_head(work, urls, env, logs / f"{way}.log"))
            started[way] = await stack.enter_async_context(
                open_endpoint(head.url, work.model.name, return_token_ids=True)
            )
        yield started


@asynccontextmanager
async def _head(
    work: Workload, urls: list[str], env: Mapping[str, str], log_path: Path
) -> AsyncGenerator[Member]:
    command = (*PROGRAM, "head", "--model", str(work.model), "--route", ",".join(urls))
    head = Member("head", command, free_port(), env, log_path)
    await head.start()
    try:
        await head.wait_ready(ClusterWatcher(), _START_LIMIT_S)
        yield head
    finally:
        await head.stop()
