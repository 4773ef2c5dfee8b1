"""Tells where a request's time went: to its caller in a header, and in a line of the log.

The header is W3C's `Server-Timing`; docs/configuration.md says what its metrics mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from typing import Final

import structlog
from fastapi import Request

from meshnet.errors import InvalidRequest
from meshnet.head.call import Trace
from meshnet.head.request_times import HopSums, PhaseTimes, RequestTimes
from meshnet.openai.choices import ChoiceEvents
from meshnet.wire.headers import TIMING

_log = structlog.get_logger(__name__)

SERVER_TIMING: Final = "Server-Timing"
_ASKED: Final = {"0": False, "1": True}


def wants_timing(request: Request) -> bool:
    """Whether the caller asks where the time went.

    Raises:
        InvalidRequest: It says something else than yes or no.
    """
    given = request.headers.get(TIMING, "0")
    if given not in _ASKED:
        raise InvalidRequest(
            f"{TIMING}: {given[:20]!r} is neither 0 nor 1",
            field=TIMING,
            value=given[:20],
            allowed=list(_ASKED),
        )
    return _ASKED[given]


def render(times: RequestTimes) -> str:
    """The header's value: what is known now."""
    prefill, decode = times.prefill, times.decode
    endpoints = list({**prefill.hops, **decode.hops})
    metrics = [
        _metric("total", times.total_ms),
        _metric("wait", times.waiting_ms),
        *(f"hop-{i}{_described(endpoint)}" for i, endpoint in enumerate(endpoints, start=1)),
        *_of_phase("prefill", prefill, endpoints),
        *_of_phase("decode", decode, endpoints),
    ]
    return ", ".join(metrics)


async def logged(events: ChoiceEvents, trace: Trace, model: str) -> ChoiceEvents:
    """The same events, and a line in the log at their end, whatever it is. Closed together."""
    is_complete = False
    try:
        async with aclosing(events):
            async for event in events:
                yield event
        is_complete = True
    finally:
        times = trace.times
        _log.info(
            "request ended",
            request_id=trace.request_id,
            model=model,
            complete=is_complete,
            total_ms=round(times.total_ms, 1),
            wait_ms=round(times.waiting_ms, 1),
            prefill=_fields(times.prefill),
            decode=_fields(times.decode),
        )


def _of_phase(name: str, phase: PhaseTimes, endpoints: list[str]) -> Iterator[str]:
    if not phase.hops:
        return
    yield f"{_metric(name, phase.total_ms)};tokens={phase.n_tokens}"
    yield _metric(f"{name}-head", phase.head_ms)
    for i, endpoint in enumerate(endpoints, start=1):
        hop = phase.hops.get(endpoint)
        if hop is not None:
            yield f"{_metric(f'{name}-{i}', hop.total_ms)};steps={hop.steps}"
            for part, part_ms in _parts(hop).items():
                yield _metric(f"{name}-{i}-{part}", part_ms)


def _parts(hop: HopSums) -> dict[str, float]:
    """What a hop's time consists of, milliseconds; together they are all of it."""
    parts = {
        "queue": hop.queue_ms,
        "compute": hop.compute_ms,
        "serialise": hop.serialise_ms,
        "wire": hop.wire_ms,
    }
    return parts | ({"recovery": hop.recovery_ms} if hop.recoveries else {})


def _fields(phase: PhaseTimes) -> dict[str, object]:
    """A phase as a member of a log line."""
    hops: dict[str, dict[str, float]] = {}
    for endpoint, hop in phase.hops.items():
        parts = {f"{part}_ms": round(part_ms, 1) for part, part_ms in _parts(hop).items()}
        hops[endpoint] = {"steps": hop.steps, "total_ms": round(hop.total_ms, 1), **parts}
        if hop.recoveries:
            hops[endpoint]["recoveries"] = hop.recoveries
    return {
        "tokens": phase.n_tokens,
        "total_ms": round(phase.total_ms, 1),
        "head_ms": round(phase.head_ms, 1),
        "hops": hops,
    }


def _metric(name: str, duration_ms: float) -> str:
    return f"{name};dur={duration_ms:.3f}"


def _described(endpoint: str) -> str:
    quoted = endpoint.replace("\\", "\\\\").replace('"', '\\"')
    return f';desc="{quoted}"'
