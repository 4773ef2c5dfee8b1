from __future__ import annotations

from math import exp, inf, log, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import StageError
from meshnet.generation import MAX_TOP_LOGPROBS, TokenScore
from meshnet.model.scores import score

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=30)
N_TOPS = st.integers(0, MAX_TOP_LOGPROBS)
TOKENS = st.integers(0, 29)


@given(LOGITS, TOKENS)
def test_a_score_is_the_log_of_the_softmax(logits: list[float], token: int) -> None:
    """The number is the natural log of the token's share, within float32."""
    token %= len(logits)
    expected = logits[token] - max(logits) - log(sum(exp(x - max(logits)) for x in logits))
    scored = score(torch.tensor(logits), token, 0, 0)

    assert (scored.token_id, scored.top) == (token, ())
    assert scored.logprob == pytest.approx(expected, abs=1e-5)


@given(LOGITS | st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=30), TOKENS, N_TOPS)
def test_the_top_are_the_likeliest_in_order(logits: list[float], token: int, n_top: int) -> None:
    """They come most likely first, equals by id; no more than there are tokens."""
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])
    top = score(torch.tensor(logits), token % len(logits), n_top, 0).top

    assert [i for i, _ in top] == ranked[:n_top]


@given(LOGITS, TOKENS)
def test_a_token_has_one_number(logits: list[float], token: int) -> None:
    """Its own and that among the top are the very same float: clients compare for equality."""
    token %= len(logits)
    scored = score(torch.tensor(logits), token, 30, 0)

    assert dict(scored.top)[token] == scored.logprob


@given(LOGITS, TOKENS)
def test_a_score_survives_json(logits: list[float], token: int) -> None:
    """No digit is lost on the way to the head."""
    scored = score(torch.tensor(logits), token % len(logits), 5, 0)

    assert TokenScore.model_validate_json(scored.model_dump_json()) == scored


@pytest.mark.parametrize("logit", [-inf, -3e38, -20000.0])
def test_what_is_as_good_as_impossible_is_clamped(logit: float) -> None:
    """Minus infinity, which JSON has not, and whatever is below it, is -9999.0."""
    scored = score(torch.tensor([logit, 0.0]), 0, 2, 0)

    assert scored == TokenScore(token_id=0, logprob=-9999.0, top=((1, 0.0), (0, -9999.0)))


@pytest.mark.parametrize("bad", [nan, inf])
def test_logits_that_are_no_numbers_are_a_stage_error(bad: float) -> None:
    """They make no probabilities, and the error says where."""
    with pytest.raises(StageError, match="not finite") as caught:
        score(torch.tensor([0.0, bad, 1.0]), 0, 1, 7)

    assert caught.value.members == {"position": 7}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_scored_in_float32(dtype: torch.dtype) -> None:
    """Sums and logs are not of the stage's dtype: theirs would be off by a hundredth."""
    logits = torch.linspace(-2, 2, 1000).to(dtype)

    assert score(logits, 5, 3, 0) == score(logits.float(), 5, 3, 0)
