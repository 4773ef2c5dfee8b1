"""One hop's step that was sent before its turn: its input comes from the hop before."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from meshnet.errors import HopTimeout, InputMissing, MeshError
from meshnet.head.hop_client import HopAnswer
from meshnet.ids import StepId
from meshnet.transport.hop_stream import HopStream


@dataclass(frozen=True, slots=True)
class Handover:
    """Where a step's input comes from, and where its output goes besides to the head.

    Attributes:
        input_id: The id under which another shard pushes the input; None is from the head.
        push_id: The id under which the output is pushed; None is to the head only.
        push_to: The shard to push to.
        push_boot: The life of that shard.
    """

    input_id: str | None = None
    push_id: str | None = None
    push_to: str | None = None
    push_boot: str | None = None


class Attempt:
    """A step that is under way at one hop.

    Args:
        step_id: The id that it has; whatever else is tried of the step must have it too.
        endpoint: Of the hop.
        sent: Its answer to come.
        stream: Where it comes.
        limit_s: How long the answer may take once it is the hop's turn.
        before: The attempt of the hop that is to push the input; None where the head sent it.

    Attributes:
        outcome: What came of it; None where it was not its turn, or is not yet.
    """

    def __init__(
        self,
        step_id: StepId,
        endpoint: str,
        sent: asyncio.Task[HopAnswer],
        stream: HopStream,
        limit_s: float,
        before: Attempt | None,
    ) -> None:
        self.step_id = step_id
        self.endpoint = endpoint
        self.outcome: HopAnswer | MeshError | None = None
        self._sent = sent
        self._stream = stream
        self._limit_s = limit_s
        self._before = before

    @property
    def was_pushed(self) -> bool:
        """Whether the next hop got what this one put out."""
        return isinstance(self.outcome, HopAnswer) and self.outcome.pushed

    async def answer(self) -> HopAnswer:
        """What the hop answered; its time is that since the answer of the hop before.

        Raises:
            InputMissing: The input was not pushed, or did not come.
            MeshError: As HopClient.step.
        """
        if self._before is not None and not self._before.was_pushed:
            raise InputMissing(f"nothing was pushed to {self.endpoint}", endpoint=self.endpoint)
        try:
            answer = await self._await_answer()
        except MeshError as error:
            self.outcome = error
            raise
        self.outcome = answer
        before = self._before and self._before.outcome
        if not isinstance(before, HopAnswer):
            return answer
        return replace(answer, step_ms=max(0.0, answer.step_ms - before.step_ms))

    def cancel(self) -> None:
        """Wait for it no more."""
        self._sent.cancel()

    async def _await_answer(self) -> HopAnswer:
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._sent
        except TimeoutError as error:
            self._stream.give_up()
            raise HopTimeout(
                f"{self.endpoint} did not answer in time", endpoint=self.endpoint
            ) from error
