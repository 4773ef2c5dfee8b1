from __future__ import annotations

import base64
import json
import tracemalloc
import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshnet.errors import InvalidRequest
from meshnet.generation import MAX_LOGIT_BIAS, NO_CONTEXT, SamplingContext
from meshnet.wire.context import parse_context, render_context

VOCAB = 70
"""Not a multiple of eight: the mask's last byte has two bits that are no tokens."""
N_TOKENS = 3

ids = st.lists(st.integers(0, VOCAB - 1), max_size=9).map(tuple)
contexts = st.builds(
    SamplingContext,
    prompt_ids=ids,
    generated_ids=ids,
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5),
    banned_ids=st.lists(st.integers(1, VOCAB - 1), max_size=9).map(tuple),
    # The first token is always left to pick.
    allowed=st.none() | st.binary(max_size=8).map(lambda mask: b"\x01" + mask),
    next_ids=st.lists(st.integers(0, VOCAB - 1), max_size=N_TOKENS).map(tuple),
)


def parsed(data: bytes) -> SamplingContext:
    return parse_context(data, vocab_size=VOCAB, n_tokens=N_TOKENS)


def packed(mask: bytes) -> str:
    return base64.b64encode(zlib.compress(mask)).decode()


def refusal(sent: bytes | dict[str, object]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parsed(sent if isinstance(sent, bytes) else json.dumps(sent).encode())
    return caught.value


@given(contexts)
def test_a_context_comes_back(context: SamplingContext) -> None:
    """parse_context() undoes render_context()."""
    assert context == parsed(render_context(context))


def test_nothing_is_sent_as_nothing() -> None:
    """An empty context has no bytes, and no bytes are an empty context."""
    assert (render_context(NO_CONTEXT), parsed(b"")) == (b"", NO_CONTEXT)


def test_a_context_is_json_without_what_is_usual() -> None:
    """Members that say nothing are left out; a mask is base64 of zlib."""
    context = SamplingContext(generated_ids=(3, 4), logit_bias={7: -0.5}, allowed=b"\x06")
    sent = json.loads(render_context(context))
    mask = zlib.decompress(base64.b64decode(sent.pop("allowed")))

    assert (mask, sent) == (b"\x06", {"generated_ids": [3, 4], "logit_bias": {"7": -0.5}})


def test_a_mask_of_a_real_vocabulary_is_short() -> None:
    """Masks are mostly one bit all over: a few hundred bytes of 6,144."""
    few = SamplingContext(
        allowed=sum(1 << i for i in range(0, 49152, 997)).to_bytes(6144, "little")
    )

    assert len(render_context(few)) < 500


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        (b"{", "all of it: Invalid JSON"),
        (b"null", "all of it: Input should be"),
        (b"[]", "all of it: Input should be"),
        (b"\xff", "all of it: Invalid JSON"),
        (b"[" * 10_000, "all of it: Invalid JSON: recursion limit"),
        (b'{"prompt_ids": [NaN]}', "prompt_ids.0: "),
        ({"unheard_of": 1}, "unheard_of: Extra inputs"),
        ({"prompt_ids": 7}, "prompt_ids: "),
        ({"prompt_ids": [-1]}, "prompt_ids.0: "),
        ({"prompt_ids": [2**31]}, "prompt_ids.0: "),
        ({"generated_ids": [1.5]}, "generated_ids.0: "),
        ({"banned_ids": [None]}, "banned_ids.0: "),
        ({"next_ids": "1"}, "next_ids: "),
        ({"logit_bias": {"one": 1}}, "logit_bias.one"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1: "),
        ({"logit_bias": {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}}, "logit_bias: "),
        ({"allowed": 1}, "allowed: "),
        ({"allowed": "é"}, "allowed: Value error, no zlib in base64"),
        ({"allowed": "AAAA"}, "allowed: Value error, no zlib in base64"),
        ({"allowed": "A"}, "allowed: Value error, no zlib in base64"),
        ({"allowed": ""}, "allowed: Value error, zlib that is cut short"),
        ({"allowed": packed(b"\x01" * 9)[:-8]}, "allowed: Value error, zlib that is cut short"),
        (
            {"allowed": base64.b64encode(zlib.compress(b"\x01") + b"more").decode()},
            "allowed: Value error, zlib that is cut short, goes on",
        ),
        ({"prompt_ids": [69, 70]}, "prompt_ids: token id 70 is not in the vocabulary"),
        ({"generated_ids": [70]}, "generated_ids: token id 70 "),
        ({"logit_bias": {"2147483647": 1}}, "logit_bias: token id 2147483647 "),
        ({"banned_ids": [70]}, "banned_ids: token id 70 "),
        ({"next_ids": [70]}, "next_ids: token id 70 "),
        ({"next_ids": [1, 2, 3, 4]}, "next_ids: 4 are too many"),
        ({"allowed": packed(b"")}, "no token is left to pick"),
        ({"allowed": packed(bytes(9))}, "no token is left to pick"),
        ({"allowed": packed(bytes(8) + b"\xc0\xff")}, "no token is left to pick"),
        ({"allowed": packed(b"\x06"), "banned_ids": [1, 2, 69]}, "no token is left to pick"),
        ({"banned_ids": list(range(VOCAB))}, "no token is left to pick"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_context_is_refused(sent: bytes | dict[str, object], fault: str) -> None:
    """The refusal names the member, the fault and what is allowed."""
    error = refusal(sent)

    assert error.message.startswith(f"sampling context: {fault}")
    assert error.members["field"] == "body"
    assert error.members["allowed"]


@pytest.mark.parametrize(
    "sent",
    [
        {"allowed": packed(b"\xff" * 9)},
        {"allowed": packed(b"\xff" * 10)},
        {"allowed": packed(bytes(8) + b"\x20")},
        {"allowed": packed(b"\x02"), "banned_ids": [0, 69]},
        {"banned_ids": list(range(VOCAB - 1))},
        {"next_ids": [1, 2, 3]},
        {"logit_bias": {str(i): -100 for i in range(VOCAB)}},
        {},
    ],
    ids=str,
)
def test_a_context_may_go_to_the_limits(sent: dict[str, object]) -> None:
    """One token left, the whole vocabulary, as many next tokens as tokens: all that is right."""
    assert parsed(json.dumps(sent).encode()) == SamplingContext.model_validate(sent)


@pytest.mark.parametrize(
    "sent",
    [{"x" * 100_000: 1}, {"logit_bias": {"9" * 100_000: 1}}, {"allowed": "x" * 100_000}],
    ids=["member", "key", "value"],
)
def test_a_refusal_is_no_copy_of_the_input(sent: dict[str, object]) -> None:
    """However long a member's name, the message is not."""
    assert len(refusal(sent).message) < 400


def test_a_mask_that_inflates_without_end_is_not_inflated() -> None:
    """64 MiB in 64 KiB: they are never made, the refusal takes a few of them."""
    bomb = json.dumps({"allowed": packed(bytes(2**26))}).encode()
    tracemalloc.start()
    try:
        error = refusal(bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert "makes over 1048576 bytes" in error.message
    assert peak < 3 * 2**20


def test_many_faults_are_told_by_the_first() -> None:
    """A list is given up at its first fault: telling of all would take longer than the list."""
    sent = json.dumps({"prompt_ids": [-1] * 50_000}).encode()
    with pytest.raises(ValidationError) as caught:
        SamplingContext.model_validate_json(sent)

    assert caught.value.error_count() == 1


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(list(SamplingContext.model_fields)) | st.text(), inner
            )
        ),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode())
)
def test_anything_is_read_or_refused(data: bytes) -> None:
    """Whatever comes behind a tensor, there is a context or an InvalidRequest."""
    with suppress(InvalidRequest):
        assert isinstance(parsed(data), SamplingContext)
