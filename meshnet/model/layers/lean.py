"""Runs a span of Llama-like layers without what transformers puts around their products.

Most families are one arrangement of the same parts: two RMS norms, rotary attention with or without
norms of queries and keys, a gated MLP. Where a span's layers are such, they are read out of the
family's modules and run here: queries, keys and values in one product, gate and up in another, keys
and values in memory of our own, and one forward for the next tokens of many sessions. Whatever the
family does otherwise shows in the numbers: before it is trusted, every layer is run both ways, and
a span with a layer that differs stays with the family's own forward (docs/adr/0021-lean-layers.md).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# transformers types its modules loosely.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from meshnet.model.interface import StateCost
from meshnet.model.layers.interface import Chunk
from meshnet.model.layers.key_value_cache import KeysValues, capacity
from meshnet.model.weights.packing import seal, stacked


class LeanState:
    """One session's keys and values, by layer."""

    def __init__(self, layers: Sequence[KeysValues]) -> None:
        self.layers = layers

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(layer.nbytes for layer in self.layers)

    def fork(self, n_tokens: int) -> LeanState | None:
        """See CacheState.fork.

        The layers are looked at one after the other, and the compute thread may be between two of
        them: each has the first tokens, whether or not it has those of the running step yet.
        """
        forks = [layer.fork(n_tokens) for layer in self.layers]
        found = [fork for fork in forks if fork is not None]
        return LeanState(found) if len(found) == len(forks) else None


