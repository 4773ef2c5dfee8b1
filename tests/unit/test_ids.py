from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.ids import is_token, is_traceparent, new_id

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@given(st.text("abcXYZ019._-", min_size=1, max_size=128))
def test_ids_of_the_alphabet_are_tokens(text: str) -> None:
    """1 to 128 characters of the alphabet can travel as an id."""
    assert is_token(text)


@pytest.mark.parametrize("text", ["", "a" * 129, "a b", "a/b", "é", "a\n", "\na", "a\x00", "٣"])
def test_anything_else_is_no_token(text: str) -> None:
    """Empty, long and foreign ids are refused, a line end at the end too."""
    assert not is_token(text)


def test_new_ids_are_fresh_tokens() -> None:
    """Ids made here can travel and do not repeat."""
    made = {new_id() for _ in range(100)}

    assert (len(made), all(map(is_token, made))) == (100, True)


def test_a_w3c_trace_context_is_known() -> None:
    """A traceparent as the standard writes it is one."""
    assert is_traceparent(TRACE)


@pytest.mark.parametrize("text", ["", TRACE.upper(), TRACE + "\n", TRACE + "-0", "é", "x" * 300])
def test_what_a_hop_would_choke_on_is_no_trace_context(text: str) -> None:
    """A caller's malformed traceparent is not one to send on."""
    assert not is_traceparent(text)
