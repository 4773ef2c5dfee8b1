"""Every answer that is not streamed says how long it took."""

from __future__ import annotations

from time import perf_counter
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PROCESSING_MS: Final = "openai-processing-ms"


class ProcessingTimeMiddleware:
    """Puts OpenAI's header for it on: whole milliseconds, from the request's head to the answer's.

    A stream's head says nothing of the time that its body takes, and goes without.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and note the time."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at = perf_counter()

        async def send_with_time(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if not headers.get("content-type", "").startswith("text/event-stream"):
                    headers[PROCESSING_MS] = str(round((perf_counter() - started_at) * 1000))
            await send(message)

        await self._app(scope, receive, send_with_time)
