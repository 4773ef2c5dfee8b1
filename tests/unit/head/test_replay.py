from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import InputsDropped
from meshnet.head.replay import FedFrame, InputLog, ReplayBudget, ReplayMode
from meshnet.wire.frames import Frame

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=8)
MODES = st.sampled_from(["exact", "fast"])


def frame_of(start: int, n_tokens: int, *, width: int = 0) -> Frame:
    """Ids that are their own positions, or hidden states of so many numbers that begin so."""
    if not width:
        return Frame.of_token_ids(range(start, start + n_tokens))
    row = [i.to_bytes(2, "little") + bytes(2 * (width - 1)) for i in range(start, start + n_tokens)]
    return Frame("bfloat16", (1, n_tokens, width), b"".join(row))


def log_of(
    lengths: list[int],
    mode: ReplayMode = "exact",
    *,
    max_bytes: int = 10**6,
    width: int = 0,
) -> tuple[InputLog, ReplayBudget]:
    """A log of calls of these lengths."""
    budget = ReplayBudget(max_bytes)
    log = InputLog(budget, mode)
    past_len = 0
    for n_tokens in lengths:
        log.add(past_len, frame_of(past_len, n_tokens, width=width))
        past_len += n_tokens
    return log, budget


def ids_of(fed: list[FedFrame]) -> list[int]:
    return [i for one in fed for i in one.frame.token_ids()]


# --- the budget ---


def test_room_is_taken_up_to_the_last_byte() -> None:
    """What fits exactly is taken."""
    budget = ReplayBudget(12)

    assert (budget.take(frame_of(0, 3)), budget.used_bytes) == (True, 12)


def test_without_room_nothing_is_taken() -> None:
    """A refusal leaves the budget as it was."""
    budget, frame = ReplayBudget(12), frame_of(0, 2)
    budget.take(frame)

    assert (budget.take(frame_of(2, 2)), budget.used_bytes) == (False, 8)


def test_what_was_given_back_can_be_taken_again() -> None:
    """Room is free when its taker gave it back."""
    budget, frame = ReplayBudget(12), frame_of(0, 3)
    budget.take(frame)
    budget.give_back(frame)

    assert (budget.take(frame_of(3, 3)), budget.used_bytes) == (True, 12)


def test_an_input_that_two_hold_counts_once() -> None:
    """It takes its room with the first who holds it, and gives it back with the last."""
    budget, frame = ReplayBudget(12), frame_of(0, 3)
    budget.take(frame)
    used = [budget.used_bytes]
    assert budget.take(frame)
    used.append(budget.used_bytes)
    for _ in range(2):
        budget.give_back(frame)
        used.append(budget.used_bytes)

    assert used == [12, 12, 12, 0]


def test_what_can_be_spared_makes_room() -> None:
    """One after the other is given up until there is room, and no more."""
    budget = ReplayBudget(12)
    spare = [frame_of(start, 1) for start in range(3)]
    for frame in spare:
        budget.take(frame)

    def give_up_one() -> bool:
        if spare:
            budget.give_back(spare.pop())
        return bool(spare)

    budget.make_room = give_up_one

    assert (budget.take(frame_of(3, 2)), budget.used_bytes, len(spare)) == (True, 12, 1)


# --- the log ---


def test_what_is_kept_takes_room() -> None:
    """Three ids of four bytes are twelve bytes."""
    _, budget = log_of([2, 1])

    assert budget.used_bytes == 12


def test_inputs_come_back_call_by_call() -> None:
    """Exactly what was fed, in calls of the same lengths."""
    log, _ = log_of([2, 1, 3])

    assert list(log.replay(0, 6, 512)) == [
        FedFrame(0, frame_of(0, 2)),
        FedFrame(2, frame_of(2, 1)),
        FedFrame(3, frame_of(3, 3)),
    ]


