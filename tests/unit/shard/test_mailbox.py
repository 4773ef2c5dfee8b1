from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from meshnet.errors import InputMissing, InvalidRequest, MeshError, QueueFull
from meshnet.ids import SessionId
from meshnet.shard.mailbox import Mailbox, MailboxLimits
from meshnet.wire.frames import Frame
from meshnet.wire.headers import StepHeaders
from tests.unit.fakes import FakeClock, turn_the_loop

LIMITS = MailboxLimits(wait_s=30.0, max_steps=2, max_frames=3, max_bytes=100)


def frame_of(value: int, n_bytes: int = 4) -> Frame:
    return Frame("float32", (1, 1, n_bytes // 4), bytes([value] * n_bytes))


def step_for(input_id: str, session: str = "s") -> StepHeaders:
    return StepHeaders(
        session=session,
        cache="decode",
        past_len=3,
        shape=(1, 1, 1),
        dtype="float32",
        input_id=input_id,
    )


def opened(clock: FakeClock | None = None, limits: MailboxLimits = LIMITS) -> Mailbox:
    return Mailbox(limits, clock or FakeClock())


async def waiting(mailbox: Mailbox, *steps: StepHeaders) -> list[asyncio.Task[Frame]]:
    """Steps that wait."""
    tasks = [asyncio.create_task(mailbox.take(step)) for step in steps]
    await turn_the_loop()
    return tasks


async def outcomes(tasks: Sequence[asyncio.Task[Frame]]) -> list[object]:
    """What they got, or the class of the error."""
    found = await asyncio.gather(*tasks, return_exceptions=True)
    return [type(each) if isinstance(each, BaseException) else each for each in found]


async def is_kept(mailbox: Mailbox, push_id: str) -> bool:
    """Whether a step would get a frame at once."""
    (task,) = await waiting(mailbox, step_for(push_id, "asking"))
    task.cancel()
    return await outcomes([task]) != [asyncio.CancelledError]


async def test_a_step_that_waits_gets_its_frame() -> None:
    """Each the one that was pushed for it."""
    mailbox = opened()
    tasks = await waiting(mailbox, step_for("a", "s"), step_for("b", "t"))
    mailbox.put("b", frame_of(2))
    mailbox.put("a", frame_of(1))

    assert await outcomes(tasks) == [frame_of(1), frame_of(2)]


async def test_a_frame_waits_for_its_step() -> None:
    """And is handed out once."""
    mailbox = opened()
    mailbox.put("a", frame_of(1))

    assert await mailbox.take(step_for("a")) == frame_of(1)
    assert not await is_kept(mailbox, "a")


async def test_a_frame_that_is_pushed_twice_is_kept_once() -> None:
    """The last one counts."""
    mailbox = opened(limits=MailboxLimits(max_frames=1))
    mailbox.put("a", frame_of(1))
    mailbox.put("a", frame_of(2))

    assert await mailbox.take(step_for("a")) == frame_of(2)


async def test_a_second_frame_for_a_step_that_goes_on_is_of_no_use() -> None:
    """It has its input already."""
    mailbox = opened()
    tasks = await waiting(mailbox, step_for("a"))
    mailbox.put("a", frame_of(1))
    mailbox.put("a", frame_of(2))

    assert await outcomes(tasks) == [frame_of(1)]


async def test_a_step_waits_for_so_long_only() -> None:
    """Then it is answered that its input is missing, and what comes later finds nobody."""
    mailbox = opened(limits=MailboxLimits(wait_s=0.01))
    with pytest.raises(InputMissing, match=r"within 0\.01 s"):
        await mailbox.take(step_for("a"))
    mailbox.put("a", frame_of(1))

    assert await is_kept(mailbox, "a")


@pytest.mark.parametrize(("later_s", "expected"), [(29.9, True), (30.0, False)])
async def test_a_frame_waits_for_so_long_only(later_s: float, *, expected: bool) -> None:
    """As long as a step would."""
    clock = FakeClock()
    mailbox = opened(clock)
    mailbox.put("a", frame_of(1))
    clock.now += later_s

    assert await is_kept(mailbox, "a") == expected


async def test_the_oldest_of_too_many_frames_goes() -> None:
    """By their number."""
    mailbox = opened()
    for name in "abcd":
        mailbox.put(name, frame_of(1))

    assert [await is_kept(mailbox, name) for name in "abcd"] == [False, True, True, True]


async def test_the_oldest_of_too_long_frames_go() -> None:
    """By their bytes; one that is too long by itself is not kept either."""
    mailbox = opened()
    mailbox.put("a", frame_of(1))
    mailbox.put("b", frame_of(1, 100))
    mailbox.put("c", frame_of(1, 104))
    mailbox.put("d", frame_of(1))

    assert [await is_kept(mailbox, name) for name in "abcd"] == [False, False, False, True]


async def test_too_many_steps_do_not_wait() -> None:
    """One more is refused, and may come again."""
    mailbox = opened()
    tasks = await waiting(mailbox, step_for("a", "s"), step_for("b", "t"))
    with pytest.raises(QueueFull) as caught:
        await mailbox.take(step_for("c", "u"))
    mailbox.put("a", frame_of(1))
    mailbox.put("b", frame_of(2))

    assert caught.value.members == {"field": "queue", "value": 2, "allowed": 2}
    assert await outcomes(tasks) == [frame_of(1), frame_of(2)]


async def test_two_steps_do_not_wait_for_one_frame() -> None:
    """The second is refused, with the header's name."""
    mailbox = opened()
    tasks = await waiting(mailbox, step_for("a", "s"), step_for("a", "t"))
    mailbox.put("a", frame_of(1))

    assert await outcomes(tasks) == [frame_of(1), InvalidRequest]


async def test_a_step_ends_the_wait_of_the_one_before_it() -> None:
    """Of the same session only, and its late frame finds nobody."""
    mailbox = opened()
    tasks = await waiting(mailbox, step_for("a", "s"), step_for("b", "t"), step_for("c", "s"))
    for name in "abc":
        mailbox.put(name, frame_of(1))

    assert await outcomes(tasks) == [InputMissing, frame_of(1), frame_of(1)]


async def test_a_dismissed_step_changes_nothing_of_what_has_come() -> None:
    """A step that has its input goes on; a session without one is no fault."""
    mailbox = opened()
    tasks = await waiting(mailbox, step_for("a", "s"))
    mailbox.put("a", frame_of(1))
    mailbox.dismiss(SessionId("s"))
    mailbox.dismiss(SessionId("t"))

    assert await outcomes(tasks) == [frame_of(1)]


async def test_a_cancelled_step_leaves_its_place() -> None:
    """As when its caller has gone; what comes in that moment finds nobody."""
    mailbox = opened()
    for task in await waiting(mailbox, step_for("a", "s"), step_for("b", "t")):
        task.cancel()
    mailbox.dismiss(SessionId("s"))
    mailbox.put("b", frame_of(1))
    await turn_the_loop()
    tasks = await waiting(mailbox, step_for("c", "s"), step_for("d", "t"))
    mailbox.put("c", frame_of(1))
    mailbox.put("d", frame_of(2))

    assert await outcomes(tasks) == [frame_of(1), frame_of(2)]


async def test_a_step_comes_in_the_moment_that_another_one_is_cancelled() -> None:
    """It waits in its own right."""
    mailbox = opened()
    (cancelled,) = await waiting(mailbox, step_for("a", "s"))
    cancelled.cancel()
    coming = asyncio.create_task(mailbox.take(step_for("b", "s")))
    await turn_the_loop()
    mailbox.dismiss(SessionId("s"))

    assert await outcomes([cancelled, coming]) == [asyncio.CancelledError, InputMissing]


async def test_a_step_that_takes_another_ones_place_in_that_moment_waits() -> None:
    """The cancelled one takes nothing along when it goes."""
    mailbox = opened()
    (cancelled,) = await waiting(mailbox, step_for("a", "s"))
    coming = asyncio.create_task(mailbox.take(step_for("b", "s")))
    cancelled.cancel()
    asyncio.get_running_loop().call_soon(mailbox.put, "b", frame_of(2))
    await turn_the_loop()

    assert await outcomes([cancelled, coming]) == [asyncio.CancelledError, frame_of(2)]


@pytest.mark.parametrize(
    ("changed", "field", "found", "allowed"),
    [
        ({"shape": (1, 1, 2)}, "X-Meshnet-Shape", "1,1,1", "1,1,2"),
        ({"dtype": "float16"}, "X-Meshnet-Dtype", "float32", "float16"),
    ],
)
async def test_a_frame_must_be_what_the_steps_headers_say(
    changed: dict[str, object], field: str, found: str, allowed: str
) -> None:
    """Else the step is refused, with the header's name."""
    mailbox = opened()
    mailbox.put("a", frame_of(1))
    with pytest.raises(MeshError) as caught:
        await mailbox.take(step_for("a").model_copy(update=changed))

    assert caught.value.code == "invalid_request"
    assert caught.value.members == {"field": field, "value": found, "allowed": allowed}
