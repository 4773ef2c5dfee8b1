from __future__ import annotations

from collections.abc import Mapping

import pytest
from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, SettingsError

from services.head.settings import HeadSettings, HopSetting
from services.shard.settings import ShardSettings

SHARD = {"MESHNET_SHARD_MODEL": "m", "MESHNET_SHARD_LAYERS": "0-15"}
HEAD = {"MESHNET_HEAD_MODEL": "m", "MESHNET_HEAD_ROUTE": '[{"endpoint": "http://a:1"}]'}


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
        dtype="float32",
        threads=None,
        kv_cache=True,
        cache_ttl_seconds=600,
        cache_max_sessions=16,
        cache_max_bytes=2**31,
        drain_timeout_s=25,
        cluster_key=None,
        log_format="console",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("layers", "15"),
        ("layers", "a-b"),
        ("layers", "0-15\n"),
        ("dtype", "int8"),
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
