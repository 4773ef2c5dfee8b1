"""Whether an answer is one that a case may be given."""

from __future__ import annotations

import json
from typing import Any, Final, cast

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.raw_http import PATIENCE_S, Answer, NoAnswer
from meshnet.errors import from_code
from meshnet.wire.problems import MEDIA_TYPE

PARSER: Final = "HTTP parser"
"""What a refusal of the server's parser, which the app never hears of, is called."""
_PARSER_BODY: Final = b"Invalid HTTP request received."
_MEMBERS: Final = {"type", "title", "status", "detail", "code", "retryable"}
_LONGEST_PROBLEM: Final = 3000
"""Bytes: a refusal is no copy of what was sent."""


def outcome(answer: Answer | NoAnswer) -> str:
    """The answer in a word: a problem's code, or the status."""
    if isinstance(answer, NoAnswer):
        return answer.value
    if answer.body == _PARSER_BODY:
        return PARSER
    return str(_problem(answer).get("code", answer.status))


def fault(case: Case, answer: Answer | NoAnswer) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if isinstance(answer, NoAnswer):
        waits = answer is NoAnswer.SILENT and case.patience_s < PATIENCE_S
        closed = answer is NoAnswer.CLOSED and not case.must_answer
        return None if waits or closed else answer.value
    if outcome(answer) == PARSER and answer.status == 400:
        return None
    if answer.status not in case.allowed:
        return f"the status is {answer.status}, not of {sorted(case.allowed)}"
    if answer.status == 500 and outcome(answer) != "stage_failed":
        return f"a 500 that is {outcome(answer)}"
    if answer.status < 300:
        return _fault_of_success(case, answer)
    return None if case.method == "HEAD" else _fault_of_problem(case, answer)


def _fault_of_success(case: Case, answer: Answer) -> str | None:
    if case.answer is not None and answer.status == 200 and answer.body != case.answer:
        return "another body than is known"
    return None


def _fault_of_problem(case: Case, answer: Answer) -> str | None:
    problem = _problem(answer)
    if answer.headers.get("content-type") != MEDIA_TYPE or not problem.keys() >= _MEMBERS:
        return "no problem document"
    if problem["status"] != answer.status or from_code(problem["code"], "", {}) is None:
        return f"a problem of status {problem['status']} and code {problem['code']}"
    if len(answer.body) > _LONGEST_PROBLEM:
        return f"a problem of {len(answer.body)} bytes"
    wrong = [name for name, value in case.members.items() if problem.get(name) != value]
    return f"other {wrong} than {dict(case.members)}" if wrong else None


def _problem(answer: Answer) -> dict[str, Any]:
    if answer.headers.get("content-type") != MEDIA_TYPE:
        return {}
    try:
        value: object = json.loads(answer.body)
    except ValueError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
