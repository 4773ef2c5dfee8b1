from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import StageError
from meshnet.generation import NO_CONTEXT, Sampling, SamplingContext
from meshnet.model.sampler import sample

GREEDY = Sampling()
LOGITS = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=12)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 20),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
)
POSITIONS = st.integers(0, 2**31 - 1)
PROBABILITIES = torch.tensor([0.1, 0.6, 0.05, 0.25])


def pick(
    logits: torch.Tensor | Sequence[float],
    sampling: Sampling = GREEDY,
    position: int = 0,
    context: SamplingContext = NO_CONTEXT,
) -> int:
    """As `sample`; what is not given is of no account."""
    return sample(torch.as_tensor(logits), sampling, context, position)


def drawn(sampling: Sampling, n_draws: int = 4000) -> dict[int, float]:
    """How often each token is drawn of PROBABILITIES, over positions."""
    logits = PROBABILITIES.log()
    counts = Counter(pick(logits, sampling, position) for position in range(n_draws))
    return {token: n / n_draws for token, n in counts.items()}


def near(expected: dict[int, float]) -> object:
    """Within four standard deviations of 4000 draws."""
    return pytest.approx(expected, abs=0.032)


@given(LOGITS, SAMPLINGS, POSITIONS)
def test_the_token_is_in_the_vocabulary(
    logits: list[float], sampling: Sampling, position: int
) -> None:
    """Whatever the parameters, the token's id is one of the logits'."""
    assert 0 <= pick(logits, sampling, position) < len(logits)


@given(LOGITS, POSITIONS, st.sampled_from([0.0, 1e-8]))
def test_greedy_takes_the_largest(logits: list[float], position: int, temperature: float) -> None:
    """At temperature 0, and at 1e-8 alike, the token is one of the most likely."""
    token = pick(logits, Sampling(temperature=temperature), position)

    assert logits[token] == max(logits)


@given(LOGITS, POSITIONS)
def test_a_tiny_temperature_equals_greedy(logits: list[float], position: int) -> None:
    """Temperature 1e-8 gives the very token of temperature 0, with ties too."""
    tiny = Sampling(temperature=1e-8)

    assert pick(logits, tiny, position) == pick(logits, GREEDY, position)


@given(LOGITS, POSITIONS, st.integers(), st.floats(1e-5, 2))
def test_top_p_zero_leaves_one_token(
    logits: list[float], position: int, seed: int, temperature: float
) -> None:
    """With top_p 0 the most likely token is drawn, never none."""
    sampling = Sampling(temperature=temperature, top_p=0.0, seed=seed % 2**63)
    token = pick(logits, sampling, position)

    assert logits[token] == max(logits)


@given(LOGITS, POSITIONS, st.integers(1, 20))
def test_top_k_draws_of_the_k_most_likely(logits: list[float], position: int, k: int) -> None:
    """No token outside the k most likely ones is drawn; k may exceed the vocabulary."""
    token = pick(logits, Sampling(temperature=2.0, top_k=k, seed=3), position)

    assert logits[token] >= sorted(logits, reverse=True)[:k][-1]


@given(LOGITS, SAMPLINGS, POSITIONS)
def test_the_same_seed_draws_the_same(
    logits: list[float], sampling: Sampling, position: int
) -> None:
    """Other draws in between, and torch's own generator, change nothing."""
    first = pick(logits, sampling, position)
    torch.rand(1)
    pick(logits, sampling.model_copy(update={"seed": 1}), position + 1)

    assert pick(logits, sampling, position) == first


def test_torchs_generator_is_left_alone() -> None:
    """Sampling takes no number from the global generator."""
    before = torch.random.get_rng_state()
    pick(PROBABILITIES.log(), Sampling(temperature=1.0), 0)

    assert torch.equal(before, torch.random.get_rng_state())


def test_another_seed_draws_otherwise() -> None:
    """Seeds give different sequences."""
    logits = torch.zeros(64)
    texts = {
        tuple(pick(logits, Sampling(temperature=1.0, seed=seed), i) for i in range(8))
        for seed in range(50)
    }

    assert len(texts) == 50


def test_frequencies_follow_softmax() -> None:
    """At temperature 1 each token is drawn as often as its probability says."""
    assert drawn(Sampling(temperature=1.0)) == near({0: 0.1, 1: 0.6, 2: 0.05, 3: 0.25})


def test_frequencies_over_seeds_follow_softmax() -> None:
    """Many requests' draws at one position are spread as one request's draws over positions."""
    logits = PROBABILITIES.log()
    counts = Counter(pick(logits, Sampling(temperature=1.0, seed=seed), 5) for seed in range(4000))

    assert {token: n / 4000 for token, n in counts.items()} == near(
        {0: 0.1, 1: 0.6, 2: 0.05, 3: 0.25}
    )


