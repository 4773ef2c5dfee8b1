"""Cases with a wrong body, or with one that must do no harm."""

from __future__ import annotations

from array import array
from math import inf, nan
from random import Random

from benchmarks.fuzz import hostile
from benchmarks.fuzz.case import Bench, Case
from benchmarks.fuzz.raw_http import SHORT_PATIENCE_S, chunked
from meshnet.wire import headers


def length_of_body(bench: Bench, rng: Random) -> Case:
    step = bench.next_step(rng)
    right = len(step.body)
    length = rng.choice((0, 1, right - 1, right + 1, right // 2, 2 * right, 2**17, 2**22))
    body = step.body[:length].ljust(length, b"\0")
    if rng.random() < 0.5:
        return Case("body of another length", step.having_body(body).encode())
    step = step.having("Transfer-Encoding", "chunked")
    size = rng.choice((1, 7, 4096, 2**20)) if length < 5000 else 2**16
    return Case("chunks of another length", step.having_body(chunked(body, size)).encode())


def lying_length(bench: Bench, rng: Random) -> Case:
    """`Content-Length` is not the body's; where it is the right one, the body never ends."""
    step = bench.next_step(rng)
    right = len(step.body)
    lie = rng.choice(
        (
            *(b"-1", b"abc", b"1e3", b"0x10", b"+4", b"1_0", b"", b"4, 5", b"\xb2"),
            *(str(n).encode() for n in (0, right - 1, right + 1, 2**31, 2**63, 2**64, 10**30)),
        )
    )
    step = step.having("Content-Length", lie)
    return Case("lying length", step.encode(), must_answer=False, patience_s=3 * SHORT_PATIENCE_S)


def body_breaks_off(bench: Bench, rng: Random) -> Case:
    step = bench.next_step(rng)
    cut = rng.randrange(len(step.body))
    data = step.having("Content-Length", str(len(step.body))).having_body(step.body[:cut]).encode()
    if rng.random() < 0.3:
        whole = step.having("Transfer-Encoding", "chunked").having_body(chunked(step.body, 64))
        data = whole.encode()[: -rng.randint(1, 60)]
    return Case("body breaks off", data, must_answer=False, patience_s=SHORT_PATIENCE_S)


def huge_claim(bench: Bench, rng: Random) -> Case:
    """A shape of terabytes and the length to go with it; nothing of it is ever sent."""
    shape = rng.choice(hostile.HUGE_SHAPES)
    step = bench.next_step(rng).having(headers.SHAPE, shape)
    step = step.having("Content-Length", str(4 * rng.randint(2**28, 2**60))).having_body(b"")
    return Case("huge claim", step.encode(), frozenset({400, 413}))


def token_ids(bench: Bench, rng: Random) -> Case:
    """Ids that are none. Where hidden states are taken: ids instead of them."""
    step, vocab_size = bench.next_step(rng), bench.maker.info.vocab_size
    bad = rng.choice((-1, vocab_size, 2**31 - 1, -(2**31)))
    n_tokens = rng.randint(1, 8)
    ids = [rng.randrange(vocab_size) for _ in range(n_tokens)]
    ids[rng.randrange(n_tokens)] = bad
    step = step.having(headers.SHAPE, f"1,{n_tokens}").having(headers.DTYPE, "int32")
    step = step.without(headers.CONTEXT_BYTES)
    return Case("token ids", step.having_body(array("i", ids).tobytes()).encode())


def largest_body(bench: Bench, rng: Random) -> Case:
    """The longest step there can be, for a session that is not here."""
    n_tokens = bench.maker.info.limits.max_step_tokens
    tensor = bytes(len(bench.maker.tensor(rng, 1)) * n_tokens)
    step = bench.maker.step("ghost", 1, n_tokens, tensor, step_id="g")
    return Case("largest body", step.encode(), frozenset({409}))


def not_finite(bench: Bench, rng: Random) -> Case:
    """Hidden states of NaN, infinity and the largest numbers: `stage_failed`, or a token."""
    hidden = bench.maker.info.hidden_size
    n_tokens = rng.randint(1, 4)
    numbers = array("f", bench.maker.tensor(rng, n_tokens))
    for _ in range(rng.choice((1, 10, hidden * n_tokens))):
        numbers[rng.randrange(len(numbers))] = rng.choice((nan, inf, -inf, 3.4e38, -3.4e38))
    step = bench.maker.stateless(n_tokens, numbers.tobytes())
    made: tuple[str, ...] = ()
    if rng.random() < 0.5:
        made = (f"broken-{rng.randrange(10**9)}",)
        step = bench.maker.step(made[0], 0, n_tokens, numbers.tobytes(), step_id="n")
    return Case("not finite", step.encode(), frozenset({200, 500}), made=made)


def stateless(bench: Bench, rng: Random) -> Case:
    """A good step of no session, at any layer of the span: nothing is left, no victim notices."""
    info = bench.maker.info
    layer = rng.randrange(info.start_layer, info.end_layer)
    n_tokens = rng.randint(1, 8)
    ids = layer == 0
    step = bench.maker.stateless(n_tokens, bench.maker.tensor(rng, n_tokens, ids=ids))
    step = step.having(headers.START_LAYER, str(layer))
    step = step.having(headers.SHAPE, bench.maker.shape(n_tokens, ids=ids))
    step = step.having(headers.DTYPE, "int32" if ids else info.dtype)
    if rng.random() < 0.5:
        step = step.having(headers.SAMPLING, rng.choice(hostile.EXTREME_SAMPLINGS))
    return Case("stateless", step.encode(), frozenset({200}))
