"""Ends a text at the first of some strings, however tokens cut them."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """One answer's text on its way out; what may belong to a stop string is held back.

    The first stop string is the one that ends first, since no later text can change that; of those
    that end at the same character it is the longest. The text goes out up to where it begins, and
    is the same in whatever pieces it comes. What is held is shorter than the longest string.

    Args:
        strings: None of them empty.
        keep: Give out the string that was found too, and so hold nothing back.

    Attributes:
        found: A stop string came; what is pushed after it is dropped.
    """

    def __init__(self, strings: Sequence[str], *, keep: bool = False) -> None:
        self.found = False
        self._keep = keep
        self._matches = [_Match(string) for string in strings]
        self._held = ""

    def push(self, text: str) -> str:
        """What can go out now that `text` has come."""
        if self.found:
            return ""
        for end, character in enumerate(text, start=1):
            n_found = max((match.take(character) for match in self._matches), default=0)
            if n_found:
                self.found = True
                out, _ = self._split(text[:end], n_found)
                self._held = ""
                return out
        n_begun = max((match.n_begun for match in self._matches), default=0)
        out, self._held = self._split(text, n_begun)
        return out

    def finish(self) -> str:
        """What was held back, now that nothing more comes."""
        out, self._held = self._held, ""
        return out

    def _split(self, text: str, n_last: int) -> tuple[str, str]:
        """What is held and `text`, but for the last characters; and these, unless kept."""
        whole = self._held + text
        n_out = len(whole) - (0 if self._keep else n_last)
        return whole[:n_out], whole[n_out:]


class _Match:
    """How much of one string the text so far ends with (Knuth, Morris and Pratt)."""

    def __init__(self, string: str) -> None:
        self.n_begun = 0
        self._string = string
        # For each beginning of the string: how long a shorter one is at most that also ends it.
        self._shorter = [0]
        for character in string[1:]:
            self.take(character)
            self._shorter.append(self.n_begun)
        self.n_begun = 0

    def take(self, character: str) -> int:
        """Go on by one character; the string's length if that completes it, else 0."""
        while self.n_begun and self._string[self.n_begun] != character:
            self.n_begun = self._shorter[self.n_begun - 1]
        if self._string[self.n_begun] == character:
            self.n_begun += 1
        return self.n_begun if self.n_begun == len(self._string) else 0
