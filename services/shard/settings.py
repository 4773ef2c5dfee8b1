"""The shard's settings, read once from `MESHNET_SHARD_*`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from meshnet.observability import LogFormat

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ShardSettings(BaseSettings):
    """What one shard process runs and how much it may hold. A malformed value stops the start."""

    model_config = SettingsConfigDict(env_prefix="MESHNET_SHARD_", frozen=True, extra="ignore")

    model: str = Field(min_length=1)
    """A folder of safetensors, a GGUF file or its folder, or a Hugging Face id."""
    layers: str = Field(pattern=r"^\d+-\d+$")
    """The span, START-END with END excluded: 0-15 is layers 0 to 14."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: PositiveInt | None = None
    """Compute threads; None leaves torch's choice, the number of cores."""
    kv_cache: bool = True
    """False keeps no session state: every step must be stateless."""

    cache_ttl_seconds: Seconds = 600.0
    cache_max_sessions: PositiveInt = 16
    cache_max_bytes: PositiveInt = 2 * 1024**3
    max_step_tokens: PositiveInt = 2048
    max_queued_steps: PositiveInt = 64
    drain_timeout_s: Seconds = 25.0
    """How long held sessions may go on after the signal to stop."""

    cluster_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    """If set, every call but the health checks and metrics must carry it as a bearer token."""
    log_format: LogFormat = "console"
