"""llama.cpp over two of its RPC servers, with the same weights, against two nodes of ours.

Its programs are the user's: a folder with `llama-server` and `rpc-server`, built with
`-DGGML_RPC=ON`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Final

import httpx

from benchmarks.bench.decode import decode_rate
from benchmarks.bench.first_token import first_token_s
from benchmarks.bench.results import Result, median_of, ratio
from benchmarks.bench.sides import Endpoint, in_each_format, nodes, open_endpoint
from benchmarks.bench.streams import rate_together
from benchmarks.bench.workload import Workload
from services.cli.processes import ManagedProcess, describe_end
from services.cli.serving import free_port

DECODE: Final = 1.0
FIRST_TOKEN: Final = 0.4
EIGHT_STREAMS: Final = 2.5
_FORMATS: Final = ("int4",)
_OURS, _THEIRS = "two nodes", "llama.cpp q4"
_N_SLOTS: Final = 8
_SLOT_TOKENS: Final = 1024
_START_LIMIT_S: Final = 120.0
_RPC_SERVERS: Final = ("rpc-server", "ggml-rpc-server")
"""Its name, and the one that newer builds give it."""
# As variables, which older builds pass over: without a cache of past prompts in memory, whose
# upkeep would count against it here, and without fitting the split to free memory.
_ENV: Final = {"LLAMA_ARG_CACHE_RAM": "0", "LLAMA_ARG_FIT": "off"}


async def measure(work: Workload) -> list[Result]:
    """One stream, a long prompt and eight streams, at four bits and one thread a process."""
    binaries = work.llama
    if binaries is None:
        print("NOT MEASURED: llama.cpp, since no folder with its programs was named")
        return []

    async def measure_format(weights: str) -> list[Result]:
        async with nodes(work, 2, weights) as ours, _llama_nodes(work, binaries) as theirs:
            return await _compare(work, ours, theirs, weights)

    return await in_each_format(_FORMATS, measure_format)


async def _compare(work: Workload, ours: Endpoint, theirs: Endpoint, weights: str) -> list[Result]:
    sides = {_OURS: ours, _THEIRS: theirs}
    decode = await work.in_turn(sides, lambda side: decode_rate(work, side))
    first = await work.in_turn(sides, lambda side: first_token_s(work, side, 512))
    eight = await work.in_turn(sides, lambda side: rate_together(work, side, _N_SLOTS))
    over = f"two nodes over {_THEIRS}, {weights}"
    return [
        ratio(f"decode: {over}", decode, _OURS, _THEIRS, "higher", DECODE),
        ratio(f"first token after 512: {over}", first, _OURS, _THEIRS, "lower", FIRST_TOKEN),
        ratio(f"eight streams: {over}", eight, _OURS, _THEIRS, "higher", EIGHT_STREAMS),
        median_of(f"decode on two nodes, {_THEIRS}", decode[_THEIRS], "tokens/s", "higher"),
        median_of(f"first token after 512, {weights}", first[_OURS], "s", "lower"),
        median_of(f"first token after 512, {_THEIRS}", first[_THEIRS], "s", "lower"),
        median_of(f"eight streams in sum, {weights}", eight[_OURS], "tokens/s", "higher"),
        median_of(f"eight streams in sum, {_THEIRS}", eight[_THEIRS], "tokens/s", "higher"),
    ]


@asynccontextmanager
async def _llama_nodes(work: Workload, binaries: Path) -> AsyncGenerator[Endpoint]:
    """Two RPC servers with half of the layers each, and llama.cpp's server in front of them."""
    rpc_server = _find(binaries, *_RPC_SERVERS)
    llama_server = _find(binaries, "llama-server")
    (gguf,) = work.model.glob("*.gguf")
    ports = [free_port() for _ in range(2)]
    port = free_port()
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory()))

        async def start(name: str, *command: str | Path) -> ManagedProcess:
            arguments = [str(part) for part in command]
            process = ManagedProcess(name, arguments, env=_ENV, log_path=logs / f"{name}.log")
            stack.push_async_callback(process.stop)
            await process.start()
            return process

        for rpc_port in ports:
            options = ("--host", "127.0.0.1", "--port", str(rpc_port), "--threads", "1")
            rpc = await start(f"rpc-{rpc_port}", rpc_server, *options)
            await _until(rpc, lambda port=rpc_port: _listens(port))
        server = await start(
            "llama-server",
            *(llama_server, "--model", gguf),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--rpc", ",".join(f"127.0.0.1:{rpc_port}" for rpc_port in ports)),
            *("--n-gpu-layers", "99", "--tensor-split", "1,1"),
            *("--threads", "1", "--threads-batch", "1"),
            *("--parallel", str(_N_SLOTS), "--ctx-size", str(_N_SLOTS * _SLOT_TOKENS)),
        )
        url = f"http://127.0.0.1:{port}"
        await _until(server, lambda: _is_healthy(url))
        yield await stack.enter_async_context(
            open_endpoint(url, work.model.name, cache_prompt=False)
        )


def _find(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).is_file():
            return (folder / name).resolve()
    raise RuntimeError(f"{folder} has no {' or '.join(names)}")


async def _until(process: ManagedProcess, is_ready: Callable[[], Awaitable[bool]]) -> None:
    ends_at = monotonic() + _START_LIMIT_S
    while not await is_ready():
        log = "\n".join(process.last_log_lines())
        if process.returncode is not None:
            raise RuntimeError(f"{process.name} {describe_end(process.returncode)}\n{log}")
        if monotonic() > ends_at:
            raise RuntimeError(f"{process.name} was not ready after {_START_LIMIT_S:g} s\n{log}")
        await asyncio.sleep(0.1)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def _is_healthy(url: str) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            return (await http.get(f"{url}/health")).status_code == 200
    except httpx.TransportError:
        return False
