from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import InvalidRequest
from meshnet.generation import Sampling
from meshnet.wire import headers
from meshnet.wire.frames import ITEMSIZE, Dtype
from meshnet.wire.headers import (
    MAX_CONTEXT_BYTES,
    CacheMode,
    StepHeaders,
    parse,
    parse_dtype,
    parse_epoch,
    parse_keep,
    parse_shape,
    render,
)

MINIMAL = {"X-Meshnet-Shape": "1,6", "X-Meshnet-Dtype": "int32"}
CACHED = MINIMAL | {"X-Meshnet-Session": "s", "X-Meshnet-Cache": "prefill"}
MAX = 2**31 - 1

tokens = st.text("abcXYZ019._-", min_size=1, max_size=128)
axes = st.integers(1, MAX)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 2**40),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 10),
    top_logprobs=st.none() | st.integers(0, 20),
)


@st.composite
def steps(draw: st.DrawFn) -> StepHeaders:
    mode: CacheMode = draw(st.sampled_from(["prefill", "decode", "stateless"]))
    least_past, most_past = {"prefill": (0, MAX), "decode": (1, MAX), "stateless": (0, 0)}[mode]
    dtype: Dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
    sampling = draw(st.none() | samplings)
    push_id = draw(st.none() | tokens) if mode != "stateless" else None
    past_len = draw(st.integers(least_past, most_past))
    return StepHeaders(
        session=draw(tokens if mode != "stateless" else st.none() | tokens),
        cache=mode,
        past_len=past_len,
        shape=draw(st.tuples(axes, axes) | st.tuples(axes, axes, axes)),
        dtype=dtype,
        start_layer=draw(st.none() | st.integers(0, MAX)),
        fingerprint=draw(st.none() | tokens),
        step=draw(st.none() | tokens),
        epoch=draw(st.integers(0, MAX)),
        boot=draw(st.none() | tokens),
        fork_of=draw(st.none() | tokens.map("of-".__add__)) if past_len else None,
        sampling=sampling,
        context_bytes=draw(st.integers(0, MAX_CONTEXT_BYTES if sampling else 0)),
        input_id=draw(st.none() | tokens) if mode != "stateless" else None,
        push_id=push_id,
        push_to=push_id and "http://a:1",
        push_boot=push_id and draw(tokens),
        request_id=draw(st.none() | tokens),
        traceparent=draw(st.none() | st.text("abc-019", max_size=256)),
    )


def refusal(changed: dict[str, str]) -> dict[str, object]:
    """The members of the error to headers that are right but for these."""
    with pytest.raises(InvalidRequest) as caught:
        parse(CACHED | changed)
    return caught.value.members


@given(steps())
def test_headers_come_back(step: StepHeaders) -> None:
    """parse() undoes render()."""
    assert step == parse(render(step))


@given(steps())
def test_what_is_none_is_not_sent(step: StepHeaders) -> None:
    """Headers without a value are left out, not sent empty."""
    sent = render(step)

    assert [name for name, value in sent.items() if value == "None"] == []
    assert (step.sampling is not None) == (headers.SAMPLING in sent)
    assert (step.epoch > 0) == (headers.EPOCH in sent)
    assert (step.context_bytes > 0) == (headers.CONTEXT_BYTES in sent)


def test_sampling_is_sent_without_what_is_usual() -> None:
    """A shard of an older version is not told of parameters that it does not know, if it can be."""
    sampling = Sampling(temperature=0.5, min_p=0.0, top_logprobs=None, seed=7)
    sent = [
        render(StepHeaders(shape=(1, 1), dtype="int32", sampling=each))[headers.SAMPLING]
        for each in (sampling, Sampling())
    ]

    assert sent == ['{"temperature":0.5,"seed":7}', "{}"]


def test_the_least_step_is_stateless() -> None:
    """Shape and dtype are enough; all else has the protocol's defaults."""
    step = parse(MINIMAL)

    assert (step.session, step.cache, step.past_len, step.shape) == (None, "stateless", 0, (1, 6))
    assert (step.epoch, step.boot, step.context_bytes) == (0, None, 0)


def test_names_are_read_in_any_case() -> None:
    """HTTP's names have no case."""
    assert parse(CACHED) == parse({name.lower(): value for name, value in CACHED.items()})


def test_foreign_headers_are_passed_over() -> None:
    """Headers which are not ours are no fault, also those named like our fields."""
    assert parse(CACHED) == parse({**CACHED, "Host": "a", "session": "!", "X-Meshnet-New": "1"})


