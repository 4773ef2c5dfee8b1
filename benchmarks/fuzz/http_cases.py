"""Cases that are no request of the protocol, or no HTTP at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Final

from benchmarks.fuzz.case import CLIENT_ERRORS, Bench, Case
from benchmarks.fuzz.raw_http import SHORT_PATIENCE_S, Request, chunked

_METHODS: Final = (
    *("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY"),
    *("get", "BREW", "X" * 300),
)
_PATHS: Final = (
    *("/", "//", "*", "/v1", "/v1/", "/v1/forward/", "//v1/forward", "/v1//forward", "/v2/forward"),
    *("/v1/forward%00", "/v1/forward;x", "/v1/forward%2f", "/V1/FORWARD", "/v1/./forward"),
    *("/v1/../v1/forward", "/v1/sessions", "/v1/sessions/", "/v1/shard/", "/v1/shard?x=%00"),
    *("/docs", "/openapi.json", "/redoc", "/.env", "/%ff", "/é", "/" + "a" * 5000, "/livez/"),
    *("http://elsewhere/v1/shard", "http://elsewhere:0/", "/v1/models", "/readyz", "/metrics"),
)
_CHUNK_SIZES: Final = (
    *(b"FFFFFFFFFFFFFFFF", b"-1", b"+4", b"0x4", b"4;" + b"x" * 20_000, b"", b"g", b" 4", b"4 "),
    *(b"00000000000000000000004", b"7fffffff", b"\xff"),
)
_NOISE: Final = (
    *(b"", b"\r\n", b"\r\n" * 1000, b"\0" * 64, b"\n\n", b"GET", b"GET /livez", b"GET / HTTP/9.9"),
    *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 8),
    *(b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/0.9\r\n\r\n", b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n"),
    b"A" * 70_000,
)


def path_or_method(bench: Bench, rng: Random) -> Case:
    method, path = rng.choice(_METHODS), rng.choice(_PATHS)
    if rng.random() < 0.2:
        path = f"/v1/sessions/{rng.choice(bench.victims).session}"
        method = rng.choice([m for m in _METHODS if m != "DELETE"])
    request = bench.maker.request(method, path)
    if rng.random() < 0.3:
        request = replace(bench.ghost_step(rng), method=method, path=path)
    allowed = CLIENT_ERRORS | {200}
    return Case("path or method", request.encode(), allowed, method, must_answer=False)


def framing(bench: Bench, rng: Random) -> Case:
    """HTTP that is none; of a session that nobody has, should it pass all the same."""
    ghost = bench.ghost_step(rng)
    broken: tuple[Callable[[], bytes], ...] = (
        lambda: rng.choice(_NOISE),
        lambda: rng.randbytes(rng.randint(1, 2000)),
        lambda: ghost.encode().replace(b"\r\n", b"\n"),
        lambda: ghost.encode().replace(b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/2", b"FTP/1"))),
        lambda: ghost.encode().replace(b": ", rng.choice((b" : ", b":\r\n ", b"", b"\0: ")), 3),
        lambda: ghost.encode()[: rng.randrange(1, 400)],
        lambda: ghost.without("Host").encode(),
        lambda: ghost.having("X-Pad", b"x" * 70_000).encode(),
        lambda: _with_many_headers(ghost, rng).encode(),
        lambda: ghost.having("Transfer-Encoding", rng.choice(("gzip", "x, chunked"))).encode(),
        lambda: ghost.having("Content-Length", "4").adding("Content-Length", "8").encode(),
        lambda: ghost.having("Expect", "100-continue").encode(),
        lambda: ghost.having("Upgrade", "websocket").having("Connection", "Upgrade").encode(),
        lambda: ghost.encode() * 3,
        lambda: _both_lengths(ghost),
        lambda: _chunk_of_size(ghost, rng.choice(_CHUNK_SIZES)),
    )
    data = rng.choice(broken)()
    return Case("framing", data, CLIENT_ERRORS, must_answer=False, patience_s=SHORT_PATIENCE_S)


def _with_many_headers(step: Request, rng: Random) -> Request:
    for i in range(rng.choice((50, 500, 3000))):
        step = step.adding(f"X-Meshnet-Pad-{i}", "x")
    return step


def _both_lengths(step: Request) -> bytes:
    both = step.having("Content-Length", str(len(step.body))).having("Transfer-Encoding", "chunked")
    return both.having_body(chunked(step.body, 100)).encode()


def _chunk_of_size(step: Request, size: bytes) -> bytes:
    body = size + b"\r\n" + step.body + b"\r\n0\r\n\r\n"
    return step.having("Transfer-Encoding", "chunked").having_body(body).encode()


def other_type(bench: Bench, rng: Random) -> Case:
    """`Content-Type` and its like are not looked at: a miss, as of any ghost."""
    kinds = ("application/json", "multipart/form-data", "text/plain; charset=\x7f", "x" * 3000)
    step = bench.ghost_step(rng).having("Content-Type", rng.choice(kinds))
    step = step.having("Content-Encoding", rng.choice(("gzip", "br", "identity", "")))
    return Case("other content type", step.encode(), frozenset({400, 409}))
