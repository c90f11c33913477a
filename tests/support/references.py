"""Write the reference pages of docs/ from the code: `scripts/docs`; a test compares them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import inspect

from refitd.checkpoints.publish import Published
from refitd.checkpoints.save import Saved
from refitd.config import Config
from refitd.offline import Shards
from refitd.protocol import reports
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.cable_reports import CableReport
from refitd.protocol.versions import shown as shown_version
from refitd_cli import control, daemon, printed
from refitd_cli.commands.doctor import DoctorFound
from tests.support.api_reference import api

ROOT = Path(__file__).parents[2]
WIDTH = 100
MADE = "Made by `scripts/docs` from the code; do not edit it."


def commands(group: click.Group, parent: click.Context) -> Iterator[click.Context]:
    """Yield a context for every command below a group."""
    for name in group.list_commands(parent):
        found = group.get_command(parent, name)
        assert found is not None
        context = click.Context(found, parent=parent, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH)
        if isinstance(found, click.Group):
            yield from commands(found, context)
        else:
            yield context


def cli() -> str:
    """Return the reference of both programs."""
    parts = [f"# Reference: `refitctl` and `refitd`\n\n{MADE} [operate.md](operate.md) says how they are used."]
    for name, group in (("refitctl", control.main), ("refitd", daemon.main)):
        width = {"terminal_width": WIDTH, "max_content_width": WIDTH}
        top = click.Context(group, info_name=name, **group.context_settings, **width)
        for context in commands(group, top):
            usage = "\n".join(line.rstrip() for line in context.get_help().splitlines())
            parts.append(f"## {context.command_path}\n\n```text\n{usage}\n```")
    return "\n\n".join(parts) + "\n"


def configuration() -> str:
    """Return the reference of the configuration; the words are the comments of configs/laptop.toml."""
    parts = [
        f"# Reference: configuration\n\n{MADE}\n\n"
        "Every key can be set in the file, or as REFITD_SECTION__KEY in the environment; "
        "`refitctl config show` says what is in force, and why. [operate.md](operate.md#configuration) has the rest."
    ]
    words = explained()
    for section in inspect.type_info(Config).fields:  # type: ignore[attr-defined]
        table, kind = section.name, section.type
        if isinstance(kind, inspect.DictType):
            table, kind = f"{table}.NAME", kind.value_type
        rows = [
            f"| `{field.name}` | {shown(field.type)} | `{toml(field)}` | {words[section.name, field.name]} |"
            for field in kind.fields
        ]
        about = (kind.cls.__doc__ or "").strip().splitlines()[0]
        head = "| key | values | default | meaning |\n| --- | --- | --- | --- |"
        parts.append(f"## [{table}]\n\n{about}\n\n{head}\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def explained() -> dict[tuple[str, str], str]:
    """Return the comment above each key of configs/laptop.toml, as one line."""
    found: dict[tuple[str, str], str] = {}
    section, comment = "", []
    for line in (ROOT / "configs/laptop.toml").read_text().splitlines():
        if line.startswith("# "):
            comment.append(line[2:])
        elif table := re.match(r"\[(\w+)", line):
            section, comment = table[1], []
        elif key := re.match(r"(\w+) = ", line):
            found[section, key[1]] = " ".join(comment).replace("|", "\\|").replace("<", "&lt;")
            comment = []
        else:
            comment = []
    return found


def shown(kind: inspect.Type) -> str:
    """Return a type and its limits for people."""
    match kind:
        case inspect.BoolType():
            return "true, false"
        case inspect.LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in values)
        case inspect.StrType(pattern=str(pattern)):
            return ", ".join(f"`{word}`" for word in pattern.strip("^$()").split("|"))
        case inspect.StrType(max_length=most):
            return "text" if most is None else f"text, at most {most} characters"
        case inspect.IntType() | inspect.FloatType():
            name = "whole number" if isinstance(kind, inspect.IntType) else "number"
            bounds = [
                f"{sign} {value:,}"
                for sign, value in ((">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt))
                if value is not None
            ]
            return ", ".join([name, *bounds])
        case inspect.VarTupleType(item_type=item):
            return f"list of {shown(item)}"
        case inspect.UnionType(types=kinds):
            return " or ".join(map(shown, kinds))
        case inspect.DictType(value_type=item):
            return f"table of {shown(item)}"
    raise TypeError(kind)


def toml(field: inspect.Field) -> str:
    """Return a default as TOML."""
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case tuple():
            return "[]"
        case dict():
            return "{}"
    return str(value)


# What `--json` prints, by command; words in capitals stand for any, options tell what else the command can print.
REPORTS: dict[str, type] = {
    "swap": reports.SwapReport,
    "rollback": reports.SwapReport,
    "publish --from DIR": Published,
    "save": Saved,
    "history": reports.HistoryReport,
    "status": reports.StatusReport,
    "watch": reports.StatusReport,
    "models": reports.ModelStatus,
    "trace": printed.TraceWritten,
    "plan MODEL": reports.PlanReport,
    "plan --source FILE --target FILE": printed.ManifestPlanned,
    "explain": printed.Explained,
    "simulate": printed.Simulated,
    "manifest": Shards,
    "manifest --output FILE": printed.ManifestWritten,
    "verify": reports.VerifyReport,
    "abort": printed.SwapAborted,
    "evict": reports.EvictReport,
    "forget": reports.ForgetReport,
    "drain": reports.DrainReport,
    "resume": reports.ResumeReport,
    "reload": reports.ReloadReport,
    "keygen": printed.KeyMade,
    "config check": printed.ConfigChecked,
    "config show": printed.ConfigShown,
    "doctor": DoctorFound,
    "support-bundle": printed.BundleWritten,
    "dashboard": printed.DashboardServed,
    "demo": printed.DemoRan,
    "doctor --links": CableReport,
}
SCHEMA = "refitctl.schema.json"
ERROR = {
    "type": "object",
    "required": ["code", "message", "causes"],
    "properties": {
        "code": {"type": "string"},
        "message": {"type": "string"},
        "causes": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


def schema() -> str:
    """Return the JSON Schema of what the commands print."""
    _, components = msgspec.json.schema_components([*REPORTS.values(), Config], ref_template="#/$defs/{name}")
    commands: dict[str, Any] = {command: {"$ref": f"#/$defs/{report.__name__}"} for command, report in REPORTS.items()}
    commands["models"] = {"type": "object", "properties": {"models": {"type": "array", "items": commands["models"]}}}
    together = {"models": {"type": "array", "items": commands["swap"]}}
    commands["swap --with MODEL"] = {"type": "object", "properties": together}
    swapped = components["SwapReport"]
    commands["publish --from DIR --swap"] = swapped | {
        "properties": swapped["properties"] | {"published": commands["publish --from DIR"]}
    }
    made = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:refitd:refitctl:{shown_version(PROTOCOL_VERSION)}",
        "title": "What refitctl --json prints, by command",
        "version": shown_version(PROTOCOL_VERSION),
        "properties": commands,
        "$defs": {**components, "Error": ERROR},
    }
    return json.dumps(made, indent=1) + "\n"


def json_page() -> str:
    """Return the page on JSON output."""
    rows = "\n".join(
        f"| `refitctl {command} --json` | `{report.__name__}` | {_first_sentence(report)} |"
        for command, report in REPORTS.items()
    )
    return (
        f"# Reference: JSON output\n\n{MADE}\n\nWith `--json` a command prints one object on one line of stdout. "
        f"[{SCHEMA}]({SCHEMA}) has the JSON Schema of each, by command, under `properties`; its `version` is that of "
        f"the protocol, {shown_version(PROTOCOL_VERSION)}. Within a major version fields are added and never removed, "
        "renamed or retyped: ignore those that you do not know. A command that fails prints "
        '`{"error": {"code", "message", "causes"}}` (`Error`) and exits with 1, or 2 where the command line or the '
        "configuration is at fault; `swap`, `rollback` and `explain` add `error` to what they print. `models` and "
        "`swap --with` print their reports as the list `models`, `publish --swap` prints the swap's with what was "
        "`published`. `watch` prints an object each time that it asks.\n\n"
        f"| command | report | what it says |\n| --- | --- | --- |\n{rows}\n"
    )


def _first_sentence(report: type) -> str:
    return (report.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


PAGES = {
    ROOT / "docs/cli.md": cli,
    ROOT / "docs/configuration.md": configuration,
    ROOT / "docs/api.md": lambda: api(MADE),
    ROOT / "docs/json.md": json_page,
    ROOT / "docs" / SCHEMA: schema,
}


def main() -> None:
    """Write the pages; with --check, exit 1 if one of them is not what it should be."""
    for path, make in PAGES.items():
        if "--check" not in sys.argv:
            path.write_text(make())
        elif path.read_text() != make():
            sys.exit(f"{path.relative_to(ROOT)} is not what the code says; run scripts/docs")


if __name__ == "__main__":
    main()
