"""Every fault on every hop, once: the text is that of an undisturbed request, or the error is."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.faults.fleet import FaultCluster
from benchmarks.faults.matrix import Cell, sampled_cells
from benchmarks.faults.runner import run_cell

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),  # the first test of a fleet starts its shards
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[FaultCluster]:
    """Shards, standbys and a head behind proxies; each test says what it needs of them."""
    async with FaultCluster(smollm2, tmp_path_factory.mktemp("faults"), "stream") as cluster:
        yield cluster


@pytest.mark.parametrize(
    "cell", sampled_cells(), ids=lambda cell: "-".join(str(cell).replace(",", "").split())
)
async def test_a_fault_ends_as_documented(cluster: FaultCluster, cell: Cell) -> None:
    """After a fault the text is the undisturbed one, or where nobody can help, the error is."""
    verdict = await run_cell(cluster, cell)
    assert verdict.is_as_expected, f"{verdict.outcome}: {verdict.detail}"
