"""What `meshnet up` shows while its members load, and what it says afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from meshnet.wire.messages import ShardReadiness
from services.cli.cluster import ClusterWatcher


class LoadingLines(ClusterWatcher):
    """A line for each member while they load; then plain lines. On stderr.

    Args:
        names: The members.
        live: False shows no moving lines: something else writes to the terminal.
    """

    def __init__(self, names: Sequence[str], *, live: bool = True) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[state]}"),
            console=self._console,
            disable=not live,
        )
        self._tasks: dict[str, TaskID] = {
            name: self._progress.add_task(name, total=None, state="starting") for name in names
        }

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the lines as they are; what follows goes below them."""
        self._progress.stop()

    def loading(self, name: str, readiness: ShardReadiness) -> None:
        """Move the member's bar."""
        # A head tells no bytes: its bar is empty, then full.
        ready = readiness.state == "ready"
        total = readiness.total_bytes or (1 if ready else None)
        self._progress.update(
            self._tasks[name],
            total=total,
            completed=total if ready else readiness.loaded_bytes,
            state=readiness.reason if readiness.reason and not ready else readiness.state,
        )

    def note(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, markup=False)
