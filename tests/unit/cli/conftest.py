"""An environment without settings of ours, and no model folder of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is set on this machine must not decide a test."""
    for name in list(os.environ):  # noqa: TID251  # the tests' own environment
        if name.startswith("MESHNET_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MESHNET_MODELS_DIR", str(tmp_path / "models"))
