"""Where a model's tensors are: a safetensors folder, a GGUF file, or a Hugging Face repository.

Reads directories and headers only; a tensor is read when it is asked for.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers, huggingface_hub and safetensors type their surface loosely.

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from meshnet.errors import ModelError
from meshnet.model.config_file import read_config
from meshnet.model.gguf_file import GgufCheckpoint
from meshnet.model.identity import safetensors_table, sample_digest

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

    def weights(self) -> str | None:
        """Digest of the whole checkpoint, `KIND-VALUE`; cheap, and the same on every shard of it.

        Returns:
            None if not all of it is here. Values of different kinds say nothing of each other.
        """
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
        return GgufCheckpoint(path)
    if path.is_dir():
        return _open_folder(path)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise _not_found(model, "no such file or folder")
    return SafetensorsCheckpoint(model, HubFiles(model))


def _open_folder(path: Path) -> Checkpoint:
    if (path / _INDEX).is_file() or (path / _SINGLE).is_file():
        return SafetensorsCheckpoint(str(path), FolderFiles(path))
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) != 1:
        raise _not_found(str(path), f"it holds no safetensors and {len(ggufs)} GGUF files")
    return GgufCheckpoint(ggufs[0])


def _not_found(model: str, why: str) -> ModelError:
    return ModelError(
        f"model {model!r}: {why}",
        field="model",
        value=model,
        allowed="a folder with config.json and safetensors or one GGUF file, a GGUF file, or a "
        "Hugging Face id",
    )


class Files(Protocol):
    """A model's files, wherever they come from."""

    def fetch(self, name: str) -> Path | None:
        """A file's local path, or None if the model has no such file.

        Raises:
            ModelError: It cannot be fetched.
        """
        ...

    def weights(self, names: Collection[str]) -> str | None:
        """See `Checkpoint.weights`; `names` are the files that hold tensors."""
        ...


@dataclass(frozen=True)
class FolderFiles:
    """The files of a local folder; some may be elsewhere."""

    folder: Path

    def fetch(self, name: str) -> Path | None:
        """The file, if the folder has it."""
        path = self.folder / name
        return path if path.is_file() else None

    def weights(self, names: Collection[str]) -> str | None:
        """`sample-` and a digest of all headers and samples of the tensors' bytes."""
        paths = [self.folder / name for name in names]
        try:
            digest = sample_digest((path, safetensors_table(path)) for path in paths)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # missing or damaged; if the span needs it, `open` says so
        return None if digest is None else f"sample-{digest}"


class HubFiles:
    """The files of a Hugging Face repository, all of the commit that the first one was of."""

    def __init__(self, repository: str) -> None:
        self._repository = repository
        self._commit: str | None = None

    def fetch(self, name: str) -> Path | None:
        """Fetch a file, or find it in the cache."""
        try:
            path = Path(hf_hub_download(self._repository, name, revision=self._commit))
        except LocalEntryNotFoundError as error:  # asked offline, or the hub cannot be reached
            raise _not_found(self._repository, str(error)) from error
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, OSError) as error:
            raise _not_found(self._repository, str(error)) from error
        self._commit = self._commit or _commit_of(path.parents[name.count("/")])
        return path

    def weights(self, names: Collection[str]) -> str | None:
        """`commit-` and the commit's hash, once a file was fetched."""
        del names
        return None if self._commit is None else f"commit-{self._commit}"


def _commit_of(folder: Path) -> str | None:
    """The commit of a folder of Hugging Face's cache: `.../snapshots/COMMIT`."""
    return folder.name if folder.parent.name == "snapshots" else None


@dataclass(frozen=True)
class SafetensorsCheckpoint:
    """Safetensors files, local or fetched one by one as they are needed.

    Attributes:
        model: Folder or repository.
        files: Where they are.
    """

    model: str
    files: Files

    def config(self) -> PreTrainedConfig:
        """Read the text model's config.

        Raises:
            ModelError: It is missing or cannot be read.
        """
        path = self.files.fetch("config.json")
        if path is None:
            raise _not_found(self.model, "config.json is missing")
        return read_config(path)

    def weights(self) -> str | None:
        """The hub's commit, or a digest of samples of every file; None if one is missing."""
        return self.files.weights(set(self._directory().values()))

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
        index = self.files.fetch(_INDEX)
        if index is None:
            return dict.fromkeys(self._open_file(_SINGLE).keys(), _SINGLE)
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise _not_found(self.model, f"{_INDEX} has no weight_map: {error!r}") from error

    def _open_file(self, name: str) -> Any:  # noqa: ANN401  # safe_open has no type
        path = self.files.fetch(name)
        if path is None:
            raise _not_found(self.model, f"{name} is missing")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise _not_found(self.model, f"{name} is damaged: {error}") from error


def revision(config: PreTrainedConfig, names: Collection[str]) -> str:
    """Digest of what every shard of one model agrees on: its config and its tensors' names."""
    passing = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"}
    stable = {k: v for k, v in config.to_dict().items() if k not in passing}
    text = json.dumps([stable, sorted(names)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
