from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import StageError
from meshnet.generation import Sampling
from meshnet.model.fake_stage import FakeStage, FakeState, fake_facts, next_token
from meshnet.model.interface import StageOutput, StageStep
from meshnet.topology import LayerSpan
from meshnet.wire.frames import Frame
from meshnet.wire.messages import TailAnswer

IDS = st.lists(st.integers(0, 63), min_size=1, max_size=12)


def stage_of(span: str) -> FakeStage:
    return FakeStage(fake_facts(LayerSpan.parse(span)))


def run(
    stage: FakeStage, frame: Frame, state: FakeState | None = None, position: int = 0
) -> StageOutput:
    return stage.run(StageStep(frame, stage.facts.span.start, position, Sampling()), state)


@given(IDS)
def test_a_split_model_says_what_the_whole_says(ids: list[int]) -> None:
    """Three stages in a row answer as one stage does."""
    frame = Frame.of_token_ids(ids)
    for span in ("0-1", "1-3"):
        hidden = run(stage_of(span), frame)
        assert isinstance(hidden, Frame)
        frame = hidden

    assert run(stage_of("3-4"), frame) == run(stage_of("0-4"), Frame.of_token_ids(ids))


@given(IDS, st.integers(0, 11))
def test_a_history_in_two_steps_is_one_history(ids: list[int], cut: int) -> None:
    """Prefill and continuation give the token that all ids give at once."""
    stage = stage_of("0-4")
    state = stage.new_state(0)
    head, tail = ids[:cut], ids[cut:] or [1]
    if head:
        run(stage, Frame.of_token_ids(head), state)

    assert run(stage, Frame.of_token_ids(tail), state, len(head)) == TailAnswer(
        token_id=next_token(head + tail, 64)
    )


def test_another_history_gives_another_text() -> None:
    """Any id lost, doubled or moved changes what is said, over a few tokens at least."""
    histories = [[5, 6, 7], [5, 6], [5, 6, 6, 7], [6, 5, 7]]
    texts = [tuple(next_token([*ids, i], 2**31) for i in range(4)) for ids in histories]

    assert len(set(texts)) == len(texts)


def test_a_step_at_another_position_fails() -> None:
    """A history of another length than the step's position is a StageError."""
    stage = stage_of("0-4")
    state = FakeState([5, 6])
    with pytest.raises(StageError, match="step at 3, history of 2"):
        run(stage, Frame.of_token_ids([7]), state, position=3)


def test_nothing_is_sampled_unasked() -> None:
    """Without sampling the tail extends its history and answers nothing."""
    stage, state = stage_of("0-4"), FakeState()
    answer = stage.run(StageStep(Frame.of_token_ids([5, 6]), 0, 0), state)

    assert (answer, state.ids) == (TailAnswer(), [5, 6])


def test_a_state_costs_what_was_said_before() -> None:
    """The bytes announced for n tokens are those of a state that holds them."""
    stage, state = stage_of("0-4"), FakeState([1, 2, 3])

    assert state.nbytes == stage.state_nbytes(3) == 192
