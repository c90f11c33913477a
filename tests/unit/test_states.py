"""The state machines as docs/states.md shows them."""

from __future__ import annotations

from tests.support.states import DOCUMENT, drawn


def test_the_document_shows_the_tables_that_the_code_looks_up() -> None:
    text = DOCUMENT.read_text()
    assert text == drawn(text), "docs/states.md is not what the tables are; run scripts/states"
