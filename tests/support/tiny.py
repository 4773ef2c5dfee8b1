"""Tiny random models of real architectures, saved as their users would have them."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers types its models loosely.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 64
"""As many as the number tokenizer of tests.support.mesh can spell."""
WINDOW = 8
"""Shorter than the texts, where the family has a window."""

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class TinyModel:
    """A saved model and what transformers says with it."""

    folder: Path
    n_layers: int
    model: Any

    def greedy(self, prompt: list[int], n_tokens: int) -> list[int]:
        """The continuation by `transformers.generate`, unsplit."""
        out = self.model.generate(
            torch.tensor([prompt]), max_new_tokens=n_tokens, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()


def config_of(family: str, n_layers: int, *, tied: bool) -> PreTrainedConfig:
    """A tiny config; sliding and full layers alternate unevenly where a family has both."""
    common: dict[str, Any] = {**_COMMON, "num_hidden_layers": n_layers, "tie_word_embeddings": tied}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"] * n_layers
    match family:
        case "llama":
            return LlamaConfig(**common)
        case "qwen2":
            return Qwen2Config(
                **common, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
            )
        case "qwen3":
            return Qwen3Config(**common, head_dim=8)
        case "mistral":
            return MistralConfig(**common, sliding_window=WINDOW)
        case "gemma3":
            return Gemma3TextConfig(
                **common, head_dim=8, sliding_window=WINDOW, layer_types=kinds[:n_layers]
            )
        case "gemma2":
            return Gemma2Config(**common, head_dim=8, sliding_window=WINDOW)
        case _:
            raise ValueError(family)


def save_tiny(folder: Path, family: str, n_layers: int, *, tied: bool, seed: int = 0) -> TinyModel:
    """Make a random model and save it as safetensors."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, n_layers, tied=tied)).eval()
    # Wider than the default, so that greedy choices are no near-ties; the embedding less so, lest a
    # tied model repeats the token it sees.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02 if "embed" in name else 0.3)
    model.save_pretrained(folder)
    return TinyModel(folder, n_layers, model)


def all_cuts(n_layers: int, max_spans: int) -> list[list[tuple[int, int]]]:
    """Every way to split the layers into 1 to `max_spans` spans."""
    cuts: list[list[tuple[int, int]]] = []
    for n_spans in range(1, max_spans + 1):
        for inner in combinations(range(1, n_layers), n_spans - 1):
            edges = [0, *inner, n_layers]
            cuts.append(list(pairwise(edges)))
    return cuts
