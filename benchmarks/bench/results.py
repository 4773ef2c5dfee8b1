"""One measured number, its target, and the file that all of them are kept in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.results import RESULTS, write_result

RESULTS_FILE = RESULTS / "bench.json"

Better = Literal["higher", "lower"]
Raw = Mapping[str, Sequence[float]]
"""Every single measurement, by what was measured."""


@dataclass(frozen=True, slots=True)
class Result:
    """One number. Without a target it is for comparison only."""

    name: str
    value: float
    unit: str
    better: Better
    raw: Raw
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


def median_of(
    name: str, values: Sequence[float], unit: str, better: Better, target: float | None = None
) -> Result:
    """The median of some measurements."""
    raw = {"values": _all_rounded(values)}
    return Result(name, _rounded(median(values)), unit, better, raw, target)


def ratio(
    name: str, raw: Raw, over: str, under: str, better: Better, target: float | None = None
) -> Result:
    """The median of the ratios of two sides, round by round.

    What changes from round to round, such as other load on the machine, does not count so.

    Args:
        name: The result's.
        raw: The measurements of each side, one a round.
        over: The side above the line.
        under: The side below it.
        better: Which way is better.
        target: What the ratio has to reach.
    """
    pairs = zip(raw[over], raw[under], strict=True)
    value = _rounded(median(a / b for a, b in pairs))
    sides = {side: _all_rounded(raw[side]) for side in (over, under)}
    return Result(name, value, "ratio", better, sides, target)


def _rounded(value: float) -> float:
    """To four digits: no measurement here has more."""
    return float(f"{value:.4g}")


def _all_rounded(values: Iterable[float]) -> list[float]:
    return [_rounded(value) for value in values]


def merged(old: Iterable[Result], new: Iterable[Result]) -> list[Result]:
    """The old results, those of a name that was measured again replaced, and what is new."""
    return list({result.name: result for result in (*old, *new)}.values())


def save(path: Path, results: Iterable[Result]) -> None:
    """Write results as a JSON list."""
    write_result(path, [asdict(result) | {"met": result.met} for result in results])


def load(path: Path) -> list[Result]:
    """Read what `save` wrote; nothing if there is no such file."""
    if not path.is_file():
        return []
    items: list[dict[str, Any]] = json.loads(path.read_text())
    return [
        Result(**{name: value for name, value in item.items() if name != "met"}) for item in items
    ]