def test_blanks_in_a_shape_are_no_fault() -> None:
    """Some clients write a blank after a comma."""
    assert parse(MINIMAL | {"X-Meshnet-Shape": "1, 6 ,576"}).shape == (1, 6, 576)


@pytest.mark.parametrize("name", MINIMAL)
def test_a_missing_header_is_named(name: str) -> None:
    """Shape and dtype have no default: their absence is refused by name."""
    with pytest.raises(InvalidRequest, match="required") as caught:
        parse({k: v for k, v in MINIMAL.items() if k != name})

    assert name == caught.value.members["field"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Meshnet-Session", ""),
        ("X-Meshnet-Session", "a/b"),
        ("X-Meshnet-Session", "a" * 129),
        ("X-Meshnet-Cache", "keep"),
        ("X-Meshnet-Past-Len", "-1"),
        ("X-Meshnet-Past-Len", "six"),
        ("X-Meshnet-Past-Len", str(2**31)),
        ("X-Meshnet-Past-Len", "9" * 5000),
        ("X-Meshnet-Past-Len", "5.0"),
        ("X-Meshnet-Past-Len", "+5"),
        ("X-Meshnet-Past-Len", "1_0"),
        ("X-Meshnet-Past-Len", "٣"),
        ("X-Meshnet-Shape", ""),
        ("X-Meshnet-Shape", "6"),
        ("X-Meshnet-Shape", "1,6,576,1"),
        ("X-Meshnet-Shape", "1,-6"),
        ("X-Meshnet-Shape", "1,0"),
        ("X-Meshnet-Shape", "1,1099511627776"),
        ("X-Meshnet-Shape", "1,6.5"),
        ("X-Meshnet-Shape", "1,nan"),
        ("X-Meshnet-Dtype", "object"),
        ("X-Meshnet-Dtype", ""),
        ("X-Meshnet-Start-Layer", "-1"),
        ("X-Meshnet-Fingerprint", "a b"),
        ("X-Meshnet-Step", "\x00"),
        ("X-Meshnet-Epoch", "-1"),
        ("X-Meshnet-Epoch", "1.0"),
        ("X-Meshnet-Epoch", str(2**31)),
        ("X-Meshnet-Boot", "a b"),
        ("X-Meshnet-Boot", ""),
        ("X-Meshnet-Sampling", ""),
        ("X-Meshnet-Sampling", "{"),
        ("X-Meshnet-Sampling", "[]"),
        ("X-Meshnet-Sampling", '{"temperature": NaN}'),
        ("X-Meshnet-Sampling", '{"temperature": -1}'),
        ("X-Meshnet-Sampling", '{"top_q": 1}'),
        ("X-Meshnet-Sampling", "[" * 10_000),
        ("X-Meshnet-Sampling", "\ud800"),
        ("X-Meshnet-Sampling", '{"repetition_penalty": 0}'),
        ("X-Meshnet-Sampling", '{"top_logprobs": 21}'),
        ("X-Meshnet-Context-Bytes", ""),
        ("X-Meshnet-Context-Bytes", "-1"),
        ("X-Meshnet-Context-Bytes", "1.0"),
        ("X-Meshnet-Context-Bytes", str(16 * 1024**2 + 1)),
        ("X-Request-Id", "a\nb"),
        ("traceparent", "a" * 257),
    ],
    ids=lambda text: text[:30],
)
def test_a_malformed_header_is_named(name: str, value: str) -> None:
    """The refusal names the header, what it was, at most 200 characters of it, and the rule."""
    members = refusal({name: value})

    assert (name, value[:200]) == (members["field"], members["value"])
    assert members["allowed"]


def test_a_fault_within_the_sampling_is_told() -> None:
    """The message says which parameter of the JSON is wrong."""
    with pytest.raises(InvalidRequest, match=r"X-Meshnet-Sampling\.top_p"):
        parse(MINIMAL | {"X-Meshnet-Sampling": '{"top_p": 3}'})


@pytest.mark.parametrize("text", ['{"%s": 1}', '{"%s'], ids=["member", "cut"])
def test_a_refusal_is_no_copy_of_the_sampling(text: str) -> None:
    """However long a member's name, the message is not."""
    with pytest.raises(InvalidRequest) as caught:
        parse(MINIMAL | {"X-Meshnet-Sampling": text % ("x" * 50_000)})

    assert len(caught.value.message) < 400


