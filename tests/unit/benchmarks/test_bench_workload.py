from __future__ import annotations

from pathlib import Path

from benchmarks.bench.workload import Workload

WORK = Workload(Path(), n_layers=2, ids=(1, 2, 3), rounds=2, n_tokens=4)


def test_a_prompt_goes_round_the_text() -> None:
    """From any place on, past its end more than once."""
    assert WORK.prompt(5, at=2) == [3, 1, 2, 3, 1]
    assert WORK.prompt(1, at=7) == [2]


async def test_cases_take_turns_and_the_first_round_does_not_count() -> None:
    """Two rounds are three, of which the last two are told."""
    asked: list[int] = []

    async def measure(case: int) -> float:
        asked.append(case)
        return float(len(asked))

    assert await WORK.in_turn({"a": 7, "b": 8}, measure) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert asked == [7, 8, 7, 8, 7, 8]
