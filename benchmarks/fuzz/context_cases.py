"""Cases about the sampling context behind a step's tensor."""

from __future__ import annotations

import json
from random import Random

from benchmarks.fuzz import hostile
from benchmarks.fuzz.case import Bench, Case
from benchmarks.fuzz.raw_http import Request
from benchmarks.fuzz.steps import with_context
from meshnet.generation import SamplingContext
from meshnet.wire import headers
from meshnet.wire.context import render_context


def hostile_context(bench: Bench, rng: Random) -> Case:
    """One that is none, or does not fit: refused before the session is touched."""
    step = with_context(bench.next_step(rng), rng.choice(hostile.CONTEXTS))
    return Case("hostile context", step.encode())


def nothing_left(bench: Bench, rng: Random) -> Case:
    """Perfect in every member, and no token is left to pick."""
    ids = [rng.randrange(bench.maker.info.vocab_size) for _ in range(rng.randrange(9))]
    mask = sum(1 << i for i in set(ids)).to_bytes(bench.maker.mask_nbytes, "little")
    context = render_context(SamplingContext(allowed=mask, banned_ids=tuple(ids)))
    return Case("nothing left to pick", with_context(bench.next_step(rng), context).encode())


def context_length(bench: Bench, rng: Random) -> Case:
    """The header is not the context's length; or it is, and no step may have so much."""
    step = bench.next_step(rng)
    right = len(step.body)
    lie = rng.choice((0, 1, right, right + 1, 2**16, 2**21, headers.MAX_CONTEXT_BYTES))
    if rng.random() < 0.3:
        step = with_context(step, b" " * rng.choice((2**21, 2**22)))
        return Case("longest context", step.encode(), frozenset({413}))
    step = step.having(headers.CONTEXT_BYTES, str(lie))
    return Case("lying context length", step.encode(), frozenset({400, 413}))


def context_without_sampling(bench: Bench, rng: Random) -> Case:
    step = bench.next_step(rng).without(headers.SAMPLING)
    return Case("context without sampling", step.encode())


def spoilt_context(bench: Bench, rng: Random) -> Case:
    """A few bytes are others; where that leaves a context, a step of no session is taken."""
    context = bytearray(bench.maker.context(rng))
    for _ in range(rng.choice((1, 2, 10))):
        place = rng.randrange(len(context) + 1)
        context[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    step = with_context(_stateless(bench, rng), bytes(context))
    return Case("spoilt context", step.encode(), frozenset({200, 400}))


def extreme_context(bench: Bench, rng: Random) -> Case:
    """A legal one, with any legal parameters: taken, and nothing is left of it."""
    step = _stateless(bench, rng).having(headers.SAMPLING, rng.choice(hostile.EXTREME_SAMPLINGS))
    vocab_size, n_next = bench.maker.info.vocab_size, rng.randint(0, 4)
    context = json.loads(bench.maker.context(rng))
    context["next_ids"] = [rng.randrange(vocab_size) for _ in range(n_next)]
    if rng.random() < 0.3:
        context["logit_bias"] = {str(i): rng.choice((-100, 100)) for i in range(1024)}
    if rng.random() < 0.3:
        context["generated_ids"] = [rng.randrange(vocab_size)] * 5000
    step = with_context(step, json.dumps(context).encode())
    return Case("extreme context", step.encode(), frozenset({200}))


def _stateless(bench: Bench, rng: Random) -> Request:
    n_tokens = 4
    return bench.maker.stateless(n_tokens, bench.maker.tensor(rng, n_tokens))
