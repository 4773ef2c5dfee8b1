from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from services.head import processing_time
from services.head.processing_time import PROCESSING_MS, ProcessingTimeMiddleware
from tests.unit.services.asgi import ask, passes_untouched


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """A clock that is a quarter of a second further whenever it is read."""
    seconds = count(100, 0.25)
    monkeypatch.setattr(processing_time, "perf_counter", lambda: next(seconds))
    return seconds


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_an_answer_tells_its_time(status: int) -> None:
    """Whole milliseconds, from the request to the answer's head, whatever it says."""
    answer = await ask(ProcessingTimeMiddleware(PlainTextResponse("x", status)))

    assert (answer.status, answer.headers[PROCESSING_MS]) == (status, "250")


async def test_a_stream_does_not() -> None:
    """Its head would tell the time of the first token as that of the answer."""
    stream = Response("data: x\n\n", media_type="text/event-stream")
    answer = await ask(ProcessingTimeMiddleware(stream))

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert PROCESSING_MS not in answer.headers


async def test_what_is_no_request_passes() -> None:
    """The lifespan takes no time."""
    seen: list[tuple[Scope, Receive, Send]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    assert await passes_untouched(ProcessingTimeMiddleware(app), seen)
