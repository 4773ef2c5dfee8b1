"""How much memory a process takes, as Linux tells it."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(pid: int, kind: str) -> int:
    """A line of /proc/PID/status in bytes (`VmRSS`, `VmHWM`, `RssAnon`); 0 of one that has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in lines:
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak(pid: int) -> None:
    """Let `VmHWM` begin anew, at what the process takes now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
