"""Ask twice; the second time a shard's container is killed in the middle and started again.

Both answers must be the same text. Usage: smoke_client.py HOST:PORT CONTAINER. Needs nothing but
the standard library.
"""
# ruff: noqa: T201, S603, S607  # a script: it prints, and calls docker from the path

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from time import monotonic
from typing import Any

QUESTION = "Write a long story about a lighthouse keeper who finds a map."
MAX_TOKENS = 200
MIN_TOKENS = 120  # an answer that ends earlier leaves nothing to disturb
KILL_AFTER_PIECES = 40
READ_TIMEOUT_S = 180  # longer than the head's recovery may take


@dataclass
class Answer:
    """What came over one stream."""

    pieces: list[str] = field(default_factory=list[str])
    tokens: int = 0
    seconds: float = 0.0
    longest_pause: float = 0.0
    paused_after: int = 0

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


def main(address: str, container: str) -> None:
    """Compare an undisturbed answer with a disturbed one."""
    calm = ask(address)
    report("undisturbed", calm)
    before = rebuilds(address)
    broken = ask(address, kill=container)
    report("shard killed", broken)
    tried_again = rebuilds(address) - before
    print(f"  steps tried again: {tried_again:.0f}")
    if calm.tokens < MIN_TOKENS:
        sys.exit(f"the answer has {calm.tokens} tokens, too few to be disturbed")
    if not tried_again:
        sys.exit("the head did not notice that the shard was gone: nothing was tested")
    if broken.text != calm.text:
        sys.exit(f"the answers differ:\n--- undisturbed\n{calm.text}\n--- now\n{broken.text}")


def ask(address: str, *, kill: str | None = None) -> Answer:
    """Stream one answer; kill and restart the container `kill` once some tokens are there."""
    answer = Answer()
    restart = None
    started = last = monotonic()
    for chunk in stream(address):
        now = monotonic()
        if now - last > answer.longest_pause:
            answer.longest_pause, answer.paused_after = now - last, len(answer.pieces)
        last = now
        if "error" in chunk:
            sys.exit(f"an error event after {len(answer.pieces)} pieces: {chunk['error']}")
        for choice in chunk["choices"]:
            answer.pieces += [choice["delta"]["content"]] if choice["delta"].get("content") else []
        if chunk.get("usage"):
            answer.tokens = chunk["usage"]["completion_tokens"]
        if kill and restart is None and len(answer.pieces) == KILL_AFTER_PIECES:
            # Beside the stream, so that reading goes on and the pause is measured as it is.
            restart = subprocess.Popen(
                ["sh", "-ec", f"docker kill {kill}; docker start {kill}"], stdout=subprocess.DEVNULL
            )
    answer.seconds = last - started
    if restart is not None and restart.wait(60) != 0:
        sys.exit("the container could not be killed and started")
    return answer


def stream(address: str) -> Iterator[dict[str, Any]]:
    """The events of one streamed chat completion; the process ends unless `[DONE]` is the last."""
    connection = HTTPConnection(address, timeout=READ_TIMEOUT_S)
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"the head answered {response.status}: {response.read(2000)!r}")
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            connection.close()
            return
        if data.startswith("{"):
            yield json.loads(data)
    sys.exit("the stream ended without [DONE]")


def rebuilds(address: str) -> float:
    """How many steps the head has tried again so far."""
    connection = HTTPConnection(address, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return sum(float(n) for n in re.findall(r"\nmeshnet_head_rebuilds_total\{.*\} (.+)", text))


def report(name: str, answer: Answer) -> None:
    """Print the figures."""
    print(
        f"  {name}: {answer.tokens} tokens in {answer.seconds:.1f} s,"
        f" longest pause {answer.longest_pause:.2f} s after piece {answer.paused_after}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
