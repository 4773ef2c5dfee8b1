"""A mesh as its clients see it, and the processes that serve one.

Nothing here imports Meshnet: the clients have an environment of their own, and only HTTP connects
the two.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv/bin/python"
"""The project's environment, which `make install` makes."""
MODEL = ROOT / ".models/smollm2"

PROMPT = "What is the capital of France?"
"""The model answers it in few words, and then stops by itself."""
STOP_LIMIT_S = 60.0


@dataclass(frozen=True)
class Greedy:
    """An answer at temperature 0, and of how many tokens it is, the one that ends it included."""

    text: str
    n_tokens: int


@dataclass(frozen=True)
class Mesh:
    """Where a mesh listens, and the model that it serves."""

    url: str
    model: str

    @property
    def base_url(self) -> str:
        """What OpenAI clients call the base URL."""
        return f"{self.url}/v1"

    def post(self, path: str, **body: object) -> Any:  # JSON
        """The answer to a plain request, no client in between."""
        response = httpx.post(
            f"{self.base_url}/{path}",
            json={"model": self.model, **body},
            trust_env=False,
            timeout=120,
        )
        response.raise_for_status()
        return response.json()

    def greedy(self) -> Greedy:
        """What the model says to `PROMPT`, by a plain request."""
        messages = [{"role": "user", "content": PROMPT}]
        answer = self.post("chat/completions", messages=messages, temperature=0)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        return Greedy(choice["message"]["content"], answer["usage"]["completion_tokens"])


@contextmanager
def meshnet_up(log: Path) -> Generator[Mesh]:
    """Run `meshnet up` with the real model over two shards."""
    command = ["services.cli", "up", "--model", str(MODEL), "--port", str(_free_port())]
    with _running(command, log) as process:
        text = ""
        while not (found := re.search(r"Ready: (http://\S+)/v1", text)):
            text += _line(process, log)
        yield Mesh(found[1], MODEL.name)


@contextmanager
def fake_meshes(log: Path) -> Generator[str]:
    """Run the two fake meshes; yields the line that they print."""
    with _running(["tests.support.fake_mesh"], log) as process:
        yield _line(process, log)


@contextmanager
def _running(module: Sequence[str], log: Path) -> Generator[subprocess.Popen[str]]:
    """A process of the project's environment, which SIGINT ends."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(PYTHON), "-m", *module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=STOP_LIMIT_S)


def _line(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(f"it ended with {process.wait()}: {log.read_text()[-2000:]}")
    return line


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
