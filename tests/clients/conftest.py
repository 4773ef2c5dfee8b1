"""One real mesh for all clients, and two fake ones: a whole and a broken one."""

from __future__ import annotations

import json
from collections.abc import Generator

import pytest

from tests.clients.mesh import Greedy, Mesh, fake_meshes, meshnet_up


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Generator[Mesh]:
    """`meshnet up` with the real model."""
    with meshnet_up(tmp_path_factory.mktemp("mesh") / "log") as running:
        yield running


@pytest.fixture(scope="session")
def greedy(mesh: Mesh) -> Greedy:
    """What the real model says to the tests' prompt."""
    return mesh.greedy()


@pytest.fixture(scope="session")
def _fakes(tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, str]]:
    with fake_meshes(tmp_path_factory.mktemp("fakes") / "log") as line:
        yield json.loads(line)


@pytest.fixture(scope="session")
def fake(_fakes: dict[str, str]) -> Mesh:
    """A mesh without a model, as fast as the code around one."""
    return Mesh(_fakes["whole"], "fake")


@pytest.fixture(scope="session")
def broken(_fakes: dict[str, str]) -> Mesh:
    """A mesh that fails a few tokens into each answer."""
    return Mesh(_fakes["broken"], "fake")
