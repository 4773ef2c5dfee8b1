"""The command line's own settings, read from `MESHNET_*`; and how options meet settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from services.cli.errors import BadOption

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

SomeSettings = TypeVar("SomeSettings", bound=BaseSettings)


class CliSettings(BaseSettings):
    """What no single command owns."""

    model_config = SettingsConfigDict(env_prefix="MESHNET_", frozen=True, extra="ignore")

    models_dir: Path = Field(default_factory=lambda: Path.home() / ".cache/meshnet/models")
    """Where fetched models are kept, a folder each."""
    cluster_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    """The key of a cluster that `meshnet up` starts; None makes a random one."""
    api_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    """The key that `meshnet chat` and `meshnet bench` show; no option, others can read those."""


def load_settings(kind: type[SomeSettings], options: Mapping[str, object]) -> SomeSettings:
    """Settings from the environment, overridden by the options that were given.

    Args:
        kind: The settings' class.
        options: Setting name to value; None was not given.

    Raises:
        BadOption: A value is missing or malformed; names the option or the variable it came from.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    try:
        return kind(**given)
    except ValidationError as error:
        # include_input: never, it may be the cluster key.
        first = error.errors(include_url=False, include_input=False)[0]
        raise _bad_option(kind, given, first) from error
    except SettingsError as error:  # a variable that should be JSON and is not
        raise BadOption(f"{kind.model_config.get('env_prefix')}*", str(error)) from error


def _bad_option(
    kind: type[BaseSettings], given: Mapping[str, object], error: ErrorDetails
) -> BadOption:
    field = str(error["loc"][0])
    variable = f"{kind.model_config.get('env_prefix')}{field}".upper()
    option = f"--{field.replace('_', '-')}"
    if error["type"] == "missing":
        return BadOption(option, f"missing, and {variable} is not set")
    source = option if field in given else variable
    inner = ".".join(str(part) for part in error["loc"][1:])
    where = f"{source} ({inner})" if inner else source
    return BadOption(where, error["msg"])
