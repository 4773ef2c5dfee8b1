"""A model's small files: where they are, which ids end an answer, how long a context is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

# Its progress bar's type is a bare generic, which strict mode calls unknown.
from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

from meshnet.errors import ModelError

SMALL_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.jinja",
)
"""What is fetched of a repository. Never a weight."""

_ALLOWED: Final = (
    "a folder with config.json and tokenizer.json (weights are not read), or a Hugging Face id"
)
_HUGGING_FACE_ID: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_LAYER_KEYS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_POSITION_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the head must know of a model besides its tokenizer; None is not said there."""

    end_token_ids: frozenset[int]
    n_layers: int | None
    max_positions: int | None


def find_folder(model: str) -> Path:
    """The local folder of `model`, fetched first if it is a Hugging Face id.

    Raises:
        ModelError: There is no such folder and no such repository, or it cannot be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if not _HUGGING_FACE_ID.fullmatch(model):
        raise model_error(f"there is no folder {model}", model)
    try:
        return Path(snapshot_download(model, allow_patterns=list(SMALL_FILES)))
    except (OSError, ValueError) as error:  # the hub's errors are one or the other
        raise model_error(f"{model} is no folder, and Hugging Face says: {error}", model) from error


def read_facts(folder: Path) -> ModelFacts:
    """Read config.json and, if there is one, generation_config.json.

    Raises:
        ModelError: config.json is missing, or one of the two is no JSON object.
    """
    config = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    # Multimodal models keep the language model's own config one level down.
    nested = config.get("text_config")
    text_config = cast("dict[str, object]", nested) if isinstance(nested, dict) else {}
    return ModelFacts(
        end_token_ids=frozenset(
            token_id
            for source in (config, text_config, generation)
            for token_id in as_ids(source.get("eos_token_id"))
        ),
        n_layers=_first_count((text_config, config), _LAYER_KEYS),
        max_positions=_first_count((text_config, config), _POSITION_KEYS),
    )


def as_ids(value: object) -> list[int]:
    """The token ids in a config's value: an id, a list of ids, or nothing."""
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]


def model_error(problem: str, model: str) -> ModelError:
    """A ModelError that says what would have been right."""
    return ModelError(f"{problem}; allowed: {_ALLOWED}", value=model, allowed=_ALLOWED)


def _read_json(path: Path) -> dict[str, object]:
    try:
        raw: object = json.loads(path.read_bytes())
    except OSError as error:
        raise model_error(f"{path} cannot be read: {error.strerror}", str(path.parent)) from error
    except ValueError as error:
        raise model_error(f"{path} is not JSON: {error}", str(path.parent)) from error
    if not isinstance(raw, dict):
        raise model_error(f"{path} is no JSON object", str(path.parent))
    return cast("dict[str, object]", raw)


def _first_count(sources: tuple[Mapping[str, object], ...], keys: tuple[str, ...]) -> int | None:
    for source in sources:
        for key in keys:
            value = source.get(key)
            if isinstance(value, int):
                return value
    return None
