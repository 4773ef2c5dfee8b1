"""JSON Schema's regular expressions, which are ECMA-262's, in the dialect of the grammar engine.

The engine reads Rust's. Most of both is the same; what means another thing there is rewritten or
refused, so that what the engine makes matches the pattern in any other reader of the schema.
"""

from __future__ import annotations

import re
from typing import Final

_SPACES: Final = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_REWRITTEN: Final = {
    r"\s": f"[{_SPACES}]",  # Rust's has U+0085 and lacks U+FEFF
    r"\S": f"[^{_SPACES}]",
}
_ANY: Final = r"[^\n\r\u2028\u2029]"  # Rust's dot is anything but \n
_PIECE: Final = re.compile(
    r"""\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|[pP]\{[^}]*\}|.)"""
    r"""|\[\^?\]?|&&|--|~~|[*+?}]\+|\(\?(?:[is]+[:)]|[:=!]|P?<)?|.""",
    re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\(?:[dDwWsSbBfnrtv0-9]|[xupP].+|[^0-9A-Za-z])", re.DOTALL)
_SET_OPERATORS: Final = frozenset({"&&", "--", "~~"})


def to_engine(pattern: str) -> str:
    """`pattern` for the engine; what is wrong in both dialects is left for it to find.

    Raises:
        ValueError: Something in it means different things to different readers.
    """
    out: list[str] = []
    in_class = False
    for match in _PIECE.finditer(pattern):
        piece = match[0]
        if piece.startswith("\\"):
            _check_escape(piece)
        else:
            _check_in_class(piece) if in_class else _check_outside(piece)
            in_class = piece != "]" if in_class else piece in ("[", "[^")
        out.append(_ANY if piece == "." and not in_class else _REWRITTEN.get(piece, piece))
    return "".join(out)


def _check_escape(piece: str) -> None:
    if not _ESCAPE.fullmatch(piece):
        raise ValueError(f"{piece} is no escape of ECMA-262")


def _check_in_class(piece: str) -> None:
    if piece.startswith("[") or piece in _SET_OPERATORS:
        raise ValueError(f"{piece} in a character class is not portable; escape it")


def _check_outside(piece: str) -> None:
    if piece in ("[]", "[^]"):
        raise ValueError(f"a class that begins with {piece} is not portable")
    if piece == "(?":
        raise ValueError("this kind of group is not portable")
    if len(piece) == 2 and piece.endswith("+"):
        raise ValueError(f"the possessive {piece} is not portable")
