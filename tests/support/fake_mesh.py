"""Two meshes of fake stages in a process of their own: for clients of another environment.

`python -m tests.support.fake_mesh` prints a line of JSON, `{"whole": URL, "broken": URL}`, and
serves until its stdin ends. The model writes single bytes, so that it can write whatever a grammar
asks for; the broken mesh fails some tokens into each answer.
"""
# pyright: reportUnknownMemberType=false
# tokenizers types its surface loosely.

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from meshnet.errors import StageError
from meshnet.model.fake_stage import FakeStage, FakeState, fake_facts
from meshnet.model.interface import CacheState, StageOutput, StageStep
from meshnet.text.model_files import ModelFacts
from meshnet.text.tokenizer import ChatTokenizer
from meshnet.topology import even_spans
from tests.support.mesh import Mesh, serve_mesh

N_LAYERS = 4
N_POSITIONS = {"whole": 128, "broken": 8192}
"""Few, so that an answer without a limit is short; or many, for prompts that hold a schema."""
N_STEPS_BEFORE_FAILURE = 4
_END = "<|end|>"
_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"


@dataclass
class _BreakingState(FakeState):
    n_decode_steps: int = 0


class BreakingStage(FakeStage):
    """Fails in the middle of each answer, and not before."""

    def new_state(self, start_layer: int) -> FakeState:
        """An empty history."""
        del start_layer
        return _BreakingState()

    def run(self, step: StageStep, state: CacheState | None) -> StageOutput:
        """As the fake stage, for some tokens."""
        if step.position and isinstance(state, _BreakingState):
            state.n_decode_steps += 1
            if state.n_decode_steps > N_STEPS_BEFORE_FAILURE:
                raise StageError("this stage fails in the middle of each answer")
        return super().run(step, state)


def byte_tokenizer(n_positions: int) -> ChatTokenizer:
    """A token a byte, and one that ends an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(_END, special=True)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=_TEMPLATE, eos_token=_END
    )
    facts = ModelFacts(frozenset({len(alphabet)}), n_layers=N_LAYERS, max_positions=n_positions)
    return ChatTokenizer(tokenizer, facts)


def _mesh(name: str, kind: type[FakeStage]) -> AbstractAsyncContextManager[Mesh]:
    tokenizer = byte_tokenizer(N_POSITIONS[name])
    facts = [
        replace(
            fake_facts(span, N_LAYERS, tokenizer.vocab_size),
            max_positions=N_POSITIONS[name],
        )
        for span in even_spans(N_LAYERS, 2)
    ]
    return serve_mesh([kind(one) for one in facts], tokenizer)


async def _main() -> None:
    async with (
        _mesh("whole", FakeStage) as whole,
        _mesh("broken", BreakingStage) as broken,
    ):
        urls = {"whole": whole.head.url, "broken": broken.head.url}
        print(json.dumps(urls), flush=True)  # noqa: T201  # who started us reads it
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main())
