from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.ids import SessionId
from meshnet.model.fake_stage import FakeState
from meshnet.model.interface import StageStep
from meshnet.shard.scheduler import Job, StepScheduler
from meshnet.wire.frames import Frame

MAX_BATCH = 4


def decode(session: str, at: float = 0.0, *, start_layer: int = 0) -> Job:
    """One token of a session."""
    return Job(_step(1, start_layer), FakeState(), SessionId(session), at)


def chunk(session: str, at: float = 0.0) -> Job:
    """A part of a session's prompt."""
    return Job(_step(3, 0), FakeState(), SessionId(session), at)


def short_prompt(session: str) -> Job:
    """A session's first token."""
    return Job(_step(1, 0, position=0), FakeState(), SessionId(session), 0.0)


def stateless(at: float = 0.0) -> Job:
    """A step of one token that keeps nothing."""
    return Job(_step(1, 0), None, None, at)


def _step(n_tokens: int, start_layer: int, *, position: int = 7) -> StageStep:
    return StageStep(Frame.of_token_ids([5] * n_tokens), start_layer, position)


def scheduler_of(*jobs: Job) -> StepScheduler[Job]:
    scheduler: StepScheduler[Job] = StepScheduler(MAX_BATCH)
    for job in jobs:
        scheduler.add(job)
    return scheduler


def sessions_in(jobs: list[Job]) -> list[str | None]:
    return [job.session for job in jobs]


def run_next(scheduler: StepScheduler[Job], began_at: float, ended_at: float) -> list[str | None]:
    """Whose steps are taken and run."""
    jobs = scheduler.take(began_at)
    scheduler.ended(jobs, ended_at)
    return sessions_in(jobs)


# --- what runs together ---


def test_decodes_that_wait_run_as_one_batch() -> None:
    """All of them are taken at once, in the order they came."""
    scheduler = scheduler_of(decode("a"), decode("b"), decode("c"))

    assert sessions_in(scheduler.take(1.0)) == ["a", "b", "c"]
    assert len(scheduler) == 0


def test_nothing_is_taken_where_nothing_waits() -> None:
    """An empty queue gives an empty list."""
    assert scheduler_of().take(1.0) == []


def test_a_batch_is_no_larger_than_allowed() -> None:
    """With five that wait and room for four the last one comes next."""
    scheduler = scheduler_of(*(decode(s) for s in "abcde"))

    assert run_next(scheduler, 1, 2) == ["a", "b", "c", "d"]
    assert run_next(scheduler, 2, 3) == ["e"]


def test_decodes_of_other_start_layers_run_apart() -> None:
    """A batch goes through the same layers; the oldest decode says which."""
    scheduler = scheduler_of(
        decode("a", start_layer=2), decode("b"), decode("c", start_layer=2), decode("d")
    )

    assert run_next(scheduler, 1, 2) == ["a", "c"]
    assert run_next(scheduler, 2, 3) == ["b", "d"]


def test_two_steps_of_a_session_are_never_in_one_batch() -> None:
    """The second one depends on the first, and comes after it."""
    scheduler = scheduler_of(decode("a"), decode("a"), decode("b"))

    assert run_next(scheduler, 1, 2) == ["a", "b"]
    assert run_next(scheduler, 2, 3) == ["a"]


@pytest.mark.parametrize(
    "single",
    [chunk("p"), short_prompt("p"), stateless()],
    ids=["chunk", "short-prompt", "stateless"],
)
def test_what_is_no_decode_runs_alone(single: Job) -> None:
    """A prompt's tokens share no forward, not even a single one, nor does a stateless step."""
    scheduler = scheduler_of(single, chunk("q"), decode("a"), decode("b"))

    assert scheduler.take(1.0) == [single]
    assert sessions_in(scheduler.take(1.0)) == ["q"]
    assert sessions_in(scheduler.take(1.0)) == ["a", "b"]


# --- taking turns ---


def test_where_both_wait_they_take_turns() -> None:
    """One chunk, the decodes, one chunk, the decodes: neither is done first to the end."""
    scheduler = scheduler_of(chunk("p"), chunk("q"), chunk("r"))
    order: list[list[str | None]] = []
    for now in range(6):
        order.append(run_next(scheduler, now, now + 1))
        if order[-1] != ["a"]:
            scheduler.add(decode("a", now + 0.5))

    assert order == [["p"], ["a"], ["q"], ["a"], ["r"], ["a"]]


