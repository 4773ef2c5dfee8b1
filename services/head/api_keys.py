"""API keys: who a caller is, by the digest of what it shows."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hmac import compare_digest

from services.head.rate_limit import RateLimit
from services.head.settings import HeadSettings


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever showed a key.

    Attributes:
        name: Of the key.
        sha256: The key's digest, as `digest_of` makes it.
        rate_limit: None lets any number of requests through.
    """

    name: str
    sha256: str
    rate_limit: RateLimit | None = None


class ApiKeys:
    """The keys that open a head."""

    def __init__(self, callers: Sequence[Caller]) -> None:
        self._callers = tuple(callers)

    def caller(self, key: str) -> Caller | None:
        """Whose key it is. Takes the same time whichever it is, and if it is none."""
        digest = digest_of(key)
        found = None
        for caller in self._callers:
            if compare_digest(caller.sha256, digest):
                found = caller
        return found


def api_keys_of(settings: HeadSettings) -> ApiKeys | None:
    """The keys of the settings; the cluster's opens everything too. None: none is asked for."""
    if not settings.api_keys:
        return None
    callers = [
        Caller(key.name, key.sha256, RateLimit(key.rate_limit) if key.rate_limit else None)
        for key in settings.api_keys
    ]
    if settings.cluster_key is not None:
        callers.append(Caller("cluster", digest_of(settings.cluster_key.get_secret_value())))
    return ApiKeys(callers)


def new_key() -> str:
    """A random key of 256 bits."""
    return f"mesh_{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> str:
    """What is kept of a key: its SHA-256, in hexadecimal.

    A slow hash with a salt protects passwords, which can be guessed. Nobody guesses 256 random
    bits, however quick the hash is; and this one is computed at each request.
    """
    return hashlib.sha256(key.encode()).hexdigest()
