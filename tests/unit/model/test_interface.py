from __future__ import annotations

from typing import get_args

from meshnet.model.fake_stage import FakeStage, FakeState, fake_facts
from meshnet.model.interface import CacheState, StageModel, StageOutput, StageStep
from meshnet.topology import LayerSpan
from meshnet.wire.frames import Frame
from meshnet.wire.messages import TailAnswer


def test_the_fakes_are_what_a_shard_needs() -> None:
    """The fake stage is a StageModel and its history a CacheState, so pyright checks here."""
    stage: StageModel = FakeStage(fake_facts(LayerSpan(0, 4)))
    state: CacheState = stage.new_state(0)

    assert (type(state), state.nbytes) == (FakeState, 0)


def test_a_stage_answers_a_frame_or_a_tails_answer() -> None:
    """These two are all that a stage can put out."""
    assert get_args(StageOutput) == (Frame, TailAnswer)


def test_a_step_samples_only_when_told() -> None:
    """Without parameters a step samples nothing."""
    assert StageStep(Frame.of_token_ids([1]), start_layer=0, position=0).sampling is None
