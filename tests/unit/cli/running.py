"""Runs the command line in the test's own process."""

from __future__ import annotations

from dataclasses import dataclass

from typer.testing import CliRunner

from services.cli.main import app


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    error_lines: list[str]


def run(*arguments: str, stdin: str | None = None) -> Ended:
    """Run `meshnet ARGUMENTS`."""
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    return Ended(result.exit_code, result.stdout, result.stderr.splitlines())
