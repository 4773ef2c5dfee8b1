"""Where a model's tensors are: a safetensors folder, a GGUF file, or a Hugging Face repository.

Reads directories and headers only; a tensor is read when it is asked for.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers, huggingface_hub and safetensors type their surface loosely.

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from meshnet.errors import ModelError
from meshnet.model import gguf_file

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class LazyTensor(Protocol):
    """A tensor still on disk; `tensor[...]` reads it."""

    def __getitem__(self, index: Any) -> torch.Tensor:  # noqa: ANN401  # as slices of tensors go
        ...


class Checkpoint(Protocol):
    """A model's config and where its tensors are."""

    def config(self) -> PreTrainedConfig:
        """Read the text model's config."""
        ...

    def names(self, skeleton: PreTrainedModel) -> Collection[str]:
        """Every tensor's name in transformers' spelling, layers counted over the whole model."""
        ...

    def open(self, names: Collection[str]) -> Mapping[str, LazyTensor]:
        """The named tensors, none of them read yet; files without one of them are not touched.

        Raises:
            ModelError: A file is missing, truncated or not what it should be.
        """
        ...


def open_checkpoint(model: str) -> Checkpoint:
    """Find a model.

    Args:
        model: A folder with `config.json` and safetensors or one GGUF file, a GGUF file, or a
            Hugging Face id.

    Raises:
        ModelError: There is no such model, or it holds no weights that can be read.
    """
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return gguf_file.GgufCheckpoint(path)
    if path.is_dir():
        return _open_folder(path)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise _not_found(model, "no such file or folder")
    return SafetensorsCheckpoint(model, lambda name: _download(model, name))


def _open_folder(path: Path) -> Checkpoint:
    if (path / _INDEX).is_file() or (path / _SINGLE).is_file():
        return SafetensorsCheckpoint(str(path), lambda name: _in_folder(path, name))
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) != 1:
        raise _not_found(str(path), f"it holds no safetensors and {len(ggufs)} GGUF files")
    return gguf_file.GgufCheckpoint(ggufs[0])


def _in_folder(folder: Path, name: str) -> Path | None:
    return folder / name if (folder / name).is_file() else None


def _download(repository: str, name: str) -> Path | None:
    try:
        return Path(hf_hub_download(repository, name))
    except LocalEntryNotFoundError as error:  # asked offline, or the hub cannot be reached
        raise _not_found(repository, str(error)) from error
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, OSError) as error:
        raise _not_found(repository, str(error)) from error


def _not_found(model: str, why: str) -> ModelError:
    return ModelError(
        f"model {model!r}: {why}",
        field="model",
        value=model,
        allowed="a folder with config.json and safetensors or one GGUF file, a GGUF file, or a "
        "Hugging Face id",
    )


@dataclass(frozen=True)
class SafetensorsCheckpoint:
    """Safetensors files, local or fetched one by one as they are needed.

    Attributes:
        model: Folder or repository.
        fetch: A file's local path by its name, or None if the model has no such file.
    """

    model: str
    fetch: Callable[[str], Path | None]

    def config(self) -> PreTrainedConfig:
        """Read the text model's config.

        Raises:
            ModelError: It is missing or cannot be read.
        """
        path = self.fetch("config.json")
        if path is None:
            raise _not_found(self.model, "config.json is missing")
        return read_config(path)

    def names(self, skeleton: PreTrainedModel) -> Collection[str]:
        """Every tensor's name, from the index or the single file's header."""
        del skeleton  # safetensors speak transformers' names already
        return self._directory().keys()

    def open(self, names: Collection[str]) -> Mapping[str, LazyTensor]:
        """The named tensors, lazily; only the files that hold them are opened (or fetched)."""
        directory = self._directory()
        files = {name: directory[name] for name in names}
        opened = {file: self._open_file(file) for file in sorted(set(files.values()))}
        try:
            return {name: opened[file].get_slice(name) for name, file in files.items()}
        except SafetensorError as error:
            raise _not_found(self.model, f"the index and the files disagree: {error}") from error

    def _directory(self) -> dict[str, str]:
        """Tensor name to file name."""
        index = self.fetch(_INDEX)
        if index is None:
            return dict.fromkeys(self._open_file(_SINGLE).keys(), _SINGLE)
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise _not_found(self.model, f"{_INDEX} has no weight_map: {error!r}") from error

    def _open_file(self, name: str) -> Any:  # noqa: ANN401  # safe_open has no type
        path = self.fetch(name)
        if path is None:
            raise _not_found(self.model, f"{name} is missing")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise _not_found(self.model, f"{name} is damaged: {error}") from error


def read_config(path: Path) -> PreTrainedConfig:
    """The text model's config from a `config.json`.

    Raises:
        ModelError: It is not a transformers config.
    """
    try:
        return AutoConfig.from_pretrained(path.parent).get_text_config(decoder=True)
    except (ValueError, OSError, KeyError) as error:
        raise _not_found(str(path), f"config.json cannot be read: {error}") from error


def revision(config: PreTrainedConfig, names: Collection[str]) -> str:
    """Digest of what every shard of one model agrees on: its config and its tensors' names."""
    passing = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
    stable = {k: v for k, v in config.to_dict().items() if k not in passing}
    text = json.dumps([stable, sorted(names)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
