"""A token's log probability out of logits, and the likeliest tokens beside it."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch types what becomes of a tensor's numbers loosely.

from __future__ import annotations

from typing import Final

import torch

from meshnet.errors import StageError
from meshnet.generation import TokenScore

LEAST_LOGPROB: Final = -9999.0
"""Told of whatever is less likely: JSON has no minus infinity."""


def score(logits: torch.Tensor, token_id: int, n_top: int, position: int) -> TokenScore:
    """Score the token that was picked, or that came.

    A token has one number, in float32, wherever it is told: clients compare the token's own with
    its alternatives' for equality.

    Args:
        logits: [vocab_size], any float dtype, as the model gave them.
        token_id: The token.
        n_top: How many of the likeliest tokens to tell; of equals those with lower ids.
        position: The token's, counted from the prompt's first.

    Raises:
        StageError: The logits make no probabilities: some are not finite.
    """
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32).clamp(min=LEAST_LOGPROB)
    if bool(logprobs.isnan().any()):
        raise StageError("the tail's logits are not finite", position=position)
    top_ids = _top_ids(logits, min(n_top, len(logits)))
    top = zip(top_ids.tolist(), logprobs[top_ids].tolist(), strict=True)
    return TokenScore(token_id=token_id, logprob=float(logprobs[token_id]), top=tuple(top))


def _top_ids(logits: torch.Tensor, n: int) -> torch.Tensor:
    """As a stable sort would rank them, in a fraction of its time; `topk` takes any of equals."""
    if n == 0:
        return torch.empty(0, dtype=torch.long)
    least = logits.topk(n).values[-1]
    ids = (logits >= least).nonzero().squeeze(-1)
    return ids[logits[ids].sort(descending=True, stable=True).indices[:n]]
