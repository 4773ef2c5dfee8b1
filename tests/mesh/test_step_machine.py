"""Whatever meets at a shard, over HTTP: each step is applied once or not at all, and none leaks.

More examples, and others every time:

    .venv/bin/python -m tests.mesh.test_step_machine 5000
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from contextlib import AsyncExitStack
from itertools import count

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.mesh.step_player import N_SESSIONS, Action, Kind, Player, serve_watched

pytestmark = pytest.mark.mesh

ACTIONS = st.builds(
    Action,
    kind=st.sampled_from([Kind.NEXT] * 8 + [Kind.TWICE, Kind.LATE] * 3 + list(Kind)),
    session=st.integers(0, N_SESSIONS - 1),
    n_tokens=st.integers(1, 3),
    after_ms=st.integers(0, 5),
    nth=st.integers(0, 5),
)
ROUNDS = st.lists(st.lists(ACTIONS, min_size=1, max_size=5), min_size=3, max_size=8)

EVERYTHING = {  # but `cache_full`, which needs four steps in one moment
    "run",
    "replay",
    "CLOSE",
    "FREE",
    "KEEP",
    "forked",
    "DROPPED",
    "TORN",
    "session_busy",
    "stale_epoch",
    "cache_miss length_mismatch",
    "cache_miss unknown",
    "cache_miss evicted",
    "cache_miss restarted",
}


def _play_many(how_many: settings) -> Counter[str]:
    """Play so many examples on one served shard. Returns what became of their steps."""
    logging.disable(logging.INFO)  # or pytest would keep thousands of lines
    seen: Counter[str] = Counter()
    examples = count()
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        shard = runner.run(stack.enter_async_context(serve_watched()))

        @how_many
        @given(rounds=ROUNDS)
        def play(rounds: list[list[Action]]) -> None:
            player = Player(shard, example=next(examples), seen=seen)
            seen["actions"] += sum(map(len, rounds))
            shard.stage.runs.clear()
            runner.run(player.play(rounds))

        try:
            play()
        finally:
            runner.run(stack.aclose())
            logging.disable(logging.NOTSET)
    return seen


def test_any_interleaving_applies_each_step_once_or_not() -> None:
    """Answers are right or refusals with a reason; what is held is what was run, once each."""
    # Nothing is made shorter after a failure: the steps would not meet as they did.
    phases = [Phase.explicit, Phase.generate]
    seen = _play_many(settings(max_examples=120, deadline=None, derandomize=True, phases=phases))
    print(f"\n{dict(seen)}")  # noqa: T201  # figures for whoever runs with -s
    assert EVERYTHING - seen.keys() == set()


if __name__ == "__main__":
    _play_many(settings(max_examples=int(sys.argv[1]), deadline=None, database=None))
