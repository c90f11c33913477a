"""The reference pages are what the code says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from refitd.errors import RefusedError
from tests.support import cli
from tests.support.programs import run
from tests.support.site import ROOT, build

SCHEMA = json.loads((ROOT / "docs/refitctl.schema.json").read_text())
NOT_FAKED = (
    "evict",
    "forget",
    "drain",
    "resume",
    "reload",
    "doctor --links",
)  # of which tests.support.cli has no client


def test_references_are_what_the_code_says() -> None:
    # a process of its own: click keeps the help option with which a command was first shown
    found = run([sys.executable, "-m", "tests.support.references", "--check"])
    assert found.returncode == 0, found.stderr


def fits(value: Any, schema: dict[str, Any], where: str = "") -> None:
    """Check a value against a JSON Schema, as far as ours go: references, types, properties, items, alternatives."""
    if "$ref" in schema:
        return fits(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], where)
    if "anyOf" in schema:
        return fits(
            value, next(one for one in schema["anyOf"] if (one.get("type") == "null") == (value is None)), where
        )
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    if (expected := schema.get("type")) is not None:
        assert kinds.get(type(value), "null") in (expected, "integer" if expected == "number" else expected), where
    if "properties" in schema:
        assert {*schema.get("required", ())} <= value.keys() <= schema["properties"].keys(), where
        for key, one in value.items():
            fits(one, schema["properties"][key], f"{where}.{key}")
    for one in value if isinstance(value, list) else ():
        fits(one, schema.get("items") or {}, f"{where}[]")
    return None


@pytest.mark.parametrize("command", [command for command in SCHEMA["properties"] if command not in NOT_FAKED])
def test_what_commands_print_fits_the_schema(command: str) -> None:
    words = command.replace("MODEL", "").split()
    asked = [] if words[0] in ("status", "history", "models", "watch") else ["policy"]
    asked += ["--count", "1"] if words[0] == "watch" else []
    ran = cli.run(cli.FakeClient(), *words, *asked, "--json")
    fits(ran.object, SCHEMA["properties"][command])
    failed = cli.run(RefusedError("no"), *words, *asked, "--json")
    fits(failed.object["error"], SCHEMA["$defs"]["Error"])


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
