from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from meshnet.errors import InvalidRequest, MeshError, ModelError
from services.cli.errors import CliError, OneLineErrors


def _ends_with(error: BaseException) -> tuple[int, list[str]]:
    app = typer.Typer(cls=OneLineErrors)

    @app.callback()
    def group() -> None: ...  # pyright: ignore[reportUnusedFunction]  # typer has it

    @app.command()
    def fail() -> None:  # pyright: ignore[reportUnusedFunction]  # typer has it
        raise error

    result = CliRunner().invoke(app, ["fail"])
    return result.exit_code, result.stderr.splitlines()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (CliError("it broke"), 1, "Error: it broke"),
        (ModelError("no\n such model"), 1, "Error: no such model"),
        (
            InvalidRequest("9 is too many", field="n_shards", value=9, allowed="1 to 4"),
            2,
            "Error: --n-shards: 9 is too many; allowed: 1 to 4",
        ),
        (MeshError("x; allowed: 1 to 4", allowed="1 to 4"), 1, "Error: x; allowed: 1 to 4"),
    ],
)
def test_an_expected_error_is_one_line(error: Exception, code: int, line: str) -> None:
    """The option, the problem and what is allowed are said once each, in one line."""
    assert (code, [line]) == _ends_with(error)


def test_log_lines_come_before_the_error() -> None:
    """What a log says more is shown first, so that the error is the last line."""
    expected = ["  | one", "  | two", "Error: it broke"]
    assert (1, expected) == _ends_with(CliError("it broke", ["one", "two"]))


@pytest.mark.parametrize("error", [typer.Abort(), KeyboardInterrupt()])
def test_an_interrupt_is_no_error(error: BaseException) -> None:
    """Ctrl-C ends a command without a word, with the shell's exit code for it."""
    assert _ends_with(error) == (130, [])


def test_an_unexpected_error_keeps_its_traceback() -> None:
    """What nobody foresaw is not made to look like a bad option."""
    result = _ends_with(ZeroDivisionError())
    assert result[0] == 1
    assert not any(line.startswith("Error") for line in result[1])