def test_every_decode_that_waited_goes_before_the_next_chunk() -> None:
    """Also those that did not fit into the first batch, and nobody who came later."""
    scheduler = scheduler_of(chunk("p"), chunk("q"), *(decode(s, 0.5) for s in "abcde"))
    order = [run_next(scheduler, 0, 1), run_next(scheduler, 1, 2), run_next(scheduler, 2, 3)]
    scheduler.add(decode("late", 2.5))
    order += [run_next(scheduler, 3, 4), run_next(scheduler, 4, 5)]

    assert order == [["p"], ["a", "b", "c", "d"], ["e"], ["q"], ["late"]]


# --- giving up ---


@pytest.mark.parametrize("job", [decode("a"), chunk("a")], ids=["decode", "chunk"])
def test_a_step_that_waits_can_be_given_up(job: Job) -> None:
    """It is not taken then, and is given up once."""
    scheduler = scheduler_of(job, decode("b"))

    assert (scheduler.remove(job), scheduler.remove(job)) == (True, False)
    assert sessions_in(scheduler.take(1.0)) == ["b"]


def test_a_step_that_was_taken_cannot_be_given_up() -> None:
    """It runs, or has."""
    job = decode("a")
    scheduler = scheduler_of(job)
    scheduler.take(1.0)

    assert not scheduler.remove(job)


# --- the pause before a batch ---


def ran_together(*sessions: str, start_layer: int = 0) -> StepScheduler[Job]:
    """Sessions that ran together from -8.0 to 0.0: the longest pause is a quarter of that, 2 s."""
    scheduler = scheduler_of(*(decode(s, -8, start_layer=start_layer) for s in sessions))
    run_next(scheduler, -8, 0)
    return scheduler


def test_who_left_together_is_waited_for() -> None:
    """The first one back waits for the second, 2 s at most, and for nobody when it is there."""
    scheduler = ran_together("a", "b")
    scheduler.add(decode("a", 9.0))
    pauses = [scheduler.pause_s(now) for now in (9.0, 10.5, 11.0, 12.0)]
    scheduler.add(decode("b", 10.9))

    assert pauses == [2.0, 0.5, 0.0, 0.0]
    assert scheduler.pause_s(10.9) == 0.0
    assert sessions_in(scheduler.take(10.9)) == ["a", "b"]


def test_a_lone_session_is_never_paused() -> None:
    """Its step is due the moment it comes."""
    scheduler = ran_together("a")
    scheduler.add(decode("a", 1.0))

    assert scheduler.pause_s(1.0) == 0.0


def test_who_did_not_come_in_time_is_in_another_batch_from_then_on() -> None:
    """Each of the two is waited for by nobody then."""
    scheduler = ran_together("a", "b")
    scheduler.add(decode("a", 9.0))
    run_next(scheduler, 11.0, 19.0)
    scheduler.add(decode("b", 19.0))
    late = scheduler.pause_s(19.0)
    run_next(scheduler, 19.0, 27.0)
    scheduler.add(decode("a", 28.0))

    assert (late, scheduler.pause_s(28.0)) == (0.0, 0.0)


@pytest.mark.parametrize(("away_s", "pause_s"), [(1.0, 2.0), (2.0, 2.0), (2.1, 0.0), (7.0, 0.0)])
def test_two_that_take_turns_on_one_shard_meet(away_s: float, pause_s: float) -> None:
    """Who waits waits for who just left, if that one comes back at once.

    One that is away for longer is at work on other shards, and the two are best apart.
    """
    scheduler = ran_together("a")
    scheduler.add(decode("a", away_s))
    assert scheduler.take(away_s)
    waiting, ended_at = decode("b", away_s + 1), away_s + 8
    scheduler.ended([decode("a", away_s)], ended_at)
    scheduler.add(waiting)

    assert scheduler.pause_s(ended_at) == pause_s


def test_who_was_given_up_is_not_waited_for() -> None:
    """It had come."""
    scheduler = ran_together("a", "b")
    late = decode("b", 1.0)
    scheduler.add(late)
    scheduler.remove(late)
    scheduler.add(decode("a", 4.0))

    assert scheduler.pause_s(4.0) == 0.0


def test_sessions_of_other_layers_are_not_waited_for() -> None:
    """They could not be in the batch."""
    scheduler = ran_together("b", "c", start_layer=2)
    scheduler.add(decode("c", 1.0, start_layer=2))
    scheduler.take(1.0)
    scheduler.add(decode("a", 1.0))

    assert scheduler.pause_s(1.0) == 0.0


