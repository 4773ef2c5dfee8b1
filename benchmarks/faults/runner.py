"""Runs one cell: a sound cluster, the fault armed, the request, and what came of it."""

from __future__ import annotations

from typing import Final

from benchmarks.faults.actions import set_scene
from benchmarks.faults.fleet import FaultCluster
from benchmarks.faults.matrix import DECODE_STEP, Cell
from benchmarks.faults.question import ask
from benchmarks.faults.trigger import Trigger
from benchmarks.faults.verdict import BY_THE_HEAD, Evidence, Verdict, asks_again, judge
from services.cli.cluster import ClusterError

REPLY_LIMIT_S: Final = 120.0
"""Longer than all of the head's time-outs together: what takes longer hangs."""
_TRIES: Final = 5


async def run_cell(cluster: FaultCluster, cell: Cell) -> Verdict:
    """Run it; a cluster that cannot be had is an outcome, too.

    Where hidden states are to go from shard to shard, it is run again until the fault meets a step
    that does so: on a busy machine one may go by the head where the one before it did not.
    """
    verdict = await _run_once(cluster, cell)
    for _ in range(_TRIES - 1):
        if verdict.outcome != BY_THE_HEAD:
            break
        verdict = await _run_once(cluster, cell)
    return verdict


async def _run_once(cluster: FaultCluster, cell: Cell) -> Verdict:
    try:
        baseline = await cluster.prepare(cell.setup)
    except ClusterError as error:
        return Verdict(cell, "not ready", text_identical=False, recovery_ms=0.0, detail=str(error))
    scene = set_scene(cell, DECODE_STEP[cell.when], cluster.at(cell.fleet, cell.hop))
    try:
        reply = await ask(cluster.head_url, cell.way, limit_s=REPLY_LIMIT_S)
        next_reply = None
        if asks_again(cell):
            next_reply = await ask(cluster.head_url, "plain", limit_s=REPLY_LIMIT_S, n_tokens=1)
    finally:
        scene.end()
    left = await cluster.settle(cell.fleet)
    fired_at = None if scene.late else scene.trigger.fired_at
    seen = Evidence(
        reply,
        baseline.text,
        error_s=None if fired_at is None else reply.asked_at + reply.total_s - fired_at,
        next_error=None if next_reply is None else next_reply.error,
        left=tuple(left),
        by_the_head=cluster.is_direct and _goes_by_the_head(scene.trigger),
    )
    outcome, detail = judge(cell, seen)
    return Verdict(
        cell,
        outcome,
        text_identical=seen.is_identical,
        recovery_ms=baseline.recovery_ms(cell, reply),
        detail=detail,
    )


def _goes_by_the_head(trigger: Trigger) -> bool:
    """A prefill always does, and so says nothing."""
    met = trigger.met
    return met is not None and met.is_decode and not met.is_direct
