"""A GGUF file as a checkpoint: transformers' names and conventions over llama.cpp's tensors.

Reads and dequantises one tensor at a time. transformers' own GGUF loader holds the whole model; it
is the reference that tests compare this one with.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportUnknownParameterType=false
# transformers and gguf type their surface loosely.

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, dequantize
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from meshnet.errors import ModelError
from meshnet.model.config_file import config_from_metadata, read_config
from meshnet.model.gguf_header import GgufHeader, TensorInfo, read_header
from meshnet.model.identity import StoredTensor, sample_digest
from meshnet.model.weights.gguf_blocks import Blocks, is_kept
from meshnet.model.weights.int4 import fits_int4
from meshnet.model.weights.packing import Packing

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class GgufCheckpoint:
    """One GGUF file, with or without its `config.json` beside it."""

    path: Path

    def config(self) -> PreTrainedConfig:
        """Read the config beside the file, else the one its metadata describe.

        Raises:
            ModelError: The file is not whole, or neither config can be read.
        """
        self._check_whole()
        beside = self.path.parent / "config.json"
        return read_config(beside) if beside.is_file() else config_from_metadata(self.path)

    def weights(self) -> str | None:
        """`gguf-` and a digest of the tensor table and samples of the tensors' blocks.

        Raises:
            ModelError: The file cannot be read.
        """
        table = [
            StoredTensor(info.name, info.kind.name, info.shape, info.start, info.nbytes)
            for info in self._header.tensors
        ]
        try:
            digest = sample_digest([(self.path, table)])
        except OSError as error:
            raise self._damaged(str(error)) from error
        return None if digest is None else f"gguf-{digest}"

    def names(self, skeleton: PreTrainedModel) -> Collection[str]:
        """Every tensor's name, in transformers' spelling."""
        return self._directory(skeleton).keys()

    def open(self, names: Collection[str]) -> Mapping[str, GgufTensor]:
        """The named tensors, lazily. `names` must have been called before, with the skeleton."""
        return {name: self._tensors[name] for name in names}

    def _directory(self, skeleton: PreTrainedModel) -> Mapping[str, GgufTensor]:
        if not self._tensors:
            processor = self._processor
            for gguf_name, name in _name_map(skeleton, processor, self._infos).items():
                if gguf_name in self._infos:
                    info = self._infos[gguf_name]
                    self._tensors[name] = GgufTensor(self._blob, info, processor)
        return self._tensors

    @cached_property
    def _tensors(self) -> dict[str, GgufTensor]:
        return {}

    @cached_property
    def _header(self) -> GgufHeader:
        try:
            return read_header(self.path)
        except (ValueError, OSError, struct.error) as error:
            raise self._damaged(str(error)) from error

    def _check_whole(self) -> None:
        end = max((info.start + info.nbytes for info in self._header.tensors), default=0)
        size = self.path.stat().st_size
        if end > size:
            raise self._damaged(f"its tensors end at byte {end}, the file at {size}")

    @cached_property
    def _infos(self) -> dict[str, TensorInfo]:
        return {info.name: info for info in self._header.tensors}

    @cached_property
    def _blob(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.memmap(self.path, mode="r", dtype=np.uint8)

    @cached_property
    def _processor(self) -> TensorProcessor:
        kind = TENSOR_PROCESSORS.get(self._header.architecture, TensorProcessor)
        return kind(config=self.config().to_dict())

    def _damaged(self, why: str) -> ModelError:
        return ModelError(
            f"{self.path} cannot be read: {why}",
            field="model",
            value=str(self.path),
            allowed="a whole GGUF file, version 2 or 3",
        )


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file; `tensor[...]` reads and dequantises it to float32."""

    blob: np.ndarray[Any, np.dtype[np.uint8]]
    info: TensorInfo
    processor: TensorProcessor

    def __getitem__(self, index: Any) -> torch.Tensor:  # noqa: ANN401  # as slices of tensors go
        """The whole tensor, in transformers' layout of rows."""
        values = self._dequantised()
        processed = self.processor.process(weights=values, name=self.info.name).weights
        return torch.from_numpy(np.ascontiguousarray(processed))[index]

    def blocks(self, packing: Packing) -> Blocks | None:
        """The tensor's blocks, in transformers' order of rows, if they can stay as they are."""
        if not is_kept(self.info.kind, packing) or not fits_int4(*self.info.shape):
            return None
        raw = self._raw()
        numbered = np.arange(len(raw), dtype=np.float32).reshape(-1, 1)
        rows = self.processor.process(weights=numbered.copy(), name=self.info.name).weights
        if not np.array_equal(np.sort(rows, axis=0), numbered):
            return None  # transformers changes more than the order
        _, block_bytes = GGML_QUANT_SIZES[self.info.kind]
        ordered = torch.from_numpy(raw[rows.ravel().astype(np.int64)])
        return Blocks(self.info.kind, ordered.unflatten(1, (-1, block_bytes)))

    def _raw(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """[rows, bytes of a row], in the file's order of rows."""
        block, block_bytes = GGML_QUANT_SIZES[self.info.kind]
        *rows, columns = self.info.shape
        stored = self.blob[self.info.start : self.info.start + self.info.nbytes]
        return stored.reshape(int(np.prod(rows, dtype=np.int64)), columns // block * block_bytes)

    def _dequantised(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Some rows at a time: dequantising makes several copies of what it is given."""
        raw = self._raw()
        values = np.empty((len(raw), self.info.shape[-1]), dtype=np.float32)
        for row in range(0, len(raw), _ROWS_AT_ONCE):
            some = raw[row : row + _ROWS_AT_ONCE]
            values[row : row + _ROWS_AT_ONCE] = dequantize(some, self.info.kind)
        return values.reshape(self.info.shape)


class _Childless:
    """A model that does not show its submodules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = model.config
        self.state_dict = model.state_dict

    def named_children(self) -> list[tuple[str, torch.nn.Module]]:
        return []


def _name_map(
    skeleton: PreTrainedModel, processor: TensorProcessor, wanted: Collection[str]
) -> Mapping[str, str]:
    """GGUF's name of a tensor to transformers'.

    transformers makes the map of the whole model, then that of each of its submodules for what was
    not in it, 397 maps for SmolLM2 in five seconds. The first one mostly has all.
    """
    shallow: dict[str, str] = get_gguf_hf_weights_map(_Childless(skeleton), processor)
    if all(name in shallow for name in wanted):
        return shallow
    return get_gguf_hf_weights_map(skeleton, processor)
