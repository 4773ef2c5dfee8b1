from __future__ import annotations

import json
import re

import pytest

from meshnet import errors
from meshnet.errors import MeshError, from_code
from meshnet.wire import problems


def all_below(kind: type[MeshError]) -> list[type[MeshError]]:
    return [found for sub in kind.__subclasses__() for found in (sub, *all_below(sub))]


KINDS = all_below(MeshError)


def drawn_tree() -> dict[str, tuple[str, int]]:
    """Each class in the module's drawing: its parent, and the status drawn beside it or above."""
    tree: dict[str, tuple[str, int]] = {}
    path: list[tuple[str, int]] = [("MeshError", 500)]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([│├└─ ]+)(\w+) *(\d{3})?", line)
        if match and "─" in match[1]:
            depth = len(match[1]) // 4
            parent, parents_status = path[depth - 1]
            status = int(match[3]) if match[3] else parents_status
            path[depth:] = [(match[2], status)]
            tree[match[2]] = (parent, status)
    return tree


def test_the_drawing_shows_the_tree() -> None:
    """The docstring's drawing has every class under its parent, with its status."""
    real = {kind.__name__: (kind.__mro__[1].__name__, kind.status) for kind in KINDS}

    assert drawn_tree() == real


def test_codes_are_unique() -> None:
    """No two classes share a code, so that a code names one class."""
    codes = [kind.code for kind in (MeshError, *KINDS)]

    assert sorted(set(codes)) == sorted(codes)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_every_error_survives_the_wire(kind: type[MeshError]) -> None:
    """An error comes out of its problem document as its class, with its message and members."""
    error = kind("went wrong", field="X", held=3)
    body = json.dumps(problems.to_problem(error)).encode()
    received = problems.from_problem(body, status=error.status, endpoint="http://a")

    assert (kind, "went wrong") == (type(received), received.message)
    assert received.members == {"field": "X", "held": 3, "endpoint": "http://a"}


def test_an_unknown_code_is_none() -> None:
    """A code of a later version makes no error here."""
    assert from_code("from_the_future", "x", {}) is None


def test_a_member_may_have_any_name() -> None:
    """Members named like the constructor's own parameters are members all the same."""
    error = from_code("cache_miss", "x", {"message": 1, "self": 2})

    assert error is not None
    assert error.members == {"message": 1, "self": 2}


def test_an_error_reads_as_its_message() -> None:
    """str() of an error is the sentence for a person."""
    assert str(errors.CacheFull("no room", used=3)) == "no room"
