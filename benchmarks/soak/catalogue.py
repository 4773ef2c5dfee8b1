"""What is asked: requests whose undisturbed answers are known, and some that are no requests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final

_SHORT: Final = (
    "Why is the sky blue?",
    "Name three fruits.",
    "Write a haiku about the sea.",
    "Count from one to twenty in words.",
    "What is the capital of France, and what is it known for?",
)
_WINDS: Final = ("calm", "fresh", "wild")
_LONG: Final = tuple(
    " ".join(
        f"On day {day} the keeper of the lighthouse wrote: wind {_WINDS[day % 3]}, {day * 7} ships."
        for day in range(1, n_days)
    )
    + " Summarise the log."
    for n_days in (9, 22, 36)
)
"""About 200, 450 and 750 tokens: one chunk of a prefill, and two."""
_HEAT: Final = ((0.0, 0), (0.8, 1), (0.8, 2))
"""Temperature and seed."""
_MAX_TOKENS: Final = (1, 60, 7, 24, 40, 13, 2, 50, 33)

INVALID: Final[tuple[dict[str, object], ...]] = (
    {"messages": []},
    {"messages": [{"role": "king", "content": "hi"}]},
    {"max_tokens": 0},
    {"temperature": 3},
    {"n": 0},
    {"max_tokens": 100_000},
)
"""Changes after which a request is refused with a 400."""


@dataclass(frozen=True)
class Question:
    """One request; with the same seed it is always answered the same."""

    name: str
    prompt: str
    max_tokens: int
    temperature: float
    seed: int

    def body(self, model: str, *, stream: bool) -> dict[str, object]:
        """The request's JSON."""
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": stream,
            **usage,
        }


def catalogue() -> list[Question]:
    """Each prompt greedily and with two seeds; lengths from 1 to 60 tokens."""
    asked = product((*_SHORT, *_LONG), _HEAT)
    return [
        Question(f"question-{i}", prompt, _MAX_TOKENS[i % len(_MAX_TOKENS)], temperature, seed)
        for i, (prompt, (temperature, seed)) in enumerate(asked)
    ]
