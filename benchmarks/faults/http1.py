"""HTTP/1.1 messages as the proxy needs them: whole, byte for byte, and a few headers read.

Knows Content-Length and chunked bodies; no trailers' meaning, no pipelining.
"""

from __future__ import annotations

import re
from asyncio import IncompleteReadError, StreamReader
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshnet.wire import headers as names

_SESSION_PATH = "/v1/sessions/"
_NO_BODY = frozenset({204, 304})
PROBE_PREFIX = "probe-"
"""How the ids of sessions begin that the head makes to see whether a shard computes."""


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer.

    Attributes:
        head: The first line, the headers and the empty line.
        body: As it came, chunk sizes included.
        headers: By lower-case name.
        number: Of a step that came over a stream; None for what came as a request.
    """

    head: bytes
    body: bytes
    headers: Mapping[str, str]
    number: int | None = None

    @property
    def raw(self) -> bytes:
        """All its bytes."""
        return self.head + self.body

    @property
    def first_line(self) -> list[str]:
        """Method, path and version; or version, status and reason."""
        return self.head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)

    @property
    def session(self) -> str | None:
        """The session that a step or a DELETE is about; None for anything else."""
        method, path, *_ = self.first_line
        if method == "DELETE" and path.startswith(_SESSION_PATH):
            return path.removeprefix(_SESSION_PATH)
        return self._get(names.SESSION) if self.is_step else None

    @property
    def is_step(self) -> bool:
        """Whether it is a step of a session that is no probe."""
        session = self._get(names.SESSION) or PROBE_PREFIX
        is_forward = self.first_line[:2] == ["POST", "/v1/forward"]
        return is_forward and not session.startswith(PROBE_PREFIX)

    @property
    def opens_stream(self) -> bool:
        """Whether it asks for a kept-open stream."""
        return self._get("upgrade") == "websocket"

    @property
    def is_decode(self) -> bool:
        """Whether a step continues with the last token; one that is none is a prefill."""
        return self._get(names.CACHE) == "decode"

    @property
    def is_direct(self) -> bool:
        """Whether a step has its input from another shard, or hands on its output to one."""
        return self._get(names.INPUT_ID) is not None or self._get(names.PUSH_ID) is not None

    @property
    def past_len(self) -> int:
        """The tokens that a step builds on."""
        return int(self._get(names.PAST_LEN) or 0)

    def with_header(self, name: str, value: str) -> Message:
        """The same with another value of a header that it has.

        Raises:
            ValueError: It has no such header.
        """
        pattern = rb"(?i)(\r\n" + re.escape(name.encode()) + rb":)[^\r]*"
        head, n_found = re.subn(pattern, rb"\g<1> " + value.encode(), self.head)
        if n_found != 1:
            raise ValueError(f"{name} is there {n_found} times")
        return replace(self, head=head, headers={**self.headers, name.lower(): value})

    def _get(self, name: str) -> str | None:
        return self.headers.get(name.lower())


async def read_request(reader: StreamReader) -> Message | None:
    """The next request of a connection; None where the caller has closed it between two.

    Raises:
        IncompleteReadError: The caller closed it within one.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except IncompleteReadError as error:
        if error.partial:
            raise
        return None
    headers = _parse(head)
    return Message(head, await _read_body(reader, headers), headers)


async def read_answer(reader: StreamReader) -> Message:
    """The answer to a request that was not a HEAD.

    Raises:
        IncompleteReadError: The connection was closed before its end.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    answer = Message(head, b"", _parse(head))
    if int(answer.first_line[1]) in _NO_BODY:
        return answer
    return replace(answer, body=await _read_body(reader, answer.headers))


def _parse(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:-2]
    pairs = (line.partition(":") for line in lines)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _read_body(reader: StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _read_chunks(reader)
    return await reader.readexactly(int(headers.get("content-length", "0")))


async def _read_chunks(reader: StreamReader) -> bytes:
    """Chunks and trailers, up to and with the last empty line."""
    parts: list[bytes] = []
    size = 1
    while size:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        parts.append(line)
        if size:
            parts.append(await reader.readexactly(size + 2))
    while line := await reader.readuntil(b"\r\n"):
        parts.append(line)
        if line == b"\r\n":
            break
    return b"".join(parts)
