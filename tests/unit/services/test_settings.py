from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, SettingsError

from services.head.settings import HeadSettings, HopSetting, ModelSetting
from services.shard.settings import ShardSettings

SHARD = {"MESHNET_SHARD_MODEL": "m", "MESHNET_SHARD_LAYERS": "0-15"}
ROUTE = '[{"endpoint": "http://a:1"}]'
HEAD = {"MESHNET_HEAD_MODEL": "m", "MESHNET_HEAD_ROUTE": ROUTE}
TWO_MODELS = f'[{{"model": "org/a", "route": {ROUTE}}}, {{"model": "org/b", "route": {ROUTE}}}]'
SEVERAL = {"MESHNET_HEAD_MODELS": TWO_MODELS}
DIGEST = "0" * 64


def read(
    kind: type[BaseSettings], environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> BaseModel:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return kind()


def faults(
    kind: type[BaseSettings], environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The settings that stop the start."""
    with pytest.raises(ValidationError) as caught:
        read(kind, environment, monkeypatch)
    return list(dict.fromkeys(str(error["loc"][0]) for error in caught.value.errors()))


def test_a_shard_needs_a_model_and_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no default is named when it is missing."""
    assert faults(ShardSettings, {}, monkeypatch) == ["model", "layers"]


def test_a_shards_defaults_are_the_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 s, 16 sessions, 2 GiB, and caches on."""
    settings = read(ShardSettings, SHARD, monkeypatch)

    assert settings == ShardSettings(
        model="m",
        layers="0-15",
        dtype=None,
        weights=None,
        threads=None,
        kv_cache=True,
        cache_ttl_seconds=600,
        cache_max_sessions=16,
        cache_max_bytes=2**31,
        drain_timeout_s=25,
        cluster_key=None,
        log_format="console",
    )
    assert isinstance(settings, ShardSettings)
    assert (settings.stage_dtype, settings.packing) == ("float32", None)


@pytest.mark.parametrize(
    ("given", "dtype", "packing"),
    [
        ({"weights": "fp32"}, "float32", None),
        ({"weights": "bf16"}, "bfloat16", None),
        ({"weights": "bf16", "dtype": "bfloat16"}, "bfloat16", None),
        ({"weights": "int8"}, "float32", "int8"),
        ({"weights": "int4", "dtype": "bfloat16"}, "bfloat16", "int4"),
        ({"dtype": "float16"}, "float16", None),
    ],
)
def test_weights_say_what_a_shard_computes_in(
    given: Mapping[str, str], dtype: str, packing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are not packed are of the dtype of everything; packed ones leave it alone."""
    environment = {f"MESHNET_SHARD_{name.upper()}": value for name, value in given.items()}
    settings = read(ShardSettings, SHARD | environment, monkeypatch)

    assert isinstance(settings, ShardSettings)
    assert (settings.stage_dtype, settings.packing) == (dtype, packing)


def test_weights_of_another_dtype_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 weights that are computed with in bfloat16 would be no float32 weights."""
    environment = {"MESHNET_SHARD_WEIGHTS": "fp32", "MESHNET_SHARD_DTYPE": "bfloat16"}

    assert faults(ShardSettings, SHARD | environment, monkeypatch) == ["weights"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("layers", "15"),
        ("layers", "a-b"),
        ("layers", "0-15\n"),
        ("dtype", "int8"),
        ("weights", "q4_0"),
        ("max_batch_sessions", "0"),
        ("threads", "0"),
        ("kv_cache", "perhaps"),
        ("cache_ttl_seconds", "0"),
        ("cache_ttl_seconds", "ten"),
        ("cache_ttl_seconds", "nan"),
        ("cache_ttl_seconds", "inf"),
        ("cache_max_sessions", "0"),
        ("cache_max_sessions", "1.5"),
        ("cache_max_bytes", "2GB"),
        ("max_step_tokens", "-1"),
        ("max_queued_steps", "0"),
        ("drain_timeout_s", "0"),
        ("cluster_key", ""),
        ("log_format", "xml"),
    ],
)
def test_a_shards_malformed_value_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A malformed value stops the start and names its setting, and no other."""
    environment = SHARD | {f"MESHNET_SHARD_{name.upper()}": value}

    assert faults(ShardSettings, environment, monkeypatch) == [name]


def test_a_head_needs_a_model_and_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no default is named when it is missing."""
    assert faults(HeadSettings, {}, monkeypatch) == ["model", "route"]


def test_a_route_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hops come in order, a start layer where one is given."""
    route = '[{"endpoint": "http://a:1"}, {"endpoint": "https://b", "start_layer": 3}]'
    settings = read(HeadSettings, HEAD | {"MESHNET_HEAD_ROUTE": route}, monkeypatch)

    assert isinstance(settings, HeadSettings)
    assert settings.route == (
        HopSetting(endpoint="http://a:1"),
        HopSetting(endpoint="https://b", start_layer=3),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("route", "[]"),
        ("route", '[{"endpoint": "a:1"}]'),
        ("route", '[{"endpoint": "http://a:1/"}]'),
        ("route", '[{"endpoint": "file:///etc"}]'),
        ("route", '[{"endpoint": "http://a:1", "start_layer": -1}]'),
        ("route", '[{"endpoint": "http://a:1", "layer": 1}]'),
        ("prefill_chunk_tokens", "0"),
        ("max_body_bytes", "0"),
        ("max_concurrent_requests", "0"),
        ("max_concurrent_requests", "129"),
        ("max_queued_requests", "-1"),
        ("open_answer_tokens", "0"),
        ("max_choices", "0"),
        ("max_choices", "129"),
        ("stream_start_s", "0"),
        ("stream_ping_s", "inf"),
        ("strict_parameters", "perhaps"),
        ("served_model_name", ""),
        ("cors_origins", '["example.org"]'),
        ("cors_origins", '["https://example.org/"]'),
        ("cors_origins", '["https://*"]'),
        ("route", '[{"endpoint": "http://a:1"}, {"endpoint": "http://a:1", "start_layer": 2}]'),
        ("connect_timeout_s", "0"),
        ("probe_timeout_s", "0"),
        ("min_step_timeout_s", "0"),
        ("step_timeout_s", "-1"),
        ("recovery_timeout_s", "soon"),
        ("max_rebuilds_per_token", "0"),
        ("replay", "slow"),
        ("replay_max_bytes", "-1"),
        ("drain_timeout_s", "inf"),
        ("route_poll_s", "0"),
        ("route_poll_s", "inf"),
        ("cluster_key", ""),
        ("log_format", "xml"),
    ],
)
def test_a_heads_malformed_value_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A malformed value stops the start and names its setting, and no other."""
    environment = HEAD | {f"MESHNET_HEAD_{name.upper()}": value}

    assert faults(HeadSettings, environment, monkeypatch) == [name]


def test_a_shard_named_twice_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the endpoint, and that each is to be named once."""
    twice = '[{"endpoint": "http://b:1"}, {"endpoint": "http://a:1"}, {"endpoint": "http://b:1"}]'
    with pytest.raises(ValidationError, match="http://b:1 is named twice; allowed: each shard"):
        read(HeadSettings, HEAD | {"MESHNET_HEAD_ROUTE": twice}, monkeypatch)


def read_head(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> HeadSettings:
    settings = read(HeadSettings, environment, monkeypatch)
    assert isinstance(settings, HeadSettings)
    return settings


def test_one_model_is_told_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, name and route make the one that is served."""
    settings = read_head(HEAD | {"MESHNET_HEAD_SERVED_MODEL_NAME": "x"}, monkeypatch)
    route = (HopSetting(endpoint="http://a:1"),)

    assert settings.served == (ModelSetting(model="m", served_model_name="x", route=route),)
    assert [model.name for model in settings.served] == ["x"]


def test_several_models_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own route, and unless named the last part of its path or id for a name."""
    settings = read_head(SEVERAL, monkeypatch)

    assert [model.name for model in settings.served] == ["a", "b"]
    assert settings.served == settings.models


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"MESHNET_HEAD_MODEL": "m"}, ["route"]),
        ({"MESHNET_HEAD_ROUTE": ROUTE}, ["model"]),
        (SEVERAL | {"MESHNET_HEAD_MODEL": "m"}, ["model"]),
        (SEVERAL | {"MESHNET_HEAD_SERVED_MODEL_NAME": "x"}, ["served_model_name"]),
        (SEVERAL | HEAD, ["model", "route"]),
        ({"MESHNET_HEAD_MODELS": "[]"}, ["model", "route"]),
        ({"MESHNET_HEAD_MODELS": '[{"model": "m"}]'}, ["models"]),
        ({"MESHNET_HEAD_MODELS": '[{"model": "m", "route": []}]'}, ["models"]),
        ({"MESHNET_HEAD_MODELS": '[{"model": "m", "name": "n"}]'}, ["models"]),
        ({"MESHNET_HEAD_MODELS": TWO_MODELS.replace("org/b", "org2/a")}, ["models"]),
    ],
)
def test_the_models_are_told_in_one_way(
    environment: Mapping[str, str], named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a model, two ways at once and an id given twice are told by their setting."""
    assert named == faults(HeadSettings, environment, monkeypatch)


def test_an_id_given_twice_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the id, and that each is to be served once."""
    twice = TWO_MODELS.replace("org/b", "org2/a")
    with pytest.raises(ValidationError, match="a is named twice; allowed: each id once"):
        read(HeadSettings, {"MESHNET_HEAD_MODELS": twice}, monkeypatch)


def key(**changed: str) -> dict[str, str]:
    return {"name": "alice", "sha256": DIGEST} | changed


@pytest.mark.parametrize(
    "keys",
    [
        [{"name": "alice"}],
        [{"name": "alice", "key": "mesh_x"}],
        [key(sha256="abc")],
        [key(sha256="G" * 64)],
        [key(name="")],
        [key(name="a\nb")],
        [key(rate_limit="often")],
        [key(rate_limit="10/fortnight")],
        [key(rate_limit="0/minute")],
        [key(rate_limit="60/minute; 1000/day")],
        [key(), key(sha256="1" * 64)],
        [key(), key(name="bob")],
    ],
)
def test_a_malformed_key_is_named(
    keys: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no digest, no name, no rate limit, or there twice stops the start."""
    environment = HEAD | {"MESHNET_HEAD_API_KEYS": json.dumps(keys)}

    assert faults(HeadSettings, environment, monkeypatch) == ["api_keys"]


def test_a_key_may_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is a name, a digest, and a limit or none."""
    keys = [key(rate_limit="60/minute"), {"name": "bob", "sha256": "1" * 64, "rate_limit": None}]
    settings = read_head(HEAD | {"MESHNET_HEAD_API_KEYS": json.dumps(keys)}, monkeypatch)

    assert [(key.name, key.rate_limit) for key in settings.api_keys] == [
        ("alice", "60/minute"),
        ("bob", None),
    ]


def test_origins_are_all_or_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page may call unless a list says which; an empty one is none."""
    assert read_head(HEAD, monkeypatch).cors_origins == ("*",)
    for origins in ((), ("https://a.example", "http://localhost:3000")):
        environment = {"MESHNET_HEAD_CORS_ORIGINS": json.dumps(origins)}
        assert read_head(environment, monkeypatch).cors_origins == origins


def test_nothing_may_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte for inputs is a setting like another: all hops are fed anew then."""
    settings = read(HeadSettings, HEAD | {"MESHNET_HEAD_REPLAY_MAX_BYTES": "0"}, monkeypatch)

    assert isinstance(settings, HeadSettings)
    assert settings.replay_max_bytes == 0


def test_a_route_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read as JSON at all stops the start and names the setting too."""
    with pytest.raises(SettingsError, match='"route"'):
        read(HeadSettings, HEAD | {"MESHNET_HEAD_ROUTE": "http://a:1"}, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "environment"),
    [
        (ShardSettings, SHARD | {"MESHNET_SHARD_CLUSTER_KEY": "s3cret"}),
        (HeadSettings, HEAD | {"MESHNET_HEAD_CLUSTER_KEY": "s3cret"}),
    ],
    ids=["shard", "head"],
)
def test_the_key_is_not_shown(
    kind: type[BaseSettings], environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings can be printed without giving the cluster key away."""
    assert "s3cret" not in repr(read(kind, environment, monkeypatch))


@pytest.mark.parametrize(
    ("kind", "environment"), [(ShardSettings, SHARD), (HeadSettings, HEAD)], ids=["shard", "head"]
)
def test_settings_do_not_change(
    kind: type[BaseSettings], environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read at the start stays so."""
    settings = read(kind, environment, monkeypatch)
    with pytest.raises(ValidationError, match="frozen"):
        settings.__setattr__("model", "other")
