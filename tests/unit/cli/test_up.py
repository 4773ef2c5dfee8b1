from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from meshnet.wire.messages import ShardReadiness
from services.cli import up as up_module
from services.cli.cluster import LocalCluster
from services.cli.progress import LoadingLines
from services.cli.serving import free_port
from tests.unit.cli.running import run
from tests.unit.cli.test_cluster import STAND_IN


def _folder(path: Path, **config: object) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_says_where_it_is_until_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The endpoint is told when every member is ready; a signal stops them, exit code 0."""
    monkeypatch.setattr(up_module, "LocalCluster", partial(LocalCluster, program=STAND_IN))
    monkeypatch.setattr(up_module, "mkdtemp", _always(str(tmp_path)))
    monkeypatch.setattr(up_module, "_invitation", partial(_signal_soon, number))
    model = _folder(tmp_path / "good", num_hidden_layers=5)
    monkeypatch.setattr(up_module, "resolve", _always("good"))
    monkeypatch.setattr(up_module, "find_folder", _always(Path(model)))
    port = free_port()
    ended = run("up", "--model", model, "--port", str(port))
    assert (0, f"http://127.0.0.1:{port}/v1 good\n") == (ended.code, ended.out)
    assert {"shard-1.log", "shard-2.log", "head.log"} <= {path.name for path in tmp_path.iterdir()}
    said = "\n".join(ended.error_lines)
    assert "layers 0-2, 3-4" in said
    assert str(tmp_path) in said.replace("\n", "")
    assert "Stopping..." in said


def _always(value: object) -> Callable[..., object]:
    def answer(*_: object, **__: object) -> object:
        return value

    return answer


def _signal_soon(number: signal.Signals, base_url: str, model_name: str) -> str:
    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), number)
    return f"{base_url} {model_name}"


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ({"num_hidden_layers": 3}, ["--shards", "4"], "--shards: 3 layers cannot be split over 4"),
        ({}, [], "does not say how many layers"),
    ],
)
def test_a_model_that_cannot_be_split_is_one_line(
    tmp_path: Path, config: dict[str, object], arguments: list[str], words: str
) -> None:
    """Nothing is started where the layers do not suffice, or are not known."""
    model = _folder(tmp_path / "m", **config)
    ended = run("up", "--model", model, "--port", str(free_port()), *arguments)
    assert len(ended.error_lines) == 1
    assert words in ended.error_lines[0]


def test_the_example_can_be_pasted() -> None:
    """The curl that is shown is one shell command with a JSON body."""
    text = up_module._invitation("http://127.0.0.1:1/v1", "it's")  # pyright: ignore[reportPrivateUsage]  # what is shown
    words = shlex.split(text[text.index("curl") :])
    assert words[2] == "http://127.0.0.1:1/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "it's"


def test_lines_show_bytes_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    """A member that loads shows its bytes; the head, which counts none, its reason; then ready."""
    with LoadingLines(["shard-1", "head"]) as lines:
        lines.loading("shard-1", ShardReadiness(state="ready", loaded_bytes=2048, total_bytes=2048))
        lines.loading("head", ShardReadiness(state="loading", reason="a hop is missing"))
        lines.note("[red]a note[/red]")
    shown = capsys.readouterr().err
    assert "2.0/2.0 KiB" in shown
    assert "a hop is missing" in shown
    assert "[red]a note[/red]" in shown
