"""Transformers by itself, one process: what the mesh is compared with.

`python -m benchmarks.bench.alone MODEL_FOLDER --threads N --dtype float32`: reads questions from
stdin and answers on stdout, a line of JSON each. The first line that it writes says which of two
ways to generate it takes, `generate` or a plain loop: the one that is faster here.

    {"prompt": [...], "n_tokens": 8}  ->  {"ids": [...], "came_s": [...]}, seconds since asked
    {"score": [...]}                  ->  {"logprobs": [...]}, of each token but the first
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers types its models loosely.

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

TRIAL_TOKENS = 16
TRIALS = 3

Tokens = list[tuple[int, float]]
"""Each token, and when it was there."""
Generate = Callable[[Any, list[int], int], Tokens]


class _Clock(BaseStreamer):
    """Notes the tokens that `generate` tells, and when."""

    def __init__(self) -> None:
        self.tokens: Tokens = []
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self.tokens.append((int(value), perf_counter()))
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is held back."""


def _generate(model: Any, prompt: list[int], n_tokens: int) -> Tokens:  # noqa: ANN401
    """By `generate`; the model's config names no end token, so that it makes all of them."""
    clock = _Clock()
    ids = torch.tensor([prompt])
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n_tokens,
        do_sample=False,
        streamer=clock,
    )
    return clock.tokens


def _loop(model: Any, prompt: list[int], n_tokens: int) -> Tokens:  # noqa: ANN401
    """By a loop that does nothing but what it must."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([prompt])
    tokens: Tokens = []
    for _ in range(n_tokens):
        logits = model(input_ids=ids, cache=cache, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(dim=-1, keepdim=True)
        tokens.append((int(ids), perf_counter()))
    return tokens


def _faster(model: Any, ways: dict[str, Generate]) -> str:  # noqa: ANN401
    def trial(way: Generate) -> float:
        tokens = way(model, list(range(1000, 1016)), TRIAL_TOKENS)
        return tokens[-1][1] - tokens[0][1]

    times = {name: [trial(way) for _ in range(TRIALS)] for name, way in ways.items()}
    return min(times, key=lambda name: min(times[name]))


def _score(model: Any, ids: list[int]) -> list[float]:  # noqa: ANN401
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    scores = torch.log_softmax(logits, dim=-1)
    return scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def _load(folder: Path, dtype: str) -> Any:  # noqa: ANN401
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    (gguf,) = folder.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf.name, dtype=getattr(torch, dtype)
    )
    model.generation_config.eos_token_id = None
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = _load(options.model, options.dtype)
    ways: dict[str, Generate] = {"generate": _generate, "a plain loop": _loop}
    with torch.inference_mode():
        chosen = _faster(model, ways)
        print(json.dumps({"way": chosen}), flush=True)
        for line in sys.stdin:
            asked_at = perf_counter()
            question: dict[str, Any] = json.loads(line)
            answer: dict[str, Any]
            if "score" in question:
                answer = {"logprobs": _score(model, question["score"])}
            else:
                tokens = ways[chosen](model, question["prompt"], question["n_tokens"])
                answer = {
                    "ids": [token_id for token_id, _ in tokens],
                    "came_s": [at - asked_at for _, at in tokens],
                }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
