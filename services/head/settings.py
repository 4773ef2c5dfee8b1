"""The head's settings, read once from `MESHNET_HEAD_*`."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    SecretStr,
    field_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from meshnet.head.replay import ReplayMode
from meshnet.observability import LogFormat

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class HopSetting(BaseModel):
    """One hop of the configured route."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str = Field(pattern=r"^https?://[^/]+$")
    start_layer: NonNegativeInt | None = None


class HeadSettings(BaseSettings):
    """Which route the head drives and within what limits. A malformed value stops the start."""

    model_config = SettingsConfigDict(env_prefix="MESHNET_HEAD_", frozen=True, extra="ignore")

    model: str = Field(min_length=1)
    """A folder with config and tokenizer (weights are not read), or a Hugging Face id."""
    served_model_name: str | None = None
    """The id clients use; None is the folder's or repository's name."""
    route: tuple[HopSetting, ...] = Field(min_length=1)
    """JSON: [{"endpoint": "http://host:port", "start_layer": 0}, ...], in any order; of several
    that run the same layers each is the others' standby."""

    @field_validator("route")
    @classmethod
    def _check_endpoints(cls, route: tuple[HopSetting, ...]) -> tuple[HopSetting, ...]:
        endpoints = [hop.endpoint for hop in route]
        twice = {endpoint for endpoint in endpoints if endpoints.count(endpoint) > 1}
        if twice:
            raise ValueError(f"{min(twice)} is named twice; allowed: each shard once")
        return route

    prefill_chunk_tokens: PositiveInt = 512
    max_body_bytes: PositiveInt = 8 * 1024**2
    max_concurrent_requests: Annotated[int, Field(ge=1, le=128)] = 16
    """More than these at once are answered 503 with Retry-After."""

    connect_timeout_s: Seconds = 5.0
    probe_timeout_s: Seconds = 3.0
    """The longest a hop may take for what computes nothing."""
    min_step_timeout_s: Seconds = 5.0
    """A step may take ten times what the measured speed makes it, but at least this long."""
    step_timeout_s: Seconds = 120.0
    """The longest a hop may take for one step, and the limit while nothing was measured."""
    recovery_timeout_s: Seconds = 60.0
    """The longest one token may take to recover, waiting for a lost hop included; feeding a hop
    again, which takes as long as it takes, is not."""
    max_rebuilds_per_token: PositiveInt = 4
    replay: ReplayMode = "exact"
    """How a hop that lost a session is fed again: in calls of the original lengths, which gives the
    same bits, or fast, in as few calls as it takes."""
    replay_max_bytes: NonNegativeInt = 256 * 1024**2
    """For what hops were fed, over all sessions. A session that finds no room there is prefilled
    anew on all hops."""
    route_poll_s: Seconds = 2.0
    """How often the hops are asked whether they are ready."""
    drain_timeout_s: Seconds = 25.0
    """How long running requests may go on after the signal to stop."""

    cluster_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    """Sent to every shard; a caller who pins a route must show it as bearer token."""
    log_format: LogFormat = "console"
