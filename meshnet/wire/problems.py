"""Errors as RFC 9457 problem documents, both ways."""

from __future__ import annotations

import json
from typing import Final, cast

from meshnet.errors import HopProtocolError, MeshError, from_code

MEDIA_TYPE: Final = "application/problem+json"

_OWN_MEMBERS: Final = frozenset({"type", "title", "status", "detail", "code", "retryable"})


def to_problem(error: MeshError) -> dict[str, object]:
    """The problem document of `error`; its members stand beside the standard ones."""
    return {
        **error.members,
        "type": f"urn:meshnet:problem:{error.code}",
        "title": error.code.replace("_", " "),
        "status": error.status,
        "detail": error.message,
        "code": error.code,
        "retryable": error.retryable,
    }


def from_problem(body: bytes, *, status: int, endpoint: str) -> MeshError:
    """The error that a hop answered with, as the class that it raised.

    Anything that is not one of our problem documents is a HopProtocolError naming the hop.
    """
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):  # not JSON, not text at all, or nested without end
        raw = None
    if isinstance(raw, dict):
        document = cast("dict[str, object]", raw)
        members = {k: v for k, v in document.items() if k not in _OWN_MEMBERS}
        members["endpoint"] = endpoint  # who was asked is known here, whatever the answer says
        code, detail = document.get("code"), document.get("detail")
        if isinstance(code, str) and isinstance(detail, str):
            error = from_code(code, detail, members)
            if error is not None:
                return error
    return HopProtocolError(
        f"{endpoint} answered {status} without a problem document", endpoint=endpoint, status=status
    )
