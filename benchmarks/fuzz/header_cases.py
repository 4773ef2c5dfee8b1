"""Cases with a wrong header."""

from __future__ import annotations

from random import Random

from benchmarks.fuzz import hostile
from benchmarks.fuzz.case import CLIENT_ERRORS, Bench, Case
from meshnet.wire import headers


def illegal_header(bench: Bench, rng: Random) -> Case:
    name = rng.choice(hostile.STEP_HEADERS)
    step = bench.next_step(rng).having(name, hostile.illegal_value(rng, name))
    return Case("illegal header", step.encode())


def illegal_headers(bench: Bench, rng: Random) -> Case:
    step = bench.next_step(rng)
    for name in rng.sample(hostile.STEP_HEADERS, rng.randint(2, len(hostile.STEP_HEADERS))):
        step = step.having(name, hostile.illegal_value(rng, name))
    return Case("illegal headers", step.encode())


def doubled_illegal(bench: Bench, rng: Random) -> Case:
    name = rng.choice(hostile.STEP_HEADERS)
    step = bench.next_step(rng).adding(name, hostile.illegal_value(rng, name))
    return Case("doubled header", step.encode())


def missing_header(bench: Bench, rng: Random) -> Case:
    name = rng.choice(
        (headers.SESSION, headers.CACHE, headers.PAST_LEN, headers.SHAPE, headers.DTYPE)
    )
    return Case("missing header", bench.next_step(rng).without(name).encode())


def unfit_header(bench: Bench, rng: Random) -> Case:
    """Each is legal, but not here, or not with the others."""
    info, step = bench.maker.info, bench.next_step(rng)
    hidden = info.hidden_size
    changes: list[tuple[str, str]] = [
        *((headers.SHAPE, shape) for shape in hostile.HUGE_SHAPES),
        *((headers.SHAPE, f"1,1,{hidden + off}") for off in (-1, 1, hidden)),
        *((headers.SHAPE, shape) for shape in ("2,1", f"2,1,{hidden}", f"1,{hidden}")),
        (headers.SHAPE, bench.maker.shape(info.limits.max_step_tokens + 1)),
        (headers.SHAPE, bench.maker.shape(1, ids=not bench.maker.takes_ids)),
        *((headers.DTYPE, dtype) for dtype in ("bfloat16", "float16")),
        (headers.DTYPE, "float32" if bench.maker.takes_ids else "int32"),
        *((headers.PAST_LEN, n) for n in ("0", str(info.max_positions), "2147483647")),
        (headers.CACHE, "stateless"),
        *((headers.START_LAYER, str(n)) for n in (info.end_layer, info.n_layers, 2**31 - 1)),
        *((headers.FINGERPRINT, text) for text in ("x", info.revision[:128], "0" * 64)),
    ]
    name, value = rng.choice(changes)
    return Case("unfit header", step.having(name, value).encode(), frozenset({400, 409, 413}))


def wild(bench: Bench, rng: Random) -> Case:
    """Anything in any header, doubled and left out, for sessions of its own."""
    step, names = bench.ghost_step(rng), [headers.SESSION]
    if rng.random() < 0.3:
        step = step.having(headers.PAST_LEN, "0").having(headers.CACHE, "prefill")
    for name in (*hostile.STEP_HEADERS, "Content-Type", "Content-Encoding", "Accept", "Cookie"):
        dice = rng.random()
        if dice < 0.05:
            step = step.without(name)
        elif dice < 0.1:
            step = step.having(name, hostile.hostile_text(rng))
        elif dice < 0.15:
            step = step.adding(name, hostile.hostile_text(rng))
    sent = [value.strip(b" \t") for name, value in step.headers if name.decode() in names]
    made = tuple(v.decode() for v in sent if hostile.is_legal(headers.SESSION, v))
    return Case("wild", step.encode(), CLIENT_ERRORS | {200}, must_answer=False, made=made)
