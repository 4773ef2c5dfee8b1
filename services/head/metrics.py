"""The head's numbers for Prometheus. One registry an app, so that several can share a process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from functools import partial
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from meshnet.errors import MeshError
from meshnet.generation import TokenEvent
from meshnet.head.admission import Admission
from meshnet.head.reservations import Reservations

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class HeadMetrics:
    """Counts requests, tokens and rebuilds, and times them."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._refusals = Counter(
            "meshnet_head_refusals", "Requests answered with an error", ["code"], registry=registry
        )
        self._generations = Counter(
            "meshnet_head_generations", "Generations ended", ["model", "outcome"], registry=registry
        )
        self._tokens = Counter(
            "meshnet_head_tokens", "Tokens generated", ["model"], registry=registry
        )
        self._cached = Counter(
            "meshnet_head_cached_tokens",
            "Tokens of prompts that were not computed again",
            ["model"],
            registry=registry,
        )
        self._rebuilds = Counter(
            "meshnet_head_rebuilds", "Steps tried again", ["code"], registry=registry
        )
        self._replayed = Counter(
            "meshnet_head_replayed_layer_tokens",
            "Tokens times layers computed again after a loss",
            registry=registry,
        )
        self._first_token = Histogram(
            "meshnet_head_time_to_first_token_seconds",
            "From a generation's beginning to its first token, waiting for its turn included",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._between_tokens = Histogram(
            "meshnet_head_inter_token_seconds",
            "From one token to the next",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._active = Gauge(
            "meshnet_head_active", "Generations running", ["model"], registry=registry
        )
        self._waiting = Gauge(
            "meshnet_head_waiting",
            "Generations waiting for their turn",
            ["model"],
            registry=registry,
        )
        self._reserved = Gauge(
            "meshnet_head_reserved_bytes",
            "What running generations may come to take of a hop's cache",
            ["hop"],
            registry=registry,
        )

    def watch(self, model: str, admission: Admission) -> None:
        """Show how many generations of a model run, and how many wait, as it is when asked."""
        self._active.labels(model).set_function(lambda: admission.n_running)
        self._waiting.labels(model).set_function(lambda: admission.n_waiting)

    def watch_hops(self, endpoints: Iterable[str], reservations: Reservations) -> None:
        """Show what is reserved on each hop, as it is when asked."""
        for endpoint in endpoints:
            told = partial(reservations.nbytes, endpoint)
            self._reserved.labels(endpoint).set_function(told)

    def count_refusal(self, code: str) -> None:
        """Note one request that was answered with an error."""
        self._refusals.labels(code).inc()

    def count_rebuild(self, failure: MeshError) -> None:
        """Note one step that is tried again."""
        self._rebuilds.labels(failure.code).inc()

    def count_replay(self, layer_tokens: int) -> None:
        """Note what was computed again."""
        self._replayed.inc(layer_tokens)

    async def observed(
        self, events: AsyncGenerator[TokenEvent], model: str
    ) -> AsyncGenerator[TokenEvent]:
        """The same events of a model, counted and timed. Closed together."""
        last_at = perf_counter()
        tokens, between = self._tokens.labels(model), self._between_tokens.labels(model)
        cached = self._cached.labels(model)
        histogram = self._first_token.labels(model)
        outcome = "aborted"
        try:
            async with aclosing(events):
                async for event in events:
                    now = perf_counter()
                    histogram.observe(now - last_at)
                    tokens.inc(event.n_tokens)
                    cached.inc(event.n_cached)
                    last_at, histogram = now, between
                    outcome = event.finish_reason or outcome
                    yield event
        finally:
            self._generations.labels(model, outcome).inc()

    def render(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)
