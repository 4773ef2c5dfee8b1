"""Spans, hops and routes: which shard runs which layers. Pure, nothing here opens a connection."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshnet.errors import InvalidRequest, RouteError

_SPAN = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """The half-open layer range `[start, end)`, never empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise InvalidRequest(
                f"span [{self.start}, {self.end}) is not a layer range",
                field="span",
                value=str(self),
                allowed="0 <= start < end",
            )

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.end

    @classmethod
    def parse(cls, text: str) -> LayerSpan:
        """Read `"0-15"`, which is `[0, 15)`.

        Raises:
            InvalidRequest: `text` is not two numbers joined by `-`, or the range is empty.
        """
        match = _SPAN.fullmatch(text)
        if match is None:
            raise InvalidRequest(
                f"layers {text!r} is not a layer range",
                field="layers",
                value=text,
                allowed="START-END with START < END, for example 0-15 for layers 0 to 14",
            )
        return cls(int(match[1]), int(match[2]))


def even_spans(n_layers: int, n_shards: int) -> list[LayerSpan]:
    """Split `n_layers` over `n_shards` as evenly as whole layers allow, the longer spans first.

    Raises:
        InvalidRequest: There are fewer layers than shards, or no shard.
    """
    if not 1 <= n_shards <= n_layers:
        raise InvalidRequest(
            f"{n_layers} layers cannot be split over {n_shards} shards",
            field="shards",
            value=n_shards,
            allowed=f"1 to {n_layers}",
        )
    size, extra = divmod(n_layers, n_shards)
    starts = [i * size + min(i, extra) for i in range(n_shards + 1)]
    return [LayerSpan(a, b) for a, b in pairwise(starts)]


