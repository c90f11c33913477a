"""Messages as another minor version of the protocol writes them."""

from __future__ import annotations

from typing import Any

import msgspec

UNKNOWN = {"deep": [1, {"deeper": b"\0"}], "nothing": None}


def newer(plain: Any, value: object) -> Any:
    """Return a value's plain form with unknown fields, in it and in each nested value."""
    if isinstance(value, msgspec.Struct) and isinstance(plain, dict):
        found = {name: newer(part, getattr(value, name, None)) for name, part in plain.items()}
        return {**found, "of_a_newer_version": UNKNOWN}
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__[: len(plain)]
        return [*(newer(part, getattr(value, name)) for name, part in zip(names, plain, strict=True)), UNKNOWN]
    if isinstance(plain, list) and isinstance(value, tuple):
        return [newer(part, of) for part, of in zip(plain, value, strict=True)]
    return plain


def older(plain: Any, value: object) -> Any:
    """Return a value's plain form without fields that have their default, in it and in each nested value."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        has_default = {f.name for f in fields if not f.required and getattr(value, f.name) == _default(f)}
        if isinstance(plain, dict):
            kept = {name: part for name, part in plain.items() if name not in has_default}
            return {name: older(part, getattr(value, name, None)) for name, part in kept.items()}
        names = [f.name for f in fields]
        while names and names[-1] in has_default:
            names.pop()
        return [older(part, getattr(value, name)) for name, part in zip(names, plain, strict=False)]
    if isinstance(plain, list) and isinstance(value, tuple):
        return [older(part, of) for part, of in zip(plain, value, strict=True)]
    return plain


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
