"""Errors that end a command: what they say in one line, and the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from meshnet.errors import InvalidRequest, MeshError


class CliError(Exception):
    """An expected end of a command, exit code 1.

    Args:
        message: One line: what was wrong, and what to do or what is allowed.
        log_lines: Lines of a log that say more; shown before the message.
    """

    exit_code = 1

    def __init__(self, message: str, log_lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.log_lines = log_lines


class BadOption(CliError):
    """An option or a setting is wrong; nothing was started. Exit code 2."""

    exit_code = 2

    def __init__(self, option: str, problem: str, allowed: str | None = None) -> None:
        super().__init__(f"{option}: {problem}" + (f"; allowed: {allowed}" if allowed else ""))


class OneLineErrors(TyperGroup):
    """Ends with one line on stderr, and no traceback, where an error was to be expected."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:  # noqa: ANN401  # as typer declares it
        """Run the command line; unless standalone, errors are left to the caller."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except CliError as error:
            for line in error.log_lines:
                typer.echo(f"  | {line}", err=True)
            code = _say(error.message, error.exit_code)
        except MeshError as error:
            code = _say(_describe(error), 2 if isinstance(error, InvalidRequest) else 1)
        except TyperException as error:
            # An empty message is a group without a command, which has printed its help.
            code = _say(_describe_usage(error), error.exit_code) if str(error) else 2
        except typer.Abort:
            code = 130
        raise SystemExit(code if isinstance(code, int) else 0)


def _say(message: str, code: int) -> int:
    typer.echo("Error: " + " ".join(message.split()), err=True)
    return code


def _describe(error: MeshError) -> str:
    """The option, the problem, and what is allowed, each of them once."""
    field, allowed = error.members.get("field"), error.members.get("allowed")
    option = f"--{str(field).replace('_', '-')}: " if field else ""
    rest = f"; allowed: {allowed}" if allowed and str(allowed) not in error.message else ""
    return f"{option}{error.message}{rest}"


def _describe_usage(error: TyperException) -> str:
    context = getattr(error, "ctx", None)  # a usage error knows the command it is about
    hint = f" (see '{context.command_path} --help')" if context else ""
    return f"{error.format_message()}{hint}"
