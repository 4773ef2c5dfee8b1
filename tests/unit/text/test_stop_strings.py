from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.text.stop_strings import StopStrings

# Few characters, so that strings overlap, contain and end each other.
TEXTS = st.text("ab", max_size=24) | st.text("ab🌶", max_size=24)
STRINGS = st.lists(st.text("ab🌶", min_size=1, max_size=6), max_size=4)
CUTS = st.lists(st.integers(0, 24), max_size=8)


def in_pieces(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


def outcome(pieces: Sequence[str], strings: Sequence[str], *, keep: bool) -> tuple[str, bool]:
    """All that goes out, and whether a stop string was found."""
    stops = StopStrings(strings, keep=keep)
    return "".join([*(stops.push(piece) for piece in pieces), stops.finish()]), stops.found


def right(text: str, strings: Sequence[str], *, keep: bool) -> tuple[str, bool]:
    """The same by looking at all places at once."""
    found = [
        (start + len(string), start)
        for string in strings
        for start in range(len(text))
        if text.startswith(string, start)
    ]
    if not found:
        return text, False
    end, start = min(found)
    return text[: end if keep else start], True


@given(TEXTS, STRINGS, CUTS, st.booleans())
def test_the_text_ends_at_the_string_that_ends_first(
    text: str, strings: list[str], cuts: list[int], keep: bool
) -> None:
    """However the text is cut, it goes out up to the first end of a string, or all of it."""
    assert outcome(in_pieces(text, cuts), strings, keep=keep) == right(text, strings, keep=keep)


@given(TEXTS, STRINGS.filter(bool), CUTS)
def test_no_more_is_held_than_could_still_be_a_stop_string(
    text: str, strings: list[str], cuts: list[int]
) -> None:
    """What has come and is not out yet begins one of the strings, and is not a whole one."""
    stops, come, out = StopStrings(strings), "", ""
    for piece in in_pieces(text, cuts):
        come, out = come + piece, out + stops.push(piece)
        held = come.removeprefix(out)
        if not stops.found:
            assert any(s.startswith(held) and s != held for s in strings)
            assert not any(
                s.startswith(come[n:]) for s in strings for n in range(len(out))
            )  # nor less


@given(TEXTS, STRINGS, CUTS)
def test_what_is_kept_is_not_held(text: str, strings: list[str], cuts: list[int]) -> None:
    """Where the string stays in the text, all goes out at once."""
    stops = StopStrings(strings, keep=True)
    out = "".join(stops.push(piece) for piece in in_pieces(text, cuts))

    assert (out, stops.finish()) == (right(text, strings, keep=True)[0], "")


@pytest.mark.parametrize(
    ("strings", "pieces", "given_out"),
    [
        (["END"], ["so ", "E", "N", "D of it"], ["so ", "", "", ""]),
        (["END"], ["so ", "E", "N", "O"], ["so ", "", "", "ENO"]),
        (["END"], ["EE", "ND"], ["E", ""]),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""]),
        (["abcd", "bc"], ["a", "b", "c", "d"], ["", "", "a", ""]),
        (["abcd", "bc"], ["abcd"], ["a"]),
        (["bc", "abc"], ["xabc"], ["x"]),
        (["\n\n"], ["a\n", "b", "\n", "\n"], ["a", "\nb", "", ""]),
        ([], ["a", "b"], ["a", "b"]),
    ],
)
def test_pieces_go_out_as_soon_as_they_can(
    strings: list[str], pieces: list[str], given_out: list[str]
) -> None:
    """A beginning of a stop string waits; it goes out once it is none, and never if it was one."""
    stops = StopStrings(strings)

    assert given_out == [stops.push(piece) for piece in pieces]


def test_a_beginning_at_the_end_goes_out_once() -> None:
    """When nothing more comes, what was held back is text after all."""
    stops = StopStrings(["END"])

    assert [stops.push("an E"), stops.push("N"), stops.finish(), stops.finish()] == [
        "an ",
        "",
        "EN",
        "",
    ]


def test_nothing_follows_a_stop_string() -> None:
    """What is pushed after the end is dropped, and nothing is left for finish()."""
    stops = StopStrings(["END"], keep=True)

    assert [stops.push("an END, and"), stops.push(" more"), stops.finish()] == ["an END", "", ""]


class Counted(str):
    """Counts how often one of its characters is looked at."""

    __slots__ = ("looks",)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        self.looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("string", ["a" * 400 + "b", "a" * 400 + "b" + "a" * 400])
@pytest.mark.parametrize("text", ["a" * 4000, ("a" * 399 + "c") * 10])
def test_a_long_text_takes_no_more_than_its_length(string: str, text: str) -> None:
    """Each character costs a few looks, whatever the string and however it was begun before."""
    counted = Counted(string)
    counted.looks = 0
    stops = StopStrings([counted])
    for piece in in_pieces(text, range(0, 4000, 7)):
        stops.push(piece)

    assert counted.looks <= 4 * (len(string) + len(text))
