"""`meshnet head`: the OpenAI-compatible endpoint over the shards of one model."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from pydantic import TypeAdapter, ValidationError

from services.cli.errors import BadOption
from services.cli.models import resolve_known
from services.cli.serving import StopWithStdin, serve, stop_with_stdin
from services.cli.settings import load_settings
from services.head.settings import HeadSettings, HopSetting

_ROUTE: Final = TypeAdapter(tuple[HopSetting, ...])
_ALLOWED: Final = (
    "http://HOST:PORT[@START_LAYER], several joined by commas; or JSON: "
    '[{"endpoint": "http://HOST:PORT", "start_layer": 0}, ...]'
)


def head(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder with config and tokenizer (weights are not read), a Hugging Face id, "
            "or a name that `meshnet model get` knows. (env: MESHNET_HEAD_MODEL)"
        ),
    ] = None,
    route: Annotated[
        str | None,
        typer.Option(
            metavar="URL[@START],...",
            help="The shards in any order, joined by commas; those of the same layers are each "
            "other's standby. START is the first layer to run there, the shard's own first layer "
            "unless given. Or the same as JSON. "
            "(env: MESHNET_HEAD_ROUTE, JSON only)",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    stop_with_stdin_: StopWithStdin = False,
) -> None:
    """Run the head: serve the OpenAI API, and drive the shards of one model. Needs no torch.

    Everything else (time-outs, limits, the cluster key) is set by MESHNET_HEAD_* variables; an
    option overrides its variable.
    """
    if stop_with_stdin_:
        stop_with_stdin()
    hops = None if route is None else parse_route(route)
    settings = load_settings(HeadSettings, {"model": resolve_known(model), "route": hops})
    from services.head.app import create_app  # here, so that `--help` does not wait for it

    serve(lambda: create_app(settings), host=host, port=port)


def parse_route(text: str) -> tuple[HopSetting, ...]:
    """The hops that `--route` names.

    Raises:
        BadOption: The text is neither URLs nor JSON, or names no hop.
    """
    try:
        if text.lstrip().startswith("["):
            hops = _ROUTE.validate_json(text)
        else:
            hops = _ROUTE.validate_python([_hop(part.strip()) for part in text.split(",")])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadOption("--route", f"hop {where}: {first['msg']}", _ALLOWED) from error
    if not hops:
        raise BadOption("--route", "there is no hop in it", _ALLOWED)
    return hops


def _hop(text: str) -> dict[str, object]:
    endpoint, separator, start = text.rpartition("@")
    if not separator:
        return {"endpoint": text.rstrip("/")}
    return {"endpoint": endpoint.rstrip("/"), "start_layer": start}
