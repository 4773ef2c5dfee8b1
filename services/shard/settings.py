"""The shard's settings, read once from `MESHNET_SHARD_*`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, PositiveInt, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from meshnet.observability import LogFormat

Dtype = Literal["float32", "bfloat16", "float16"]
Weights = Literal["fp32", "bf16", "int8", "int4"]
Packing = Literal["int8", "int4"]

_DTYPE_OF: Final[dict[Weights, Dtype]] = {"fp32": "float32", "bf16": "bfloat16"}
"""Weights that are not packed are of the dtype that everything is computed in."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ShardSettings(BaseSettings):
    """What one shard process runs and how much it may hold. A malformed value stops the start."""

    model_config = SettingsConfigDict(env_prefix="MESHNET_SHARD_", frozen=True, extra="ignore")

    model: str = Field(min_length=1)
    """A folder of safetensors, a GGUF file or its folder, or a Hugging Face id."""
    layers: str = Field(pattern=r"^\d+-\d+$")
    """The span, START-END with END excluded: 0-15 is layers 0 to 14."""
    dtype: Dtype | None = None
    """Of hidden states and caches; as `weights` say, or float32."""
    weights: Weights | None = None
    """How weights are kept; None is in the dtype."""
    threads: PositiveInt | None = None
    """Compute threads; None leaves torch's choice, the number of cores."""
    kv_cache: bool = True
    """False keeps no session state: every step must be stateless."""

    cache_ttl_seconds: Seconds = 600.0
    cache_max_sessions: PositiveInt = 16
    cache_max_bytes: PositiveInt = 2 * 1024**3
    max_step_tokens: PositiveInt = 2048
    max_queued_steps: PositiveInt = 64
    max_batch_sessions: PositiveInt = 32
    """Sessions whose decode steps may run as one batch."""
    drain_timeout_s: Seconds = 25.0
    """How long held sessions may go on after the signal to stop."""

    cluster_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    """If set, every call but the health checks and metrics must carry it as a bearer token."""
    push: bool = True
    """Whether hidden states go to the next shard where a head asks for that, with the cluster key,
    and come from the one before. False takes no part in direct return."""
    log_format: LogFormat = "console"

    @field_validator("weights")
    @classmethod
    def _fit_dtype(cls, weights: Weights | None, info: ValidationInfo) -> Weights | None:
        dtype = info.data.get("dtype")
        expected = _DTYPE_OF.get(weights, dtype) if weights else dtype
        if dtype not in (None, expected):
            raise ValueError(
                f"{weights} weights are computed with in {expected}, and dtype is {dtype}; leave "
                "one of them out"
            )
        return weights

    @property
    def stage_dtype(self) -> Dtype:
        """The dtype of hidden states and caches."""
        return self.dtype or _DTYPE_OF.get(self.weights or "fp32", "float32")

    @property
    def packing(self) -> Packing | None:
        """How linear layers' weights are packed."""
        return self.weights if self.weights in ("int8", "int4") else None
