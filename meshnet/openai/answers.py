"""What stands between a checked request and its answer: who serves it, and what is to be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshnet.generation import GenerationRequest
from meshnet.grammar.compiler import GrammarCompiler
from meshnet.openai.bodies import Heading
from meshnet.openai.sampling_fields import choice_seed
from meshnet.openai.stream import AnswerWriter
from meshnet.text.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Serving:
    """The served model as one request meets it.

    Attributes:
        tokenizer: Its tokenizer and chat template.
        grammars: Compiles what an answer must look like.
        heading: What every chunk of the answer repeats.
        max_positions: The context in tokens, prompt and answer together.
        max_choices: The most answers to one request.
        seed: A fresh random one; used if the client gave none.
    """

    tokenizer: ChatTokenizer
    grammars: GrammarCompiler
    heading: Heading
    max_positions: int
    max_choices: int
    seed: int


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The generations of a request, in the order of its choices, and who writes the answer."""

    generations: Sequence[GenerationRequest]
    writer: AnswerWriter


def each_choice(generation: GenerationRequest, n: int) -> list[GenerationRequest]:
    """The same generation `n` times, each with a seed of its own."""
    return [
        replace(
            generation,
            sampling=generation.sampling.model_copy(
                update={"seed": choice_seed(generation.sampling.seed, index)}
            ),
        )
        for index in range(n)
    ]
