"""What unsplit transformers says how likely a text's continuation is: the reference of lm_eval.

`python -m tests.support.loglikelihoods MODEL_FOLDER` reads a JSON list of pairs, context and
continuation, from stdin, and prints one of pairs: the log-likelihood, and whether each token of
the continuation is the likeliest one.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers types its models loosely.

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def _loglikelihood(
    model: Any,  # noqa: ANN401  # transformers types it loosely
    prompt: list[int],
    continuation: list[int],
) -> tuple[float, bool]:
    ids = torch.tensor([prompt + continuation])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    scores = torch.log_softmax(logits.float(), dim=-1)
    chosen = scores.gather(1, torch.tensor(continuation)[:, None]).sum()
    return chosen.item(), scores.argmax(dim=-1).tolist() == continuation


def main(folder: Path) -> None:
    """Answer stdin."""
    torch.set_num_threads(1)
    (gguf,) = folder.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    answers: list[tuple[float, bool]] = []
    for context, continuation in json.load(sys.stdin):
        prompt, whole = encode(context), encode(context + continuation)
        answers.append(_loglikelihood(model.eval(), prompt, whole[len(prompt) :]))
    print(json.dumps(answers))  # noqa: T201  # who started us reads it


if __name__ == "__main__":
    main(Path(sys.argv[1]))
