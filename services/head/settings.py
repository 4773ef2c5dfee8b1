"""The head's settings, read once from `MESHNET_HEAD_*`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    SecretStr,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticKnownError
from pydantic_settings import BaseSettings, SettingsConfigDict

from meshnet.head.direct_return import HopReturn
from meshnet.head.replay import ReplayMode
from meshnet.observability import LogFormat

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ModelSource = Annotated[str, Field(min_length=1)]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/*]+)$")]


class HopSetting(BaseModel):
    """One hop of a configured route."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str = Field(pattern=r"^https?://[^/]+$")
    start_layer: NonNegativeInt | None = None


def _check_hops(route: tuple[HopSetting, ...]) -> tuple[HopSetting, ...]:
    _check_unique([hop.endpoint for hop in route], "each shard once")
    return route


def _check_unique(names: Sequence[str], allowed: str) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{min(twice)} is named twice; allowed: {allowed}")


Hops = Annotated[tuple[HopSetting, ...], AfterValidator(_check_hops)]


class ModelSetting(BaseModel):
    """One served model, and the shards that run it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSource
    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    route: Hops = Field(min_length=1)

    @property
    def name(self) -> str:
        """The id clients use."""
        return self.served_model_name or PurePath(self.model).name


def _check_rate_limit(text: str) -> str:
    # Here, not above: every command reads this module, and the library takes 0.1 s to import.
    from services.head.rate_limit import parse

    parse(text)
    return text


class ApiKeySetting(BaseModel):
    """One key that opens the endpoint, as `meshnet key` prints it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the key, which itself is kept nowhere."""
    rate_limit: Annotated[str, AfterValidator(_check_rate_limit)] | None = None
    """`N/second`, `/minute`, `/hour` or `/day`: generations begun with this key."""


class HeadSettings(BaseSettings):
    """Which models the head serves and within what limits. A malformed value stops the start."""

    model_config = SettingsConfigDict(env_prefix="MESHNET_HEAD_", frozen=True, extra="ignore")

    models: tuple[ModelSetting, ...] = ()
    """JSON: [{"model": ..., "served_model_name": ..., "route": [...]}, ...]. For a single one its
    members can be settings by themselves, instead of this one."""
    model: ModelSource | None = None
    """A folder with config and tokenizer (weights are not read), or a Hugging Face id."""
    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    """The id clients use; None is the folder's or repository's name."""
    route: Hops = ()
    """JSON: [{"endpoint": "http://host:port", "start_layer": 0}, ...], in any order; of several
    that run the same layers each is the others' standby."""

    @field_validator("models")
    @classmethod
    def _check_models(cls, models: tuple[ModelSetting, ...]) -> tuple[ModelSetting, ...]:
        _check_unique([model.name for model in models], "each id once")
        return models

    # Defaults are validated too, in settings.
    @field_validator("model", "served_model_name", "route")
    @classmethod
    def _check_alone(cls, value: Any, info: ValidationInfo) -> Any:  # noqa: ANN401  # of three types
        if value and info.data.get("models"):
            raise ValueError("is for a single model; allowed: nothing, where `models` is set")
        return value

    @field_validator("model", "route")
    @classmethod
    def _check_there(cls, value: Any, info: ValidationInfo) -> Any:  # noqa: ANN401  # of two types
        if not value and info.data.get("models") == ():
            raise PydanticKnownError("missing")
        return value

    @field_validator("api_keys")
    @classmethod
    def _check_api_keys(cls, keys: tuple[ApiKeySetting, ...]) -> tuple[ApiKeySetting, ...]:
        _check_unique([key.name for key in keys], "each name once")
        _check_unique([key.sha256 for key in keys], "each key once")
        return keys

    @property
    def served(self) -> tuple[ModelSetting, ...]:
        """Every model, however it was told."""
        if self.model is None:
            return self.models
        name = self.served_model_name
        return (ModelSetting(model=self.model, served_model_name=name, route=self.route),)

    prefill_chunk_tokens: PositiveInt = 128
    """Short, so that a prompt makes several, and each hop works on another one of them."""
    max_body_bytes: PositiveInt = 8 * 1024**2
    max_concurrent_requests: Annotated[int, Field(ge=1, le=128)] = 16
    """Generations of one model at once; the others wait for their turn."""
    max_queued_requests: NonNegativeInt = 64
    """Generations of one model that may wait, of each API key; what comes then is 503 with
    Retry-After."""
    open_answer_tokens: PositiveInt = 1024
    """Reserved in the hops' caches for an answer that may fill the context, as one without a limit
    may; it goes on while there is room. For any other, all that it may have is reserved."""
    max_choices: Annotated[int, Field(ge=1, le=128)] = 16
    """The most choices of one request: `n`, times its prompts."""
    strict_parameters: bool = False
    """Whether a parameter that nobody has heard of is refused, and not only named in a header."""
    stream_start_s: Seconds = 10.0
    """How long a stream's status waits for the first token: until then an error has its own."""
    stream_ping_s: Seconds = 15.0
    """How often a stream that has nothing to say tells that it is alive."""

    hop_transport: Literal["auto", "post", "stream"] = "auto"
    """How steps go to the hops: each as a POST, or over a stream that is kept open; auto is over a
    stream while there is one."""
    hop_return: HopReturn = "auto"
    """Which way hidden states go: by the head (`star`), or from hop to hop (`direct`) wherever all
    hops of a route can; `auto` does so where they are a millisecond away or more."""
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
    prefix_reuse: bool = True
    """Whether a prompt that begins as another one did is computed from there on only. How soon it
    is answered then tells its caller that there was such a prompt."""
    route_poll_s: Seconds = 2.0
    """How often the hops are asked whether they are ready."""
    drain_timeout_s: Seconds = 25.0
    """How long running requests may go on after the signal to stop."""

    cluster_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    """Sent to every shard; a caller who pins a route must show it as bearer token."""
    api_keys: tuple[ApiKeySetting, ...] = ()
    """If set, everything but health checks and preflights needs one of them, or the cluster key."""
    cors_origins: tuple[Origin, ...] = ("*",)
    """Web pages that may call: `https://host:port` each, or `*` for all."""
    log_format: LogFormat = "console"
