"""`meshnet bench`: how fast a running head answers, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import Annotated, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from services.cli.chat import DEFAULT_URL, EndpointModel, EndpointUrl
from services.cli.chat_client import Answer, ChatClient
from services.cli.settings import CliSettings, load_settings
from services.cli.timing import PARTS, TokenTimes, token_times

_PROMPTS: Final = (
    "Tell me a story about a ship and the sea.",
    "How does a river find its way to the sea?",
    "What should I know before I plant an apple tree?",
    "Explain how bread is made, step by step.",
)


def bench(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="What to ask, in turn; unless given, our own."),
    ] = None,
    *,
    url: EndpointUrl = DEFAULT_URL,
    model: EndpointModel = None,
    streams: Annotated[int, typer.Option(min=1, max=64, help="Answers at a time.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How often so many.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
) -> None:
    """Ask a running head, and tell how fast it was and where the time went, hop by hop.

    Where the endpoint asks for an API key, set MESHNET_API_KEY.
    """
    key = load_settings(CliSettings, {}).api_key
    texts = list(islice(cycle(prompts or _PROMPTS), streams * rounds))
    answers: list[Answer] = []
    taken_s = 0.0
    with (
        ChatClient(
            url,
            model=model,
            max_tokens=max_tokens,
            temperature=0.0,
            api_key=key.get_secret_value() if key else None,
            timed=True,
        ) as client,
        ThreadPoolExecutor(max_workers=streams) as threads,
    ):
        _ask_together(client, threads, texts[:streams])  # what is done once is done with it
        for first in range(0, len(texts), streams):
            started_at = perf_counter()
            answers += _ask_together(client, threads, texts[first : first + streams])
            taken_s += perf_counter() - started_at
    console = Console()
    console.print(_describe(answers, streams, taken_s), highlight=False)
    times = token_times(answer.timing for answer in answers)
    if times is None:
        console.print("The endpoint does not tell where the time went.", highlight=False)
        return
    console.print(_table(times))
    console.print(_conclude(times), highlight=False)


def _ask_together(
    client: ChatClient, threads: ThreadPoolExecutor, texts: Sequence[str]
) -> list[Answer]:
    def ask(text: str) -> Answer:
        return client.ask([{"role": "user", "content": text}], lambda _: None)

    return list(threads.map(ask, texts))


def _describe(answers: Sequence[Answer], streams: int, taken_s: float) -> str:
    n_tokens = sum(answer.n_tokens for answer in answers)
    rates = [answer.tokens_per_s for answer in answers if answer.tokens_per_s is not None]
    rate = f", then {median(rates):.1f} tokens/s" if rates else ""
    return (
        f"{len(answers)} answers, {streams} at a time, {n_tokens} tokens\n"
        f"an answer (median): first token after {median(a.first_s for a in answers) * 1000:.0f} ms"
        f"{rate}\n"
        f"in sum: {n_tokens / taken_s:.1f} tokens/s, prompts included"
    )


def _table(times: TokenTimes) -> Table:
    """Milliseconds a token after the first; a row for each hop, for the head, and for all."""
    table = Table(box=box.SIMPLE, title="milliseconds a token", title_justify="left")
    told = [part for part in PARTS if part != "recovery" or times.of_part(part)]
    table.add_column("hop", overflow="fold")
    for name in (*told, "all"):
        table.add_column(name, justify="right", no_wrap=True)
    for endpoint, parts in times.hops.items():
        cells = [_ms(parts[part]) for part in told]
        table.add_row(endpoint.partition("://")[2], *cells, _ms(sum(parts.values())))
    table.add_row("head", *("" for _ in told), _ms(times.head_ms), end_section=True)
    table.add_row("all", *(_ms(times.of_part(part)) for part in told), _ms(times.all_ms))
    return table


def _conclude(times: TokenTimes) -> str:
    compute_ms = times.of_part("compute")
    share = compute_ms / times.all_ms
    return (
        f"{compute_ms:.2f} of {times.all_ms:.2f} ms are compute ({share:.0%}): one machine with "
        "all layers, as fast as each of these is with its own, would need that too. "
        f"The other {times.all_ms - compute_ms:.2f} ms are what hops and head cost. "
        "Compute of a step that ran in a batch is all of the batch's."
    )


def _ms(value: float) -> str:
    return f"{value:.2f}"
