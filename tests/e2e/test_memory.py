"""A shard takes the memory of its own tensors, and little more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_no_shard_takes_more_than_its_tensors_and_a_little(smollm2: Path) -> None:
    """In 2 and in 3, from GGUF and safetensors, every shard's peak is within 1.15 x + 60 MB.

    Packed weights are held to what they would take in float32.
    """
    table = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", str(smollm2)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    sys.stdout.write(table.stdout)
    assert table.returncode == 0, table.stdout + table.stderr
    assert table.stdout.count("| yes |") == 14