def test_temperature_flattens() -> None:
    """At temperature 2 the probabilities' square roots are drawn from."""
    roots = [sqrt(p) for p in (0.1, 0.6, 0.05, 0.25)]
    shares = [root / sum(roots) for root in roots]

    assert drawn(Sampling(temperature=2.0)) == near(dict(enumerate(shares)))


def test_top_k_renormalises() -> None:
    """Of the two most likely, the draw is in proportion to their probabilities."""
    assert drawn(Sampling(temperature=1.0, top_k=2)) == near({1: 0.6 / 0.85, 3: 0.25 / 0.85})


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {1}), (0.7, {1, 3}), (0.9, {0, 1, 3})])
def test_top_p_keeps_what_reaches_the_sum(top_p: float, kept: set[int]) -> None:
    """The fewest tokens whose probabilities reach top_p are drawn from."""
    assert drawn(Sampling(temperature=1.0, top_p=top_p)).keys() == kept


def test_top_p_renormalises() -> None:
    """Of the tokens kept, the draw is in proportion to their probabilities."""
    assert drawn(Sampling(temperature=1.0, top_p=0.7)) == near({1: 0.6 / 0.85, 3: 0.25 / 0.85})


def test_top_p_is_reached_by_its_equal() -> None:
    """A sum of exactly top_p is enough."""
    halves = torch.zeros(2)
    tokens = {pick(halves, Sampling(temperature=1.0, top_p=0.5), i) for i in range(50)}

    assert tokens == {0}


def test_top_p_counts_among_the_top_k() -> None:
    """top_k comes first: 0.6 of 0.85 reaches 0.7, though 0.6 alone does not."""
    assert drawn(Sampling(temperature=1.0, top_k=2, top_p=0.7)) == {1: 1.0}


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.0, {0, 1, 2, 3}), (0.1, {0, 1, 3}), (0.4, {1, 3}), (1.0, {1})]
)
def test_min_p_keeps_a_share_of_the_most_likely(min_p: float, kept: set[int]) -> None:
    """Tokens at least min_p times as likely as the most likely one are drawn from."""
    assert drawn(Sampling(temperature=1.0, min_p=min_p)).keys() == kept


def test_min_p_renormalises() -> None:
    """Of the tokens kept, the draw is in proportion to their probabilities."""
    assert drawn(Sampling(temperature=1.0, min_p=0.4)) == near({1: 0.6 / 0.85, 3: 0.25 / 0.85})


def test_min_p_is_met_by_its_equal() -> None:
    """With min_p 1 all of the most likely tokens are kept."""
    sampling = Sampling(temperature=1.0, min_p=1.0)

    assert {pick([2.0, 1.0, 2.0], sampling, i) for i in range(50)} == {0, 2}


def test_min_p_speaks_of_probabilities_after_temperature() -> None:
    """At temperature 2 the share of 0.1 to 0.6 is its root, 0.41: enough for 0.3."""
    shares = {t: drawn(Sampling(temperature=t, min_p=0.3)).keys() for t in (1.0, 2.0)}

    assert shares == {1.0: {1, 3}, 2.0: {0, 1, 3}}


def test_top_p_counts_what_min_p_drops() -> None:
    """Both judge the same probabilities: 0.6 and 0.25 reach 0.8 though min_p drops the latter."""
    assert drawn(Sampling(temperature=1.0, min_p=0.5, top_p=0.8)) == {1: 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_float_dtype_will_do(dtype: torch.dtype) -> None:
    """Logits come in the stage's dtype."""
    logits = torch.tensor([0.0, 40.0, 0.0], dtype=dtype)

    assert pick(logits, Sampling(temperature=1.0), 0) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_not_finite_is_a_stage_error(bad: float, temperature: float) -> None:
    """NaN and infinity never become a token; the error has the position."""
    with pytest.raises(StageError, match="not finite") as caught:
        pick([0.0, bad, 1.0], Sampling(temperature=temperature), 7)

    assert caught.value.members == {"position": 7}


@pytest.mark.parametrize(
    ("logits", "draw", "token"),
    [(PROBABILITIES.log(), 0.0, 1), (PROBABILITIES.log(), 1 - 2**-53, 2), (torch.zeros(2), 0.5, 1)],
    ids=["least", "greatest", "between"],
)
def test_every_draw_has_its_token(
    logits: torch.Tensor, draw: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's share of [0, 1) begins with its draw and ends before the next one's."""

    def the_draw(seed: int, position: int) -> float:
        del seed, position
        return draw

    monkeypatch.setattr("meshnet.model.sampler.uniform", the_draw)

    assert pick(logits, Sampling(temperature=1.0), 0) == token


def test_the_picks_of_old_seeds_stay() -> None:
    """A seed's text is the same in every version: these were drawn before there were contexts."""
    sampling = Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=11)
    picks = [pick(torch.linspace(0, 3, 64), sampling, position) for position in range(12)]

    assert picks == [58, 32, 30, 40, 63, 40, 61, 60, 40, 45, 59, 42]
