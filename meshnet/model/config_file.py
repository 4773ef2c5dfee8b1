"""A model's config: from its `config.json`, else from the metadata of a GGUF file."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers types its configs loosely.

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from meshnet.errors import ModelError

_UNREADABLE: Final = (
    ValueError,
    OSError,
    KeyError,
    TypeError,
    AttributeError,
    StrictDataclassError,
)
"""What transformers raises of a config that is no JSON, of an unknown family, or contradictory."""


def read_config(path: Path) -> PreTrainedConfig:
    """The text model's config from a `config.json`.

    Raises:
        ModelError: It is not a transformers config.
    """
    try:
        return AutoConfig.from_pretrained(path.parent).get_text_config(decoder=True)
    except _UNREADABLE as error:
        raise ModelError(
            f"{path} cannot be read: {error}",
            field="model",
            value=str(path),
            allowed="a config.json of a model that transformers knows",
        ) from error


def config_from_metadata(path: Path) -> PreTrainedConfig:
    """The transformers config that a bare GGUF file describes.

    Runs in a process of its own: transformers reads the whole vocabulary for it, 160 MB that a
    shard would not get back.

    Raises:
        ModelError: transformers cannot make a config of it.
    """
    child = subprocess.run(  # noqa: S603  # our own interpreter and module
        [sys.executable, "-m", "meshnet.model.gguf_config", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode != 0:
        raise ModelError(
            f"{path} has no config.json beside it, and its metadata give none: "
            f"{child.stderr.strip().splitlines()[-1:]}",
            field="model",
            value=str(path),
            allowed="a GGUF file of an architecture that transformers can read",
        )
    fields = json.loads(child.stdout)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)
