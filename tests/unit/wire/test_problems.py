from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import CacheMiss, HopProtocolError, MeshError
from meshnet.wire.problems import from_problem, to_problem

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=3,
)


def received(body: bytes, status: int = 409) -> MeshError:
    return from_problem(body, status=status, endpoint="http://a")


def test_a_problem_is_a_document_of_rfc_9457() -> None:
    """The standard members, our code and retryable, and the error's own members beside them."""
    problem = to_problem(CacheMiss("not here", reason="expired", held=0))

    assert problem == {
        "type": "urn:meshnet:problem:cache_miss",
        "title": "cache miss",
        "status": 409,
        "detail": "not here",
        "code": "cache_miss",
        "retryable": False,
        "reason": "expired",
        "held": 0,
    }


def test_a_member_cannot_hide_the_code() -> None:
    """A member named like a standard one gives way to it."""
    assert to_problem(CacheMiss("x", code="other", status=1))["code"] == "cache_miss"


def test_who_answered_is_who_was_asked() -> None:
    """The error names the hop that was asked, whatever endpoint the answer names."""
    body = json.dumps(to_problem(CacheMiss("x", endpoint="http://elsewhere"))).encode()

    assert received(body).members["endpoint"] == "http://a"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>502 Bad Gateway</html>",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"{}",
        b'{"code": "cache_miss"}',
        b'{"code": 7, "detail": "x"}',
        b'{"code": "cache_miss", "detail": null}',
        b'{"code": "from_the_future", "detail": "x"}',
        b"[" * 200_000,
        b'{"code": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_anything_else_is_a_protocol_error(body: bytes) -> None:
    """A body which is not one of our problems names the hop and the status it came with."""
    error = received(body, status=502)

    assert type(error) is HopProtocolError
    assert error.members == {"endpoint": "http://a", "status": 502}


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body_becomes_an_error(body: bytes) -> None:
    """Whatever a hop answers, the outcome is one of our errors."""
    assert isinstance(received(body), MeshError)


@given(st.dictionaries(st.text() | st.sampled_from(["message", "self"]), JSON, max_size=3))
def test_any_members_come_through(members: dict[str, object]) -> None:
    """A problem of ours keeps its class, whatever members stand beside it."""
    body = json.dumps(members | {"code": "cache_miss", "detail": "x"}).encode()

    assert type(received(body)) is CacheMiss
