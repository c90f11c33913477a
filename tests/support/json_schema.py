"""Check the output of `--json` against the JSON Schema of docs/refitctl.schema.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
KNOWN = {
    "$ref",
    "anyOf",
    "type",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "maxItems",
    "minItems",
}
KNOWN |= {"properties", "required", "additionalProperties", "items", "prefixItems", "title", "description", "default"}
KNOWN |= {"const", "exclusiveMinimum", "exclusiveMaximum", "propertyNames"}


@cache
def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs/refitctl.schema.json").read_text())
    return found


def check_printed(words: Sequence[str], stdout: str) -> None:
    """Check every line that a command printed; `words` are those after `refitctl`."""
    for line in stdout.splitlines():
        value = json.loads(line)
        error = value.pop("error", None)
        if error is not None:
            fits(error, schema()["$defs"]["Error"], "error")
        if value or error is None:
            fits(value, schema_of(words), words[0])


def schema_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the schema of the command that shares the most words with these."""
    found: dict[str, Any] = {}
    most = 0
    for command, one in schema()["properties"].items():
        needs = [word for word in command.split() if not word.isupper()]
        if needs[0] == words[0] and {*needs} <= {*words} and len(needs) > most:
            most, found = len(needs), one
    assert most, f"no schema for {' '.join(words)}"
    return found


def fits(value: Any, wanted: dict[str, Any], where: str = "") -> None:
    """Check a value against a JSON Schema; refuse properties that the schema lacks."""
    assert wanted.keys() <= KNOWN, f"{where}: this test does not know {wanted.keys() - KNOWN}"
    if "$ref" in wanted:
        return fits(value, schema()["$defs"][wanted["$ref"].rpartition("/")[2]], where)
    if "anyOf" in wanted:
        kind, kinds = KINDS.get(type(value), "null"), [_kind(one) for one in wanted["anyOf"]]
        assert kind in kinds, f"{where}: {kind}, not {' or '.join(map(str, kinds))}"
        return fits(value, wanted["anyOf"][kinds.index(kind)], where)
    kind = KINDS.get(type(value), "null")
    if (expected := wanted.get("type")) is not None:
        assert kind in (expected, "integer" if expected == "number" else expected), f"{where}: {kind}, not {expected}"
    assert value in wanted.get("enum", [value]), f"{where}: {value!r} is none of {wanted['enum']}"
    assert value == wanted.get("const", value), f"{where}: {value!r}, not {wanted['const']}"
    if kind in ("integer", "number"):
        assert wanted.get("minimum", value) <= value <= wanted.get("maximum", value), f"{where}: {value}"
    if kind == "string":
        assert wanted.get("minLength", 0) <= len(value) <= wanted.get("maxLength", len(value)), (
            f"{where}: {len(value)} characters"
        )
    if kind == "array":
        assert wanted.get("minItems", 0) <= len(value) <= wanted.get("maxItems", len(value)), f"{where}: {len(value)}"
    if "properties" in wanted:
        assert {*wanted.get("required", ())} <= value.keys() <= wanted["properties"].keys(), (
            f"{where}: {sorted(value.keys() ^ wanted['properties'].keys())}"
        )
    for key, one in value.items() if isinstance(value, dict) else ():
        known = wanted.get("properties", {})
        fits(key, wanted.get("propertyNames", {}), f"{where}: a name")
        fits(one, known[key] if key in known else wanted.get("additionalProperties", {}), f"{where}.{key}")
    for number, one in enumerate(value) if isinstance(value, list) else ():
        before = wanted.get("prefixItems", [])
        fits(one, before[number] if number < len(before) else wanted.get("items") or {}, f"{where}[{number}]")
    return None


def _kind(wanted: dict[str, Any]) -> str | None:
    if "$ref" in wanted:
        return _kind(schema()["$defs"][wanted["$ref"].rpartition("/")[2]])
    return wanted.get("type")
