"""The faults themselves: what each does to the step that it meets, and to the shard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from benchmarks.faults.http1 import Message
from benchmarks.faults.matrix import HOPS, MOMENTS, Cell, Fault
from benchmarks.faults.node import Node
from benchmarks.faults.trigger import Trigger
from meshnet.wire.headers import FINGERPRINT

STOPPED_S: Final = 4.0
"""Longer than a head waits for a decode step."""
HELD_S: Final = 3.0
"""Twice the short time to live."""
ONE_WAY_S: Final = 0.15
_WRONG_FINGERPRINT: Final = "0" * 32


@dataclass
class Scene:
    """One cell while it runs.

    Attributes:
        cell: Which one.
        trigger: Set when the scene is.
        ended: The client has its reply.
        late: Copies of steps that are still to be delivered.
        timers: What is to happen by itself; called off at the end.
    """

    cell: Cell
    trigger: Trigger = field(init=False)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    late: list[Message] = field(default_factory=list[Message])
    timers: list[asyncio.TimerHandle] = field(default_factory=list[asyncio.TimerHandle])

    def end(self) -> None:
        """Let go of what is held."""
        self.ended.set()
        for timer in self.timers:
            timer.cancel()


async def _kill(scene: Scene, node: Node, step: Message) -> bytes | None:
    await node.kill()
    if scene.cell.fleet == "cached":  # the head's long wait is as good as any to load in
        await node.start_successor()
    return await node.proxy.forward(step)  # to nobody


async def _restart(scene: Scene, node: Node, step: Message) -> bytes | None:
    del scene
    await node.kill()
    await node.start()
    return await node.proxy.forward(step)  # long before it listens


async def _stop(scene: Scene, node: Node, step: Message) -> bytes | None:
    node.stop()
    if scene.cell.fleet == "cached":  # with a standby only the end of the cell resumes it
        loop = asyncio.get_running_loop()
        scene.timers.append(loop.call_later(STOPPED_S, node.resume))
    return await node.proxy.forward(step)


async def _evict(scene: Scene, node: Node, step: Message) -> bytes | None:
    del scene
    await node.evict()
    return await node.proxy.forward(step)


async def _expire(scene: Scene, node: Node, step: Message) -> bytes | None:
    del scene
    await asyncio.sleep(HELD_S)
    return await node.proxy.forward(step)


async def _drop_answer(scene: Scene, node: Node, step: Message) -> bytes | None:
    del scene
    await node.proxy.forward(step)
    return None


async def _duplicate(scene: Scene, node: Node, step: Message) -> bytes | None:
    answers = [await node.proxy.forward(step), await node.proxy.forward(step)]
    parity = HOPS.index(scene.cell.hop) + MOMENTS.index(scene.cell.when)
    return answers[(parity + 1) % 2]  # the second one in even cells


async def _reorder(scene: Scene, node: Node, step: Message) -> bytes | None:
    """A copy comes again after the session's next step, or about when the session is closed."""

    async def deliver(node: Node, later: Message) -> bytes | None:
        if later.session != step.session or not scene.late:
            return await node.proxy.forward(later)
        copy = scene.late.pop()
        if not later.is_step and scene.cell.way == "stream":
            await node.proxy.forward(copy)
            return await node.proxy.forward(later)
        answer = await node.proxy.forward(later)
        await node.proxy.forward(copy)
        return answer

    scene.late.append(step)
    scene.trigger.afterwards = deliver
    return await node.proxy.forward(step)


async def _wrong_fingerprint(scene: Scene, node: Node, step: Message) -> bytes | None:
    del scene
    return await node.proxy.forward(step.with_header(FINGERPRINT, _WRONG_FINGERPRINT))


async def _half_open(scene: Scene, node: Node, step: Message) -> bytes | None:
    del node, step
    await scene.ended.wait()
    return None


async def _slow_link(scene: Scene, node: Node, step: Message) -> bytes | None:
    del scene
    node.proxy.delay_s = ONE_WAY_S  # cleared at the end of the cell
    return await node.proxy.forward(step)


_ACTIONS: Final[dict[Fault, Callable[[Scene, Node, Message], Awaitable[bytes | None]]]] = {
    "kill": _kill,
    "restart": _restart,
    "stop": _stop,
    "evict": _evict,
    "expire": _expire,
    "drop_answer": _drop_answer,
    "duplicate": _duplicate,
    "reorder": _reorder,
    "wrong_fingerprint": _wrong_fingerprint,
    "half_open": _half_open,
    "slow_link": _slow_link,
}


def set_scene(cell: Cell, decode_step: int, nodes: list[Node]) -> Scene:
    """Arm the cell's fault on every shard of its hop."""
    scene = Scene(cell)

    async def act(node: Node, step: Message) -> bytes | None:
        return await _ACTIONS[cell.fault](scene, node, step)

    scene.trigger = Trigger(decode_step, act)
    for node in nodes:
        scene.trigger.arm(node)
    return scene
