"""`meshnet chat`: talk to a head in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated, Final

import typer

from services.cli.chat_client import Answer, ChatClient, HopTime
from services.cli.errors import CliError
from services.cli.settings import CliSettings, load_settings

EndpointUrl = Annotated[str, typer.Option(help="The endpoint's base URL.")]
EndpointModel = Annotated[
    str | None, typer.Option(help="Its name there; the first one listed unless given.")
]
DEFAULT_URL: Final = "http://127.0.0.1:8000/v1"


def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(help="What to ask; without it a conversation is held, until Ctrl-D."),
    ] = None,
    *,
    url: EndpointUrl = DEFAULT_URL,
    model: EndpointModel = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=2, help="0 is greedy; the server's default unless given."),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Tell after each answer where the time went.")
    ] = False,
) -> None:
    """Ask the model, and see the answer as it is generated.

    Where the endpoint asks for an API key, set MESHNET_API_KEY.
    """
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    key = load_settings(CliSettings, {}).api_key
    with ChatClient(
        url,
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        api_key=key.get_secret_value() if key else None,
    ) as client:
        if prompt is not None:
            _ask(client, [_message("user", prompt)], stats=stats)
            return
        with suppress(EOFError, KeyboardInterrupt):
            _converse(client, stats=stats)
        typer.echo()


def _converse(client: ChatClient, *, stats: bool) -> None:
    history: list[dict[str, str]] = []
    while True:
        text = input("> ").strip()
        if not text:
            continue
        turn = [*history, _message("user", text)]
        try:
            answer = _ask(client, turn, stats=stats)
        except CliError as error:  # the next question may be answered
            typer.echo(f"Error: {error.message}", err=True)
        except KeyboardInterrupt:  # enough of this answer
            typer.echo()
        else:
            history = [*turn, _message("assistant", answer.text)]


def _ask(client: ChatClient, messages: list[dict[str, str]], *, stats: bool) -> Answer:
    shown = False

    def show(text: str) -> None:
        nonlocal shown
        shown = True
        typer.echo(text, nl=False)

    try:
        answer = client.ask(messages, show)
    finally:
        if shown:
            typer.echo()
    if stats:
        typer.echo(_describe(answer), err=True)
        for line in _table(client.hop_times()):
            typer.echo(line, err=True)
    return answer


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _describe(answer: Answer) -> str:
    rate = "" if answer.tokens_per_s is None else f", then {answer.tokens_per_s:.1f} tokens/s"
    return (
        f"\n{answer.n_tokens} tokens, the first after {answer.first_s * 1000:.0f} ms{rate}; "
        f"finish reason: {answer.finish_reason}"
    )


def _table(hops: list[HopTime]) -> list[str]:
    """Lines of columns; the times are medians over recent decode steps."""
    if not hops:
        return []
    rows = [("hop", "layers", "step ms", "compute ms", "queue ms")]
    rows += [
        (hop.endpoint, hop.layers or "-", _ms(hop.step_ms), _ms(hop.compute_ms), _ms(hop.queue_ms))
        for hop in hops
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
