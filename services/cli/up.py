"""`meshnet up`: a whole cluster on this machine."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path, PurePath
from tempfile import mkdtemp
from typing import Annotated

import typer

from meshnet.errors import ModelError
from meshnet.text.model_files import find_folder, read_facts
from meshnet.topology import LayerSpan, even_spans
from services.cli.cluster import LocalCluster
from services.cli.models import resolve
from services.cli.progress import LoadingLines
from services.cli.serving import check_port_free, share_of_cores
from services.cli.settings import CliSettings, load_settings
from services.shard.settings import Dtype, Weights


def up(
    *,
    model: Annotated[
        str,
        typer.Option(
            help="smollm2 (fetched once), a folder, a GGUF file, or a Hugging Face id.",
        ),
    ] = "smollm2",
    shards: Annotated[int, typer.Option(min=1, help="How many; each gets a span of layers.")] = 2,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The endpoint's port.")] = 8000,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of hidden states and caches; float32 unless --weights is bf16.",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        Weights | None,
        typer.Option(
            help="How weights are kept: in 8 or 4 bits, or in the dtype unless given.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Compute threads of each shard; its share of the cores unless given."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the logs here instead of writing them to files.")
    ] = False,
) -> None:
    """Start shards and a head on this machine, and stop them with Ctrl-C.

    All of it listens on 127.0.0.1 only. A shard that ends is started again. MESHNET_SHARD_* and
    MESHNET_HEAD_* variables reach the processes; MESHNET_CLUSTER_KEY sets their key, which is a
    random one otherwise.
    """
    check_port_free("127.0.0.1", port)
    loadable = resolve(model, note=lambda text: typer.echo(text, err=True))
    spans = even_spans(_count_layers(loadable), shards)
    key = load_settings(CliSettings, {}).cluster_key
    log_dir = None if verbose else Path(mkdtemp(prefix="meshnet-"))
    names = [*(f"shard-{i}" for i in range(1, shards + 1)), "head"]
    lines = LoadingLines(names, live=not verbose)
    cluster = LocalCluster(
        loadable,
        spans,
        dtype=dtype,
        weights=weights,
        threads=threads or share_of_cores(shards),
        port=port,
        log_dir=log_dir,
        cluster_key=key.get_secret_value() if key else None,
        watcher=lines,
    )
    _introduce(loadable, spans, log_dir, lines)
    asyncio.run(_until_signal(_run(cluster, lines, PurePath(loadable).name)))


def _count_layers(model: str) -> int:
    n_layers = read_facts(find_folder(model)).n_layers
    if n_layers is None:
        raise ModelError(
            f"config.json of {model} does not say how many layers there are",
            field="model",
            allowed="a decoder-only language model",
        )
    return n_layers


def _introduce(
    model: str, spans: list[LayerSpan], log_dir: Path | None, lines: LoadingLines
) -> None:
    shares = ", ".join(f"{span.start}-{span.end - 1}" for span in spans)
    lines.note(f"Model {model}, layers {shares}")
    if log_dir is not None:
        lines.note(f"Logs in {log_dir}")


async def _run(cluster: LocalCluster, lines: LoadingLines, model_name: str) -> None:
    with lines:
        async with cluster:
            lines.stop()
            typer.echo(_invitation(cluster.base_url, model_name))
            await asyncio.Event().wait()


def _invitation(base_url: str, model_name: str) -> str:
    question = {
        "model": model_name,
        "stream": True,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    return (
        f"\nReady: {base_url} (OpenAI-compatible; Ctrl-C stops it)\n\n"
        f"  meshnet chat --url {base_url} 'What is the capital of France?'\n\n"
        f"  curl -N {base_url}/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(json.dumps(question))}\n"
    )


async def _until_signal(work: Coroutine[None, None, None]) -> None:
    """Run `work` to its end or until SIGINT or SIGTERM; its own clean-up is waited for.

    A signal during the clean-up changes nothing: that ends by its own limits.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        typer.echo("Stopping...", err=True)
        working.cancel()
    with suppress(asyncio.CancelledError):
        await working
