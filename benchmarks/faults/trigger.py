"""The moment of a fault: it waits for one step on one hop, and then fires, once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter

from benchmarks.faults.http1 import Message
from benchmarks.faults.node import Node

Action = Callable[[Node, Message], Awaitable[bytes | None]]
"""What is done with a step; returns as `Proxy.forward`."""


class Trigger:
    """Armed on every shard of a hop; whichever serves the session has the fault.

    Attributes:
        fired_at: `perf_counter()` of the fault, None before it.
        met: The step that it met, None before it.
        afterwards: Once it has fired: what is done with everything else that comes to that shard.
    """

    def __init__(self, decode_step: int, action: Action) -> None:
        self.fired_at: float | None = None
        self.met: Message | None = None
        self.afterwards: Action | None = None
        self._decode_step = decode_step
        self._action = action
        self._decoded: dict[str, set[int]] = {}
        self._node: Node | None = None

    def arm(self, node: Node) -> None:
        """See all steps of this shard from now on."""

        async def intercept(request: Message) -> bytes | None:
            return await self._handle(node, request)

        node.proxy.intercept = intercept

    async def _handle(self, node: Node, request: Message) -> bytes | None:
        if (
            self.fired_at is None
            and request.is_step
            and self._ordinal(request) == self._decode_step
        ):
            self.fired_at = perf_counter()
            self.met = request
            self._node = node
            return await self._action(node, request)
        if self.afterwards is not None and node is self._node:
            return await self.afterwards(node, request)
        return await node.proxy.forward(request)

    def _ordinal(self, step: Message) -> int:
        """Which decode step of its session this is; 0 is the prefill. A repeat does not count."""
        if not step.is_decode:
            return 0 if step.past_len == 0 else -1
        positions = self._decoded.setdefault(step.session or "", set())
        positions.add(step.past_len)
        return len(positions)
