from __future__ import annotations

import pytest

from meshnet.grammar.ecma_regex import to_engine
from tests.support.schemas import byte_matcher, forms, takes


def matches(pattern: str, text: str) -> bool:
    """Whether the engine writes `text` where a schema asks for `pattern`."""
    matcher = byte_matcher({"type": "string", "pattern": pattern})
    assert not matcher.is_error(), matcher.get_error()
    return takes(matcher, next(forms(text)))


@pytest.mark.parametrize(
    ("pattern", "text", "is_match"),
    [
        ("^.$", "a", True),
        ("^.$", "\n", False),
        ("^.$", "\r", False),
        ("^.$", "\u2028", False),
        ("^.$", "\x85", True),
        ("^[.]$", "a", False),
        (r"^\s$", "\ufeff", True),
        (r"^\s$", "\u00a0", True),
        (r"^\s$", "\x85", False),
        (r"^\S$", "\ufeff", False),
        (r"^\S$", "\x85", True),
        (r"^[^\s]$", "\ufeff", False),
        (r"^[\S]$", "\ufeff", False),
        (r"^[a\s]+$", "a a", True),
        (r"^\w$", "é", False),
        (r"^\W$", "é", True),
        (r"^\d$", "\u0663", False),
        (r"^\u00e9\xe9$", "éé", True),
        (r"^\u{1F336}$", "🌶", True),
        (r"^\p{L}$", "é", True),
        (r"^a/b\/c$", "a/b/c", True),
        ("^a$", "a\n", False),
        ("^[a-]$", "-", True),
        ("^[*+]$", "+", True),
        (r"^[a\]b]$", "]", True),
        (r"^a\++$", "a++", True),
        ("^(?:a|b)?c$", "bc", True),
        ("(?i)^a$", "A", True),
        ("^(?P<x>a)(?<y>b)$", "ab", True),
        ("a|^b", "ba", True),
        ("a|^b", "cb", False),
    ],
)
def test_a_pattern_matches_as_in_ecma_262(pattern: str, text: str, is_match: bool) -> None:
    """What the engine writes for a pattern is what the pattern matches in JavaScript."""
    assert matches(pattern, text) == is_match


@pytest.mark.parametrize("pattern", ["", "abc", r"^[A-Z]{2}-\d+$", r"\(\.\)", "a{2,3}?", "[^a]"])
def test_what_means_the_same_stays_as_it_is(pattern: str) -> None:
    """Both dialects' common part is passed on."""
    assert to_engine(pattern) == pattern


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("[a&&b]", "&& in a character class"),
        ("[a--b]", "-- in a character class"),
        ("[a~~b]", "~~ in a character class"),
        ("[[:alpha:]]", r"\[ in a character class"),
        ("[]a]", r"begins with \[\]"),
        ("[^]", r"begins with \[\^\]"),
        ("a++", r"possessive \+\+"),
        ("a{2}+", r"possessive }\+"),
        ("(?x)a b", "kind of group"),
        ("(?m)^a", "kind of group"),
        ("(?>a)", "kind of group"),
        (r"\Aa", r"\\A is no escape"),
        (r"a\z", r"\\z is no escape"),
        (r"\a", r"\\a is no escape"),
        (r"[\a]", r"\\a is no escape"),
        (r"\x{61}", r"\\x is no escape"),
        (r"\pL", r"\\p is no escape"),
        ("a\\", r"\\ is no escape"),
    ],
)
def test_what_means_different_things_is_refused(pattern: str, problem: str) -> None:
    """A construct that the engine reads in its own way is named."""
    with pytest.raises(ValueError, match=problem):
        to_engine(pattern)
