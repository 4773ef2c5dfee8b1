"""All kinds of cases, and how often each comes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from benchmarks.fuzz import body_cases, context_cases, header_cases, http_cases, session_cases
from benchmarks.fuzz.case import Bench, Case

Kind = Callable[[Bench, Random], Case]

_FOR_ALL: Final[dict[Kind, int]] = {
    header_cases.illegal_header: 12,
    header_cases.illegal_headers: 4,
    header_cases.doubled_illegal: 4,
    header_cases.missing_header: 4,
    header_cases.unfit_header: 10,
    header_cases.wild: 12,
    body_cases.length_of_body: 5,
    body_cases.lying_length: 4,
    body_cases.body_breaks_off: 4,
    body_cases.huge_claim: 4,
    body_cases.token_ids: 4,
    body_cases.largest_body: 1,
    body_cases.stateless: 3,
    context_cases.hostile_context: 10,
    context_cases.nothing_left: 1,
    context_cases.context_length: 4,
    context_cases.context_without_sampling: 1,
    context_cases.spoilt_context: 4,
    context_cases.extreme_context: 4,
    session_cases.other_entry: 4,
    session_cases.no_key: 5,
    session_cases.repeat: 4,
    session_cases.closing: 6,
    http_cases.path_or_method: 6,
    http_cases.framing: 10,
    http_cases.other_type: 2,
    session_cases.late_step: 6,
    session_cases.stale_epoch: 6,
    session_cases.other_life: 3,
    session_cases.spoilt_closing: 3,
}
_FOR_TAILS: Final[dict[Kind, int]] = {body_cases.not_finite: 4}


def random_case(bench: Bench, rng: Random) -> Case:
    """A case of a random kind."""
    kinds = dict(_FOR_ALL)
    kinds |= _FOR_TAILS if bench.maker.is_tail else {}
    (kind,) = rng.choices(list(kinds), list(kinds.values()))
    return kind(bench, rng)