@dataclass(frozen=True, slots=True)
class HopSpec:
    """A hop as the operator or caller names it; `start_layer` None is the shard's first layer."""

    endpoint: str
    start_layer: int | None = None


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What a shard says of itself, as far as a route depends on it."""

    model: str
    revision: str
    fingerprint: str
    span: LayerSpan
    n_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    max_positions: int
    kv_cache: bool = True
    push: bool = False
    """Whether it pushes to other shards, and takes what they push."""
    max_step_tokens: int = 2**31 - 1
    state_base_bytes: int = 0
    """A session of n tokens takes at most this plus n times `state_token_bytes` of the cache."""
    state_token_bytes: int = 0
    """0, and 0 for the base: not told."""
    cache_bytes: int = 2**63 - 1
    """What all sessions may take together."""
    max_sessions: int = 2**31 - 1
    transformers_version: str = ""
    weights: str | None = None
    """Digest of the whole checkpoint, `KIND-VALUE`; only those of one kind can be compared."""
    layer_digests: tuple[str, ...] = ()
    """Digests of what the shard holds of each layer of its span, ends included; or none at all."""

    @property
    def max_session_tokens(self) -> int:
        """The longest sequence, in tokens, that the model takes, and one session's state may."""
        if not self.kv_cache or self.session_bytes(self.max_positions) <= self.cache_bytes:
            return self.max_positions
        return max(0, (self.cache_bytes - self.state_base_bytes) // max(1, self.state_token_bytes))

    def session_bytes(self, n_tokens: int) -> int:
        """The most that the state of so many tokens takes of the cache, as far as was told."""
        return self.state_base_bytes + n_tokens * self.state_token_bytes

    def digest_of(self, layer: int) -> str | None:
        """The digest of one layer of the span."""
        return self.layer_digests[layer - self.span.start] if self.layer_digests else None


@dataclass(frozen=True, slots=True)
class Hop:
    """One shard on a route; it runs `layers` (its span from the hop's start layer on).

    `boot_id` is the life of the shard's process that the facts are from.
    """

    endpoint: str
    layers: LayerSpan
    facts: ShardFacts
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """Ordered hops that tile `[0, n_layers)` exactly once."""

    hops: tuple[Hop, ...]

    @property
    def stateless(self) -> bool:
        """Whether some hop keeps no cache, so that every step must be a full prefill."""
        return not all(hop.facts.kv_cache for hop in self.hops)

    @property
    def max_positions(self) -> int:
        """The longest sequence, in tokens, that every hop can take."""
        longest = min(hop.facts.max_session_tokens for hop in self.hops)
        # Without caches every step is the whole sequence.
        return min(longest, self.max_step_tokens) if self.stateless else longest

    @property
    def max_step_tokens(self) -> int:
        """The longest step, in tokens, that every hop takes."""
        return min(hop.facts.max_step_tokens for hop in self.hops)


def make_hop(spec: HopSpec, facts: ShardFacts, boot_id: str = "") -> Hop:
    """The hop that a shard makes.

    Raises:
        RouteError: The start layer lies outside the shard's span.
    """
    start = facts.span.start if spec.start_layer is None else spec.start_layer
    if start not in facts.span:
        raise RouteError(
            f"start layer {start} is outside the span {facts.span} of {spec.endpoint}",
            field="start_layer",
            value=start,
            allowed=f"{facts.span.start} to {facts.span.end - 1}",
            endpoint=spec.endpoint,
        )
    return Hop(spec.endpoint, LayerSpan(start, facts.span.end), facts, boot_id)


def build_route(hops: Sequence[Hop]) -> Route:
    """Make a route of the hops in the order given, first layer's hop first.

    Raises:
        RouteError: A hop serves another model than the first, or the layers run leave a gap, run
            twice, or do not end at the last layer.
    """
    if not hops:
        raise RouteError(
            "a route needs at least one hop", field="route", value=[], allowed="1+ hops"
        )
    for hop in hops[1:]:
        check_same_model(hops[0], hop)
    _check_tiling(hops)
    return Route(tuple(hops))


def choose_route(hops: Sequence[Hop], load: Callable[[Hop], tuple[int, ...]]) -> Route:
    """Make a route of some of the hops, in the order of their layers.

    Args:
        hops: What there is of one model, in any order; several may run the same layers.
        load: How busy a hop is. Wherever several go on at a layer, the least busy is taken, or
            the first of those.

    Raises:
        RouteError: No choice of them tiles the model's layers.
    """
    # From the last layer back, so that what follows a hop is known when the hop is looked at.
    onward: dict[int, list[Hop]] = {hops[0].facts.n_layers: []} if hops else {}
    for hop in sorted(hops, key=lambda hop: (-hop.layers.start, *load(hop))):
        if hop.layers.end in onward:
            onward.setdefault(hop.layers.start, [hop, *onward[hop.layers.end]])
    if 0 in onward and hops:
        return build_route(onward[0])
    one_each = {hop.layers: hop for hop in reversed(hops)}.values()  # standbys explain nothing
    return build_route(sorted(one_each, key=lambda hop: (hop.layers.start, hop.layers.end)))


def check_same_model(ours: Hop, theirs: Hop) -> None:
    """Find out whether two hops can be on one route.

    Raises:
        RouteError: They serve different models, or the same one differently; both values are
            named.
    """
    for field in ("revision", "n_layers", "hidden_size", "dtype", "transformers_version"):
        _compare(ours, theirs, field, getattr(ours.facts, field), getattr(theirs.facts, field))
    a, b = ours.facts.weights, theirs.facts.weights
    if a is not None and b is not None and a.partition("-")[0] == b.partition("-")[0]:
        _compare(ours, theirs, "weights", a, b)
    digests_known = ours.facts.layer_digests and theirs.facts.layer_digests
    if ours.facts.span == theirs.facts.span and not digests_known:
        _compare(ours, theirs, "fingerprint", ours.facts.fingerprint, theirs.facts.fingerprint)
    for layer in range(
        max(ours.facts.span.start, theirs.facts.span.start),
        min(ours.facts.span.end, theirs.facts.span.end),
    ):
        digests = ours.facts.digest_of(layer), theirs.facts.digest_of(layer)
        if None not in digests:
            _compare(ours, theirs, f"digest of layer {layer}", *digests)


def _compare(ours: Hop, theirs: Hop, field: str, a: object, b: object) -> None:
    if a != b:
        raise RouteError(
            f"{theirs.endpoint} serves another model than {ours.endpoint}: "
            f"{field} {b} ({theirs.facts.model}) against {a} ({ours.facts.model})",
            field=field,
            value=b,
            allowed=a,
            endpoint=theirs.endpoint,
        )


def _check_tiling(hops: Sequence[Hop]) -> None:
    at = 0
    for hop in hops:
        if hop.layers.start != at:
            fault = "leaves a gap" if hop.layers.start > at else "runs layers twice"
            raise RouteError(
                f"the route {fault}: layer {at} comes next, {hop.endpoint} starts at "
                f"{hop.layers.start}",
                field="start_layer",
                value=hop.layers.start,
                allowed=at,
                endpoint=hop.endpoint,
            )
        at = hop.layers.end
    n_layers = hops[0].facts.n_layers
    if at != n_layers:
        raise RouteError(
            f"the route ends at layer {at}, the model has {n_layers}: "
            f"layers {at} to {n_layers - 1} are missing",
            field="route",
            value=at,
            allowed=n_layers,
        )
