"""Whether the fast ways say what the plain one does: tokens in fp32, perplexity of each format."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Final, TypeVar

from benchmarks.bench.answers import perplexity
from benchmarks.bench.results import Result
from benchmarks.bench.sides import DTYPES, Side, in_each_format, nodes, transformers_alone
from benchmarks.bench.workload import Workload

_PLAIN: Final = "transformers fp32"
_WINDOWS: Final = 8
_WINDOW_TOKENS: Final = 192
_ONE_TOKEN_CHUNKS: Final = {"MESHNET_HEAD_PREFILL_CHUNK_TOKENS": "1"}
"""A prompt is scored in steps of one token then, which is how an answer is generated."""

_QUESTIONS: Final = 16
_QUESTION_TOKENS: Final = 32
_ANSWER_TOKENS: Final = 32
_AT_ONCE: Final = (1, 4, 16)

ToldT = TypeVar("ToldT")


async def measure(work: Workload) -> list[Result]:
    """Tokens that differ from transformers', and perplexities beside transformers'."""
    async with transformers_alone(work, threads=1, weights="fp32") as plain:
        expected = await _answers(work, plain, 1)
        results = [_perplexity("prompt at once", _PLAIN, await _scores(work, plain, 1))]

    async def measure_format(weights: str) -> list[Result]:
        told: list[Result] = []
        async with nodes(work, 2, weights) as two:
            if weights == "fp32":
                told += [await _differing(work, two, n, expected) for n in _AT_ONCE]
            told.append(_perplexity("prompt at once", weights, await _scores(work, two, 1)))
        async with nodes(work, 2, weights, _ONE_TOKEN_CHUNKS) as two:
            told.append(_perplexity("token by token", weights, await _scores(work, two, 1)))
            name = f"token by token and {_WINDOWS} at once"
            told.append(_perplexity(name, weights, await _scores(work, two, _WINDOWS)))
        return told

    return [*results, *await in_each_format(DTYPES, measure_format)]


async def _scores(work: Workload, side: Side, at_once: int) -> list[list[float]]:
    """The logarithms of the probabilities of the text's tokens, window by window."""
    windows = [work.prompt(_WINDOW_TOKENS, at=index * _WINDOW_TOKENS) for index in range(_WINDOWS)]
    return await _each(windows, side.score, at_once)


def _perplexity(way: str, weights: str, windows: Sequence[Sequence[float]]) -> Result:
    value = round(perplexity(list(chain.from_iterable(windows))), 4)
    raw = {"by window": [round(perplexity(window), 4) for window in windows]}
    return Result(f"perplexity, {way}, {weights}", value, "", "lower", raw)


async def _answers(work: Workload, side: Side, at_once: int) -> list[tuple[int, ...]]:
    prompts = [
        work.prompt(_QUESTION_TOKENS, at=index * 3 * _QUESTION_TOKENS)
        for index in range(_QUESTIONS)
    ]

    async def ids_of(prompt: Sequence[int]) -> tuple[int, ...]:
        return (await side.ask(prompt, _ANSWER_TOKENS)).ids

    return await _each(prompts, ids_of, at_once)


async def _differing(
    work: Workload, side: Side, at_once: int, expected: Sequence[tuple[int, ...]]
) -> Result:
    """How many tokens are not those of the plain path, with so many answers made at once."""
    answers = await _answers(work, side, at_once)
    counts = [
        sum(a != b for a, b in zip(answer, plain, strict=True))
        for answer, plain in zip(answers, expected, strict=True)
    ]
    name = f"tokens that differ from {_PLAIN} of {_QUESTIONS * _ANSWER_TOKENS}, {at_once} at once"
    return Result(f"{name}, fp32", sum(counts), "", "lower", {"by answer": counts}, target=0)


async def _each(
    prompts: Sequence[list[int]],
    ask: Callable[[Sequence[int]], Awaitable[ToldT]],
    at_once: int,
) -> list[ToldT]:
    """Ask for all prompts, in groups of so many at once."""
    told: list[ToldT] = []
    for start in range(0, len(prompts), at_once):
        told += await asyncio.gather(*map(ask, prompts[start : start + at_once]))
    return told
