from __future__ import annotations

import pytest

from services.cli.errors import BadOption
from services.cli.head import parse_models, parse_route
from services.cli.settings import load_settings
from services.head.settings import HopSetting, ModelSetting
from services.shard.settings import ShardSettings
from tests.unit.cli.running import run

A, B = "http://127.0.0.1:8001", "https://b.example:8002"
COMMANDS = ("up", "shard", "head", "chat", "key", "model")
MODELS = f'[{{"model": "org/m", "served_model_name": "x", "route": [{{"endpoint": "{A}"}}]}}]'


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shard", "--layers", "0-3"], ["--model", "missing", "MESHNET_SHARD_MODEL"]),
        (["shard", "--model", "m", "--layers", "3"], ["--layers", "'3'", "START-END"]),
        (["shard", "--model", "m", "--layers", "3-3"], ["3", "allowed"]),
        (["shard", "--model", "m", "--layers", "0-3", "--dtype", "int8"], ["--dtype", "float16"]),
        (["shard", "--model", "m", "--layers", "0-3", "--weights", "q4"], ["--weights", "int4"]),
        (
            ["shard", "--model=m", "--layers=0-3", "--weights=fp32", "--dtype=bfloat16"],
            ["--weights", "fp32", "bfloat16", "leave one of them out"],
        ),
        (["shard", "--threads", "0"], ["--threads", "greater than or equal to 1"]),
        (["head", "--model", "m"], ["--route", "MESHNET_HEAD_ROUTE"]),
        (["head", "--model", "m", "--route", "127.0.0.1:1"], ["--route", "http://HOST:PORT"]),
        (["head", "--models", "[{}]"], ["--models", "model 0.model", '"served_model_name"']),
        (["head", "--models", "[]"], ["--model:", "missing"]),
        (["head", "--models", MODELS, "--model", "m"], ["--model:", "single model", "`models`"]),
        (["up", "--shards", "0"], ["--shards", "greater than or equal to 1"]),
        (["chat", "--url", "ftp://x", "hi"], ["--url", "http://HOST:PORT/v1"]),
        (["model", "get", "no-such-model"], ["no-such-model", "smollm2"]),
        (["model", "get", "absent.gguf"], ["absent.gguf", "is no file"]),
        (["frobnicate"], ["frobnicate"]),
        (["shard", "--frobnicate"], ["--frobnicate", "meshnet shard --help"]),
    ],
)
def test_a_bad_option_is_one_line_on_stderr(arguments: list[str], words: list[str]) -> None:
    """A bad option ends with exit code 2 and one line that names it and what is allowed."""
    ended = run(*arguments)
    assert (ended.code, len(ended.error_lines), ended.out) == (2, 1, "")
    assert [word for word in words if word not in ended.error_lines[0]] == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "shard.example"])  # noqa: S104  # refused
def test_a_reachable_shard_needs_a_key(host: str) -> None:
    """A shard that other machines can reach is refused without a cluster key, and told why."""
    ended = run("shard", "--model", "m", "--layers", "0-3", "--host", host)
    assert ended.code == 2
    assert f"--host: {host}" in ended.error_lines[0]
    assert "MESHNET_SHARD_CLUSTER_KEY" in ended.error_lines[0]


def test_an_empty_key_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set to nothing does not pass for a key."""
    monkeypatch.setenv("MESHNET_SHARD_CLUSTER_KEY", "")
    ended = run("shard", "--model", "m", "--layers", "0-3", "--host", "10.1.2.3")
    assert (ended.code, len(ended.error_lines)) == (2, 1)
    assert "MESHNET_SHARD_CLUSTER_KEY" in ended.error_lines[0]


def test_no_command_prints_the_help() -> None:
    """Without a command, the help names all of them."""
    ended = run()
    assert ended.error_lines == []
    assert [c for c in COMMANDS if c not in ended.out] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_does_not_show_what_is_for_our_children(command: str) -> None:
    """Every command has a help, and the children's option is in none of them."""
    ended = run(command, "--help")
    assert ended.code == 0
    assert "stop-with-stdin" not in ended.out


def test_version() -> None:
    """`--version` says what this is."""
    assert run("--version").out.startswith("meshnet")


def test_options_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that was given wins; one that was not leaves the variable's value."""
    monkeypatch.setenv("MESHNET_SHARD_LAYERS", "0-5")
    monkeypatch.setenv("MESHNET_SHARD_DTYPE", "bfloat16")
    settings = load_settings(ShardSettings, {"model": "m", "layers": "5-9", "dtype": None})
    assert (settings.model, settings.layers, settings.dtype) == ("m", "5-9", "bfloat16")


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A malformed setting names the variable, not an option that does not exist."""
    monkeypatch.setenv("MESHNET_SHARD_CACHE_MAX_BYTES", "much")
    with pytest.raises(BadOption, match=r"^MESHNET_SHARD_CACHE_MAX_BYTES: .*integer"):
        load_settings(ShardSettings, {"model": "m", "layers": "0-3"})


def test_a_variable_that_is_no_json_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A route in the environment that is no JSON says so."""
    monkeypatch.setenv("MESHNET_HEAD_ROUTE", A)
    ended = run("head", "--model", "m")
    assert (ended.code, len(ended.error_lines)) == (2, 1)
    assert 'field "route"' in ended.error_lines[0]


@pytest.mark.parametrize(
    ("text", "hops"),
    [
        (A, [(A, None)]),
        (f"{A}/, {B}@15", [(A, None), (B, 15)]),
        (f'[{{"endpoint": "{A}", "start_layer": 3}}]', [(A, 3)]),
    ],
)
def test_a_route_is_urls_or_json(text: str, hops: list[tuple[str, int | None]]) -> None:
    """URLs joined by commas, each with or without its start layer, or the same as JSON."""
    expected = tuple(HopSetting(endpoint=url, start_layer=start) for url, start in hops)
    assert expected == parse_route(text)


@pytest.mark.parametrize(
    "text", ["", f"{A},", f"{A}@x", f"{A}@-1", "[]", "[", '[{"url": "x"}]', f"{A}/v1"]
)
def test_a_bad_route_says_what_is_allowed(text: str) -> None:
    """A route that names no hop, or a hop wrongly, is refused with an example."""
    with pytest.raises(BadOption, match=r"^--route: .*allowed: http://HOST:PORT"):
        parse_route(text)


def test_models_are_json() -> None:
    """Each model with its name and its route."""
    route = (HopSetting(endpoint=A),)
    assert parse_models(MODELS) == (
        ModelSetting(model="org/m", served_model_name="x", route=route),
    )


@pytest.mark.parametrize("text", ["", "org/m", "{}", '[{"model": "m"}]', '[{"model": 1}]'])
def test_bad_models_say_what_is_allowed(text: str) -> None:
    """What is no JSON, or describes a model wrongly, is refused with an example."""
    with pytest.raises(BadOption, match=r'^--models: .*allowed: JSON: \[{"model"'):
        parse_models(text)
