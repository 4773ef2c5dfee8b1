"""The shard's numbers for Prometheus. One registry an app, so that several can share a process."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from meshnet.cache.store import CacheUsage
from meshnet.errors import MeshError, MissReason
from meshnet.shard.compute import Timed

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_STEPS = (1, 2, 4, 8, 16, 32)


class ShardMetrics:
    """Counts steps and refusals; tells what the cache holds."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._queue = Histogram(
            "meshnet_shard_queue_seconds",
            "Time a step waited for the compute thread",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._compute = Histogram(
            "meshnet_shard_compute_seconds",
            "Time the stage took for a step",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._batch = Histogram(
            "meshnet_shard_batch_steps",
            "Decode steps that ran together, as each of them saw it",
            buckets=_STEPS,
            registry=registry,
        )
        self._refusals = Counter(
            "meshnet_shard_refusals",
            "Requests answered with a problem",
            ["code", "reason"],
            registry=registry,
        )
        self._sessions = Gauge("meshnet_shard_sessions", "Sessions held", registry=registry)
        self._leases = Gauge("meshnet_shard_leases", "Sessions in a step", registry=registry)
        self._kept = Gauge(
            "meshnet_shard_kept_sessions", "Closed sessions kept for forks", registry=registry
        )
        self._forks = Gauge(
            "meshnet_shard_forks", "Sessions that began as forks since the start", registry=registry
        )
        self._bytes = Gauge("meshnet_shard_cached_bytes", "Bytes cached", registry=registry)
        self._drops = Gauge(
            "meshnet_shard_sessions_dropped",
            "Sessions the cache gave up by itself since the start",
            ["reason"],
            registry=registry,
        )

    def count_step(self, phase: str, done: Timed) -> None:
        """Note one step that was run."""
        self._queue.labels(phase).observe(done.queue_ms / 1000)
        self._compute.labels(phase).observe(done.compute_ms / 1000)
        if phase == "decode" and done.batch_size:
            self._batch.observe(done.batch_size)

    def count_refusal(self, error: MeshError) -> None:
        """Note one request that was refused."""
        self._refusals.labels(error.code, str(error.members.get("reason", ""))).inc()

    def render(self, usage: CacheUsage, drops: Mapping[MissReason, int], n_forks: int) -> bytes:
        """Everything, in Prometheus' text format."""
        for reason, count in drops.items():
            self._drops.labels(reason).set(count)
        self._sessions.set(usage.sessions)
        self._leases.set(usage.leases)
        self._kept.set(usage.kept)
        self._forks.set(n_forks)
        self._bytes.set(usage.cached_bytes)
        return generate_latest(self._registry)
