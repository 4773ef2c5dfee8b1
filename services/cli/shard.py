"""`meshnet shard`: one span of a model's layers behind HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from meshnet.topology import LayerSpan
from services.cli.errors import BadOption
from services.cli.models import resolve_known
from services.cli.serving import StopWithStdin, is_loopback, serve, stop_with_stdin
from services.cli.settings import load_settings
from services.shard.settings import Dtype, ShardSettings, Weights


def shard(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder of safetensors, a GGUF file or its folder, a Hugging Face id, or a "
            "name that `meshnet model get` knows. (env: MESHNET_SHARD_MODEL)"
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="START-END",
            help="The span, END excluded: 0-15 is layers 0 to 14. (env: MESHNET_SHARD_LAYERS)",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Any but this machine's own needs a cluster key in "
            "MESHNET_SHARD_CLUSTER_KEY."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8001,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of hidden states and caches; float32 unless --weights is bf16. "
            "(env: MESHNET_SHARD_DTYPE)",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        Weights | None,
        typer.Option(
            help="How weights are kept: in 8 or 4 bits, or in the dtype unless given. "
            "(env: MESHNET_SHARD_WEIGHTS)",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Compute threads; all cores unless given. (env: MESHNET_SHARD_THREADS)"
        ),
    ] = None,
    stop_with_stdin_: StopWithStdin = False,
) -> None:
    """Run one shard: load a span of a model's layers, and compute them for a head.

    Everything else (cache limits, time to live, log format) is set by MESHNET_SHARD_* variables;
    an option overrides its variable.
    """
    if stop_with_stdin_:
        stop_with_stdin()
    if layers is not None:
        LayerSpan.parse(layers)  # says it better than a pattern does
    options = {
        "model": resolve_known(model),
        "layers": layers,
        "dtype": dtype,
        "weights": weights,
        "threads": threads,
    }
    settings = load_settings(ShardSettings, options)
    _check_reach(host, settings)
    from services.shard.app import create_app  # here, so that `--help` does not wait for it

    serve(lambda: create_app(settings), host=host, port=port)


def _check_reach(host: str, settings: ShardSettings) -> None:
    """A shard computes for, and tells its cache to, whoever reaches it: not without a key."""
    if settings.cluster_key is None and not is_loopback(host):
        raise BadOption(
            "--host",
            f"{host} can be reached from other machines, and no cluster key is set, so that "
            "anybody could use this shard; set MESHNET_SHARD_CLUSTER_KEY, here and as "
            "MESHNET_HEAD_CLUSTER_KEY for the head",
            "127.0.0.1, or any address with a cluster key",
        )
