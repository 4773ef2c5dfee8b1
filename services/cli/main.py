"""The command `meshnet`: what its commands are."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from services.cli.bench import bench
from services.cli.chat import chat
from services.cli.errors import OneLineErrors
from services.cli.head import head
from services.cli.key import key
from services.cli.model import model_app
from services.cli.shard import shard
from services.cli.up import up

app = typer.Typer(
    name="meshnet",
    cls=OneLineErrors,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # joins a paragraph's lines
    add_completion=False,
    pretty_exceptions_enable=False,  # locals in a traceback may hold the cluster key
)
app.command()(up)
app.command()(shard)
app.command()(head)
app.command()(chat)
app.command()(bench)
app.command()(key)
app.add_typer(model_app, name="model")


def _print_version(asked: bool) -> None:  # noqa: FBT001  # how typer calls it
    if not asked:
        return
    try:
        typer.echo(f"meshnet {version('meshnet')}")
    except PackageNotFoundError:  # run from a checkout that is not installed
        typer.echo("meshnet, from a checkout")
    raise typer.Exit


@app.callback()
def main(
    *,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            help="Print the version and end.",
        ),
    ] = False,
) -> None:
    """One large language model over several ordinary machines, behind an OpenAI-compatible API.

    To try it on this machine: `meshnet up`, and in another terminal `meshnet chat`. On several
    machines: one `meshnet shard` on each, and one `meshnet head` that names them all.
    """
    del show_version
