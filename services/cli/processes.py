"""Child processes that never outlive their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

_STDERR: Final = 2  # the descriptor: sys.stderr may be something that a child cannot write to

STOP_LIMIT_S: Final = 8.0
"""From SIGTERM to SIGKILL. Longer than the services' own grace."""


class ManagedProcess:
    """One child process, which can be started again after its end.

    Its stdin is a pipe that ends with us, however we end: a child run with `--stop-with-stdin`
    stops then. It has a session of its own, so that a Ctrl-C in the terminal reaches us only, and
    who stops first is ours to say.

    Args:
        name: What people call it.
        command: Program and arguments; never a secret, others can read them.
        env: Variables besides our own environment.
        log_path: Where its output goes, appended; None is our own stderr.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._command = tuple(command)
        self._env = dict(env or {})
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Its process id; that of its last life after its end."""
        return self._running.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, minus the signal's number if one ended it; None while it runs."""
        return self._running.returncode

    @property
    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process

    async def start(self) -> None:
        """Start it, for the first time or after its end."""
        if self._process is not None and self._process.returncode is None:
            raise RuntimeError(f"{self.name} runs already")
        with ExitStack() as stack:
            log = None
            if self.log_path is not None:
                log = stack.enter_context(self.log_path.open("ab"))
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.PIPE,
                stdout=log or _STDERR,
                stderr=log or _STDERR,
                env={**os.environ, **self._env},  # noqa: TID251  # handed on, not read
                start_new_session=True,
            )

    async def wait(self) -> int:
        """Wait for its end; its exit code."""
        code = await self._running.wait()
        if self._running.stdin is not None:
            self._running.stdin.close()
        return code

    def kill(self) -> None:
        """End it at once, as a crash would (SIGKILL)."""
        self.send(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to stop (SIGTERM)."""
        self.send(signal.SIGTERM)

    async def stop(self, limit_s: float = STOP_LIMIT_S) -> int | None:
        """Ask it to stop, kill it after `limit_s`; its exit code, None if it was never started."""
        if self._process is None:
            return None
        self.terminate()
        try:
            return await asyncio.wait_for(self.wait(), limit_s)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def last_log_lines(self, n_lines: int = 12) -> list[str]:
        """The end of its log; nothing where it has no log of its own."""
        if self.log_path is None or not self.log_path.is_file():
            return []
        with self.log_path.open(errors="replace") as log:
            return [line.rstrip() for line in deque(log, n_lines)]

    def send(self, number: signal.Signals) -> None:
        """Send a signal; none is sent where nothing runs."""
        with suppress(ProcessLookupError):
            self._running.send_signal(number)


def describe_end(returncode: int) -> str:
    """How a process ended, for a person."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was ended by {signal.Signals(-returncode).name}"
