"""What each endpoint does with each parameter, as a page: `python -m benchmarks.parameters`.

Writes docs/parameters.md from the tables that parsing follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from meshnet.openai.parameters import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    RESPONSES,
    TOKENIZE,
    Handling,
    Parameter,
)

PAGE: Final = Path(__file__).parents[1] / "docs" / "parameters.md"
ENDPOINTS: Final[Mapping[str, Mapping[str, Parameter]]] = {
    "POST /v1/chat/completions": CHAT,
    "POST /v1/completions": COMPLETIONS,
    "POST /v1/responses": RESPONSES,
    "POST /tokenize": TOKENIZE,
    "POST /detokenize": DETOKENIZE,
}
WORDS: Final[Mapping[Handling, str]] = {
    "used": "accepted",
    "no_op": "no-op",
    "refused": "refused",
}
_HEAD: Final = """\
# Parameters

What each endpoint does with the fields of a request. Made by `make docs` from the tables that
parsing follows, `meshnet/openai/parameters.py`; `tests/unit/docs/test_parameters.py` compares them.

- *accepted*: it has an effect. Another value than those allowed is answered 400.
- *no-op*: any value is taken, and none changes the answer.
- *refused*: it would change the answer and is not implemented. Any value but those listed is
  answered 400 with the code `unsupported_parameter`.
- A field that is in no table is taken for a stray: it is passed over and named in the answer's
  header `x-ignored-params`. With `MESHNET_HEAD_STRICT_PARAMETERS=true` it is answered 400.

Null is the same as absent, for every field. `3.0` is `3`; `true` and `"3"` are not. An error names
the field, the problem, and what is allowed, in the words of the last column.
"""


def render() -> str:
    """The whole page."""
    return "\n".join(
        [_HEAD, *(line for name, table in ENDPOINTS.items() for line in _section(name, table))]
    )


def _section(endpoint: str, table: Mapping[str, Parameter]) -> Iterator[str]:
    yield f"## `{endpoint}`\n"
    yield "| parameter | | allowed |"
    yield "|---|---|---|"
    handlings = list(WORDS)
    for name, parameter in sorted(table.items(), key=lambda e: handlings.index(e[1].handling)):
        allowed = parameter.allowed.replace("|", "\\|")
        yield f"| `{name}` | {WORDS[parameter.handling]} | {allowed} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(render())
