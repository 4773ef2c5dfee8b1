"""Penalties, bias, bans and masks: what a pick depends on besides logits and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from math import exp, isclose
from typing import cast

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from meshnet.errors import StageError
from meshnet.generation import NO_CONTEXT, Sampling, SamplingContext, is_allowed, uniform
from meshnet.model.sampler import sample

VOCAB = 6
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=8).map(tuple)
SIX_LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.just(0.0) | st.floats(0.1, 2),
    top_p=st.just(1.0) | st.floats(0, 1),
    top_k=st.integers(0, VOCAB),
    min_p=st.just(0.0) | st.floats(0, 1),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    presence_penalty=st.just(0.0) | st.floats(-2, 2),
    repetition_penalty=st.just(1.0) | st.floats(0.1, 10),
    seed=st.integers(0, 1000),
)
CONTEXTS = st.builds(
    SamplingContext,
    prompt_ids=IDS,
    generated_ids=IDS,
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
    banned_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
    allowed=st.none() | st.binary(max_size=2),
)


def mask(ids: Collection[int], n_bytes: int = 1) -> bytes:
    """A mask that allows these tokens."""
    return sum(1 << i for i in ids).to_bytes(n_bytes, "little")


def adjusted(logits: list[float], sampling: Sampling, context: SamplingContext) -> list[float]:
    """The definitions of transformers (the first) and OpenAI (the others), a token at a time."""
    made: list[float] = []
    for token, logit in enumerate(logits):
        count, factor = context.generated_ids.count(token), sampling.repetition_penalty
        if token in context.prompt_ids or count:
            logit = logit * factor if logit < 0 else logit / factor
        logit -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
        made.append(logit + context.logit_bias.get(token, 0.0))
    return made


def reference(
    logits: list[float], sampling: Sampling, context: SamplingContext, position: int
) -> int | None:
    """The token by the definitions; None if none may be picked.

    Where a rounding could decide, hypothesis is told to try something else.
    """
    numbers = adjusted(logits, sampling, context)
    ids = [
        i
        for i in range(VOCAB)
        if i not in context.banned_ids
        and (context.allowed is None or is_allowed(context.allowed, i))
    ]
    if not ids:
        return None
    ranked = sorted(ids, key=lambda i: -numbers[i])
    if sampling.temperature == 0:
        return ranked[0]
    ranked = ranked[: sampling.top_k or None]
    weights = [exp((numbers[i] - numbers[ranked[0]]) / sampling.temperature) for i in ranked]
    sums = [sum(weights[: n + 1]) / sum(weights) for n in range(len(weights))]
    n_kept = 1 + sum(before < sampling.top_p for before in sums[:-1])
    n_kept = min(n_kept, sum(weight >= sampling.min_p for weight in weights))
    draw = uniform(sampling.seed, position) * sums[n_kept - 1]
    edges = [(s, sampling.top_p) for s in sums] + [(s, draw) for s in sums]
    edges += [(weight, sampling.min_p) for weight in weights[1:] if sampling.min_p]
    assume(not any(isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in edges if a < 1 or b < 1))
    return next(i for i, edge in zip(ranked, sums, strict=True) if edge > draw)


def pick(
    logits: Sequence[float], sampling: Sampling, context: SamplingContext, position: int = 0
) -> int:
    """As `sample`."""
    return sample(torch.tensor(logits), sampling, context, position)


@given(SIX_LOGITS, SAMPLINGS, CONTEXTS, st.integers(0, 500))
def test_the_token_is_that_of_the_definitions(
    logits: list[float], sampling: Sampling, context: SamplingContext, position: int
) -> None:
    """All at once, greedy or drawn, the pick is what a slow reading of the definitions gives."""
    expected = reference(logits, sampling, context, position)
    assume(expected is not None)

    assert pick(logits, sampling, context, position) == expected


@given(SIX_LOGITS, IDS, IDS, st.floats(0.1, 10))
def test_repetition_penalty_is_transformers(
    logits: list[float], prompt_ids: tuple[int, ...], generated_ids: tuple[int, ...], factor: float
) -> None:
    """The pick is the largest of what transformers' own processor makes of the logits."""
    ids = cast("torch.LongTensor", torch.tensor([(*prompt_ids, *generated_ids, 0)]))
    doubles = cast("torch.FloatTensor", torch.tensor([logits], dtype=torch.double))
    theirs = RepetitionPenaltyLogitsProcessor(factor)(ids, doubles)
    context = SamplingContext(prompt_ids=prompt_ids, generated_ids=(*generated_ids, 0))

    assert pick(logits, Sampling(repetition_penalty=factor), context) == int(theirs.argmax())


