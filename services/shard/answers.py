"""What is answered to a step, whichever way it came."""

from __future__ import annotations

import json
from dataclasses import dataclass
from time import perf_counter

from meshnet.errors import InvalidRequest, MeshError
from meshnet.ids import SessionId
from meshnet.shard.compute import Timed
from meshnet.shard.mailbox import Mailbox
from meshnet.shard.worker import ShardWorker
from meshnet.wire import headers, problems
from meshnet.wire.frames import Frame
from meshnet.wire.headers import StepHeaders
from services.shard.metrics import ShardMetrics


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers and body, as HTTP has them."""

    status: int
    headers: dict[str, str]
    body: bytes


async def run_step(
    worker: ShardWorker,
    mailbox: Mailbox,
    metrics: ShardMetrics,
    step: StepHeaders,
    body: bytes,
    check_s: float,
) -> Answer:
    """Run one checked step, and count it. Raises as `ShardWorker.step`.

    Args:
        worker: Has checked the step.
        mailbox: A step of the session that still waits for its input there is given up.
        metrics: Where it is counted.
        step: Its headers.
        body: Its body.
        check_s: How long it took to read and check the headers, seconds.
    """
    if step.session is not None:
        mailbox.dismiss(SessionId(step.session))
    done = await worker.step(step, body)
    return as_answer(done, metrics, step, check_s)


def as_answer(done: Timed, metrics: ShardMetrics, step: StepHeaders, check_s: float) -> Answer:
    """What a step put out, as its answer; it is counted. `check_s` is as in `run_step`."""
    metrics.count_step(step.cache, done)
    ran_at = perf_counter()
    named = {
        headers.QUEUE_MS: f"{done.queue_ms:.3f}",
        headers.COMPUTE_MS: f"{done.compute_ms:.3f}",
    }
    if isinstance(done.result, Frame):
        frame = done.result
        named |= {
            headers.SHAPE: headers.render_shape(frame.shape),
            headers.DTYPE: frame.dtype,
            "content-type": "application/octet-stream",
        }
        answered = frame.data
    else:
        named["content-type"] = "application/json"
        answered = done.result.model_dump_json(exclude_defaults=True).encode()
    serialise_ms = done.read_ms + (check_s + perf_counter() - ran_at) * 1000
    named[headers.SERIALISE_MS] = f"{serialise_ms:.3f}"
    return Answer(200, named, answered)


def refuse(error: MeshError, metrics: ShardMetrics) -> Answer:
    """The one way in which an error becomes an answer; it is counted."""
    metrics.count_refusal(error)
    problem = json.dumps(
        problems.to_problem(error), ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    return Answer(error.status, {"content-type": problems.MEDIA_TYPE}, problem.encode())


def wrong_length(value: str, expected: int) -> InvalidRequest:
    """The error of a body that is not as long as its headers make it."""
    return InvalidRequest(
        f"the body has {value[:20]} bytes, its headers make {expected}",
        field="body",
        value=value[:20],
        allowed=expected,
    )
