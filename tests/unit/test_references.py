"""The reference pages are what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.references import PAGES


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_reference_is_what_the_code_says(path: Path) -> None:
    assert path.read_text() == PAGES[path](), f"{path.name} is out of date; run scripts/docs"
