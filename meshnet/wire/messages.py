"""The JSON bodies of the protocol: what a tail answers, and what a shard says of itself."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from meshnet.generation import TokenId, TokenScore
from meshnet.topology import LayerSpan, ShardFacts
from meshnet.wire.frames import Dtype
from meshnet.wire.headers import PROTOCOL_VERSION, Token

ShardState = Literal["loading", "ready", "draining", "failed"]


class TailAnswer(BaseModel):
    """The tail's answer to one step.

    `token_id` is None when nothing was to be sampled. A tail of a mixed fleet may know text only:
    then `text` is set, and "" is the end of the sequence. `score` is the token's, if asked for, and
    `prompt_scores` are those of the context's `next_ids`, in their order.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    token_id: TokenId | None = None
    text: str | None = None
    score: TokenScore | None = None
    prompt_scores: tuple[TokenScore, ...] = ()


class ShardLimits(BaseModel):
    """What one shard takes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    max_step_tokens: PositiveInt
    max_sessions: PositiveInt
    cache_ttl_s: float = Field(gt=0)
    cache_bytes: PositiveInt


class CacheUse(BaseModel):
    """What one shard's cache holds now."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    sessions: NonNegativeInt
    leases: NonNegativeInt
    cached_bytes: NonNegativeInt
    kept: NonNegativeInt = 0
    """Closed sessions that are kept for forks; not among `sessions`."""


class ShardInfo(BaseModel):
    """`GET /v1/shard`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    protocol: int = PROTOCOL_VERSION
    boot_id: Token
    draining: bool = False
    model: str
    revision: str
    fingerprint: Token
    start_layer: NonNegativeInt
    end_layer: PositiveInt
    n_layers: PositiveInt
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    dtype: Dtype
    max_positions: PositiveInt
    transformers_version: str = ""
    weights: str | None = None
    layer_digests: tuple[str, ...] = ()
    kv_cache: bool = True
    push: bool = False
    """Whether it takes part in direct return."""
    state_base_bytes: NonNegativeInt = 0
    """A session of n tokens takes at most this plus n times `state_token_bytes` of the cache."""
    state_token_bytes: NonNegativeInt = 0
    """0, and 0 for the base: not told."""
    limits: ShardLimits
    cache: CacheUse

    @model_validator(mode="after")
    def _check_span(self) -> Self:
        if not self.start_layer < self.end_layer <= self.n_layers:
            raise ValueError("start_layer < end_layer <= n_layers does not hold")
        if len(self.layer_digests) not in {0, self.end_layer - self.start_layer}:
            raise ValueError("layer_digests are not one a layer")
        return self

    def facts(self) -> ShardFacts:
        """The part that a route depends on."""
        return ShardFacts(
            model=self.model,
            revision=self.revision,
            fingerprint=self.fingerprint,
            span=LayerSpan(self.start_layer, self.end_layer),
            n_layers=self.n_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            max_positions=self.max_positions,
            transformers_version=self.transformers_version,
            weights=self.weights,
            layer_digests=self.layer_digests,
            kv_cache=self.kv_cache,
            push=self.push,
            max_step_tokens=self.limits.max_step_tokens,
            state_base_bytes=self.state_base_bytes,
            state_token_bytes=self.state_token_bytes,
            cache_bytes=self.limits.cache_bytes,
            max_sessions=self.limits.max_sessions,
        )


class ShardReadiness(BaseModel):
    """`GET /readyz` of a shard."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: ShardState
    reason: str | None = None
    loaded_bytes: NonNegativeInt = 0
    total_bytes: NonNegativeInt = 0
