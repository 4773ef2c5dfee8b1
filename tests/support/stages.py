"""Fake stages that take their time, as real ones do."""

from __future__ import annotations

import time

from meshnet.model.fake_stage import FakeStage, fake_facts
from meshnet.model.interface import CacheState, StageModel, StageOutput, StageStep
from meshnet.topology import LayerSpan, ShardFacts
from tests.support.mesh import VOCAB_SIZE


class SlowStage(FakeStage):
    """Keeps the compute thread for `delay_s` in every step."""

    def __init__(self, facts: ShardFacts, delay_s: float) -> None:
        super().__init__(facts)
        self._delay_s = delay_s

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        """As the fake stage, later."""
        time.sleep(self._delay_s)
        return super().run(step, state)


def slow_stages(*spans: tuple[int, int], delay_s: float) -> list[StageModel]:
    """Slow stages of one model."""
    return [SlowStage(fake_facts(LayerSpan(a, b), 4, VOCAB_SIZE), delay_s) for a, b in spans]
