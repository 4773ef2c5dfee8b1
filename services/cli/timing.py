"""What a head tells in `Server-Timing`, of several answers, as milliseconds a token."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

PARTS: Final = ("queue", "compute", "serialise", "wire", "recovery")
"""What a hop's time consists of; recovery is there only where there was some."""
_VALUE: Final = r'"(?:[^"\\]|\\.)*"|[^;,\s]+'
_METRIC: Final = re.compile(rf"([\w-]+)((?:;\w+=(?:{_VALUE}))*)(?:,\s*|$)")
_PARAMETER: Final = re.compile(rf";(\w+)=({_VALUE})")

Metrics = Mapping[str, Mapping[str, str]]
"""The parameters of each metric, by its name."""


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Where the time of decoded tokens went, milliseconds a token.

    Attributes:
        hops: By endpoint, then by part.
        head_ms: What no hop took.
    """

    hops: Mapping[str, Mapping[str, float]]
    head_ms: float

    def of_part(self, part: str) -> float:
        """A part's, over all hops."""
        return sum(parts[part] for parts in self.hops.values())

    @property
    def all_ms(self) -> float:
        """What a token took."""
        return self.head_ms + sum(map(self.of_part, PARTS))


def parse(text: str) -> Metrics:
    """Read a header's value; what is none of its metrics is passed over."""
    return {
        name: {key: _unquoted(value) for key, value in _PARAMETER.findall(parameters)}
        for name, parameters in _METRIC.findall(text)
    }


def token_times(texts: Iterable[str]) -> TokenTimes | None:
    """Of all tokens after the answers' first ones; None where there are none, or nothing is told.

    Args:
        texts: The header's value of each answer.
    """
    hops: defaultdict[str, Counter[str]] = defaultdict(Counter)
    head_ms, n_tokens = 0.0, 0
    for metrics in map(parse, texts):
        n_tokens += int(metrics.get("decode", {}).get("tokens", 0))
        head_ms += _duration(metrics, "decode-head")
        for name, parameters in metrics.items():
            if name.startswith("hop-") and "desc" in parameters:
                number = name.removeprefix("hop-")
                hops[parameters["desc"]].update(
                    {part: _duration(metrics, f"decode-{number}-{part}") for part in PARTS}
                )
    if not n_tokens:
        return None
    return TokenTimes(
        {
            endpoint: {part: part_ms / n_tokens for part, part_ms in parts.items()}
            for endpoint, parts in hops.items()
        },
        head_ms / n_tokens,
    )


def _duration(metrics: Metrics, name: str) -> float:
    return float(metrics.get(name, {}).get("dur", 0.0))


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value
