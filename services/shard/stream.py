"""Steps over a kept-open stream: as `POST /v1/forward`, with messages in place of requests.

Also tensors that other shards push, and the steps that wait for these.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Final, cast

import structlog
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from meshnet.errors import InvalidRequest, MeshError
from meshnet.shard.host import ShardHost
from meshnet.shard.mailbox import Mailbox
from meshnet.shard.neighbours import Neighbours
from meshnet.wire import headers, pushed_frames, stream_messages
from meshnet.wire.frames import Frame
from meshnet.wire.headers import StepHeaders
from meshnet.wire.stream_messages import UNANSWERED, StreamMessage
from services.shard.answers import Answer, as_answer, refuse, run_step, wrong_length
from services.shard.metrics import ShardMetrics
from services.shard.routes import as_response, check_key

_log = structlog.get_logger(__name__)

_PROTOCOL_ERROR: Final = 1002
_FAULT: Final = Answer(500, {"content-type": "text/plain"}, b"Internal Server Error")
"""What uvicorn answers to a request then, and no more: the log has the rest."""


async def stream(websocket: WebSocket) -> None:
    """Take steps until the caller leaves, and end those that it leaves behind."""
    metrics = cast("ShardMetrics", websocket.state.metrics)
    try:
        await check_key(websocket)
        _check_opening(websocket)
    except MeshError as error:
        await websocket.send_denial_response(as_response(refuse(error, metrics)))
        return
    await websocket.accept(stream_messages.SUBPROTOCOL)
    await _Stream(websocket, metrics).serve()


class _Stream:
    """One open stream. Every step is a task of its own, and is answered when it has run."""

    def __init__(self, websocket: WebSocket, metrics: ShardMetrics) -> None:
        self._websocket = websocket
        self._host = cast("ShardHost", websocket.state.host)
        self._mailbox = cast("Mailbox", websocket.state.mailbox)
        self._neighbours = cast("Neighbours", websocket.state.neighbours)
        self._metrics = metrics
        self._places = asyncio.Semaphore(stream_messages.MAX_IN_FLIGHT)
        self._running: set[asyncio.Task[None]] = set()
        self._without_input: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Take steps until the stream ends. A step that was begun is ended all the same.

        So its answer is there when the caller asks again. One that waits for its input was not
        begun. Only a server that cannot wait any longer cancels the others.
        """
        try:
            while True:
                await self._places.acquire()  # what is not read yet waits with the caller
                asked = await self._receive()
                if asked is None:
                    break
                if asked.number == UNANSWERED:
                    self._places.release()
                    self._put(asked)
                else:
                    self._start(asked)
            for task in self._without_input:
                task.cancel()
            while self._running:
                await asyncio.wait(self._running)
        finally:
            for task in self._running:
                task.cancel()

    async def _receive(self) -> StreamMessage | None:
        """The next message, or None at the end: the caller left, or sent what is none."""
        event = await self._websocket.receive()
        if event["type"] == "websocket.disconnect":
            return None
        try:
            return stream_messages.decode(event.get("bytes") or b"")
        except InvalidRequest as error:
            self._metrics.count_refusal(error)
            with suppress(WebSocketDisconnect):
                await self._websocket.close(_PROTOCOL_ERROR, error.message)
            return None

    def _put(self, pushed: StreamMessage) -> None:
        """Take a tensor that another shard pushes; of one that is wrong nobody is told."""
        if not self._host.push:
            return
        try:
            self._mailbox.put(*pushed_frames.from_message(pushed))
        except InvalidRequest as error:
            self._metrics.count_refusal(error)
            _log.warning("a pushed tensor is refused", reason=error.message)

    def _start(self, asked: StreamMessage) -> None:
        task = asyncio.create_task(self._answer(asked))
        self._running.add(task)
        task.add_done_callback(partial(self._end, asked.number))

    def _end(self, number: int, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._places.release()
        fault = None if task.cancelled() else task.exception()
        if fault is not None:  # nobody foresaw it
            _log.error("a step failed", exc_info=fault)
            telling = asyncio.create_task(self._send(number, _FAULT))
            self._running.add(telling)
            telling.add_done_callback(self._running.discard)

    async def _answer(self, asked: StreamMessage) -> None:
        try:
            answer = await self._run(asked)
        except MeshError as error:
            answer = refuse(error, self._metrics)
        await self._send(asked.number, answer)

    async def _run(self, asked: StreamMessage) -> Answer:
        worker, began_at = self._host.worker, perf_counter()
        step = headers.parse(asked.headers)
        expected = worker.check(step)
        check_s = perf_counter() - began_at
        if len(asked.body) != expected:
            raise wrong_length(str(len(asked.body)), expected)
        known = None if step.input_id is None else await worker.recall(step)
        if known is not None:  # nobody pushes an input twice
            answer = as_answer(known, self._metrics, step, check_s)
        else:
            body = asked.body if step.input_id is None else await self._input_of(step) + asked.body
            answer = await run_step(worker, self._mailbox, self._metrics, step, body, check_s)
        if step.push_id is not None:
            answer.headers[headers.PUSHED] = "1" if await self._push(step, answer) else "0"
        return answer

    async def _input_of(self, step: StepHeaders) -> bytes:
        """The tensor that another shard pushes for a step."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._without_input.add(task)
        try:
            return (await self._mailbox.take(step)).data
        finally:
            self._without_input.discard(task)

    async def _push(self, step: StepHeaders, answer: Answer) -> bool:
        """Give what a step put out to the shard that goes on with it."""
        dtype = headers.parse_dtype(answer.headers[headers.DTYPE])
        shape = headers.parse_shape(answer.headers[headers.SHAPE])
        message = pushed_frames.as_message(str(step.push_id), Frame(dtype, shape, answer.body))
        return await self._neighbours.push(str(step.push_to), str(step.push_boot), message)

    async def _send(self, number: int, answer: Answer) -> None:
        """Answer a step; where the caller has left, nobody."""
        message = StreamMessage(number, answer.headers, answer.body, answer.status)
        if self._websocket.application_state is WebSocketState.CONNECTED:
            with suppress(WebSocketDisconnect):
                await self._websocket.send_bytes(stream_messages.encode(message))


def _check_opening(websocket: WebSocket) -> None:
    """Refuse who would send what is not understood here; and web pages.

    A browser asks nobody before it lets any page open a WebSocket, as it does before a POST like
    ours: a page could use a shard that runs on its reader's machine, where no key is needed.
    """
    if "origin" in websocket.headers:
        raise InvalidRequest(
            "a web page is no caller of a shard",
            field="Origin",
            value=websocket.headers["origin"][:200],
            allowed=None,
        )
    boot_id = cast("ShardHost", websocket.state.host).boot_id
    if websocket.headers.get(headers.BOOT, boot_id) != boot_id:
        raise InvalidRequest(
            f"this shard is {boot_id}",
            field=headers.BOOT,
            value=websocket.headers[headers.BOOT][:200],
            allowed=boot_id,
        )
    if stream_messages.SUBPROTOCOL not in websocket.scope["subprotocols"]:
        raise InvalidRequest(
            "the stream's messages would be of another form",
            field="Sec-WebSocket-Protocol",
            value=",".join(websocket.scope["subprotocols"])[:200],
            allowed=stream_messages.SUBPROTOCOL,
        )