def test_a_context_comes_where_the_tail_samples_only() -> None:
    """Without parameters nothing is sampled or scored, and there is nothing to depend on it."""
    members = refusal({"X-Meshnet-Context-Bytes": "7"})

    assert members == {"field": "X-Meshnet-Context-Bytes", "value": 7, "allowed": 0}


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_cached_step_has_a_session(mode: str) -> None:
    """Without a session there is nothing to cache for."""
    with pytest.raises(InvalidRequest) as caught:
        parse(MINIMAL | {"X-Meshnet-Cache": mode, "X-Meshnet-Past-Len": "6"})

    assert caught.value.members["field"] == "X-Meshnet-Session"


@pytest.mark.parametrize(
    ("mode", "past_len"), [("stateless", 6), ("decode", 0)], ids=["stateless", "decode"]
)
def test_mode_and_past_agree(mode: str, past_len: int) -> None:
    """A stateless step has no past, a decode has one; the refusal names the past length."""
    members = refusal({"X-Meshnet-Cache": mode, "X-Meshnet-Past-Len": str(past_len)})

    assert ("X-Meshnet-Past-Len", past_len) == (members["field"], members["value"])


@pytest.mark.parametrize(
    "changed",
    [
        {"X-Meshnet-Past-Len": "0"},
        {"X-Meshnet-Past-Len": "0", "X-Meshnet-Cache": "stateless"},
        {"X-Meshnet-Fork-Of": "s"},
        {"X-Meshnet-Fork-Of": "no token"},
    ],
    ids=["first step", "stateless", "its own session", "malformed"],
)
def test_a_fork_is_of_another_sessions_tokens(changed: dict[str, str]) -> None:
    """It has at least one, and goes on behind them; the refusal names the header."""
    fork = {"X-Meshnet-Fork-Of": "other", "X-Meshnet-Past-Len": "6"}
    assert parse(CACHED | fork).fork_of == "other"

    assert refusal(fork | changed)["field"] == "X-Meshnet-Fork-Of"


@pytest.mark.parametrize(("text", "keep"), [(None, False), ("0", False), ("1", True)])
def test_whether_a_session_is_kept_is_read(text: str | None, *, keep: bool) -> None:
    """Only where it says so."""
    assert parse_keep(text) == keep


@pytest.mark.parametrize("text", ["", "2", "true", "1 ", "9" * 5000])
def test_what_is_neither_yes_nor_no_is_refused(text: str) -> None:
    """The refusal names the header, at most 200 characters of what it was, and the rule."""
    with pytest.raises(InvalidRequest) as caught:
        parse_keep(text)

    assert caught.value.members == {
        "field": "X-Meshnet-Keep",
        "value": text[:200],
        "allowed": "0 or 1",
    }


OUR_NAMES = [field.alias for field in StepHeaders.model_fields.values()]
VALUES = st.text() | st.sampled_from(
    [
        "",
        "1,6",
        "int32",
        "prefill",
        "decode",
        "0",
        "6",
        "{}",
        "null",
        "NaN",
        "1e999",
        "-0",
        "[[",
        "s",
    ]
)


def outcome(sent: dict[str, str]) -> StepHeaders | InvalidRequest:
    try:
        return parse(sent)
    except InvalidRequest as error:
        return error


@given(st.dictionaries(st.sampled_from(OUR_NAMES) | st.text(), VALUES))
def test_any_headers_are_read_or_refused_by_name(sent: dict[str, str]) -> None:
    """Whatever is sent, parse() gives a step, or an InvalidRequest with field and allowed."""
    found = outcome(sent)

    assert isinstance(found, StepHeaders) or found.members["field"] in OUR_NAMES
    assert isinstance(found, StepHeaders) or found.members["allowed"] not in {None, ""}


@given(st.dictionaries(st.sampled_from(OUR_NAMES), VALUES, max_size=2))
def test_a_right_step_with_wrong_headers_is_read_or_refused(changed: dict[str, str]) -> None:
    """Fuzzing around a right step reaches the checks of headers together; they name both too."""
    found = outcome(CACHED | changed)

    assert isinstance(found, StepHeaders) or found.members["field"] in OUR_NAMES
    assert isinstance(found, StepHeaders) or {"value", "allowed"} <= found.members.keys()


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_every_dtype_is_read(dtype: str) -> None:
    """A dtype of the wire reads as itself."""
    assert dtype == parse_dtype(dtype)


