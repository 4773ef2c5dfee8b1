"""The real model, and a cluster of real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from meshnet.topology import even_spans
from services.cli.cluster import LocalCluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2's folder; fetched once a checkout."""
    folder = ROOT / ".models/smollm2"
    command = [sys.executable, "-m", "services.cli", "model", "get", "smollm2"]
    subprocess.run([*command, "--dir", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_nodes(smollm2: Path) -> AsyncGenerator[LocalCluster]:
    """Two shard processes and a head, one thread each."""
    async with LocalCluster(str(smollm2), even_spans(30, 2), threads=1) as cluster:
        yield cluster
