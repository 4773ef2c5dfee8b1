"""Reads where the tensors of a GGUF file are, and skips what else is in its header.

gguf's own reader keeps every string of the vocabulary as arrays of its own (160 MB and 2 s for
49,152 of them), and transformers' lean one knows not all types of blocks. The format: GGUF version
2 and 3, ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_WIDTH: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ALIGNMENT: Final = 32
_KEPT: Final = {"general.architecture", "general.alignment"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its shape in torch's order, and where its blocks are, from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a span is loaded by."""

    architecture: str
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path) -> GgufHeader:
    """Read a file's tensor table.

    Raises:
        ValueError: It is no GGUF file of a known version, or holds blocks of an unknown type.
        struct.error: It ends within the header.
        OSError: It cannot be opened.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(data).header()


class _Reader:
    """A position in the file, and what can be read from it."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin as a GGUF file does")
        self._at = 4
        version, n_tensors, n_fields = self._take("<IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"it is version {version}; versions {_VERSIONS} are read")
        fields = dict(self._field() for _ in range(n_fields))
        table = [self._tensor() for _ in range(n_tensors)]
        alignment = int(fields.get("general.alignment") or _ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        tensors = tuple(_info(name, shape, kind, start + at) for name, shape, kind, at in table)
        return GgufHeader(str(fields.get("general.architecture")), tensors)

    def _field(self) -> tuple[str, int | str | None]:
        name = self._string()
        (kind,) = self._take("<I")
        if name in _KEPT:
            return name, self._string() if kind == _STRING else self._take("<I")[0]
        self._skip(kind)
        return name, None

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._skip_strings(1)
        elif kind == _ARRAY:
            element, count = self._take("<IQ")
            if element == _STRING:
                self._skip_strings(count)
            else:
                self._at += count * self._width(element)
        else:
            self._at += self._width(kind)

    def _skip_strings(self, count: int) -> None:
        for _ in range(count):
            (length,) = self._take("<Q")
            self._at += length

    def _width(self, kind: int) -> int:
        if kind not in _WIDTH:
            raise ValueError(f"it holds a field of type {kind}, which is not known")
        return _WIDTH[kind]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (n_axes,) = self._take("<I")
        axes = self._take(f"<{n_axes}Q")
        kind, at = self._take("<IQ")
        return name, tuple(reversed(axes)), kind, at

    def _string(self) -> str:
        (length,) = self._take("<Q")
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8")

    def _take(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values


def _info(name: str, shape: tuple[int, ...], kind_number: int, start: int) -> TensorInfo:
    kind = GGMLQuantizationType(kind_number)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return TensorInfo(name, shape, kind, start, prod(shape) // block * block_bytes)
