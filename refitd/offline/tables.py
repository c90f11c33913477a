"""Read tables strictly; collect all problems and report them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import ConfigError
from refitd.offline.values import MAX_SHOWN

S = TypeVar("S", bound=msgspec.Struct)


def table(struct: type[S], values: Any, where: str, problems: list[str], **read_already: Any) -> S | None:
    """Convert one table field by field, so that all wrong keys are reported; None if any is wrong."""
    subject = where or "the manifest"
    if not isinstance(values, Mapping):
        problems.append(f"{subject}: is {shown(values)}, expected a table")
        return None
    before = len(problems)
    fields = {f.encode_name: f for f in msgspec.structs.fields(struct)}
    for key in values:
        if key not in fields:
            problems.append(f"{at(where, key)}: unknown key; known: {', '.join(fields)}")
    found = dict(read_already)
    for key, info in fields.items():
        if key in found:
            continue
        if key not in values:
            if info.required:
                problems.append(f"{at(where, key)}: missing")
            continue
        value = values[key]
        if isinstance(value, msgspec.Struct):
            found[info.name] = value
            continue
        try:
            found[info.name] = msgspec.convert(value, info.type, strict=True)
        except msgspec.ValidationError as error:
            problems.append(f"{at(where, key)}: {error}; found {shown(value)}")
        except RecursionError:
            problems.append(f"{at(where, key)}: too deeply nested")
    return struct(**found) if len(problems) == before else None


def at(where: str, key: object) -> str:
    """Return the dotted path of a key, for messages."""
    return f"{where}.{key}" if where else str(key)


def shown(value: Any) -> str:
    """Return a value for a message, truncated if long."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def tables(value: Any, where: str, problems: list[str]) -> list[Any]:
    """Return the entries of a list of tables; [] if it is not a list."""
    if isinstance(value, list | tuple):
        return list(value)
    if value is not None:
        problems.append(f"{where}: is {shown(value)}, expected a list of tables")
    return []


def each(struct: type[S], entries: Iterable[Any], where: str, problems: list[str]) -> list[S | None]:
    """Convert every table of a list; an entry is None if its table is wrong."""
    return [table(struct, entry, f"{where}[{number}]", problems) for number, entry in enumerate(entries)]


def dtype_problems(where: str, name: str) -> list[str]:
    """Return what is wrong with the name of a dtype."""
    if name in ELEMENT_SIZES:
        return []
    return [f"{where} is {shown(name)}, expected one of {', '.join(ELEMENT_SIZES)}"]


def refusal(where: str, problems: Sequence[str]) -> ConfigError:
    """Return the error that lists the problems, at most MAX_SHOWN of them."""
    lines = [f"{where}: {problem}" for problem in problems[:MAX_SHOWN]]
    if len(problems) > MAX_SHOWN:
        lines.append(f"{where}: ... and {len(problems) - MAX_SHOWN} more problems")
    return ConfigError("\n".join(lines))
