from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.faults.matrix import Cell, Fault, FleetName, all_cells, sampled_cells
from benchmarks.faults.question import Reply, SeenError
from benchmarks.faults.verdict import Evidence, judge

GONE = SeenError(503, "shard_unavailable", "5", "")
IN_STREAM = SeenError(None, "shard_unavailable", None, "")
WHOLE = Reply(text="abc", finish_reason="length", is_done=True)


def cell_of(fault: Fault, fleet: FleetName = "cached") -> Cell:
    return Cell(fault, "first", "middle", "stream", fleet)


def seen(reply: Reply, next_error: SeenError | None = GONE) -> Evidence:
    return Evidence(reply, "abc", error_s=1.0, next_error=next_error)


def test_there_are_528_cells_and_the_sample_has_every_fault_on_every_hop() -> None:
    """The matrix is whole, and no cell is there twice."""
    assert len(set(all_cells())) == len(all_cells()) == 528
    assert len({(cell.fault, cell.hop) for cell in sampled_cells()}) == 33


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (WHOLE, "identical"),
        (replace(WHOLE, text="abd"), "wrong text"),
        (replace(WHOLE, text="ab"), "cut off"),
        (replace(WHOLE, is_done=False), "cut off"),
        (replace(WHOLE, finish_reason="stop"), "cut off"),
        (Reply(hung=True), "hang"),
        (Reply(error=GONE), "error"),
        (Reply(text="ab", error=IN_STREAM, is_done=True), "error"),
        (Reply(text="x", error=IN_STREAM), "wrong text"),
        (Reply(error=replace(GONE, retry_after=None)), "undocumented error"),
        (Reply(error=replace(GONE, code="internal")), "undocumented error"),
        (Reply(error=IN_STREAM, finish_reason="stop"), "undocumented error"),
    ],
)
def test_a_reply_is_judged(reply: Reply, outcome: str) -> None:
    """Only the whole undisturbed text is identical, only the documented error is one."""
    assert judge(cell_of("kill"), seen(reply))[0] == outcome


def test_a_fault_that_did_not_happen_proves_nothing() -> None:
    """An identical text without a fault is `not_fired`."""
    assert judge(cell_of("evict"), replace(seen(WHOLE), error_s=None))[0] == "not_fired"


def test_a_fault_that_met_no_direct_step_proves_nothing_of_direct_return() -> None:
    """What goes wrong all the same is told."""
    by_the_head = replace(seen(WHOLE), by_the_head=True)
    assert judge(cell_of("evict"), by_the_head)[0] == "by the head"
    assert judge(cell_of("evict"), replace(by_the_head, left=("first holds 1",)))[0] == "leak"


def test_a_session_left_behind_spoils_a_good_end() -> None:
    """An identical text with a session left is a `leak`."""
    assert judge(cell_of("evict"), replace(seen(WHOLE), left=("first holds 1",)))[0] == "leak"


def test_an_error_is_undocumented_where_none_is_expected() -> None:
    """What is documented for a dead shard is not for one that lost a session."""
    assert judge(cell_of("evict"), seen(Reply(error=GONE)))[0] == "undocumented error"


def test_an_error_must_come_in_time() -> None:
    """One that comes after all time-outs is late."""
    late = replace(seen(Reply(error=GONE)), error_s=60.0)
    assert judge(cell_of("kill"), late)[0] == "late error"


def test_the_next_request_must_be_told_too() -> None:
    """While the shard is dead, an answer other than 503 with Retry-After is a fault."""
    assert judge(cell_of("kill"), seen(Reply(error=GONE), None))[0] == "no 503 after"