def test_inputs_come_from_where_the_hop_goes_on() -> None:
    """Calls that the hop holds already do not come back."""
    log, _ = log_of([2, 1, 3])

    assert [one.past_len for one in log.replay(2, 6, 512)] == [2, 3]


def test_a_fed_call_tells_its_end() -> None:
    """Its end is where the next one begins."""
    log, _ = log_of([2, 1, 3])

    assert all(a.end == b.past_len for a, b in pairwise(log.replay(0, 6, 512)))


@pytest.mark.parametrize("end", [5, 7])
def test_inputs_of_other_tokens_were_not_kept(end: int) -> None:
    """A log that ends elsewhere than the hop is to stand is of no use."""
    log, _ = log_of([2, 1, 3])
    with pytest.raises(InputsDropped, match=f"tokens 0 to {end}"):
        log.replay(0, end, 512)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_an_empty_log_replays_nothing(mode: str) -> None:
    """Where nothing was kept nothing can be fed again."""
    log, _ = log_of([], "fast" if mode == "fast" else "exact")
    with pytest.raises(InputsDropped):
        log.replay(0, 3, 512)


def test_in_bulk_whatever_the_mode() -> None:
    """A log that is to be exact gives few calls where it is told to."""
    log, _ = log_of([2, 1, 3])

    assert [one.frame.n_tokens for one in log.replay(0, 6, 512, in_bulk=True)] == [6]


@given(LENGTHS, MODES, st.integers(1, 6), st.integers(0, 40))
def test_the_right_tokens_come_back(
    lengths: list[int], mode: ReplayMode, max_tokens: int, held: int
) -> None:
    """From where a hop can go on to the end, each token once, in order, in calls that join."""
    log, _ = log_of(lengths, mode)
    n_tokens = sum(lengths)
    start = log.usable(held)
    fed = list(log.replay(start, n_tokens, max_tokens)) if start < n_tokens else []

    assert ids_of(fed) == list(range(start, n_tokens))
    assert [one.past_len for one in fed] == [one.frame.token_ids()[0] for one in fed]
    assert mode == "exact" or all(one.frame.n_tokens <= max_tokens for one in fed)


@given(LENGTHS, st.integers(1, 6))
def test_bulk_is_as_few_calls_as_may_be(lengths: list[int], max_tokens: int) -> None:
    """All calls but the last are as long as the shard takes."""
    log, _ = log_of(lengths, "fast")
    *full, last = [one.frame.n_tokens for one in log.replay(0, sum(lengths), max_tokens)]

    assert set(full) <= {max_tokens}
    assert 1 <= last <= max_tokens


@given(LENGTHS, st.integers(0, 8), st.integers(1, 4))
def test_hidden_states_come_back_in_bulk(lengths: list[int], start: int, width: int) -> None:
    """Frames of three axes and two bytes a number are cut between tokens, not within."""
    log, _ = log_of(lengths, "fast", width=width)
    n_tokens = sum(lengths)
    start = min(start, n_tokens - 1)
    fed = list(log.replay(start, n_tokens, 3))

    assert fed == [
        FedFrame(at, frame_of(at, min(3, n_tokens - at), width=width))
        for at in range(start, n_tokens, 3)
    ]


@pytest.mark.parametrize(
    ("mode", "usable"),
    [("exact", [0, 0, 2, 3, 0, 0, 6, 0]), ("fast", [0, 1, 2, 3, 4, 5, 6, 0])],
)
def test_where_a_hop_can_go_on(mode: str, usable: list[int]) -> None:
    """Exactly only where a call ended, fast anywhere; never behind what was fed."""
    log, _ = log_of([2, 1, 3], "fast" if mode == "fast" else "exact")

    assert [log.usable(held) for held in range(8)] == usable


# --- no room ---


def test_a_log_that_found_no_room_keeps_nothing() -> None:
    """A part of the inputs is of no use, and takes no room."""
    log, budget = log_of([2, 2, 2], max_bytes=20)

    assert (budget.used_bytes, log.usable(2)) == (0, 0)
    with pytest.raises(InputsDropped):
        log.replay(0, 6, 512)


