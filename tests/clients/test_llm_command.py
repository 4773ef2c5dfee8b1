"""The `llm` command, told of the mesh in its file of models, against the real model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.answers import ASK_FRUIT, Fruit
from tests.clients.mesh import PROMPT, Greedy, Mesh

Llm = Callable[..., "subprocess.CompletedProcess[str]"]
GREEDY = ("-o", "temperature", "0")
MODELS_FILE = """
- model_id: whole
  model_name: {mesh.model}
  api_base: {mesh.base_url}
  supports_schema: true
- model_id: broken
  model_name: {broken.model}
  api_base: {broken.base_url}
"""


@pytest.fixture
def llm(tmp_path: Path, mesh: Mesh, broken: Mesh) -> Llm:
    """The command, with a folder of its own for models and logs."""
    models = MODELS_FILE.format(mesh=mesh, broken=broken)
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    env = {**os.environ, "LLM_USER_PATH": str(tmp_path)}  # noqa: TID251  # handed on, not read

    def run(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "llm", *arguments, "--key", "any"],
            env=env,
            input=typed,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.mark.parametrize("how", [[], ["--no-stream"]])
def test_prompt(llm: Llm, mesh: Mesh, how: list[str], greedy: Greedy) -> None:
    """A prompt is answered with the text of a plain request, streamed and in one piece."""
    done = llm("prompt", PROMPT, "-m", "whole", *GREEDY, *how)
    assert (done.stdout, done.returncode) == (greedy.text + "\n", 0)


def test_chat(llm: Llm, mesh: Mesh, greedy: Greedy) -> None:
    """`llm chat` answers what is typed."""
    done = llm("chat", "-m", "whole", *GREEDY, typed=f"{PROMPT}\nexit\n")
    assert greedy.text in done.stdout
    assert done.returncode == 0


def test_schema(llm: Llm) -> None:
    """`--schema` gives JSON of the schema."""
    schema = str(Fruit.model_json_schema()).replace("'", '"')
    done = llm("prompt", ASK_FRUIT, "-m", "whole", *GREEDY, "--schema", schema)
    assert Fruit.model_validate_json(done.stdout).name == "plum"


def test_broken_stream_is_an_error(llm: Llm) -> None:
    """A stream that fails half-way ends the command with an error."""
    done = llm("prompt", PROMPT, "-m", "broken")
    assert done.returncode != 0
    assert "Internal error" in done.stderr
