from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import InvalidRequest
from meshnet.wire.frames import ITEMSIZE, Dtype, Frame, nbytes

DTYPES: st.SearchStrategy[Dtype] = st.sampled_from(sorted(ITEMSIZE))
SHAPES = st.lists(st.integers(1, 8), min_size=2, max_size=3).map(tuple)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1))
def test_token_ids_come_back(ids: list[int]) -> None:
    """Ids put into a frame are the ids read from it."""
    assert ids == Frame.of_token_ids(ids).token_ids()


def test_token_ids_are_little_endian() -> None:
    """An id is four bytes, the least significant first."""
    frame = Frame.of_token_ids([1, 258])

    assert frame == Frame("int32", (1, 2), b"\x01\x00\x00\x00\x02\x01\x00\x00")


@given(DTYPES, SHAPES)
def test_a_frame_is_as_long_as_its_shape(dtype: Dtype, shape: tuple[int, ...]) -> None:
    """Data of the shape's length makes a frame, with the tokens on axis 1."""
    frame = Frame(dtype, shape, bytes(nbytes(dtype, shape)))

    assert shape[1] == frame.n_tokens


@given(DTYPES, SHAPES, st.integers(0, 4096))
def test_a_lying_length_is_refused(dtype: Dtype, shape: tuple[int, ...], length: int) -> None:
    """Data of any other length is refused with both lengths."""
    expected = prod(shape) * {"int32": 4, "float32": 4}.get(dtype, 2)
    if length == expected:
        length += 1
    with pytest.raises(InvalidRequest) as caught:
        Frame(dtype, shape, bytes(length))

    assert {"field": "body", "value": length, "allowed": expected} == caught.value.members


def test_a_huge_shape_allocates_nothing() -> None:
    """A shape of 2^40 elements is refused for the few bytes that came."""
    with pytest.raises(InvalidRequest):
        Frame("float32", (1, 2**20, 2**20), b"few")
