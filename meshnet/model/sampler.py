"""Picks one token from the tail's logits. A function of logits, parameters and position only."""

from __future__ import annotations

import torch

from meshnet.errors import StageError
from meshnet.generation import Sampling, uniform


def sample(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """Pick the id of the token at `position`.

    The draw is by inverse transform over the probabilities, most likely first, from one number
    that depends on seed and position alone.

    Args:
        logits: [vocab_size], any float dtype.
        sampling: Greedy, or temperature, then top_k, then top_p.
        position: Absolute position the token will take, counted from the prompt's first token.

    Raises:
        StageError: A logit is not finite.
    """
    if not bool(torch.isfinite(logits).all()):
        raise StageError("the tail's logits are not finite", position=position)
    if sampling.greedy:
        return int(logits.argmax())
    ranked, ids = torch.sort(logits.double(), descending=True, stable=True)
    if sampling.top_k:
        ranked, ids = ranked[: sampling.top_k], ids[: sampling.top_k]
    cumulative = torch.softmax(ranked / sampling.temperature, dim=-1).cumsum(dim=-1)
    n_kept = int((cumulative < sampling.top_p).sum()) + 1
    cumulative = cumulative[:n_kept]
    drawn = uniform(sampling.seed, position) * float(cumulative[-1])
    return int(ids[min(int((cumulative <= drawn).sum()), len(cumulative) - 1)])
