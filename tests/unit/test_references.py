"""The reference pages are what the code says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support.programs import run
from tests.support.site import ROOT, build


def test_references_are_what_the_code_says() -> None:
    # a process of its own: click keeps the help option with which a command was first shown
    found = run([sys.executable, "-m", "tests.support.references", "--check"])
    assert found.returncode == 0, found.stderr


def test_the_site_has_every_page_and_no_link_that_leads_nowhere(tmp_path: Path) -> None:
    pages = build(tmp_path)
    assert {*(ROOT / "docs").glob("*.md"), ROOT / "CHANGELOG.md"} <= {*pages}
    for page in tmp_path.rglob("*.html"):
        for target in re.findall(r'href="([^"]+)"', page.read_text()):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            found = (page.parent / name) if name else page
            assert found.is_file(), (page.name, target)
            assert not anchor or f'id="{anchor}"' in found.read_text(), (page.name, target)
