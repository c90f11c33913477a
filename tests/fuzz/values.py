"""Values that fit a type, values that nearly do, and corrupted bytes."""

from __future__ import annotations

import random
from typing import Any

import msgspec.inspect as inspect

INTERESTING: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**62, 2**62 + 1, 2**63, 2**64 - 1, -(2**63),
    0.5, float("inf"), float("nan"),
    "", "a", "\x00", "\x1b[2J", "../../x", "é" * 300, "x" * 513, "x" * 70_000, b"", b"\x00" * 9, [], [[]], {},
    {"type": "Hello"},
    [1, 2, 3], [2**62] * 70, {"rows": -1}, "bfloat16", "policy",
)  # fmt: skip


def value_of(kind: Any, rng: random.Random, names: tuple[str, ...] = ("policy",), depth: int = 0) -> Any:
    """Return a value, as MessagePack carries it, that fits a type; names are often ones from `names`."""
    match kind:
        case inspect.StructType():
            found = {f.encode_name: value_of(f.type, rng, names, depth + 1) for f in kind.fields if _given(f, rng)}
            if kind.array_like:
                return [value_of(f.type, rng, names, depth + 1) for f in kind.fields]
            return {kind.tag_field: kind.tag, **found} if kind.tag_field else found
        case inspect.UnionType():
            return value_of(rng.choice(kind.types), rng, names, depth)
        case inspect.IntType():
            low, high = kind.ge if kind.ge is not None else -(1 << 30), kind.le if kind.le is not None else 1 << 30
            return rng.choice((low, high, min(high, max(low, rng.randrange(8))), rng.randint(low, high)))
        case inspect.FloatType():
            least, most = kind.ge if kind.ge is not None else 0.0, kind.le if kind.le is not None else 1e3
            return min(most, max(least, rng.choice((0.0, 0.001, rng.random(), 1e3))))
        case inspect.StrType():
            text = rng.choice((*names, "w", "x" * rng.randrange(1, 40), "float32"))
            return text[: kind.max_length] if rng.random() < 0.9 else (text * 600)[: kind.max_length or 100]
        case inspect.BytesType():
            return rng.randbytes(rng.randint(kind.min_length or 0, kind.max_length or 40))
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.NoneType():
            return None
        case inspect.LiteralType():
            return rng.choice(kind.values)
        case inspect.EnumType():
            return rng.choice([member.value for member in kind.cls])
        case inspect.VarTupleType() | inspect.ListType():
            count = max(kind.min_length or 0, rng.choice((0, 1, 1, 2, 3)))
            return [value_of(kind.item_type, rng, names, depth + 1) for _ in range(count)]
        case inspect.TupleType():
            return [value_of(item, rng, names, depth + 1) for item in kind.item_types]
        case inspect.DictType():
            count = rng.randrange(3)
            return {value_of(kind.key_type, rng, names): value_of(kind.value_type, rng, names) for _ in range(count)}
    raise AssertionError(f"no values for {kind}")


def _given(field: inspect.Field, rng: random.Random) -> bool:
    return field.required or rng.random() < 0.5


def spoilt(value: Any, rng: random.Random) -> Any:
    """Return a value that differs in one place: another type, a key more or less, an item twice."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        copy = dict(value)
        match rng.randrange(6):
            case 0:
                del copy[key]
            case 1:
                copy[rng.choice(("more", "", "type", 7, "x" * 70_000))] = rng.choice(INTERESTING)
            case _:
                copy[key] = spoilt(value[key], rng)
        return copy
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        match rng.randrange(5):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value * rng.choice((2, 40))
            case _:
                return [*value[:at], spoilt(value[at], rng), *value[at + 1 :]]
    return rng.choice(INTERESTING)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few flips, cuts, insertions and repetitions."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, end = sorted((rng.randrange(len(found) + 1), rng.randrange(len(found) + 1)))
        match rng.randrange(6):
            case 0 if found:
                found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
            case 1 if found:
                found[rng.randrange(len(found))] = rng.choice((0, 0x7F, 0x80, 0xC0, 0xDB, 0xDD, 0xDF, 0xFF))
            case 2:
                del found[at:]
            case 3:
                del found[at:end]
            case 4:
                found[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                found[at:at] = found[at : min(end, at + 4096)]
    return bytes(found)


def damaged_text(text: str, rng: random.Random) -> str:
    """Return text with words and lines moved, lost, repeated or replaced."""
    lines = text.splitlines() or [""]
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(lines))
        match rng.randrange(6):
            case 0 if len(lines) > 1:
                del lines[at]
            case 1:
                lines.insert(at, rng.choice(lines))
            case 2:
                lines[at] = damaged(lines[at].encode(), rng).decode("utf-8", "replace")
            case 3:
                key, equals, _ = lines[at].partition("=")
                lines[at] = f"{key}{equals} {rng.choice(_WORDS)}"
            case 4:
                words = lines[at].split()
                rng.shuffle(words)
                lines[at] = " ".join(words)
            case _:
                lines[at] = rng.choice(_WORDS) + lines[at]
    return "\n".join(lines)


_WORDS = (
    "0", "-1", "1e400", "nan", "9223372036854775808", '""', "[]", "{}", "[[[[[[", '"\\u0000"', "true", "=", "[node]",
    "\x00",
    "node=", "roles=root", "'''", '"' + "x" * 3000 + '"', "1979-05-27", "0x",
    "[4611686018427387904, 4611686018427387904]", "\ud7ff",
)  # fmt: skip
