"""instructor against the real model; it lives in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.mesh import ROOT, Mesh
from tests.clients.scenarios import play

SCRIPT = [
    str(ROOT / ".venv-instructor/bin/python"),
    f"{Path(__file__).parent}/instructor_client.py",
]


@pytest.mark.parametrize("scenario", ["tools", "json_schema", "partial"])
def test_response_model(mesh: Mesh, scenario: str) -> None:
    """A response model comes as the schema forces it: by a tool call, a format, and streamed."""
    fruit = play(SCRIPT, scenario, mesh)
    assert (fruit["name"], fruit["count"]) == ("plum", 3)
    assert fruit["size"] in ("small", "large")


def test_error_reaches_the_caller(broken: Mesh) -> None:
    """An answer that fails raises, with the server's message."""
    assert "Internal error" in play(SCRIPT, "broken", broken)
