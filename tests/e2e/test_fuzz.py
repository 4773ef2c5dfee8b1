"""Real shards under malformed requests, for a short while."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_malformed_requests_change_nothing_on_real_shards(smollm2: Path, tmp_path: Path) -> None:
    """15 s of fuzzing give no 5xx, no growth, and sessions that go on as if nothing had been."""
    options = ["--seconds", "15", "--seed", "1", "--results", str(tmp_path / "fuzz.json")]
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz", str(smollm2), *options],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    sys.stdout.write(told.stdout)
    assert told.returncode == 0, told.stdout + told.stderr
