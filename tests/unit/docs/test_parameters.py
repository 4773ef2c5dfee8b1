"""docs/parameters.md is what the tables say."""

from __future__ import annotations

from benchmarks.parameters import ENDPOINTS, PAGE, render
from meshnet.openai import parameters


def test_page_is_up_to_date() -> None:
    """The page is the one that `make docs` writes."""
    assert PAGE.read_text() == render()


def test_page_has_every_endpoints_table() -> None:
    """No table is left out."""
    tables = [
        value for name, value in vars(parameters).items() if name.isupper() and name[0] != "_"
    ]

    assert len(tables) == len(ENDPOINTS)
    assert all(table in tables for table in ENDPOINTS.values())
