"""Clients that no test can import: each is a script that plays one scenario and prints JSON."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from tests.clients.mesh import PROMPT, Mesh

LIMIT_S = 110


def play(script: Sequence[str], scenario: str, mesh: Mesh) -> Any:
    """What a script printed of a scenario, against `mesh`."""
    where = {"BASE_URL": mesh.base_url, "MODEL": mesh.model, "PROMPT": PROMPT}
    done = subprocess.run(
        [*script, scenario],
        env=os.environ | where,  # noqa: TID251  # handed on, not read
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"{scenario}: {done.stderr[-3000:]}")
    return json.loads(done.stdout)
