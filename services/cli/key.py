"""`meshnet key`: a new API key for somebody."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from services.cli.errors import BadOption
from services.head.settings import ApiKeySetting


def key(
    name: Annotated[str, typer.Argument(help="Whose key it is: letters, digits, `.`, `_`, `-`.")],
    *,
    rate_limit: Annotated[
        str | None,
        typer.Option(
            metavar="N/UNIT",
            help="The most requests to generate: 60/minute, or by second, hour or day.",
        ),
    ] = None,
) -> None:
    """Make an API key, and print it and what a head is to know of it.

    The first line is the key. It is shown this once and kept nowhere: hand it over, it is what
    clients call the API key. The second line goes into the list MESHNET_HEAD_API_KEYS.
    """
    # Here, not above: other commands need not wait for what rate limits are made of.
    from services.head.api_keys import digest_of, new_key

    made = new_key()
    try:
        setting = ApiKeySetting(name=name, sha256=digest_of(made), rate_limit=rate_limit)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        option = "NAME" if first["loc"] == ("name",) else "--rate-limit"
        raise BadOption(option, first["msg"]) from error
    typer.echo(made)
    typer.echo(setting.model_dump_json(exclude_none=True))
