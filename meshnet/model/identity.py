"""What a shard runs, as digests: of each layer it holds, of the whole checkpoint, of itself.

Two shards are of one model if what can be compared of these is equal (`topology.check_same_model`).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers types its models loosely.

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import torch
from transformers import PreTrainedModel

from meshnet.topology import LayerSpan, ShardFacts
from meshnet.wire.headers import PROTOCOL_VERSION

LAYER_NUMBER: Final = re.compile(r"(?<=\blayers\.)(\d+)(?=\.)")
"""The layer's number in a tensor's name."""

_DIGITS: Final = 16
_FINGERPRINT_DIGITS: Final = 32
_SAMPLE_BYTES: Final = 64


def fingerprint(facts: ShardFacts) -> str:
    """Digest of everything that a step's outcome depends on, as a token."""
    parts = [
        PROTOCOL_VERSION,
        facts.revision,
        str(facts.span),
        facts.dtype,
        facts.transformers_version,
        facts.weights,
        facts.layer_digests,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_FINGERPRINT_DIGITS]


def layer_digests(
    model: PreTrainedModel, span: LayerSpan, n_layers: int, tick: Callable[[], None]
) -> tuple[str, ...]:
    """Digests of the tensors that a stage holds, one a layer; equal whatever the rest of the span.

    The embedding counts as part of the model's first layer, all else that is outside of layers as
    part of the last. Buffers that no checkpoint holds are left out.

    Args:
        model: The stage's piece, loaded. Its tensors are hashed where they are, not copied.
        span: Layers it holds.
        n_layers: Layers of the whole model.
        tick: Called before each layer; what it raises ends the hashing.
    """
    groups: dict[int, dict[str, torch.Tensor]] = {i: {} for i in range(span.start, span.end)}
    embedding = _embedding_prefix(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        number = LAYER_NUMBER.search(name)
        if number is not None:
            groups[span.start + int(number[0])][LAYER_NUMBER.sub("", name, count=1)] = tensor
        elif name.startswith(embedding):
            groups[0][name] = tensor
        elif span.end == n_layers:
            groups[n_layers - 1][name] = tensor
    digest = _TensorDigests()
    return tuple(_group_digest(group, digest, tick) for group in groups.values())


def _embedding_prefix(model: PreTrainedModel) -> str:
    embedding = model.get_input_embeddings()
    return next(f"{name}." for name, module in model.named_modules() if module is embedding)


def _group_digest(
    tensors: dict[str, torch.Tensor], digest: _TensorDigests, tick: Callable[[], None]
) -> str:
    tick()
    lines = [[name, digest.of(tensor)] for name, tensor in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:_DIGITS]


class _TensorDigests:
    """Hashes each tensor once: a tied one has two names. Tensors must outlive this."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def of(self, tensor: torch.Tensor) -> str:
        """Digest of dtype, shape and bytes."""
        if id(tensor) not in self._known:
            digest = hashlib.sha256(f"{tensor.dtype}:{list(tensor.shape)}:".encode())
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            digest.update(cast("Any", flat.numpy()))
            self._known[id(tensor)] = digest.hexdigest()
        return self._known[id(tensor)]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its name, dtype and shape there, and its bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def sample_digest(files: Iterable[tuple[Path, Iterable[StoredTensor]]]) -> str | None:
    """Digest of names, dtypes, shapes and some bytes of every tensor, whichever file it is in.

    Reads three short pieces a tensor: enough to tell two finetunes, not to find one changed number.

    Returns:
        None if a file is shorter than its tensors.

    Raises:
        OSError: A file cannot be read.
    """
    lines: list[tuple[str, str, list[int], str]] = []
    for path, tensors in files:
        with path.open("rb", buffering=0) as file:
            for tensor in tensors:
                sample = b"".join(_samples(file, tensor))
                if len(sample) < min(tensor.nbytes, _SAMPLE_BYTES) * 3:
                    return None
                lines.append((tensor.name, tensor.dtype, list(tensor.shape), sample.hex()))
    return hashlib.sha256(json.dumps(sorted(lines)).encode()).hexdigest()[:_DIGITS]


def _samples(file: BinaryIO, tensor: StoredTensor) -> Iterator[bytes]:
    """Bytes from the start, the middle and the end of one tensor."""
    length = min(tensor.nbytes, _SAMPLE_BYTES)
    room = tensor.nbytes - length
    for offset in (0, room // 2, room):
        file.seek(tensor.start + offset)
        yield file.read(length)


def safetensors_table(path: Path) -> list[StoredTensor]:
    """What a safetensors file holds, from its header.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: It does not begin as a safetensors file.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("it ends within its header")
        header: dict[str, Any] = json.loads(file.read(length))
    return [
        _stored(name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"
    ]


def _stored(name: str, entry: dict[str, Any], data_start: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    if not 0 <= start <= end:
        raise ValueError(f"{name} has no place in the file")
    return StoredTensor(
        name, entry["dtype"], tuple(entry["shape"]), data_start + start, end - start
    )
