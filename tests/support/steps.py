"""Steps sent to one shard by hand, well-formed unless told otherwise."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from meshnet.model.fake_stage import HIDDEN_SIZE
from tests.support.http import plain_client
from tests.support.mesh import CLUSTER_KEY

Body = bytes | AsyncIterator[bytes]


@dataclass(frozen=True)
class ShardClient:
    """A caller of one fake shard; `start_layer` decides whether it takes ids or hidden states."""

    http: httpx.AsyncClient
    start_layer: int = 0

    async def step(
        self,
        session: str,
        mode: str,
        past_len: int,
        ids: Sequence[int],
        *,
        changed: dict[str, str | bytes | None] | None = None,
        body: Body | None = None,
        context: bytes = b"",
    ) -> httpx.Response:
        """One step.

        Args:
            session: Its session.
            mode: The cache mode.
            past_len: Tokens before it.
            ids: Its tokens, of which the tensor is made.
            changed: Replaces headers, or leaves out those that are None.
            body: Replaces the tensor and the context.
            context: The sampling context, as it is sent.
        """
        shape = f"1,{len(ids)}" if self.start_layer == 0 else f"1,{len(ids)},{HIDDEN_SIZE}"
        headers: dict[str, str | bytes | None] = {
            "X-Meshnet-Session": session,
            "X-Meshnet-Cache": mode,
            "X-Meshnet-Past-Len": str(past_len),
            "X-Meshnet-Shape": shape,
            "X-Meshnet-Dtype": "int32" if self.start_layer == 0 else "float32",
            "X-Meshnet-Start-Layer": str(self.start_layer),
            "X-Meshnet-Sampling": "{}",
            "X-Meshnet-Context-Bytes": str(len(context)) if context else None,
        }
        headers |= changed or {}
        sent = [(name, value) for name, value in headers.items() if value is not None]
        content = self.frame(ids) + context if body is None else body
        return await self.http.post("/v1/forward", content=content, headers=_as_bytes(sent))

    def frame(self, ids: Sequence[int]) -> bytes:
        """The body of a step: ids, or the fake model's hidden states of them."""
        if self.start_layer == 0:
            return array("i", ids).tobytes()
        return array("f", [float(value) for i in ids for value in (i, 0, 0, 0)]).tobytes()

    async def cache(self) -> dict[str, int]:
        """The numbers of `GET /v1/shard`'s cache."""
        return (await self.http.get("/v1/shard")).json()["cache"]

    async def close(self, session: str) -> httpx.Response:
        """Free a session."""
        return await self.http.delete(f"/v1/sessions/{session}")


@asynccontextmanager
async def shard_client(url: str, start_layer: int = 0) -> AsyncGenerator[ShardClient]:
    """A caller that knows the cluster key."""
    auth = {"authorization": f"Bearer {CLUSTER_KEY}"}
    async with plain_client(url, auth) as http:
        yield ShardClient(http, start_layer)


def _as_bytes(headers: Sequence[tuple[str, str | bytes]]) -> list[tuple[bytes, bytes]]:
    """Bytes, so that also what httpx would not encode can be sent."""
    return [
        (name.encode(), value.encode() if isinstance(value, str) else value)
        for name, value in headers
    ]