class Norm:
    """An RMS norm over the last axis: rows over the root of their mean square, times a weight.

    In as few calls as that takes: one row of 576 costs half of what torch's own norm does.

    Args:
        weight: [n].
        epsilon: Added to the mean square.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        # Of the sum instead of the mean, which is one call less.
        n = weight.shape[-1]
        self._weight = weight.float() * n**0.5
        self._epsilon = torch.tensor(n * epsilon)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., n] to the same, in float32 and back."""
        wide = rows.float()
        squares = (wide * wide).sum(-1, keepdim=True)
        scales = squares.add_(self._epsilon).rsqrt_()
        return (wide * scales).mul_(self._weight).to(rows.dtype)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one chunk is among the rows of a step.

    Attributes:
        rows: Its rows.
        position: Tokens of its session before it.
        masks: [n, m] by window: which keys each of its tokens looks at. None are needed for one
            token, nor for the first ones of a text.
    """

    rows: slice
    position: int
    masks: dict[int | None, torch.Tensor | None]

    @property
    def n_tokens(self) -> int:
        return self.rows.stop - self.rows.start


@dataclass(frozen=True, slots=True)
class LeanLayer:
    """One decoder layer.

    Attributes:
        attention_norm: Before attention.
        attention_after_norm: Of what attention adds; or None.
        query_key_value: [n, hidden] to [n, (heads + 2 * key heads) * head_dim].
        query_norm, key_norm: Over each head, before it is rotated; or None.
        output: Of attention.
        mlp_norm: Before the MLP.
        mlp_after_norm: Of what the MLP adds; or None.
        gate_up: [n, hidden] to both halves of [n, 2 * intermediate].
        activation: Of the gate.
        down: [n, intermediate] to [n, hidden].
        n_heads, n_key_heads, head_dim: Of attention; several heads share a key.
        scale: Of queries times keys.
        window: How far back it looks; None is all the way.
        rotation: Which of the family's rotations is its own, where there are several.
    """

    attention_norm: Norm
    attention_after_norm: Norm | None
    query_key_value: nn.Module
    query_norm: Norm | None
    key_norm: Norm | None
    output: nn.Module
    mlp_norm: Norm
    mlp_after_norm: Norm | None
    gate_up: nn.Module
    activation: nn.Module
    down: nn.Module
    n_heads: int
    n_key_heads: int
    head_dim: int
    scale: float
    window: int | None
    rotation: str | None

    def stacked(self) -> LeanLayer:
        """A copy with fewer, larger products, its packed weights sealed."""
        parts = {
            "query_key_value": stacked(self.query_key_value),
            "output": stacked(self.output),
            "gate_up": stacked(self.gate_up),
            "down": stacked(self.down),
        }
        for part in parts.values():
            seal(part)
        return replace(self, **parts)

    def new_cache(self, dtype: torch.dtype) -> KeysValues:
        """An empty one."""
        return KeysValues(self.n_key_heads, self.head_dim, dtype, self.window)

    def run(
        self,
        rows: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        places: Sequence[_Place],
        caches: Sequence[KeysValues],
    ) -> torch.Tensor:
        """[n, hidden] of all chunks to the same after the layer; see `_rotation`."""
        queries, keys_values = self._attention_inputs(self.attention_norm(rows), rotation)
        sizes = [place.n_tokens for place in places]
        seen = [
            self._attend(*one)
            for one in zip(
                queries.split(sizes), keys_values.split(sizes), places, caches, strict=True
            )
        ]
        added = self.output(seen[0] if len(seen) == 1 else torch.cat(seen))
        rows = rows + (self.attention_after_norm(added) if self.attention_after_norm else added)
        gate, up = self.gate_up(self.mlp_norm(rows)).chunk(2, dim=-1)
        added = self.down(self.activation(gate) * up)
        return rows + (self.mlp_after_norm(added) if self.mlp_after_norm else added)

    def _attention_inputs(
        self, rows: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, [n, heads, head_dim], and keys before values, [n, 2 * key heads, head_dim].

        Queries and keys are rotated.
        """
        n_heads, n_key_heads = self.n_heads, self.n_key_heads
        heads = self.query_key_value(rows).view(len(rows), n_heads + 2 * n_key_heads, self.head_dim)
        to_rotate = heads[:, : n_heads + n_key_heads]
        normed = to_rotate
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = to_rotate[:, :n_heads], to_rotate[:, n_heads:]
            normed = torch.cat([self.query_norm(queries), self.key_norm(keys)], dim=1)
        cosines, sines = rotation
        turned = normed.roll(self.head_dim // 2, -1)
        torch.addcmul(normed * cosines, turned, sines, out=to_rotate)
        return heads[:, :n_heads], heads[:, n_heads:]

    def _attend(
        self,
        queries: torch.Tensor,
        keys_values: torch.Tensor,
        place: _Place,
        cache: KeysValues,
    ) -> torch.Tensor:
        """[n, heads * head_dim] of one chunk's tokens, which are put into the cache."""
        keys, values = cache.write(place.position, keys_values)
        attend = functional.scaled_dot_product_attention
        if place.n_tokens == 1:
            # The heads that share a key, as if they were tokens: a tenth of the time in bfloat16.
            queries = queries.view(1, self.n_key_heads, -1, self.head_dim)
            return attend(queries, keys, values, scale=self.scale).view(1, -1)
        mask = place.masks[self.window]
        seen = attend(
            queries.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=True,
        )
        return seen[0].transpose(0, 1).flatten(1)


@dataclass(frozen=True, slots=True)
class Ends:
    """What stands before and after a span's layers.

    Attributes:
        embedding: Of token ids, if the first layer is in the span.
        rotary: The family's own rotary embedding.
        norm: After the last layer, if it is in the span.
        lm_head: Likewise.
    """

    embedding: nn.Module | None
    rotary: nn.Module
    norm: Norm | None
    lm_head: nn.Module | None


class LeanLayers:
    """A span of them; see meshnet.model.layers.interface.Layers.

    Args:
        layers: All of the span.
        ends: What stands before and after them.
        start: The span's first layer.
        dtype: Of hidden states, keys and values.
    """

    def __init__(
        self, layers: Sequence[LeanLayer], ends: Ends, start: int, dtype: torch.dtype
    ) -> None:
        self._layers = layers
        self._ends = ends
        self._start = start
        self._dtype = dtype
        self._windows = {layer.window for layer in layers}
        self._rotations = {layer.rotation for layer in layers}
        self._token_bytes = [
            2 * layer.n_key_heads * layer.head_dim * dtype.itemsize for layer in layers
        ]

    @property
    def state_cost(self) -> StateCost:
        """As if no layer had a window."""
        token_bytes = sum(self._token_bytes)
        return StateCost(base_bytes=capacity(0) * token_bytes, token_bytes=token_bytes)

    def new_state(self, start_layer: int) -> LeanState:
        """An empty state for sessions that enter at `start_layer`."""
        layers = self._layers[start_layer - self._start :]
        return LeanState([layer.new_cache(self._dtype) for layer in layers])

    def state_nbytes(self, n_tokens: int) -> int:
        """Bytes of a state of `n_tokens` tokens that came one by one."""
        return sum(
            token_bytes * capacity(min(n_tokens, layer.window or n_tokens))
            for token_bytes, layer in zip(self._token_bytes, self._layers, strict=True)
        )

    def run(self, start_layer: int, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """All chunks in one forward; see Layers.run."""
        first = start_layer - self._start
        places = _places(chunks, self._windows)
        states = [
            cast("LeanState", self.new_state(start_layer) if chunk.state is None else chunk.state)
            for chunk in chunks
        ]
        rows = torch.cat([chunk.inputs for chunk in chunks])
        if start_layer == 0:
            rows = cast("nn.Module", self._ends.embedding)(rows)
        rotations = {
            kind: _rotation(self._ends.rotary, rows, places, kind) for kind in self._rotations
        }
        for layer, *caches in zip(
            self._layers[first:], *(state.layers for state in states), strict=True
        ):
            rows = layer.run(rows, rotations[layer.rotation], places, caches)
        for state, place in zip(states, places, strict=True):
            for cache in state.layers if place.n_tokens > 1 else ():
                cache.settle(place.position + place.n_tokens)
        rows = rows if self._ends.norm is None else self._ends.norm(rows)
        return list(rows.split([place.n_tokens for place in places]))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] of [n, hidden]."""
        return cast("nn.Module", self._ends.lm_head)(hidden)


def _places(chunks: Sequence[Chunk], windows: set[int | None]) -> list[_Place]:
    places: list[_Place] = []
    start = 0
    for chunk in chunks:
        end = start + len(chunk.inputs)
        masks = {window: _mask(chunk.position, end - start, window) for window in windows}
        places.append(_Place(slice(start, end), chunk.position, masks))
        start = end
    return places


def _mask(position: int, n_tokens: int, window: int | None) -> torch.Tensor | None:
    """[n, m]: which of the keys that KeysValues gives each token looks at."""
    end = position + n_tokens
    if n_tokens == 1 or (position == 0 and end <= (window or end)):
        return None
    oldest = 0 if window is None else max(0, position - window + 1)
    back = torch.arange(position, end).unsqueeze(1) - torch.arange(oldest, end)
    return (back >= 0) & (back < (window or end))


def _rotation(
    rotary: nn.Module, rows: torch.Tensor, places: Sequence[_Place], kind: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rows' positions, [n, 1, head_dim]; the first half of sines negated.

    A half-rotated vector is (-second half, first half); so it takes one roll.
    """
    positions = torch.cat(
        [torch.arange(p.position, p.position + p.n_tokens) for p in places]
    ).unsqueeze(0)
    tables = rotary(rows, positions) if kind is None else rotary(rows, positions, kind)
    cosines, sines = (table[0].unsqueeze(1) for table in tables)
    half = sines.shape[-1] // 2
    return cosines, torch.cat([-sines[..., :half], sines[..., half:]], dim=-1)
