"""The reference pages are what the code says."""

from __future__ import annotations

import json
import re
import sys
from itertools import takewhile
from pathlib import Path

import click
import pytest

from refitd.errors import RefusedError
from refitd_cli import control
from refitd_cli.demo.proof import Verdict
from refitd_cli.demo.show import ShownChange, SwapRow, as_object
from refitd_cli.output import to_json
from tests.support import cli
from tests.support.json_schema import check_printed, fits, schema
from tests.support.programs import run
from tests.support.references import REPORTS, commands
from tests.support.site import ROOT, build


def test_references_are_what_the_code_says() -> None:
    # a process of its own: click keeps the help option with which a command was first shown
    found = run([sys.executable, "-m", "tests.support.references", "--check"])
    assert found.returncode == 0, found.stderr


def test_every_command_that_prints_json_has_a_schema() -> None:
    prints = set()
    for context in commands(control.main, click.Context(control.main, info_name="refitctl")):
        if any("--json" in option.opts for option in context.command.params):
            prints.add(" ".join(context.command_path.split()[1:]))
    named = {" ".join(takewhile(lambda word: word[0] not in "-" and not word.isupper(), c.split())) for c in REPORTS}
    assert named == prints


@pytest.mark.parametrize("words", ["status", "history", "models", "watch --count 1", "swap m", "rollback m", "plan m"])
def test_what_commands_print_fits_the_schema(words: str) -> None:
    assert cli.run(cli.FakeClient(), *words.split(), "--json").object  # which compares
    assert cli.run(RefusedError("no"), *words.split(), "--json").object["error"]


def test_what_the_demo_prints_fits_the_schema() -> None:
    change = ShownChange("flip", 0.001, 7, places_unchanged=True, before="a")
    row = SwapRow(1, "client.swap", 5, 3.2, 0.1, 100, 0.2, 0.1, 0.4, 9, {"a": change, "b": change})
    verdicts = [Verdict("a", 3, 100, (), 0.0, 1.0), Verdict("b", 3, 60, (), 0.5, 0.9, bfloat16_bytes=100)]
    for some in (verdicts, verdicts[:1]):
        found = to_json(as_object([row], some, {"a": "TP4", "b": "TP1"}, {"a": 100, "b": 60}, 9.0))
        check_printed(("demo",), json.dumps(found))
        assert ("mxfp8" in found) == (some is verdicts)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": "7"}, "status.version: string, not integer or null"),
        ({"more": 1}, "status: \\['more'\\]"),
        ({"state": "gone"}, "status.state"),
    ],
)
def test_what_does_not_fit_a_schema_is_found(changed: dict[str, object], said: str) -> None:
    status = json.loads(json.dumps(to_json(cli.TARGET)))
    fits(status, schema()["$defs"]["TargetStatus"], "status")
    with pytest.raises(AssertionError, match=said):
        fits(status | changed, schema()["$defs"]["TargetStatus"], "status")


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
