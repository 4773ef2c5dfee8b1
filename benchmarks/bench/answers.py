"""Answers as they came, token by token, and the numbers that follow from their times."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        asked_at: When it was asked for, seconds of a monotonic clock.
        came_at: When each of its tokens was there, on the same clock.
        ids: The tokens, where they were told.
    """

    asked_at: float
    came_at: tuple[float, ...]
    ids: tuple[int, ...] = ()

    @property
    def first_token_s(self) -> float:
        """From asking to the first token."""
        return self.came_at[0] - self.asked_at

    @property
    def tokens_per_s(self) -> float:
        """How fast the tokens after the first one came."""
        return (len(self.came_at) - 1) / (self.came_at[-1] - self.came_at[0])


def read_answer(asked_at: float, events: Iterable[tuple[float, str]]) -> Answer:
    """The answer of a streamed completion.

    A server that does not tell token ids is taken to send one token an event, but for events
    without text.

    Args:
        asked_at: When it was asked for.
        events: When each `data:` line came, and its JSON.

    Raises:
        RuntimeError: An error came in the stream, or nothing did.
    """
    came_at: list[float] = []
    ids: list[int] = []
    for at, data in events:
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise RuntimeError(f"the stream ended with {event['error']}")
        for choice in event["choices"]:
            told: list[int] | None = choice.get("token_ids")
            ids += told or ()
            came_at += [at] * (bool(choice["text"]) if told is None else len(told))
    if not came_at:
        raise RuntimeError("the stream ended without a token")
    return Answer(asked_at, tuple(came_at), tuple(ids))


def tokens_per_s_together(answers: Sequence[Answer]) -> float:
    """The tokens of all answers a second, while all of them were being generated.

    That is from the latest first token to the earliest last one; 0 if there is no such time.
    """
    start = max(answer.came_at[0] for answer in answers)
    end = min(answer.came_at[-1] for answer in answers)
    if end <= start:
        return 0.0
    return sum(start < at <= end for answer in answers for at in answer.came_at) / (end - start)


def gaps_s(
    answers: Iterable[Answer], start: float, end: float
) -> tuple[Sequence[float], Sequence[float]]:
    """The times between neighbouring tokens of each answer.

    Returns:
        Those that have a part in [start, end], and all the others.
    """
    gaps = [gap for answer in answers for gap in pairwise(answer.came_at)]
    inside = [b - a for a, b in gaps if b >= start and a <= end]
    outside = [b - a for a, b in gaps if b < start or a > end]
    return inside, outside


def perplexity(logprobs: Sequence[float]) -> float:
    """Of tokens, by the logarithms of their probabilities."""
    return math.exp(-sum(logprobs) / len(logprobs))
