"""deploy/compose.yaml fits the services it starts: a misspelt variable would be ignored there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshnet.topology import LayerSpan
from services.head.settings import HeadSettings
from services.shard.settings import ShardSettings

COMPOSE_FILE = Path(__file__).parents[3] / "deploy" / "compose.yaml"
N_LAYERS = 30  # SmolLM2-135M
SHARDS = ("shard-a", "shard-b")


def _services() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(COMPOSE_FILE.read_text())["services"]


def _settings(service: str, prefix: str) -> dict[str, str]:
    """The service's variables as settings' names; every one starts with the prefix."""
    environment = _services()[service]["environment"]
    assert all(name.startswith(prefix) for name in environment)
    return {name.removeprefix(prefix).lower(): value for name, value in environment.items()}


@pytest.mark.parametrize("service", SHARDS)
def test_every_variable_of_a_shard_is_a_setting(service: str) -> None:
    assert _settings(service, "MESHNET_SHARD_").keys() <= ShardSettings.model_fields.keys()


def test_every_variable_of_the_head_is_a_setting() -> None:
    assert _settings("head", "MESHNET_HEAD_").keys() <= HeadSettings.model_fields.keys()


def test_the_spans_tile_the_model_in_the_routes_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _services()["head"]["environment"].items():
        monkeypatch.setenv(name, value)
    route = HeadSettings().route  # pyright: ignore[reportCallIssue]  # from environment
    hosts = [re.sub(r"^http://(.*):8001$", r"\1", hop.endpoint) for hop in route]
    spans = [LayerSpan.parse(_settings(host, "MESHNET_SHARD_")["layers"]) for host in hosts]
    assert hosts == list(SHARDS)
    assert [span.start for span in spans] + [N_LAYERS] == [0] + [span.end for span in spans]


@pytest.mark.parametrize("service", [*SHARDS, "head"])
def test_every_container_is_confined(service: str) -> None:
    container = _services()[service]
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert container["user"] == "10001:10001"
    assert {"mem_limit", "cpus", "pids_limit", "init"} <= container.keys()


def test_only_the_head_can_be_reached_from_outside_and_only_from_this_machine() -> None:
    services = _services()
    assert [name for name, service in services.items() if "ports" in service] == ["head"]
    assert services["head"]["ports"][0].startswith("127.0.0.1:")
    assert all(services[name]["networks"] == ["mesh"] for name in SHARDS)
