from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import InvalidRequest, RouteError
from meshnet.model.fake_stage import fake_facts
from meshnet.topology import (
    Hop,
    HopSpec,
    LayerSpan,
    Route,
    ShardFacts,
    build_route,
    check_same_model,
    choose_route,
    even_spans,
    make_hop,
)


def facts_of(span: str, **changed: object) -> ShardFacts:
    return replace(fake_facts(LayerSpan.parse(span)), **changed)


def hops_of(*spans: str, **changed_in_last: object) -> list[Hop]:
    """Hops h0, h1... that enter at their spans' first layers."""
    facts = [facts_of(span) for span in spans]
    facts[-1] = replace(facts[-1], **changed_in_last)
    return [make_hop(HopSpec(f"h{i}"), one) for i, one in enumerate(facts)]


def route_of(*spans: str, **changed_in_last: object) -> Route:
    """The route of such hops."""
    return build_route(hops_of(*spans, **changed_in_last))


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
    hops = [make_hop(HopSpec(f"h{i}"), fake_facts(span, n_layers)) for i, span in enumerate(spans)]

    assert spans == [hop.layers for hop in build_route(hops).hops]


def test_overlapping_spans_make_a_route_by_start_layers() -> None:
    """A hop entered past its first layer runs the rest of its span only."""
    hops = [
        make_hop(HopSpec("a"), facts_of("0-3")),
        make_hop(HopSpec("b", start_layer=3), facts_of("1-4")),
    ]

    assert [hop.layers for hop in build_route(hops).hops] == [LayerSpan(0, 3), LayerSpan(3, 4)]


def test_no_hop_is_no_route() -> None:
    """A route has at least one hop."""
    with pytest.raises(RouteError, match="at least one hop"):
        build_route([])


@pytest.mark.parametrize("start_layer", [0, 4])
def test_a_start_layer_lies_in_its_hops_span(start_layer: int) -> None:
    """One outside is refused with the layers that could be."""
    with pytest.raises(RouteError, match="outside the span") as caught:
        make_hop(HopSpec("a", start_layer), facts_of("1-4"))

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
    [
        ("revision", "other"),
        ("n_layers", 5),
        ("hidden_size", 8),
        ("dtype", "bfloat16"),
        ("transformers_version", "9.9"),
    ],
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


def test_a_hop_remembers_the_life_it_is_of() -> None:
    """Facts are of one life of a shard's process, which stands beside them."""
    assert make_hop(HopSpec("a"), facts_of("0-4"), "boot-7").boot_id == "boot-7"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("commit-1", "commit-1"),
        ("commit-1", "sample-2"),
        ("gguf-1", "sample-1"),
        (None, "commit-1"),
        ("commit-1", None),
        (None, None),
    ],
)
def test_weights_are_of_one_model_unless_they_are_known_to_differ(
    ours: str | None, theirs: str | None
) -> None:
    """Digests of different kinds, or a missing one, say nothing of each other."""
    a, b = facts_of("0-2", weights=ours), facts_of("2-4", weights=theirs)
    check_same_model(make_hop(HopSpec("a"), a), make_hop(HopSpec("b"), b))


def test_other_weights_are_another_model() -> None:
    """Digests of one kind that differ are refused with both."""
    a, b = facts_of("0-2", weights="commit-1"), facts_of("2-4", weights="commit-2")
    with pytest.raises(RouteError) as caught:
        check_same_model(make_hop(HopSpec("a"), a), make_hop(HopSpec("b"), b))

    assert caught.value.members == {
        "field": "weights",
        "value": "commit-2",
        "allowed": "commit-1",
        "endpoint": "b",
    }


@pytest.mark.parametrize(
    ("span", "digests", "same"),
    [
        ("0-3", ("a", "b", "c"), True),
        ("0-3", ("x", "b", "c"), True),
        ("0-3", ("a", "x", "c"), False),
        ("1-3", ("b", "x"), False),
        ("1-3", (), True),
        ("3-4", ("x",), True),
    ],
)
def test_layers_that_both_hold_are_the_same(
    span: str, digests: tuple[str, ...], same: bool
) -> None:
    """Digests are compared where the spans meet, if both shards tell them."""
    ours = make_hop(HopSpec("a"), facts_of("1-3", layer_digests=("b", "c")))
    theirs = make_hop(HopSpec("b"), facts_of(span, layer_digests=digests))
    try:
        check_same_model(ours, theirs)
    except RouteError as error:
        found = str(error.members["field"])
    else:
        found = "the same"

    assert (found == "the same") is same
    assert same or found.startswith("digest of layer ")


@pytest.mark.parametrize(
    ("ours", "theirs"), [((), ()), (("b", "c"), ()), ((), ("b", "c"))], ids=["both", "one", "other"]
)
def test_without_digests_the_fingerprint_decides(
    ours: tuple[str, ...], theirs: tuple[str, ...]
) -> None:
    """Two of one span that cannot be compared by layers are the same if all is the same."""
    a = facts_of("1-3", layer_digests=ours)
    b = facts_of("1-3", layer_digests=theirs, fingerprint="other")
    with pytest.raises(RouteError, match="fingerprint other"):
        check_same_model(make_hop(HopSpec("a"), a), make_hop(HopSpec("b"), b))


