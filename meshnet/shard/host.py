"""A shard's life: loading, ready or failed, draining; and what it says of itself meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Final, Protocol, cast

import structlog

from meshnet.cache.store import SessionCacheStore
from meshnet.errors import Draining, MeshError, ModelError, ModelLoading
from meshnet.ids import BootId
from meshnet.model.interface import CacheState, StageModel
from meshnet.shard.compute import ComputeThread
from meshnet.shard.step_log import DecodeLog
from meshnet.shard.worker import ShardWorker
from meshnet.wire.frames import Dtype
from meshnet.wire.messages import CacheUse, ShardInfo, ShardLimits, ShardReadiness, ShardState

_log = structlog.get_logger(__name__)

_DRAIN_POLL_S: Final = 0.05


class StageLoader(Protocol):
    """A stage that was checked and can be loaded."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        ...

    def load(self, progress: Callable[[int], None]) -> StageModel:
        """Read the tensors, telling the bytes read so far.

        Raises:
            ModelError: One is missing or damaged.
        """
        ...


class ShardHost:
    """Holds the worker once there is one.

    Args:
        loader: What to load.
        store: The sessions' states.
        compute: The thread that loads, and then runs steps.
        decode_log: Which decode steps get a log line.
        limits: What this shard takes.
        boot_id: Which life of the process this is.
        kv_cache: False refuses cached steps.
        push: False takes no part in direct return.
    """

    def __init__(
        self,
        *,
        loader: StageLoader,
        store: SessionCacheStore[CacheState],
        compute: ComputeThread,
        decode_log: DecodeLog,
        limits: ShardLimits,
        boot_id: BootId,
        kv_cache: bool,
        push: bool = True,
    ) -> None:
        self.store = store
        self.boot_id = boot_id
        self.push = push and kv_cache
        self._loader = loader
        self._compute = compute
        self._decode_log = decode_log
        self._limits = limits
        self._kv_cache = kv_cache
        self._worker: ShardWorker | None = None
        self._failure: MeshError | None = None
        self._loaded_bytes = 0
        self._draining = False

    async def load(self) -> None:
        """Load the stage. A failure is kept: `readiness` tells it, and `worker` raises it."""
        began_at = perf_counter()
        try:
            stage = await self._compute.run(lambda: self._loader.load(self._note_progress))
        except Exception as error:  # noqa: BLE001  # else the shard would say "loading" for ever
            foreseen = isinstance(error, MeshError)
            self._failure = error if foreseen else ModelError(f"loading failed: {error!r}")
            _log.error("loading failed", reason=self._failure.message, exc_info=not foreseen)
            return
        self._worker = ShardWorker(
            stage=stage,
            store=self.store,
            compute=self._compute,
            decode_log=self._decode_log,
            boot_id=self.boot_id,
            check_begin=self._check_begin,
            max_step_tokens=self._limits.max_step_tokens,
            kv_cache=self._kv_cache,
            push=self.push,
        )
        load_ms = round((perf_counter() - began_at) * 1000)
        _log.info("ready", span=str(stage.facts.span), load_ms=load_ms)

    @property
    def worker(self) -> ShardWorker:
        """The worker.

        Raises:
            ModelLoading: Not yet.
            ModelError: Never: the loading failed.
        """
        if self._worker is not None:
            return self._worker
        if self._failure is not None:
            raise ModelError(self._failure.message, **self._failure.members)
        raise ModelLoading(
            f"loading: {self._loaded_bytes} of {self._loader.nbytes} bytes",
            loaded_bytes=self._loaded_bytes,
            total_bytes=self._loader.nbytes,
        )

    async def drain(self, limit_s: float) -> bool:
        """Take no new session, and wait until those held are closed.

        Args:
            limit_s: How long; what is left then is lost with the process.

        Returns:
            Whether none was left.
        """
        self._draining = True
        _log.info("draining", sessions=(await self.store.usage()).sessions)
        for _ in range(max(1, round(limit_s / _DRAIN_POLL_S))):
            if not (await self.store.usage()).sessions:
                return True
            await asyncio.sleep(_DRAIN_POLL_S)
        return False

    def readiness(self) -> ShardReadiness:
        """Whether steps are taken, and why not."""
        failure = self._failure.message if self._failure else None
        return ShardReadiness(
            state=self._state(),
            reason="finishing its sessions, taking no new one" if self._draining else failure,
            loaded_bytes=self._loaded_bytes,
            total_bytes=self._loader.nbytes,
        )

    async def info(self) -> ShardInfo:
        """What the shard is and holds.

        Raises:
            ModelLoading: It is not known yet.
            ModelError: The loading failed.
        """
        facts, cost = self.worker.stage.facts, self.worker.session_cost()
        use = await self.store.usage()
        return ShardInfo(
            boot_id=self.boot_id,
            draining=self._draining,
            model=facts.model,
            revision=facts.revision,
            fingerprint=facts.fingerprint,
            start_layer=facts.span.start,
            end_layer=facts.span.end,
            n_layers=facts.n_layers,
            hidden_size=facts.hidden_size,
            vocab_size=facts.vocab_size,
            dtype=cast("Dtype", facts.dtype),
            max_positions=facts.max_positions,
            transformers_version=facts.transformers_version,
            weights=facts.weights,
            layer_digests=facts.layer_digests,
            kv_cache=self._kv_cache,
            push=self.push,
            state_base_bytes=cost.base_bytes,
            state_token_bytes=cost.token_bytes,
            limits=self._limits,
            cache=CacheUse(
                sessions=use.sessions,
                leases=use.leases,
                cached_bytes=use.cached_bytes,
                kept=use.kept,
            ),
        )

    def _check_begin(self) -> None:
        if self._draining:
            raise Draining("this shard finishes its sessions and takes no new one")

    def _state(self) -> ShardState:
        if self._draining:
            return "draining"
        return "ready" if self._worker else "failed" if self._failure else "loading"

    def _note_progress(self, loaded_bytes: int) -> None:
        self._loaded_bytes = loaded_bytes
