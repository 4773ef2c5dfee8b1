"""Where benchmarks leave their figures."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def write_result(path: Path, value: object) -> None:
    """Write figures as JSON."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")
