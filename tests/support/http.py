"""Clients for servers on this machine."""

from __future__ import annotations

from collections.abc import Mapping

import httpx


def plain_client(base_url: str = "", headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """A client without proxies and certificates: reading the latter takes 18 ms a client."""
    return httpx.AsyncClient(
        base_url=base_url,
        headers=headers,
        trust_env=False,
        verify=False,  # noqa: S501  # everything here is plain HTTP on 127.0.0.1
        timeout=30,
    )
