"""Cases that are well-formed, and still must not touch the session they name."""

from __future__ import annotations

from random import Random
from typing import Final

from benchmarks.fuzz import hostile
from benchmarks.fuzz.case import Bench, Case
from benchmarks.fuzz.steps import with_context
from meshnet.wire import headers

_SESSION_PATHS: Final = (
    *("", "/", "%00", "%0A", "%20", "%2F", "%2f..%2f..", "..", "../shard", ";x", "/x", "%C3%A9"),
    *("%ff%fe", "%", "%zz", "\xe9", "'", '"', "<script>", "x" * 129, "x" * 3000, "%2e%2e", "*"),
)


def other_entry(bench: Bench, rng: Random) -> Case:
    """A victim is held for another start layer: a miss, and it stays."""
    info = bench.maker.info
    layer = rng.randrange(info.start_layer + 1, info.end_layer)
    step = bench.next_step(rng).having(headers.START_LAYER, str(layer))
    step = step.having(headers.SHAPE, bench.maker.shape(1, ids=False))
    step = step.having(headers.DTYPE, info.dtype).without(headers.CONTEXT_BYTES)
    step = step.having_body(bench.maker.tensor(rng, 1, ids=False))
    return Case("other start layer", step.encode(), frozenset({409}))


def no_key(bench: Bench, rng: Random) -> Case:
    """A perfect step, and a perfect closing, of whoever has not the key."""
    key = bench.maker.cluster_key
    given = rng.choice((key, f"bearer {key}", f"Bearer {key[:-1]}", f"Bearer {key}x", "Bearer", ""))
    request = bench.next_step(rng)
    if rng.random() < 0.3:
        request = bench.maker.closing(rng.choice(bench.victims).session)
    stranger = request.having("Authorization", given)
    if rng.random() < 0.2:
        stranger = request.without("Authorization")
    if rng.random() < 0.2:
        stranger = request.having("Authorization", hostile.hostile_text(rng))
    return Case("no key", stranger.encode(), frozenset({401}), request.method)


def repeat(bench: Bench, rng: Random) -> Case:
    """The last step once more, with all else in it: the stored answer, and nothing is run."""
    victim, maker = rng.choice(bench.victims), bench.maker
    step = victim.last_step().without(headers.CONTEXT_BYTES).having_body(maker.tensor(rng, 1))
    step = step.having(headers.SAMPLING, rng.choice(hostile.EXTREME_SAMPLINGS))
    data = with_context(step, maker.context(rng)).encode()
    return Case("repeat", data, frozenset({200}), answer=victim.last_answer)


def closing(bench: Bench, rng: Random) -> Case:
    """`DELETE` of an id that is none, or almost a victim's."""
    session = rng.choice(bench.victims).session
    tail = rng.choice(_SESSION_PATHS)
    spoilt = (session + tail) if tail else ""
    path = "/v1/sessions/" + rng.choice((spoilt, tail, session.upper(), f"%00{session}"))
    request = bench.maker.request("DELETE", path)
    allowed = frozenset({204, 400, 404, 405})
    return Case("closing", request.encode(), allowed, "DELETE", must_answer=False)


def late_step(bench: Bench, rng: Random) -> Case:
    """A step with an id and an epoch, at another position: refused, with what is held."""
    victim = rng.choice(bench.victims)
    step, epoch = victim.next_step(), victim.epoch
    past_len = rng.choice([n for n in range(victim.past_len + 40) if n != victim.past_len])
    if past_len == 0:  # in a new epoch it would begin the session anew
        step = step.having(headers.CACHE, "prefill")
    else:
        epoch += rng.randint(0, 9)
    step = step.having(headers.PAST_LEN, str(past_len)).having(headers.EPOCH, str(epoch))
    members = {"code": "cache_miss", "reason": "length_mismatch", "held": victim.past_len}
    return Case("late step", step.encode(), frozenset({409}), members=members)


def stale_epoch(bench: Bench, rng: Random) -> Case:
    """A perfect step or closing, in an epoch that is over."""
    victim = rng.choice(bench.victims)
    request = victim.next_step()
    if rng.random() < 0.3:
        request = request.having(headers.PAST_LEN, "0").having(headers.CACHE, "prefill")
    if rng.random() < 0.3:
        request = bench.maker.closing(victim.session)
    request = request.having(headers.EPOCH, str(rng.randint(1, victim.epoch - 1)))
    if request.method == "POST" and rng.random() < 0.2:
        request = request.without(headers.EPOCH)
    members = {"code": "stale_epoch", "expected": victim.epoch, "held": victim.past_len}
    return Case("stale epoch", request.encode(), frozenset({409}), request.method, members=members)


def other_life(bench: Bench, rng: Random) -> Case:
    """A step for another life of the shard: what that one held is not here."""
    boot_id = bench.maker.info.boot_id
    boot = rng.choice((boot_id[:-1], boot_id + "0", boot_id.upper() + "-", "0", "x" * 128))
    step = bench.next_step(rng).having(headers.BOOT, boot)
    members = {"code": "cache_miss", "reason": "restarted", "held": 0}
    return Case("other life", step.encode(), frozenset({409}), members=members)


def spoilt_closing(bench: Bench, rng: Random) -> Case:
    """A closing whose epoch is none, or that says neither whether to keep nor not to."""
    request = bench.maker.closing(rng.choice(bench.victims).session)
    name = rng.choice((headers.EPOCH, headers.KEEP))
    request = request.having(name, hostile.illegal_value(rng, name))
    return Case("spoilt closing", request.encode(), method="DELETE")
