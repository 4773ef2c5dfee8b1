"""Other shards, to which steps have their output pushed: a stream to each, kept open."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from meshnet.transport.hop_stream import HopStreams, StreamLimits
from meshnet.wire import headers
from meshnet.wire.stream_messages import StreamMessage

MAX_NEIGHBOURS: Final = 32
"""Callers name them: the one that was not used for longest goes for a new one."""
_LIMITS: Final = StreamLimits(ping_s=5.0)
"""A stream that is dead without a word is found out soon, since nothing is answered on it."""


@dataclass(frozen=True, slots=True)
class _Neighbour:
    """One life of a shard.

    Attributes:
        boot_id: Which one.
        streams: To it.
        keeping: What keeps them.
    """

    boot_id: str
    streams: HopStreams
    keeping: asyncio.Task[None]


class Neighbours:
    """As a context manager, which closes all streams at its end.

    Args:
        handshake: The headers that a stream is asked for with.
        limits: How streams are opened.
    """

    def __init__(self, handshake: Mapping[str, str], limits: StreamLimits = _LIMITS) -> None:
        self._handshake = handshake
        self._limits = limits
        self._known: OrderedDict[str, _Neighbour] = OrderedDict()
        self._keeping: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Neighbours:
        return self

    async def __aexit__(self, *_: object) -> None:
        keeping = list(self._keeping)
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)

    async def push(self, endpoint: str, boot_id: str, message: StreamMessage) -> bool:
        """Send a message to a shard, at once or not at all.

        Args:
            endpoint: `http://host:port`; nothing is sent there before it has accepted a stream.
            boot_id: The life of the shard that is meant; another one takes no stream.
            message: What it is to have; there is no answer.

        Returns:
            Whether it was sent. Where no stream is open yet, one is opened meanwhile.
        """
        stream = self._streams_to(endpoint, boot_id).now()
        return stream is not None and await stream.push(message)

    def _streams_to(self, endpoint: str, boot_id: str) -> HopStreams:
        known = self._known.get(endpoint)
        if known is None or known.boot_id != boot_id:
            self._leave(endpoint)
            known = self._known[endpoint] = self._meet(endpoint, boot_id)
        self._known.move_to_end(endpoint)
        if len(self._known) > MAX_NEIGHBOURS:
            self._leave(next(iter(self._known)))
        return known.streams

    def _meet(self, endpoint: str, boot_id: str) -> _Neighbour:
        handshake = {**self._handshake, headers.BOOT: boot_id}
        streams = HopStreams(endpoint, handshake, self._limits)
        keeping = asyncio.create_task(streams.keep())
        self._keeping.add(keeping)
        keeping.add_done_callback(self._keeping.discard)
        return _Neighbour(boot_id, streams, keeping)

    def _leave(self, endpoint: str) -> None:
        known = self._known.pop(endpoint, None)
        if known is not None:
            known.keeping.cancel()
