"""Those who are measured, side by side: our nodes, and transformers by itself.

Each is a process, or several, of its own; it is asked for tokens from outside.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final, Protocol

import httpx

from benchmarks.bench.answers import Answer, read_answer
from benchmarks.bench.results import Result
from benchmarks.bench.workload import Workload
from meshnet.topology import even_spans
from services.cli.cluster import ClusterError, LocalCluster

DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "int8": "float32", "int4": "float32"}
"""The formats of weights, and what hidden states and caches are beside them."""
REUSE_VARIABLE: Final = "MESHNET_HEAD_PREFIX_REUSE"
_ANSWER_LIMIT_S: Final = 600.0
_LINE_LIMIT_BYTES: Final = 1024**2


class Side(Protocol):
    """Whoever is asked."""

    async def ask(self, prompt: Sequence[int], n_tokens: int) -> Answer:
        """The likeliest tokens after a prompt, exactly so many."""
        ...

    async def score(self, ids: Sequence[int]) -> list[float]:
        """The logarithm of each token's probability after those before it; not the first one's."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server of the OpenAI API, asked at `/v1/completions`.

    Attributes:
        http: A client of the server.
        model: The id that it serves the model by.
        extra: Further members of every request.
    """

    http: httpx.AsyncClient
    model: str
    extra: Mapping[str, object]

    async def ask(
        self, prompt: Sequence[int], n_tokens: int, on_first: Callable[[], object] = lambda: None
    ) -> Answer:
        """See Side; `on_first` is called when the first event is there."""
        body = self._body(prompt, n_tokens) | {"stream": True}
        events: list[tuple[float, str]] = []
        asked_at = perf_counter()
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                # Read at the end: whoever is measured wants this core, too.
                if line.startswith("data: {"):
                    events.append((perf_counter(), line.removeprefix("data: ")))
                    if len(events) == 1:
                        on_first()
        return read_answer(asked_at, events)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """See Side."""
        body = self._body(ids, 0) | {"prompt_logprobs": 0}
        response = await self.http.post("/v1/completions", json=body)
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.text}")
        told: list[dict[str, Any]] = response.json()["choices"][0]["prompt_logprobs"][1:]
        return [
            float(scores[str(token_id)]["logprob"])
            for scores, token_id in zip(told, ids[1:], strict=True)
        ]

    def _body(self, prompt: Sequence[int], n_tokens: int) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **self.extra,
        }


@asynccontextmanager
async def open_endpoint(url: str, model: str, **extra: object) -> AsyncGenerator[Endpoint]:
    """A client of a server that runs."""
    async with httpx.AsyncClient(
        base_url=url,
        trust_env=False,
        timeout=_ANSWER_LIMIT_S,
        limits=httpx.Limits(max_connections=64),
    ) as http:
        yield Endpoint(http, model, extra)


@asynccontextmanager
async def nodes(
    work: Workload, n_shards: int, weights: str, env: Mapping[str, str] | None = None
) -> AsyncGenerator[Endpoint]:
    """Shards of one thread each and a head, as processes. Every prompt is computed.

    Args:
        work: Whose model.
        n_shards: How many.
        weights: The format of the weights, one of DTYPES.
        env: Further settings of the processes.

    Raises:
        ClusterError: They do not start.
    """
    with TemporaryDirectory() as logs:
        cluster = LocalCluster(
            str(work.model),
            even_spans(work.n_layers, n_shards),
            weights=weights,
            threads=1,
            env={REUSE_VARIABLE: "false", **(env or {})},
            log_dir=Path(logs),
            restart=False,
        )
        async with (
            cluster,
            open_endpoint(cluster.head_url, work.model.name, return_token_ids=True) as endpoint,
        ):
            yield endpoint


@dataclass(frozen=True, slots=True)
class Alone:
    """Transformers in a process of its own; see benchmarks.bench.alone. It has one caller."""

    process: asyncio.subprocess.Process

    async def ask(self, prompt: Sequence[int], n_tokens: int) -> Answer:
        """See Side. The times are the process's own: nothing is lost on the way."""
        told = await self._tell({"prompt": list(prompt), "n_tokens": n_tokens})
        return Answer(0.0, tuple(told["came_s"]), tuple(told["ids"]))

    async def score(self, ids: Sequence[int]) -> list[float]:
        """See Side."""
        return (await self._tell({"score": list(ids)}))["logprobs"]

    async def read(self) -> dict[str, Any]:
        """The next line that it writes.

        Raises:
            RuntimeError: It ended.
        """
        if self.process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError("transformers' process ended; see above")
        return json.loads(line)

    async def _tell(self, question: Mapping[str, object]) -> dict[str, Any]:
        if self.process.stdin is None:
            raise RuntimeError("the process was started without pipes")
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        await self.process.stdin.drain()
        return await self.read()


@asynccontextmanager
async def transformers_alone(
    work: Workload, *, threads: int, weights: str
) -> AsyncGenerator[Alone]:
    """The whole model in transformers, with weights that are not quantised."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.bench.alone", str(work.model)),
        *("--threads", str(threads), "--dtype", DTYPES[weights]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_LIMIT_BYTES,
    )
    try:
        alone = Alone(process)
        way = (await alone.read())["way"]
        print(f"transformers, {weights}, threads: {threads}: by {way}", flush=True)
        yield alone
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def in_each_format(
    formats: Iterable[str], measure: Callable[[str], Awaitable[list[Result]]]
) -> list[Result]:
    """Measure with one format of weights after the other; says which of them shards refuse."""
    results: list[Result] = []
    for weights in formats:
        try:
            results += await measure(weights)
        except ClusterError as error:
            print(f"NOT MEASURED, {weights}: {error}", *error.log_lines, sep="\n  | ", flush=True)
    return results
