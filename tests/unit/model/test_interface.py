from __future__ import annotations

from typing import get_args

import pytest

from meshnet.generation import Sampling, SamplingContext
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


OWN = Sampling(top_logprobs=0)


@pytest.mark.parametrize(
    ("sampling", "next_ids", "samples", "n_scores"),
    [
        (None, (), False, 0),
        (Sampling(), (), True, 0),
        (OWN, (), True, 1),
        (Sampling(), (6,), True, 1),
        (OWN, (6,), True, 2),
        (Sampling(), (6, 7), False, 2),
        (OWN, (6, 7), False, 2),
    ],
)
def test_a_step_samples_where_there_is_a_place(
    sampling: Sampling | None, next_ids: tuple[int, ...], samples: bool, n_scores: int
) -> None:
    """A tail picks a token if it is told how, and if one may follow; it scores all it is told."""
    context = SamplingContext(next_ids=next_ids)
    step = StageStep(Frame.of_token_ids([5, 6]), 0, 0, sampling, context)

    assert (step.samples, step.n_scores) == (samples, n_scores)
