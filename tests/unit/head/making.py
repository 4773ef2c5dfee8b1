"""A head's parts, over hops that are functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace

import httpx

from meshnet.errors import MeshError
from meshnet.head.hop_client import HopClient, HopTimeouts
from meshnet.model.fake_stage import HIDDEN_SIZE, fake_facts
from meshnet.topology import HopSpec, LayerSpan, Route, build_route
from meshnet.wire import headers, problems
from meshnet.wire.headers import StepHeaders

Handler = Callable[[httpx.Request], Coroutine[None, None, httpx.Response]]


def hop_client(endpoint: str, handler: Handler, timeouts: HopTimeouts | None = None) -> HopClient:
    """A client whose shard is `handler`."""
    http = httpx.AsyncClient(base_url=endpoint, transport=httpx.MockTransport(handler))
    return HopClient(endpoint, http, timeouts or HopTimeouts())


def problem(error: MeshError) -> httpx.Response:
    """What a shard answers that raised `error`."""
    return httpx.Response(error.status, json=problems.to_problem(error))


def hidden(n_tokens: int, **changed: str) -> httpx.Response:
    """What a hop that is no tail answers to so many tokens."""
    named = {headers.SHAPE: f"1,{n_tokens},{HIDDEN_SIZE}", headers.DTYPE: "float32", **changed}
    return httpx.Response(200, content=bytes(4 * HIDDEN_SIZE * n_tokens), headers=named)


def token(token_id: int | None) -> httpx.Response:
    """What a tail answers."""
    return httpx.Response(200, json={} if token_id is None else {"token_id": token_id})


@dataclass
class FakeShard:
    """Answers steps with hidden states, or as a tail; notes all it is asked.

    Attributes:
        instead: Answers a step, or leaves it (None) to the shard.
        asked: The steps, and `DELETE session`, in order.
    """

    endpoint: str
    tail: bool
    instead: Callable[[StepHeaders], Awaitable[httpx.Response | None]] | None = None
    steps: list[StepHeaders] = field(default_factory=list[StepHeaders])
    asked: list[str] = field(default_factory=list[str])

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            self.asked.append(f"DELETE {request.url.path.rpartition('/')[2]}")
            return httpx.Response(204)
        step = headers.parse(request.headers)
        self.steps.append(step)
        self.asked.append(step.cache)
        special = await self.instead(step) if self.instead else None
        if special is not None:
            return special
        if not self.tail:
            return hidden(step.shape[1])
        return token(7 if step.sampling else None)

    def client(self) -> HopClient:
        return hop_client(self.endpoint, self)


def route_over(endpoints: Sequence[str], **changed: object) -> Route:
    """A route of so many hops, a layer each."""
    n = len(endpoints)
    facts = [replace(fake_facts(LayerSpan(i, i + 1), n), **changed) for i in range(n)]
    return build_route([HopSpec(endpoint) for endpoint in endpoints], facts)
