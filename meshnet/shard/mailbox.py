"""Where tensors that other shards push meet the steps that wait for them.

Both come by themselves, in any order. What finds no counterpart is given up after a while.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from meshnet.errors import InputMissing, InvalidRequest, QueueFull
from meshnet.ids import SessionId
from meshnet.wire import headers
from meshnet.wire.frames import Frame
from meshnet.wire.headers import StepHeaders


@dataclass(frozen=True, slots=True)
class MailboxLimits:
    """How much waits, and for how long.

    Attributes:
        wait_s: For its counterpart; a step that waits for longer is answered `input_missing`.
        max_steps: Steps that may wait at once.
        max_frames: Frames that may wait at once; the oldest goes for a new one.
        max_bytes: Of these together.
    """

    wait_s: float = 30.0
    max_steps: int = 256
    max_frames: int = 256
    max_bytes: int = 16 * 1024**2


@dataclass(frozen=True, eq=False, slots=True)
class _Waiting:
    """A step that waits."""

    input_id: str
    session: SessionId
    arrived: asyncio.Future[Frame]

    @property
    def goes_on(self) -> bool:
        """Whether it is neither let go nor about to give up."""
        return not self.arrived.done()


class Mailbox:
    """Pushed frames and waiting steps, by the id that both name.

    Args:
        limits: How much may wait.
        clock: Monotonic seconds.
    """

    def __init__(self, limits: MailboxLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._frames: OrderedDict[str, tuple[float, Frame]] = OrderedDict()
        self._nbytes = 0
        self._by_id: dict[str, _Waiting] = {}
        self._by_session: dict[SessionId, _Waiting] = {}

    def put(self, push_id: str, frame: Frame) -> None:
        """Hand a pushed frame to the step that waits for it, or keep it until that comes."""
        waiting = self._by_id.get(push_id)
        if waiting is not None and waiting.goes_on:
            self._leave(waiting)
            waiting.arrived.set_result(frame)
            return
        self._forget(push_id)
        self._frames[push_id] = self._clock() + self._limits.wait_s, frame
        self._nbytes += len(frame.data)
        self._tidy()

    async def take(self, step: StepHeaders) -> Frame:
        """The frame that a step with an `input_id` waits for, when it has come.

        Nothing else is done for the step yet. At most one step of a session waits: see `dismiss`.

        Raises:
            InputMissing: It did not come in time, or another step of the session came.
            InvalidRequest: It is not of the shape and dtype that the step has, or another step
                waits for it.
            QueueFull: Too many steps wait.
        """
        input_id, session = str(step.input_id), SessionId(str(step.session))
        self.dismiss(session)
        self._tidy()
        frame = self._forget(input_id) or await self._wait(input_id, session)
        _check(frame, step)
        return frame

    def dismiss(self, session: SessionId) -> None:
        """End the wait of a session's step: whoever steers the session has gone on without it."""
        waiting = self._by_session.get(session)
        if waiting is not None and waiting.goes_on:
            self._leave(waiting)
            why = f"session {session} goes on without this step"
            waiting.arrived.set_exception(InputMissing(why))

    async def _wait(self, input_id: str, session: SessionId) -> Frame:
        self._check_room(input_id)
        waiting = _Waiting(input_id, session, asyncio.get_running_loop().create_future())
        self._by_id[input_id] = self._by_session[session] = waiting
        try:
            async with asyncio.timeout(self._limits.wait_s):
                return await waiting.arrived
        except TimeoutError as error:
            why = f"no shard pushed the input within {self._limits.wait_s:g} s"
            raise InputMissing(why) from error
        finally:
            self._leave(waiting)

    def _leave(self, waiting: _Waiting) -> None:
        """Let it wait no more; it may have been let go already."""
        if self._by_id.get(waiting.input_id) is waiting:
            del self._by_id[waiting.input_id]
        if self._by_session.get(waiting.session) is waiting:
            del self._by_session[waiting.session]

    def _check_room(self, input_id: str) -> None:
        if input_id in self._by_id:
            raise InvalidRequest(
                f"another step waits for {input_id}",
                field=headers.INPUT_ID,
                value=input_id,
                allowed="an id of its own for each step",
            )
        if len(self._by_id) >= self._limits.max_steps:
            raise QueueFull(
                f"{len(self._by_id)} steps wait for their input",
                field="queue",
                value=len(self._by_id),
                allowed=self._limits.max_steps,
            )

    def _tidy(self) -> None:
        """Give up frames that waited too long, and the oldest of too many."""
        while self._frames:
            push_id, (ends_at, _) = next(iter(self._frames.items()))
            is_too_much = (
                len(self._frames) > self._limits.max_frames or self._nbytes > self._limits.max_bytes
            )
            if not is_too_much and self._clock() < ends_at:
                return
            self._forget(push_id)

    def _forget(self, push_id: str) -> Frame | None:
        """The frame that is kept under an id, which it then is not any more."""
        if push_id not in self._frames:
            return None
        _, frame = self._frames.pop(push_id)
        self._nbytes -= len(frame.data)
        return frame


def _check(frame: Frame, step: StepHeaders) -> None:
    """A pushed tensor must be what the step's headers make it, as one that comes with the step."""
    for field, found, expected in (
        (headers.SHAPE, headers.render_shape(frame.shape), headers.render_shape(step.shape)),
        (headers.DTYPE, frame.dtype, step.dtype),
    ):
        if found != expected:
            raise InvalidRequest(
                f"the pushed tensor's {field} is {found}",
                field=field,
                value=found,
                allowed=expected,
            )
