from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import StageError
from meshnet.generation import Sampling, SamplingContext
from meshnet.model.fake_stage import (
    FakeStage,
    FakeState,
    fake_facts,
    next_token,
    pick_token,
    score_token,
)
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


def test_a_state_costs_no_more_than_is_told() -> None:
    """Base and tokens together are what a state of any length takes."""
    stage = stage_of("0-4")
    cost = stage.state_cost

    assert [cost.base_bytes + n * cost.token_bytes for n in (0, 1, 9)] == [
        stage.state_nbytes(n) for n in (0, 1, 9)
    ]


def test_a_batch_answers_as_its_steps_alone() -> None:
    """Each of the histories is extended by its own token, and answered by itself."""
    stage, states = stage_of("0-4"), [FakeState([5, 6]), FakeState([7])]
    outcomes = stage.run_batch([(decode(8, state), state) for state in states])

    assert outcomes == [TailAnswer(token_id=next_token(ids, 64)) for ids in ([5, 6, 8], [7, 8])]
    assert ([state.ids for state in states], stage.batch_sizes) == ([[5, 6, 8], [7, 8]], [2])


def test_a_step_of_a_batch_fails_alone() -> None:
    """A step that fails is an error in its place, and its mates are answered."""
    stage, states = stage_of("0-4"), [FakeState([5, 6]), FakeState([7])]
    steps = [decode(8, state) for state in states]
    states[0].ids.append(9)
    failed, answered = stage.run_batch(list(zip(steps, states, strict=True)))

    assert isinstance(failed, StageError)
    assert answered == TailAnswer(token_id=next_token([7, 8], 64))


def decode(token_id: int, state: FakeState) -> StageStep:
    """The next token of a history."""
    return StageStep(Frame.of_token_ids([token_id]), 0, len(state.ids), Sampling())


def picked(ids: list[int], context: SamplingContext, sampling: Sampling | None = None) -> int:
    """What the tail picks after `ids`."""
    work = StageStep(Frame.of_token_ids(ids), 0, 0, sampling or Sampling(), context)
    answer = stage_of("0-4").run(work, None)
    assert isinstance(answer, TailAnswer)
    assert answer.token_id is not None
    return answer.token_id


HISTORY = [5, 6, 7]
BEST = next_token(HISTORY, 64)


@given(IDS)
def test_no_context_says_the_next_token(ids: list[int]) -> None:
    """Neither an empty context nor one that only has tokens scored changes what is said."""
    scoring = SamplingContext(next_ids=tuple(ids[1:]))

    assert picked(ids, scoring) == pick_token(ids, 64, Sampling(), SamplingContext())
    assert picked(ids, scoring) == next_token(ids, 64)


@pytest.mark.parametrize(
    ("sampling", "context", "above_best"),
    [
        (Sampling(), SamplingContext(banned_ids=(BEST, BEST + 1)), 2),
        (Sampling(), SamplingContext(allowed=(1 << (BEST + 9)).to_bytes(8, "little")), 9),
        (Sampling(), SamplingContext(logit_bias={BEST + 20: 0.5}), 20),
        (Sampling(), SamplingContext(logit_bias={BEST: -100}), 1),
        (Sampling(presence_penalty=0.01), SamplingContext(generated_ids=(BEST, BEST)), 0),
        (Sampling(frequency_penalty=0.01), SamplingContext(generated_ids=(BEST, BEST)), 1),
        (Sampling(presence_penalty=0.02), SamplingContext(generated_ids=(BEST,)), 1),
        (Sampling(presence_penalty=0.02), SamplingContext(prompt_ids=(BEST,)), 0),
        (Sampling(repetition_penalty=1.05), SamplingContext(prompt_ids=(BEST,)), 1),
        (Sampling(repetition_penalty=1.05), SamplingContext(generated_ids=(BEST,)), 1),
    ],
)
def test_a_context_changes_what_is_said(
    sampling: Sampling, context: SamplingContext, above_best: int
) -> None:
    """Neighbours are 1/64 apart: the pick is the token so far above the best that then leads."""
    assert BEST + 20 < 64
    assert picked(HISTORY, context, sampling) == BEST + above_best


def test_where_nothing_may_be_picked_the_step_fails() -> None:
    """A mask that allows nothing of the vocabulary is a StageError."""
    with pytest.raises(StageError, match="no token may be picked"):
        picked(HISTORY, SamplingContext(allowed=bytes(8)))


def test_scores_are_of_one_distribution() -> None:
    """The tokens' shares add up to 1, the best leads, and a token has one number."""
    scored = [score_token(HISTORY, token, 64, 20) for token in range(64)]

    assert sum(exp(score.logprob) for score in scored) == pytest.approx(1.0)
    assert scored[0].top[0] == (BEST, scored[BEST].logprob)
    assert [token for token, _ in scored[0].top] == [(BEST + i) % 64 for i in range(20)]


@pytest.mark.parametrize("n_top", [0, 3])
def test_the_tail_scores_what_it_picks(n_top: int) -> None:
    """The pick is the banned best token's neighbour; its score knows of no ban."""
    context = SamplingContext(banned_ids=(BEST,))
    work = StageStep(Frame.of_token_ids(HISTORY), 0, 0, Sampling(top_logprobs=n_top), context)

    assert stage_of("0-4").run(work, None) == TailAnswer(
        token_id=BEST + 1, score=score_token(HISTORY, BEST + 1, 64, n_top)
    )


def test_the_tail_scores_what_comes_next() -> None:
    """In two steps, the first with a next token each: every token is scored after those before."""
    stage, state, sampling = stage_of("0-4"), FakeState(), Sampling(top_logprobs=2)
    ids = [5, 6, 7, 8, 9]
    first = StageStep(
        Frame.of_token_ids(ids[:3]), 0, 0, sampling, SamplingContext(next_ids=(6, 7, 8))
    )
    last = StageStep(Frame.of_token_ids(ids[3:]), 0, 3, sampling, SamplingContext(next_ids=(9,)))
    answers = [stage.run(step, state) for step in (first, last)]
    scores = [score_token(ids[:n], ids[n], 64, 2) for n in range(1, 5)]
    said = next_token(ids, 64)

    assert answers == [
        TailAnswer(prompt_scores=tuple(scores[:3])),
        TailAnswer(
            token_id=said, score=score_token(ids, said, 64, 2), prompt_scores=tuple(scores[3:])
        ),
    ]
