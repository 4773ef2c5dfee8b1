from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshnet.generation import Sampling, SamplingContext, is_allowed, uniform

SEEDS = st.integers(-(2**63), 2**63 - 1)
PINNED = [0.8336885269740499, 0.3214364412611488, 0.9459165357046844, 0.722988422396006]


def test_the_draw_is_pinned() -> None:
    """A seed's draws are the same on every machine and in every version."""
    drawn = [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(-5, 1000)]

    assert drawn == PINNED


@given(SEEDS, st.integers(0, 2**31))
def test_the_draw_depends_on_its_arguments_only(seed: int, position: int) -> None:
    """Drawing elsewhere in between changes nothing."""
    first = uniform(seed, position)
    uniform(seed + 1, position + 1)

    assert first == uniform(seed, position)


@given(SEEDS, st.integers(0, 2**31))
def test_the_draw_is_in_range(seed: int, position: int) -> None:
    """A draw is in [0, 1), so that it never points past the last token."""
    assert 0.0 <= uniform(seed, position) < 1.0


def test_draws_of_neighbours_do_not_collide() -> None:
    """Seed 1 at position 11 is another draw than seed 11 at position 1."""
    assert uniform(1, 11) != uniform(11, 1)


@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_are_spread_evenly(by: str) -> None:
    """Over positions and over seeds alike, each tenth gets about a tenth of the draws."""
    draws = [uniform(7, i) if by == "position" else uniform(i, 7) for i in range(10_000)]
    tenths = [sum(i <= draw * 10 < i + 1 for draw in draws) for i in range(10)]

    assert max(abs(n - 1000) for n in tenths) < 120  # four standard deviations


def test_the_largest_digest_is_still_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding never turns the largest draw into 1."""

    class AllOnes:
        def digest(self) -> bytes:
            return b"\xff" * 8

    def all_ones(message: bytes, *, digest_size: int) -> AllOnes:
        assert (digest_size, message) == (8, b"0:0")
        return AllOnes()

    monkeypatch.setattr("hashlib.blake2b", all_ones)

    assert uniform(0, 0) < 1.0


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0.0, True), (1e-8, True), (1e-5, False), (1.0, False)]
)
def test_a_tiny_temperature_is_greedy(temperature: float, greedy: bool) -> None:
    """A temperature under which a softmax would overflow takes the most likely token."""
    assert greedy == Sampling(temperature=temperature).greedy


@pytest.mark.parametrize(
    "malformed",
    [
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": 2.1},
        {"presence_penalty": -2.1},
        {"presence_penalty": float("nan")},
        {"repetition_penalty": 0.009},
        {"repetition_penalty": 10.1},
        {"top_logprobs": -1},
        {"top_logprobs": 21},
        {"seed": 2**63},
        {"seed": -(2**63) - 1},
        {"unheard_of": 1},
    ],
    ids=str,
)
def test_malformed_sampling_is_named(malformed: dict[str, float]) -> None:
    """A parameter out of range or unknown is refused by its name."""
    with pytest.raises(ValidationError) as caught:
        Sampling.model_validate(malformed)

    assert [error["loc"] for error in caught.value.errors()] == [tuple(malformed)]


@pytest.mark.parametrize(
    ("changed", "penalised"),
    [
        ({}, False),
        ({"temperature": 1.0, "min_p": 0.1, "top_logprobs": 5}, False),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"repetition_penalty": 0.9}, True),
    ],
)
def test_penalties_are_what_asks_for_the_tokens_so_far(
    changed: dict[str, float], penalised: bool
) -> None:
    """Any of the three does, in either direction, and nothing else."""
    assert penalised == Sampling.model_validate(changed).penalised


@given(st.binary(max_size=4), st.integers(0, 40))
def test_a_mask_has_a_bit_a_token(mask: bytes, token_id: int) -> None:
    """The lowest bit of the first byte is token 0, and what is past the end is not allowed."""
    bits = "".join(f"{byte:08b}"[::-1] for byte in mask)

    assert is_allowed(mask, token_id) == (bits[token_id : token_id + 1] == "1")


def test_scoring_changes_nothing_else() -> None:
    """The tokens to be scored are put in place of those of before; all else stays."""
    context = SamplingContext(generated_ids=(1,), logit_bias={2: 3.0}, next_ids=(4,))

    assert context.scoring([5, 6]) == SamplingContext(
        generated_ids=(1,), logit_bias={2: 3.0}, next_ids=(5, 6)
    )


@pytest.mark.parametrize(
    ("context", "is_empty"),
    [
        (SamplingContext(), True),
        (SamplingContext(allowed=b""), False),
        (SamplingContext(next_ids=(0,)), False),
    ],
)
def test_a_context_is_empty_without_members(context: SamplingContext, is_empty: bool) -> None:
    """A mask that allows nothing is not the same as none."""
    assert context.is_empty == is_empty