def test_a_log_with_a_gap_is_never_used() -> None:
    """What is fed after the budget was full is not kept, though there would be room again."""
    log, budget = log_of([2, 4], max_bytes=20)
    log.add(6, frame_of(6, 1))

    assert budget.used_bytes == 0
    with pytest.raises(InputsDropped):
        log.replay(6, 7, 512)


def test_a_cleared_log_begins_anew() -> None:
    """After clear() the first input is kept again, also where there had been no room."""
    log, budget = log_of([2, 4], max_bytes=20)
    log.clear()
    log.add(0, frame_of(0, 3))

    assert (ids_of(list(log.replay(0, 3, 512))), budget.used_bytes) == ([0, 1, 2], 12)


def test_clearing_twice_gives_back_once() -> None:
    """Room that was given back is not given back again."""
    log, budget = log_of([2])
    log.clear()
    log.clear()

    assert budget.used_bytes == 0


DEEDS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=40)


@given(DEEDS, st.integers(0, 60))
def test_the_budget_is_never_overdrawn(deeds: list[tuple[int, int]], max_bytes: int) -> None:
    """Whatever logs take and clear, no more is taken than there is, and all comes back."""
    budget = ReplayBudget(max_bytes)
    logs = [InputLog(budget, "exact") for _ in range(3)]
    seen: list[int] = []
    for which, n_tokens in deeds:
        if n_tokens:
            logs[which].add(0, frame_of(0, n_tokens))
        else:
            logs[which].clear()
        seen.append(budget.used_bytes)
    for log in logs:
        log.clear()

    assert all(0 <= used <= max_bytes for used in seen)
    assert budget.used_bytes == 0


# --- beginning as another log ---


@given(LENGTHS, st.integers(1, 40), st.integers(0, 3))
def test_a_log_begins_as_another_one(lengths: list[int], n_tokens: int, width: int) -> None:
    """The first tokens come in the calls of the other log, the last one of them cut."""
    other, budget = log_of(lengths, width=width)
    n_tokens = min(n_tokens, sum(lengths))
    log = InputLog(budget, "exact")
    log.begin_as(other, n_tokens)
    fed = list(log.replay(0, n_tokens, 512))

    assert [one.past_len for one in fed] == [0, *(one.end for one in fed[:-1])]
    assert [one.frame for one in fed] == [
        frame_of(one.past_len, one.frame.n_tokens, width=width) for one in fed
    ]
    assert [one.end for one in fed[:-1]] == [one.end for one in other.replay(0, sum(lengths), 512)][
        : len(fed) - 1
    ]


def test_shared_inputs_take_room_once() -> None:
    """Only the part of a call that was cut is new; it all comes back with the last log."""
    other, budget = log_of([2, 3, 4])
    log = InputLog(budget, "exact")
    log.begin_as(other, 6)
    used = [budget.used_bytes]
    other.clear()
    used.append(budget.used_bytes)
    log.clear()
    used.append(budget.used_bytes)

    assert used == [36 + 4, 6 * 4, 0]


@pytest.mark.parametrize("n_kept", [0, 5])
def test_a_log_cannot_begin_as_one_that_kept_too_little(n_kept: int) -> None:
    """It keeps nothing then: it would have a gap."""
    other, budget = log_of([n_kept] if n_kept else [])
    log = InputLog(budget, "exact")
    log.begin_as(other, 6)
    log.add(6, frame_of(6, 1))

    assert log.nbytes == 0
    with pytest.raises(InputsDropped):
        log.replay(0, 7, 512)


def test_the_last_end_of_a_call() -> None:
    """Where a fork of at most so many tokens can begin and be fed again in the same calls."""
    log, _ = log_of([2, 1, 3])

    assert [log.last_end(n) for n in range(8)] == [0, 0, 2, 3, 3, 3, 6, 6]
