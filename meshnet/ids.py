"""Names of sessions, steps, requests and process lives."""

from __future__ import annotations

import re
import uuid
from typing import Final, NewType

SessionId = NewType("SessionId", str)
"""One generation's state over all hops."""

StepId = NewType("StepId", str)
"""One step of a session; a repeat carries the same id."""

RequestId = NewType("RequestId", str)
"""One request at the head, the same in every hop's log."""

BootId = NewType("BootId", str)
"""Which life of a shard process this is."""

TOKEN_PATTERN: Final = r"^[A-Za-z0-9._-]{1,128}$"  # noqa: S105  # a pattern, no secret
"""What an id in a header may look like."""

_TOKEN = re.compile(TOKEN_PATTERN)
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def is_token(text: str) -> bool:
    """Whether `text` can travel as an id: 1-128 characters of `[A-Za-z0-9._-]`."""
    return _TOKEN.fullmatch(text) is not None  # `$` alone lets a line end pass


def is_traceparent(text: str) -> bool:
    """Whether `text` is a W3C trace context, and so may be sent on to the hops."""
    return _TRACEPARENT.fullmatch(text) is not None


def new_id() -> str:
    """A fresh id, unique over all machines: 32 hexadecimal digits."""
    return uuid.uuid4().hex
