from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from time import monotonic

import pytest

from services.cli.processes import ManagedProcess, describe_end

# A child that stops with its stdin, as ours do, and says when it is there.
OBEDIENT = """
import sys, time
from services.cli.serving import stop_with_stdin
stop_with_stdin()
print("here", flush=True)
time.sleep(60)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("here", flush=True)
time.sleep(60)
"""
# A parent that starts such a child, and tells its process id.
PARENT = f"""
import asyncio, sys
from pathlib import Path
from services.cli.processes import ManagedProcess
async def main():
    log = Path(sys.argv[1])
    child = ManagedProcess("child", [sys.executable, "-c", {OBEDIENT!r}], log_path=log)
    await child.start()
    while not child.last_log_lines():
        await asyncio.sleep(0.02)
    print(child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def _python(code: str, log: Path, **env: str) -> ManagedProcess:
    return ManagedProcess("child", [sys.executable, "-c", code], env=env, log_path=log)


async def _wait_for_log(process: ManagedProcess) -> None:
    async with asyncio.timeout(30):
        while not process.last_log_lines():  # noqa: ASYNC110  # another process sets no Event
            await asyncio.sleep(0.02)


async def test_output_and_environment(tmp_path: Path) -> None:
    """Both outputs are in the log; the variables given are the child's, besides our own."""
    code = "import os, sys; print(os.environ['SECRET']); sys.exit(len(os.environ['PATH']) < 1)"
    process = _python(code, tmp_path / "log", SECRET="key")
    await process.start()
    assert await process.wait() == 0
    assert process.last_log_lines() == ["key"]


async def test_the_log_is_that_of_all_lives(tmp_path: Path) -> None:
    """A process that is started again has another id, and goes on in the same log."""
    process = _python("import os; print(os.getpid())", tmp_path / "log")
    pids: list[str] = []
    for _ in range(2):
        await process.start()
        await process.wait()
        pids.append(str(process.pid))
    assert pids == process.last_log_lines()
    assert pids[1:] == process.last_log_lines(1)


async def test_stop_asks_first(tmp_path: Path) -> None:
    """A process that heeds SIGTERM ends by it."""
    process = _python("print('here', flush=True); import time; time.sleep(60)", tmp_path / "log")
    await process.start()
    await _wait_for_log(process)
    assert await process.stop() == -signal.SIGTERM
    assert process.returncode == -signal.SIGTERM


async def test_stop_has_a_limit(tmp_path: Path) -> None:
    """A process that does not heed SIGTERM is killed when the limit is over."""
    process = _python(STUBBORN, tmp_path / "log")
    await process.start()
    await _wait_for_log(process)
    assert await process.stop(limit_s=0.2) == -signal.SIGKILL


async def test_stopping_twice_or_too_early_is_no_error(tmp_path: Path) -> None:
    """A process that never ran or has ended can be stopped, killed and asked about."""
    process = _python("print(1)", tmp_path / "log")
    assert await process.stop() is None
    assert process.last_log_lines() == []
    await process.start()
    await process.wait()
    process.kill()
    assert (await process.stop(), process.returncode) == (0, 0)


async def test_one_life_at_a_time(tmp_path: Path) -> None:
    """A process that runs cannot be started; one that was never started has no id."""
    process = _python("import time; time.sleep(60)", tmp_path / "log")
    with pytest.raises(RuntimeError, match="never started"):
        _ = process.pid
    await process.start()
    with pytest.raises(RuntimeError, match="runs already"):
        await process.start()
    process.kill()
    assert await process.wait() == -signal.SIGKILL


async def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    """A child goes with its parent, even if that is killed and can do nothing more."""
    parent = _python(PARENT, tmp_path / "parent")
    parent = ManagedProcess(
        "parent", [sys.executable, "-c", PARENT, str(tmp_path / "child")], log_path=parent.log_path
    )
    await parent.start()
    await _wait_for_log(parent)
    child_pid = int(parent.last_log_lines()[0])
    os.kill(child_pid, 0)
    parent.kill()
    await parent.wait()
    assert await _gone(child_pid, limit_s=10)


async def _gone(pid: int, limit_s: float) -> bool:
    end = monotonic() + limit_s
    while monotonic() < end:
        try:
            # A zombie is gone as well: whoever adopted it has not looked yet.
            if "\nState:\tZ" in await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text):
                return True
        except OSError:
            return True
        await asyncio.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("code", "text"), [(0, "ended with exit code 0"), (3, "code 3"), (-9, "was ended by SIGKILL")]
)
def test_an_end_is_described(code: int, text: str) -> None:
    """A signal has a name, an exit code its number."""
    assert text in describe_end(code)