@pytest.mark.parametrize(
    ("sampling", "logits", "expected"),
    [
        (Sampling(frequency_penalty=0.5), [3.0, 2.25, 1.75], 1),  # 2.0, 2.25, 1.25
        (Sampling(frequency_penalty=0.5), [3.5, 2.25, 1.75], 0),  # 2.5, 2.25, 1.25
        (Sampling(frequency_penalty=-1.0), [0.0, 1.75, 0.5], 0),  # 2.0, 1.75, 1.5
        (Sampling(presence_penalty=1.0), [3.0, 2.25, 2.75], 1),  # 2.0, 2.25, 1.75
        (Sampling(presence_penalty=0.5), [3.0, 2.25, 2.75], 0),  # 2.5, 2.25, 2.25
        (Sampling(presence_penalty=1.0, frequency_penalty=1.0), [3.0, -0.5, 1.5], 0),  # 0, -0.5
        (Sampling(presence_penalty=1.0, frequency_penalty=1.0), [3.0, 0.5, 1.5], 1),
        (Sampling(repetition_penalty=2.0), [4.0, 2.5, 1.0], 1),  # 2.0, 2.5, 0.5
        (Sampling(repetition_penalty=2.0), [-1.0, -1.5, -1.0], 1),  # -2.0, -1.5, -2.0
        (Sampling(repetition_penalty=0.5), [2.0, 3.5, 1.0], 0),  # 4.0, 3.5, 2.0
    ],
)
def test_generated_tokens_are_penalised(
    sampling: Sampling, logits: list[float], expected: int
) -> None:
    """Token 0 came twice and token 2 once: frequency counts, presence and repetition do not."""
    assert pick(logits, sampling, SamplingContext(generated_ids=(0, 2, 0))) == expected


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(frequency_penalty=2.0), 0),
        (Sampling(presence_penalty=2.0), 0),
        (Sampling(repetition_penalty=2.0), 1),
    ],
)
def test_the_prompts_tokens_are_penalised_for_repetition_only(
    sampling: Sampling, expected: int
) -> None:
    """OpenAI's penalties speak of the answer, transformers' of the prompt as well."""
    assert pick([2.0, 1.5], sampling, SamplingContext(prompt_ids=(0, 0))) == expected


def test_a_bias_is_added() -> None:
    """A token 2 below the most likely wins with 2.5, and not with 1.5."""
    picks = [pick([3.0, 1.0], Sampling(), SamplingContext(logit_bias={1: b})) for b in (1.5, 2.5)]

    assert picks == [0, 1]


def test_a_bias_is_not_multiplied() -> None:
    """Penalised first, a logit of 2 is 1 and with a bias of 3 it is 4: not (2 + 3) / 2."""
    context = SamplingContext(generated_ids=(0,), logit_bias={0: 3.0})

    assert pick([2.0, 3.5], Sampling(repetition_penalty=2.0), context) == 0