@given(st.text().filter(lambda text: text not in ITEMSIZE))
def test_another_dtype_is_refused(text: str) -> None:
    """An answer's dtype outside the four is refused, naming header and dtypes."""
    with pytest.raises(InvalidRequest) as caught:
        parse_dtype(text)

    assert caught.value.members["field"] == "X-Meshnet-Dtype"
    assert "bfloat16" in str(caught.value.members["allowed"])


@given(st.tuples(axes, axes) | st.tuples(axes, axes, axes))
def test_an_answers_shape_comes_back(shape: tuple[int, ...]) -> None:
    """parse_shape() undoes render_shape()."""
    assert shape == parse_shape(headers.render_shape(shape))


@pytest.mark.parametrize(
    "text", ["", "1", "1,0", "1,2,3,4", "1,,2", "1,-2", "a,b", "1," + "9" * 5000]
)
def test_an_answers_shape_follows_the_rule_of_a_steps(text: str) -> None:
    """What no step could have is refused in an answer too."""
    with pytest.raises(InvalidRequest) as caught:
        parse_shape(text)

    assert ("X-Meshnet-Shape", text[:200]) == (
        caught.value.members["field"],
        caught.value.members["value"],
    )


@given(st.integers(0, MAX))
def test_an_epoch_is_read(epoch: int) -> None:
    """A number of up to 2**31 - 1 reads as itself."""
    assert parse_epoch(str(epoch)) == epoch


def test_no_epoch_is_none_in_particular() -> None:
    """Who sends none has epoch 0."""
    assert parse_epoch(None) == 0


@pytest.mark.parametrize("text", ["", "-1", "1.0", "one", "+1", "1_0", str(2**31), "9" * 5000])
def test_what_is_no_epoch_is_refused(text: str) -> None:
    """The refusal names the header, at most 200 characters of what it was, and the rule."""
    with pytest.raises(InvalidRequest) as caught:
        parse_epoch(text)

    assert caught.value.members == {
        "field": "X-Meshnet-Epoch",
        "value": text[:200],
        "allowed": "0 to 2147483647",
    }


PUSH = {
    "X-Meshnet-Push-Id": "p",
    "X-Meshnet-Push-To": "http://a:1",
    "X-Meshnet-Push-Boot": "b",
}


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://10.0.0.1:8001",
        "https://shard-1.example:443",
        "http://shard_1",
        "http://localhost:65535",
        "http://[::1]:8001",
        "http://[fe80::1]",
    ],
)
def test_an_endpoint_to_push_to_is_read(endpoint: str) -> None:
    """Scheme, host and port."""
    assert parse(CACHED | PUSH | {"X-Meshnet-Push-To": endpoint}).push_to == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "10.0.0.1:8001",
        "ws://a:1",
        "file:///etc/passwd",
        "http://",
        "http://a:1/",
        "http://a:1/path",
        "http://a:1?query",
        "http://a:1#fragment",
        "http://user:secret@a:1",
        "http://user@a",
        "http://a b",
        "http://a:",
        "http://a:65536",
        "http://a:x",
        "http://a..b",
        "http://" + "a" * 64,
        "http://" + "a." * 150,
        "http://\u00e4:1",
        "http://[::1:8001",
        "http://[::::]:1",
        "http://[1.2.3.4]",
        "http://a:1\n",
    ],
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    """Nothing is to be connected to that is no shard's address, and no key goes in a URL."""
    members = refusal(PUSH | {"X-Meshnet-Push-To": endpoint})

    assert members["field"] == "X-Meshnet-Push-To"
    assert "http://HOST:PORT" in str(members["allowed"])


@pytest.mark.parametrize("name", PUSH)
def test_a_push_has_an_id_a_place_and_a_life(name: str) -> None:
    """The first one that is missing is named."""
    with pytest.raises(InvalidRequest) as caught:
        parse(CACHED | {each: value for each, value in PUSH.items() if each != name})

    assert caught.value.members["field"] == name


@pytest.mark.parametrize(
    ("direct", "field"),
    [({"X-Meshnet-Input-Id": "i"}, "X-Meshnet-Input-Id"), (PUSH, "X-Meshnet-Push-Id")],
)
def test_a_stateless_step_has_no_part_in_direct_return(direct: dict[str, str], field: str) -> None:
    """It may be of no session, and nobody could give up its wait."""
    assert refusal(direct | {"X-Meshnet-Cache": "stateless"})["field"] == field
