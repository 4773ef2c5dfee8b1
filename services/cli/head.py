"""`meshnet head`: the OpenAI-compatible endpoint over the shards of one model or of several."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from pydantic import TypeAdapter, ValidationError

from services.cli.errors import BadOption
from services.cli.models import resolve_known
from services.cli.serving import StopWithStdin, serve, stop_with_stdin
from services.cli.settings import load_settings
from services.head.settings import HeadSettings, HopSetting, ModelSetting

_MODELS: Final = TypeAdapter(tuple[ModelSetting, ...])
_ROUTE: Final = TypeAdapter(tuple[HopSetting, ...])
_ALLOWED_MODELS: Final = (
    'JSON: [{"model": "FOLDER|ID", "served_model_name": "NAME", '
    '"route": [{"endpoint": "http://HOST:PORT"}, ...]}, ...]'
)
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
    models: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Several models, each with its own shards, instead of --model and --route: "
            '`[{"model": ..., "served_model_name": ..., "route": [...]}, ...]`. '
            "(env: MESHNET_HEAD_MODELS)",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    stop_with_stdin_: StopWithStdin = False,
) -> None:
    """Run the head: serve the OpenAI API, and drive the models' shards. Needs no torch.

    Everything else (time-outs, limits, API keys, the cluster key) is set by MESHNET_HEAD_*
    variables; an option overrides its variable.
    """
    if stop_with_stdin_:
        stop_with_stdin()
    options = {
        "models": None if models is None else parse_models(models),
        "model": resolve_known(model),
        "route": None if route is None else parse_route(route),
    }
    settings = load_settings(HeadSettings, options)
    from services.head.app import create_app  # here, so that `--help` does not wait for it

    serve(lambda: create_app(settings), host=host, port=port)


def parse_models(text: str) -> tuple[ModelSetting, ...]:
    """The models that `--models` names; what `meshnet model get` knows is fetched first.

    Raises:
        BadOption: The text is no JSON, or describes a model wrongly.
    """
    try:
        models = _MODELS.validate_json(text)
    except ValidationError as error:
        raise _bad_option("--models", "model", error, _ALLOWED_MODELS) from error
    return tuple(model.model_copy(update={"model": resolve_known(model.model)}) for model in models)


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
        raise _bad_option("--route", "hop", error, _ALLOWED) from error
    if not hops:
        raise BadOption("--route", "there is no hop in it", _ALLOWED)
    return hops


def _bad_option(option: str, what: str, error: ValidationError, allowed: str) -> BadOption:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return BadOption(option, f"{what} {where}: {first['msg']}", allowed)


def _hop(text: str) -> dict[str, object]:
    endpoint, separator, start = text.rpartition("@")
    if not separator:
        return {"endpoint": text.rstrip("/")}
    return {"endpoint": endpoint.rstrip("/"), "start_layer": start}
