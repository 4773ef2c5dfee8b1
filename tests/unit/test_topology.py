from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import InvalidRequest, RouteError
from meshnet.model.fake_stage import fake_facts
from meshnet.topology import HopSpec, LayerSpan, Route, ShardFacts, build_route, even_spans


def facts_of(span: str, **changed: object) -> ShardFacts:
    return replace(fake_facts(LayerSpan.parse(span)), **changed)


def route_of(*spans: str, **changed_in_last: object) -> Route:
    """Hops h0, h1... that enter at their spans' first layers."""
    facts = [facts_of(span) for span in spans]
    facts[-1] = replace(facts[-1], **changed_in_last)
    return build_route([HopSpec(f"h{i}") for i in range(len(facts))], facts)


@given(st.integers(0, 10**9 - 2), st.integers(0, 10**9 - 2))
def test_a_span_reads_as_it_is_written(a: int, b: int) -> None:
    """parse() undoes str()."""
    span = LayerSpan(min(a, b), max(a, b) + 1)

    assert span == LayerSpan.parse(str(span))


@pytest.mark.parametrize(
    "text", ["", "3", "-", "1-", "-1", "a-b", "1-2-3", "1 - 2", "1-2\n", "٣-٤", "-1-2", "9" * 5000]
)
def test_a_malformed_span_is_refused(text: str) -> None:
    """What is not two numbers joined by a hyphen is refused, naming it and an example."""
    with pytest.raises(InvalidRequest, match="is not a layer range") as caught:
        LayerSpan.parse(text)

    assert (text, "layers") == (caught.value.members["value"], caught.value.members["field"])
    assert "0-15" in str(caught.value.members["allowed"])


@pytest.mark.parametrize(("start", "end"), [(2, 2), (3, 2), (-1, 2)])
def test_an_empty_span_is_refused(start: int, end: int) -> None:
    """A span has at least one layer, from 0 on."""
    with pytest.raises(InvalidRequest) as caught:
        LayerSpan(start, end)

    assert f"{start}-{end}" == caught.value.members["value"]


def test_a_span_is_half_open() -> None:
    """The span 2-5 has the layers 2, 3 and 4."""
    span = LayerSpan(2, 5)

    assert [layer for layer in range(8) if layer in span] == [2, 3, 4]
    assert len(span) == 3


def test_only_a_number_is_a_layer() -> None:
    """Another thing than a number is in no span."""
    assert "2" not in LayerSpan(2, 5)


@given(st.data())
def test_even_spans_tile_the_model(data: st.DataObject) -> None:
    """They join without gap, lengths differ by one at most, and the longer ones come first."""
    n_layers = data.draw(st.integers(1, 200))
    n_shards = data.draw(st.integers(1, n_layers))
    spans = even_spans(n_layers, n_shards)
    lengths = [len(span) for span in spans]

    assert (0, n_layers, n_shards) == (spans[0].start, spans[-1].end, len(spans))
    assert all(a.end == b.start for a, b in pairwise(spans))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize("n_shards", [0, -1, 5])
def test_more_shards_than_layers_are_refused(n_shards: int) -> None:
    """4 layers go on 1 to 4 shards, and the error says so."""
    with pytest.raises(InvalidRequest) as caught:
        even_spans(4, n_shards)

    assert (n_shards, "1 to 4") == (
        caught.value.members["value"],
        caught.value.members["allowed"],
    )


@given(st.data())
def test_every_even_split_makes_a_route(data: st.DataObject) -> None:
    """Hops whose spans tile the model are a route over just these layers."""
    n_layers = data.draw(st.integers(1, 40))
    spans = even_spans(n_layers, data.draw(st.integers(1, n_layers)))
    specs = [HopSpec(f"h{i}") for i in range(len(spans))]
    route = build_route(specs, [fake_facts(span, n_layers) for span in spans])

    assert spans == [hop.layers for hop in route.hops]


def test_overlapping_spans_make_a_route_by_start_layers() -> None:
    """A hop entered past its first layer runs the rest of its span only."""
    specs = [HopSpec("a"), HopSpec("b", start_layer=3)]
    route = build_route(specs, [facts_of("0-3"), facts_of("1-4")])

    assert [LayerSpan(0, 3), LayerSpan(3, 4)] == [hop.layers for hop in route.hops]


def test_no_hop_is_no_route() -> None:
    """A route has at least one hop."""
    with pytest.raises(RouteError, match="at least one hop"):
        build_route([], [])


@pytest.mark.parametrize("start_layer", [0, 4])
def test_a_start_layer_lies_in_its_hops_span(start_layer: int) -> None:
    """One outside is refused with the layers that could be."""
    with pytest.raises(RouteError, match="outside the span") as caught:
        build_route([HopSpec("a", start_layer)], [facts_of("1-4")])

    assert (
        caught.value.members["allowed"],
        caught.value.members["endpoint"],
    ) == ("1 to 3", "a")


@pytest.mark.parametrize(
    ("spans", "fault"),
    [
        (["1-4"], "leaves a gap: layer 0 comes next, h0 starts at 1"),
        (["0-2", "3-4"], "leaves a gap: layer 2 comes next, h1 starts at 3"),
        (["0-3", "2-4"], "runs layers twice: layer 3 comes next, h1 starts at 2"),
        (["0-4", "0-4"], "runs layers twice"),
        (["0-2", "2-4", "0-2"], "runs layers twice"),
        (["0-2"], "ends at layer 2, the model has 4: layers 2 to 3 are missing"),
    ],
)
def test_hops_that_do_not_tile_the_model_are_refused(spans: list[str], fault: str) -> None:
    """Gaps, layers run twice and missing ends are each told as what they are."""
    with pytest.raises(RouteError, match=fault):
        route_of(*spans)


@pytest.mark.parametrize(
    ("field", "value"),
    [("revision", "other"), ("n_layers", 5), ("hidden_size", 8), ("dtype", "bfloat16")],
)
def test_hops_of_two_models_are_refused(field: str, value: object) -> None:
    """A hop whose model differs from the first one's is refused with both values."""
    with pytest.raises(RouteError, match="another model") as caught:
        route_of("0-2", "2-4", **{field: value})

    members = caught.value.members
    assert (field, value, "h1") == (members["field"], members["value"], members["endpoint"])
    assert getattr(facts_of("0-2"), field) == members["allowed"]


def test_a_name_may_differ_between_hops() -> None:
    """Shards may have the same model under different paths."""
    assert len(route_of("0-2", "2-4", model="/elsewhere").hops) == 2


@pytest.mark.parametrize("kv_cache", [True, False])
def test_one_hop_without_cache_makes_a_route_stateless(kv_cache: bool) -> None:
    """A route keeps state only where every hop does."""
    assert route_of("0-2", "2-4", kv_cache=kv_cache).stateless is not kv_cache


def test_a_route_takes_what_its_least_hop_takes() -> None:
    """The longest sequence and the longest step are those of the hop that takes least."""
    route = route_of("0-2", "2-4", max_positions=100, max_step_tokens=7)

    assert (route.max_positions, route.max_step_tokens) == (100, 7)


def test_a_stateless_sequence_is_one_step() -> None:
    """Where every step is the whole sequence, none is longer than the longest step."""
    route = route_of("0-2", "2-4", kv_cache=False, max_positions=100, max_step_tokens=7)

    assert route.max_positions == 7
