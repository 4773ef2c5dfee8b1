"""What came of a cell, against what must come of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.faults.fleet import STEP_TIMEOUT_S
from benchmarks.faults.matrix import DOCUMENTED, Cell
from benchmarks.faults.question import Reply, SeenError

BY_THE_HEAD: Final = "by the head"
"""The outcome of a cell that says nothing of direct return: its step took no part in it."""
ERROR_SLACK_S: Final = 5.0
"""How much later than its time-outs the head may say that it gave up."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of the results.

    Attributes:
        outcome: `identical` or `error` as documented; anything else is a fault of Meshnet's.
        text_identical: Whether the whole text is that of the undisturbed request.
        recovery_ms: See `Baseline.recovery_ms`.
        detail: For people, where something is wrong.
    """

    cell: Cell
    outcome: str
    text_identical: bool
    recovery_ms: float
    detail: str = ""

    @property
    def is_as_expected(self) -> bool:
        """Whether this may happen."""
        return self.outcome in self.cell.expected.split(" or ")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen of a cell.

    Attributes:
        reply: Of the client.
        reference: The undisturbed text.
        error_s: From the fault to the end of the reply; None where it did not happen.
        next_error: What the next request met, where one was made: the shard is still dead.
        left: Sessions or steps that did not end.
        by_the_head: The fault was to meet a step of direct return, and met another one.
    """

    reply: Reply
    reference: str
    error_s: float | None
    next_error: SeenError | None = None
    left: tuple[str, ...] = ()
    by_the_head: bool = False

    @property
    def is_identical(self) -> bool:
        """Whether the reply is the undisturbed one."""
        return self.reply.is_whole and self.reply.text == self.reference


def judge(cell: Cell, seen: Evidence) -> tuple[str, str]:
    """The outcome, and a detail where it is a bad one."""
    reply = seen.reply
    if seen.error_s is None:
        return "not_fired", f"{reply.error or reply.text}"
    if reply.hung:
        return "hang", f"after {len(reply.event_s)} tokens"
    outcome, detail = ("identical", "") if seen.is_identical else _judge_unequal(cell, seen)
    if outcome not in {"identical", "error"}:
        return outcome, detail
    if seen.left:
        return "leak", "; ".join(seen.left)
    return (BY_THE_HEAD if seen.by_the_head else outcome), detail


def _judge_unequal(cell: Cell, seen: Evidence) -> tuple[str, str]:
    reply, error = seen.reply, seen.reply.error
    if not seen.reference.startswith(reply.text):
        return "wrong text", repr(reply.text)
    if error is None:
        return "cut off", f"{reply.finish_reason=} {reply.is_done=} {reply.text!r}"
    if reply.finish_reason is not None or not _is_documented(cell, error):
        return "undocumented error", f"{error} {reply.finish_reason=}"
    bound_s = cell.setup.recovery_s + STEP_TIMEOUT_S + ERROR_SLACK_S
    if (seen.error_s or 0.0) > bound_s:
        return "late error", f"{seen.error_s:.1f} s"
    if asks_again(cell) and not _says_later(seen.next_error):
        return "no 503 after", f"{seen.next_error}"
    return "error", ""


def asks_again(cell: Cell) -> bool:
    """Whether the shard stays away, so that also the next request must be told."""
    return cell.fault == "kill" and cell.fleet == "cached"


def _is_documented(cell: Cell, error: SeenError) -> bool:
    """As docs/wire-protocol.md has it; in a stream that has begun there is no status."""
    for status, code in DOCUMENTED.get(cell.fault, ()):
        if error.code == code and error.status in (None, status):
            return error.status != 503 or error.retry_after is not None
    return False


def _says_later(error: SeenError | None) -> bool:
    return error is not None and error.status == 503 and error.retry_after is not None
