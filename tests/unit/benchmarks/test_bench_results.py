from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bench.results import Better, Result, load, median_of, merged, ratio, save
from benchmarks.bench.tables import BEGIN, END, README, render, replace_between

SPEED = Result("decode, fp32", 2.0, "tokens/s", "higher", {"values": [2.0]})


@pytest.mark.parametrize(
    ("better", "target", "met"),
    [
        ("higher", None, None),
        ("higher", 2.0, True),
        ("higher", 2.1, False),
        ("lower", 2.0, True),
        ("lower", 1.9, False),
    ],
)
def test_a_target_is_met_from_its_better_side(
    better: Better, target: float | None, met: bool | None
) -> None:
    """The target itself is enough; where there is none, nothing is met or missed."""
    assert replace(SPEED, better=better, target=target).met is met


def test_a_ratio_is_the_median_of_each_rounds() -> None:
    """A round that is slow for both sides changes nothing."""
    raw = {"a": [2.0, 20.0, 9.0], "b": [1.0, 10.0, 3.0], "c": [7.0]}
    assert ratio("r", raw, "a", "b", "higher", 1.5) == Result(
        "r", 2.0, "ratio", "higher", {"a": [2.0, 20.0, 9.0], "b": [1.0, 10.0, 3.0]}, 1.5
    )


def test_sides_of_a_ratio_have_the_same_rounds() -> None:
    """A measurement that is missing is no ratio of the others."""
    with pytest.raises(ValueError, match="shorter"):
        ratio("r", {"a": [1.0, 2.0], "b": [1.0]}, "a", "b", "higher")


def test_values_have_four_digits() -> None:
    """The median and the single measurements alike."""
    result = median_of("m", [1.23456, 123456.0, 0.0012344], "s", "lower")
    assert result == Result("m", 1.235, "s", "lower", {"values": [1.235, 123500.0, 0.001234]})


def test_what_is_measured_again_takes_its_old_place() -> None:
    """And what was not measured this time stays."""
    other, new = replace(SPEED, name="other"), replace(SPEED, name="new")
    again = replace(SPEED, value=3.0)
    assert merged([SPEED, other], [again, new]) == [again, other, new]


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    """With and without a target; and nothing comes of a file that is not there."""
    results = [SPEED, replace(SPEED, name="x", target=1.5)]
    save(tmp_path / "bench.json", results)
    assert load(tmp_path / "bench.json") == results
    assert load(tmp_path / "none.json") == []


def test_the_tables_have_targets_and_a_column_for_each_side() -> None:
    """A missed target stands out, and a cell that nobody measured is empty."""
    results = [
        replace(SPEED, name="over", target=1.5),
        replace(SPEED, name="under", better="lower", target=1.5),
        SPEED,
        replace(SPEED, name="decode, int8", value=3.0),
        replace(SPEED, name="perplexity, alone, int8", value=12.5, unit=""),
    ]
    assert render(results).splitlines() == [
        "1 of 2 targets are met.",
        "",
        "|  | measured | target | met |",
        "|---|---|---|---|",
        "| over | 2 | >= 1.5 | yes |",
        "| under | 2 | <= 1.5 | **no** |",
        "",
        "|  | fp32 | int8 |",
        "|---|---|---|",
        "| decode, tokens/s | 2 | 3 |",
        "| perplexity, alone |  | 12.5 |",
    ]


def test_only_what_is_between_the_markers_is_replaced() -> None:
    """And putting the same there again changes nothing."""
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = replace_between(text, "new")
    assert once == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert replace_between(once, "new") == once


@pytest.mark.parametrize("text", ["", f"{BEGIN} x", f"x {END}"])
def test_without_both_markers_nothing_is_replaced(text: str) -> None:
    """It is an error, not a README without its tables."""
    with pytest.raises(ValueError, match="there is no"):
        replace_between(text, "new")


def test_the_readme_has_the_markers() -> None:
    """So the tables have a place there."""
    assert replace_between(README.read_text(), "x")
