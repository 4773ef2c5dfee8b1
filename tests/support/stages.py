"""Fake stages that take their time, as real ones do."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from meshnet.errors import StageError
from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.model.interface import CacheState, StageModel, StageOutput, StageStep
from meshnet.topology import LayerSpan, ShardFacts
from tests.support.mesh import VOCAB_SIZE


class SlowStage(FakeStage):
    """Keeps the compute thread for `delay_s` in every step, and in every batch."""

    def __init__(self, facts: ShardFacts, delay_s: float) -> None:
        super().__init__(facts)
        self._delay_s = delay_s
        self._fast = FakeStage(facts)

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        """As the fake stage, later."""
        time.sleep(self._delay_s)
        return super().run(step, state)

    def run_batch(
        self, works: Sequence[tuple[StageStep, CacheState]]
    ) -> list[StageOutput | StageError]:
        """As the fake stage, later."""
        time.sleep(self._delay_s)
        self.batch_sizes.append(len(works))
        return self._fast.run_batch(works)


def slow_stages(*spans: tuple[int, int], delay_s: float) -> list[StageModel]:
    """Slow stages of one model."""
    return [SlowStage(fake_facts(LayerSpan(a, b), 4, VOCAB_SIZE), delay_s) for a, b in spans]


class GatedStage(FakeStage):
    """Begins a chunk, which is what has more than one token, and ends it when it is let.

    Attributes:
        lets: How many chunks may still end; release it for one more.
        ran: What was begun: each chunk as the ids in it, each batch as the ids of its steps.
    """

    def __init__(self, facts: ShardFacts) -> None:
        super().__init__(facts)
        self.lets = threading.Semaphore(0)
        self.ran: list[list[int]] = []

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        """As the fake stage, when it is let."""
        if step.frame.n_tokens > 1:
            self.ran.append(step.frame.token_ids())
            self.lets.acquire(timeout=10)
        return super().run(step, state)

    def run_batch(
        self, works: Sequence[tuple[StageStep, CacheState]]
    ) -> list[StageOutput | StageError]:
        """As the fake stage."""
        self.ran.append([token_id for step, _ in works for token_id in step.frame.token_ids()])
        return super().run_batch(works)