def test_nothing_that_can_run_waits_for_a_pause() -> None:
    """A chunk fills the time, and a full batch needs nobody."""
    scheduler = ran_together("a", "b")
    assert scheduler.pause_s(0.5) == 0.0
    scheduler.add(decode("a", 1.0))
    waiting = chunk("p", 1.0)
    scheduler.add(waiting)
    assert scheduler.pause_s(1.0) == 0.0
    scheduler.remove(waiting)
    assert scheduler.pause_s(1.0) == 2.0
    for session in "cde":
        scheduler.add(decode(session, 1.0))

    assert scheduler.pause_s(1.0) == 0.0


def test_of_very_many_sessions_those_who_came_last_are_remembered() -> None:
    """Memory is bounded: who left with one of 1024 others before is not known any more."""
    scheduler = ran_together("a", "b")
    for number in range(1024):
        scheduler.add(decode(f"s{number}", 9.0))
        run_next(scheduler, 9.0, 9.0)
    scheduler.add(decode("a", 10.0))

    assert scheduler.pause_s(10.0) == 0.0


# --- whatever comes, and whenever ---


@dataclass(frozen=True)
class Event:
    """Something comes, or what runs ends; after that the thread takes what is due."""

    after_s: float
    comes: str
    start_layer: int


events = st.lists(
    st.builds(
        Event,
        after_s=st.sampled_from([0.01, 0.1, 1.0, 5.0]),
        comes=st.sampled_from(["decode", "decode", "chunk", "nothing"]),
        start_layer=st.sampled_from([0, 0, 0, 2]),
    ),
    max_size=60,
)


@dataclass
class Thread:
    """Takes what is due whenever it is free, and checks all that must hold of it."""

    scheduler: StepScheduler[Job]
    waiting: list[Job]
    running: list[Job]
    ran: list[Job]
    owed: list[Job]
    patience_s: float = 0.0
    began_at: float = 0.0
    ended_at: float = 0.0

    def end(self, now: float) -> None:
        self.scheduler.ended(self.running, now)
        self.ended_at = now
        if self.running[0].is_decode:
            self.patience_s = (now - self.began_at) / 4
        else:
            self.owed = [job for job in self.waiting if job.is_decode]
        self.ran += self.running
        self.running = []

    def look(self, now: float) -> None:
        """Take what is due, and check the pause if nothing is."""
        pause_s = self.scheduler.pause_s(now)
        if pause_s:
            assert all(job.is_decode for job in self.waiting)
            first = min(job.queued_at for job in self.waiting)
            assert now + pause_s <= max(first, self.ended_at) + self.patience_s + 1e-9
            return
        self.running, self.began_at = self.scheduler.take(now), now
        assert bool(self.running) == bool(self.waiting)
        if self.running:
            self.check_taken()
        self.waiting = [job for job in self.waiting if job not in self.running]
        self.owed = [job for job in self.owed if job not in self.running]

    def check_taken(self) -> None:
        decodes = [job for job in self.waiting if job.is_decode]
        singles = [job for job in self.waiting if not job.is_decode]
        if self.running[0].is_decode:
            assert not singles or self.owed, "a chunk waits for those only that waited before it"
            assert decodes[0] in self.running, "the oldest is not passed over"
            assert len(self.running) <= MAX_BATCH
            assert len({job.session for job in self.running}) == len(self.running)
            assert len({job.step.start_layer for job in self.running}) == 1
        else:
            assert self.running == singles[:1]
            assert not self.owed, "no second chunk before those that waited for the first"


@given(events, st.integers(1, 12))
def test_nobody_starves_and_nothing_runs_twice(happenings: list[Event], n_sessions: int) -> None:
    """Turns, bounds and order hold at each moment, and in the end everything has run once."""
    thread = Thread(scheduler_of(), [], [], [], [])
    now, came = 0.0, list[Job]()
    for number, event in enumerate(happenings):
        now += event.after_s
        session = f"s{number % n_sessions}"
        match event.comes:
            case "decode":
                came.append(decode(session, now, start_layer=event.start_layer))
            case "chunk":
                came.append(chunk(session, now))
            case _:
                if thread.running:
                    thread.end(now)
        if event.comes != "nothing":
            thread.waiting.append(came[-1])
            thread.scheduler.add(came[-1])
        assert len(thread.scheduler) == len(thread.waiting)
        if not thread.running:
            thread.look(now)
    while thread.running or thread.waiting:
        now += 10  # longer than any pause
        if thread.running:
            thread.end(now)
        else:
            thread.look(now)

    assert sorted(map(id, thread.ran)) == sorted(map(id, came))
