"""The head's image and pyproject.toml name the same dependencies, but for torch's part."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
ONLY_THE_SHARDS = {"gguf", "numpy", "safetensors", "torch"}


def _project_dependencies() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def _head_requirements() -> list[str]:
    lines = (ROOT / "deploy" / "head.requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_head_is_installed_with_everything_but_torchs_part() -> None:
    """Letter for letter: a version raised in one file is raised in the other."""
    expected = [line for line in _project_dependencies() if _name(line) not in ONLY_THE_SHARDS]
    assert _head_requirements() == expected


def test_torchs_part_is_in_pyproject() -> None:
    """A name that is dropped there is no longer to be left out here."""
    assert {_name(line) for line in _project_dependencies()} >= ONLY_THE_SHARDS


def test_every_dependency_has_its_exact_version_in_the_constraints() -> None:
    """So the images are built of what was tested."""
    lines = (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    pinned = {_name(line) for line in lines if "==" in line}
    assert {_name(line) for line in _project_dependencies()} <= pinned


def _name(line: str) -> str:
    return Requirement(line).name.lower().replace("_", "-")
