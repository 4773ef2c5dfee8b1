"""Writes the README's speed tables: `python -m benchmarks.bench.tables`.

They are made of benchmarks/results/bench.json only, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.bench.results import RESULTS_FILE, Result, load

README: Final = Path(__file__).parents[2] / "README.md"
BEGIN: Final = "<!-- speed:begin; made by `python -m benchmarks.bench.tables` -->"
END: Final = "<!-- speed:end -->"
_SIGNS: Final = {"higher": ">=", "lower": "<="}


def render(results: Sequence[Result]) -> str:
    """Both tables: what has a target, and what is there to compare."""
    judged = [result for result in results if result.target is not None]
    others = [result for result in results if result.target is None]
    n_met = sum(result.met is True for result in judged)
    lines = [
        f"{n_met} of {len(judged)} targets are met.",
        *("", *_table(["", "measured", "target", "met"], map(_judged_row, judged))),
        *("", *_pivot(others)),
    ]
    return "\n".join(lines)


def _judged_row(result: Result) -> list[str]:
    target = f"{_SIGNS[result.better]} {result.target:g}"
    return [result.name, f"{result.value:g}", target, "yes" if result.met else "**no**"]


def _pivot(results: Iterable[Result]) -> list[str]:
    """A row for what was measured, a column for whom: a name is `WHAT, WHOM`."""
    rows: dict[str, dict[str, str]] = {}
    for result in results:
        what, _, whom = result.name.rpartition(", ")
        label = f"{what}, {result.unit}" if result.unit else what
        rows.setdefault(label, {})[whom] = f"{result.value:g}"
    columns = list(dict.fromkeys(whom for row in rows.values() for whom in row))
    cells = ([label, *(row.get(whom, "") for whom in columns)] for label, row in rows.items())
    return _table(["", *columns], cells)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def replace_between(text: str, body: str) -> str:
    """The text with another body between the markers.

    Raises:
        ValueError: A marker is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"there is no {BEGIN} ... {END}")
    return f"{before}{begin}\n\n{body}\n\n{end}{after}"


def main() -> None:
    README.write_text(replace_between(README.read_text(), render(load(RESULTS_FILE))))


if __name__ == "__main__":
    main()