def test_the_layer_that_differs_is_told() -> None:
    """The error names the layer, counted over the whole model, and both digests."""
    ours = make_hop(HopSpec("a"), facts_of("1-3", layer_digests=("b", "c")))
    theirs = make_hop(HopSpec("b"), facts_of("2-4", layer_digests=("x", "d")))
    with pytest.raises(RouteError) as caught:
        check_same_model(ours, theirs)

    assert caught.value.members == {
        "field": "digest of layer 2",
        "value": "x",
        "allowed": "c",
        "endpoint": "b",
    }


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


@pytest.mark.parametrize(
    ("told", "longest"),
    [
        ({}, 100),
        ({"state_base_bytes": 10, "state_token_bytes": 2, "cache_bytes": 210}, 100),
        ({"state_base_bytes": 10, "state_token_bytes": 2, "cache_bytes": 209}, 99),
        ({"state_base_bytes": 10, "state_token_bytes": 2, "cache_bytes": 10}, 0),
        ({"state_base_bytes": 10, "state_token_bytes": 2, "cache_bytes": 1}, 0),
        ({"state_base_bytes": 10, "cache_bytes": 10}, 100),
        ({"state_base_bytes": 10, "cache_bytes": 9}, 0),
        ({"state_token_bytes": 2, "cache_bytes": 20, "kv_cache": False}, 100),
    ],
    ids=str,
)
def test_a_session_is_no_longer_than_the_cache_has_room_for(
    told: dict[str, int], longest: int
) -> None:
    """The model's context, or less where the state of so many tokens is larger than the cache."""
    facts = facts_of("0-4", max_positions=100, **told)

    assert facts.max_session_tokens == longest
    assert not longest or not facts.kv_cache or facts.session_bytes(longest) <= facts.cache_bytes


def test_the_smallest_cache_limits_a_sequence() -> None:
    """What one hop cannot hold, the route cannot."""
    a = make_hop(HopSpec("a"), facts_of("0-2", state_token_bytes=2, cache_bytes=21))
    b = make_hop(HopSpec("b"), facts_of("2-4", state_token_bytes=1, cache_bytes=21))

    assert build_route([a, b]).max_positions == 10


# --- a route out of many shards ---


def idle(_: Hop) -> tuple[int, ...]:
    return (0,)


SPANS = st.tuples(st.integers(0, 5), st.integers(1, 6)).filter(lambda span: span[0] < span[1])


def hops_at(spans: list[tuple[int, int]]) -> list[Hop]:
    return [
        make_hop(HopSpec(f"h{i}"), fake_facts(LayerSpan(*span), n_layers=6))
        for i, span in enumerate(spans)
    ]


def can_tile(spans: list[tuple[int, int]]) -> bool:
    """Whether some of the spans join from 0 to 6; found by trying all."""
    reached = {0}
    for _ in spans:
        reached |= {end for start, end in spans if start in reached}
    return 6 in reached


@given(st.lists(SPANS, max_size=8))
def test_a_route_is_found_if_there_is_one(spans: list[tuple[int, int]]) -> None:
    """Whatever else there is, hops that tile the model are found, and nothing else is."""
    try:
        found = [hop.layers for hop in choose_route(hops_at(spans), idle).hops]
    except RouteError:
        found = []
    ends = [0, *(span.end for span in found)]

    assert bool(found) == can_tile(spans)
    assert [span.start for span in found] == ends[:-1]
    assert not found or ends[-1] == 6


@given(st.permutations(range(6)), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_the_least_busy_hop_is_taken_at_every_place(order: list[int], loads: list[int]) -> None:
    """Of two that run the same layers the one with less to do is taken, whatever the order."""
    spans = [(0, 2), (2, 4), (4, 6)] * 2
    hops = hops_at(spans)
    load_of = dict(zip((hop.endpoint for hop in hops), loads, strict=True))
    route = choose_route([hops[i] for i in order], lambda hop: (load_of[hop.endpoint],))

    assert [load_of[hop.endpoint] for hop in route.hops] == [
        min(loads[i], loads[i + 3]) for i in range(3)
    ]


def test_of_equals_the_first_is_taken() -> None:
    """Where both are as busy, the one named first serves."""
    route = choose_route(hops_at([(0, 6), (0, 6)]), idle)

    assert [hop.endpoint for hop in route.hops] == ["h0"]


def test_a_busy_hop_is_taken_where_the_idle_one_leads_nowhere() -> None:
    """An idle hop after which nobody goes on is no choice."""
    hops = hops_at([(0, 3), (0, 2), (2, 6)])
    route = choose_route(hops, lambda hop: (hop.endpoint == "h1",))

    assert [hop.endpoint for hop in route.hops] == ["h1", "h2"]


def test_out_of_nothing_there_is_no_route() -> None:
    """Without hops nothing can be chosen."""
    with pytest.raises(RouteError, match="at least one hop"):
        choose_route([], idle)


@pytest.mark.parametrize(
    ("spans", "fault"),
    [
        ([(3, 6)], "leaves a gap: layer 0 comes next"),
        ([(0, 3), (0, 3)], "layers 3 to 5 are missing"),
        ([(0, 2), (0, 2), (4, 6)], "leaves a gap: layer 2 comes next"),
        ([(0, 3), (2, 6)], "runs layers twice: layer 3 comes next, h1 starts at 2"),
    ],
)
def test_what_is_missing_is_told(spans: list[tuple[int, int]], fault: str) -> None:
    """Where there is no choice the error tells where the layers end, not that some are twice."""
    with pytest.raises(RouteError, match=fault):
        choose_route(hops_at(spans), idle)
