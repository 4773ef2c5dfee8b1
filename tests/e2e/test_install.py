"""What is installed works: outside the checkout, and the head without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

HEAD_WITHOUT_TORCH = """
import sys
for name in ("torch", "safetensors", "gguf"):
    sys.modules[name] = None  # from here on, importing it fails
from meshnet.text.tokenizer import ChatTokenizer
from services.head.app import create_app
from services.head.settings import HeadSettings, HopSetting
tokenizer = ChatTokenizer.load(sys.argv[1])
route = (HopSetting(endpoint="http://127.0.0.1:1"),)
create_app(HeadSettings(model=sys.argv[1], route=route), tokenizer=tokenizer)
ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
detokenizer = tokenizer.new_detokenizer()
print("".join(map(detokenizer.push, tokenizer.encode("a  2 \\N{PARTY POPPER}"))))
print(sorted(tokenizer.end_token_ids), len(ids))
"""


def test_the_head_works_where_torch_cannot_be_imported(smollm2: Path) -> None:
    """App, tokenizer, template and detokenizer work with torch, safetensors and gguf absent."""
    output = subprocess.run(
        [sys.executable, "-c", HEAD_WITHOUT_TORCH, str(smollm2)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert output.splitlines() == ["a  2 🎉", "[2] 31"]


def test_the_wheel_gives_a_working_command_outside_the_checkout(tmp_path: Path) -> None:
    """`pip install .` puts every package in place: `meshnet` runs from an unrelated folder."""
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, str(target), str(ROOT)], check=True)
    for command in (["--version"], ["up", "--help"], ["shard", "--help"], ["model", "--help"]):
        shown = subprocess.run(
            [sys.executable, "-m", "services.cli", *command],
            cwd=tmp_path,
            env={"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"},
            check=True,
            capture_output=True,
            text=True,
        )
        assert "meshnet" in shown.stdout.lower()
    modules = {path.relative_to(target) for path in target.rglob("*.py")}
    packages = ("meshnet", "services")
    ours = {p.relative_to(ROOT) for name in packages for p in (ROOT / name).rglob("*.py")}
    assert ours <= modules
