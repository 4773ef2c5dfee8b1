"""What every part of the benchmark asks for: slices of one text, as token ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TypeVar

from meshnet.text.tokenizer import ChatTokenizer

TEXT = Path(__file__).parent / "text.txt"
"""Written for this benchmark, and in the public domain."""
PROMPT_TOKENS = 64
STRIDE = 61
"""From one prompt to the next in the text, where none may begin as one before it did."""

CaseT = TypeVar("CaseT")


@dataclass(frozen=True, slots=True)
class Workload:
    """The model, the text and how much of it is asked for.

    Attributes:
        model: Its folder, with one GGUF file.
        n_layers: Its decoder layers.
        ids: The tokens of the text.
        rounds: How often every measurement is made, besides a first one that does not count.
        n_tokens: How many tokens an answer has, whose speed is measured.
        llama: The folder with llama.cpp's programs, if there are some.
    """

    model: Path
    n_layers: int
    ids: tuple[int, ...]
    rounds: int
    n_tokens: int
    llama: Path | None = None

    @classmethod
    def of(cls, model: Path, *, rounds: int, n_tokens: int, llama: Path | None) -> Workload:
        """Read the text with the model's tokenizer.

        Raises:
            ModelError: There is no tokenizer.
        """
        tokenizer = ChatTokenizer.load(str(model))
        ids = tokenizer.encode_prompt(TEXT.read_text(), add_special_tokens=False)
        return cls(model, tokenizer.n_layers or 0, tuple(ids), rounds, n_tokens, llama)

    def prompt(self, n_tokens: int = PROMPT_TOKENS, *, at: int = 0) -> list[int]:
        """So many tokens of the text from a place on; after its end it begins anew."""
        return list(islice(cycle(self.ids), at, at + n_tokens))

    async def in_turn(
        self, cases: Mapping[str, CaseT], measure: Callable[[CaseT], Awaitable[float]]
    ) -> dict[str, list[float]]:
        """Measure some cases one after the other, round by round.

        A round that does not count comes first: whatever is done once only is done then.

        Returns:
            The values of each, one a round.
        """
        taken: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(self.rounds + 1):
            for name, case in cases.items():
                taken[name].append(await measure(case))
        return {name: values[1:] for name, values in taken.items()}
