"""What several unit tests put in place of the world."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from meshnet.topology import ShardFacts
from meshnet.wire.frames import Dtype
from meshnet.wire.messages import CacheUse, ShardInfo, ShardLimits


class FakeClock:
    """Seconds that pass only when somebody sleeps, or when told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class FakeLog:
    """Stands in for a module's structlog logger; keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[Mapping[str, object]] = []

    def info(self, event: str, **members: object) -> None:
        self.lines.append({"event": event, **members})

    warning = info
    error = info

    @classmethod
    def instead_of(cls, logger: str, monkeypatch: pytest.MonkeyPatch) -> FakeLog:
        log = cls()
        monkeypatch.setattr(logger, log)
        return log


async def turn_the_loop(times: int = 20) -> None:
    """Let everything run that can run now."""
    for _ in range(times):
        await asyncio.sleep(0)


def shard_info(
    facts: ShardFacts, boot_id: str = "boot-1", *, draining: bool = False, sessions: int = 0
) -> ShardInfo:
    """What a shard of these facts says of itself."""
    return ShardInfo(
        boot_id=boot_id,
        draining=draining,
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
        kv_cache=facts.kv_cache,
        push=facts.push,
        state_base_bytes=facts.state_base_bytes,
        state_token_bytes=facts.state_token_bytes,
        limits=ShardLimits(
            max_step_tokens=facts.max_step_tokens,
            max_sessions=facts.max_sessions,
            cache_ttl_s=60,
            cache_bytes=facts.cache_bytes,
        ),
        cache=CacheUse(sessions=sessions, leases=0, cached_bytes=0),
    )
