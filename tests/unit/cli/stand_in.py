"""Stands in for the command line in tests of a cluster: a member that only says it is ready.

`python stand_in.py shard|head OPTIONS --port N --stop-with-stdin`. With --model:
`good` is ready at once, `bad` says that its loading failed, `dying` ends with a message, and
`slow` loads for ever.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from services.cli.serving import stop_with_stdin

ANSWERS = {
    "good": (200, b'{"state": "ready", "loaded_bytes": 7, "total_bytes": 7}'),
    "bad": (503, b'{"state": "failed", "reason": "a tensor is missing"}'),
    "slow": (503, b'{"state": "loading", "loaded_bytes": 1, "total_bytes": 7}'),
}


def _option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        kind = _option("--model") if sys.argv[1] == "shard" else "good"
        status, body = ANSWERS[kind]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        """A poll is no news."""


def main() -> None:
    stop_with_stdin()
    sys.stdout.write(f"{' '.join(sys.argv[1:])}\n")
    sys.stdout.flush()
    if _option("--model") == "dying" and sys.argv[1] == "shard":
        sys.exit("Error: --model: there is none")
    HTTPServer(("127.0.0.1", int(_option("--port"))), _Handler).serve_forever()


if __name__ == "__main__":
    main()
