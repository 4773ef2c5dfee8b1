"""One step as one hop sees it, what ties its logs together, and who there is to take it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from meshnet.errors import MeshError
from meshnet.generation import NO_CONTEXT, Sampling, SamplingContext
from meshnet.head.hop_client import HopClient
from meshnet.head.request_times import RequestTimes
from meshnet.topology import Hop
from meshnet.wire.frames import Frame
from meshnet.wire.headers import CacheMode


@dataclass(frozen=True, slots=True)
class Trace:
    """What ties the logs of all hops to one request, and where its time went."""

    request_id: str | None = None
    traceparent: str | None = None
    times: RequestTimes = field(default_factory=RequestTimes, compare=False)


@dataclass(frozen=True, slots=True)
class Call:
    """One step as one hop sees it.

    Attributes:
        mode: How the hop treats its cache.
        frame: The hop's input.
        past_len: Tokens that the hop must already hold.
        sampling: How the tail samples; None samples nothing.
        context: What its answer depends on besides.
    """

    mode: CacheMode
    frame: Frame
    past_len: int
    sampling: Sampling | None = None
    context: SamplingContext = NO_CONTEXT


class Shards(Protocol):
    """The shards there are; see RouteBook."""

    def client(self, endpoint: str) -> HopClient:
        """The way to a shard."""
        ...

    async def look(self, hop: Hop) -> Hop:
        """What the shard of `hop` is now.

        Raises:
            MeshError: It is not there, or not ready.
        """
        ...

    def set_aside(self, endpoint: str, failure: MeshError) -> None:
        """Use the shard for nothing new for a while."""
        ...

    def alternative(self, hop: Hop) -> Hop | None:
        """Another shard that can take over from `hop`."""
        ...

    def enter(self, endpoint: str) -> None:
        """Count a session as served there."""
        ...

    def leave(self, endpoint: str) -> None:
        """Count it no more."""
        ...
