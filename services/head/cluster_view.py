"""`GET /v1/cluster`: the hops as the head sees them."""

from __future__ import annotations

from pydantic import BaseModel

from meshnet.head.route_book import HopStatus
from services.head.head import Head
from services.head.served_model import ServedModel


class HopView(BaseModel):
    """One configured shard. The times are medians over its recent decode steps, in milliseconds."""

    endpoint: str
    served_model_name: str
    """The id of the model that it is configured for."""
    state: str
    reason: str | None = None
    layers: str | None = None
    model: str | None = None
    fingerprint: str | None = None
    boot_id: str | None = None
    dtype: str | None = None
    kv_cache: bool | None = None
    transformers_version: str | None = None
    serving: int | None = None
    """Sessions of this head that the shard serves."""
    sessions: int | None = None
    cached_bytes: int | None = None
    steps: int = 0
    step_ms: float | None = None
    queue_ms: float | None = None
    compute_ms: float | None = None
    overhead_ms: float | None = None
    """Of a step beyond its queue and compute: what the hop costs."""


class ClusterView(BaseModel):
    """Every configured shard, in the order configured; once for each model that names it."""

    hops: list[HopView]


def cluster_view(head: Head) -> ClusterView:
    """What is known of the hops."""
    return ClusterView(
        hops=[
            _hop_view(model, status)
            for model in head.models.values()
            for status in model.book.status
        ]
    )


def _hop_view(model: ServedModel, status: HopStatus) -> HopView:
    endpoint, info = status.spec.endpoint, status.info
    reason = status.error.message if status.error else None
    if info is None:
        return HopView(
            endpoint=endpoint,
            served_model_name=model.name,
            state="unavailable",
            reason=reason,
        )
    view = HopView(
        endpoint=endpoint,
        served_model_name=model.name,
        state=_state(status),
        reason=reason,
        serving=model.book.sessions(endpoint),
        layers=f"{info.start_layer}-{info.end_layer}",
        model=info.model,
        fingerprint=info.fingerprint,
        boot_id=info.boot_id,
        dtype=info.dtype,
        kv_cache=info.kv_cache,
        transformers_version=info.transformers_version or None,
        sessions=info.cache.sessions,
        cached_bytes=info.cache.cached_bytes,
    )
    recent = model.kit.times.of(endpoint)
    if recent is None:
        return view
    return view.model_copy(
        update={
            "steps": recent.steps,
            "step_ms": recent.step_ms,
            "queue_ms": recent.queue_ms,
            "compute_ms": recent.compute_ms,
            "overhead_ms": recent.overhead_ms,
        }
    )


def _state(status: HopStatus) -> str:
    if status.error is not None:
        return "refused"
    if status.info is not None and status.info.draining:
        return "draining"
    return "ready" if status.is_proven else "probing"