@given(SIX_LOGITS, st.sets(st.integers(0, VOCAB - 1), min_size=1), SAMPLINGS, st.integers(1, 4))
def test_a_masked_token_is_never_picked(
    logits: list[float], ids: set[int], sampling: Sampling, n_bytes: int
) -> None:
    """The pick is one of the mask's, whatever the parameters, and however long the mask is."""
    context = SamplingContext(allowed=mask(ids, n_bytes))

    assert {pick(logits, sampling, context, position) for position in range(5)} <= ids


def test_what_is_beyond_the_masks_end_is_not_allowed() -> None:
    """A mask of one byte allows none of the tokens after the eighth, likely as they are."""
    logits = [0.0] * 8 + [5.0] * 12

    assert pick(logits, Sampling(), SamplingContext(allowed=mask({3}))) == 3


def test_a_masks_lowest_bit_is_its_first() -> None:
    """Byte 1's bit 0 is token 8."""
    assert pick([0.0] * 16, Sampling(), SamplingContext(allowed=bytes([0, 1]))) == 8


def test_a_draw_is_among_what_is_allowed() -> None:
    """Of the two allowed, each is drawn as often as its probability says."""
    logits = torch.tensor([0.1, 0.6, 0.05, 0.25]).log()
    context = SamplingContext(allowed=mask({0, 3}))
    counts = Counter(sample(logits, Sampling(temperature=1.0), context, i) for i in range(4000))

    assert {token: n / 4000 for token, n in counts.items()} == pytest.approx(
        {0: 0.1 / 0.35, 3: 0.25 / 0.35}, abs=0.032
    )


def test_top_k_and_min_p_count_what_is_allowed() -> None:
    """A likely token that is not allowed takes no place, and sets no standard."""
    context = SamplingContext(allowed=mask({0, 2}))
    for sampling in (Sampling(temperature=1.0, top_k=1), Sampling(temperature=1.0, min_p=0.9)):
        assert {pick([1.0, 9.0, 0.5], sampling, context, i) for i in range(30)} == {0}


def test_no_bias_brings_back_what_is_banned() -> None:
    """A banned token is not picked, nor is one outside the mask, with a bias of 100."""
    biased = {0: 100.0, 1: 100.0}
    context = SamplingContext(logit_bias=biased, banned_ids=(0,), allowed=mask({0, 2}))

    assert pick([1.0, 1.0, 0.0], Sampling(), context) == 2


@pytest.mark.parametrize(
    "context",
    [
        SamplingContext(allowed=b""),
        SamplingContext(allowed=b"\x00"),
        SamplingContext(allowed=b"\x00\x01"),  # token 8 of 6
        SamplingContext(allowed=mask({2}), banned_ids=(2,)),
        SamplingContext(banned_ids=tuple(range(VOCAB))),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_may_be_picked_nothing_is(
    context: SamplingContext, temperature: float
) -> None:
    """It is a StageError that says so, with the position."""
    with pytest.raises(StageError, match="no token may be picked") as caught:
        pick([0.0] * VOCAB, Sampling(temperature=temperature), context, 7)

    assert caught.value.members == {"position": 7}


@given(SIX_LOGITS, SAMPLINGS, CONTEXTS)
def test_the_logits_stay_as_they_are(
    logits: list[float], sampling: Sampling, context: SamplingContext
) -> None:
    """Scores are made of them afterwards: no penalty and no mask may be left in them."""
    assume(reference(logits, sampling, context, 0) is not None)
    tensor = torch.tensor(logits, dtype=torch.double)
    sample(tensor, sampling, context, 0)

    assert torch.equal(tensor, torch.tensor(logits, dtype=torch.double))


@given(SIX_LOGITS, SAMPLINGS, st.integers(0, 500))
def test_tokens_to_be_scored_change_no_pick(
    logits: list[float], sampling: Sampling, position: int
) -> None:
    """With nothing but next_ids the pick is that of no context, to the bit."""
    context = SamplingContext(next_ids=(1, 2, 3))

    assert pick(logits, sampling, context, position) == pick(logits, sampling, NO_CONTEXT, position)
