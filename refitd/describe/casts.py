"""The dtype conversions that a destination may declare, and their numbers in plans.

Each copy of a plan carries the number of its conversion; 0 copies bytes unchanged. Numbers are never reused, so that
other releases read plans correctly.
"""

from __future__ import annotations

from refitd.dtypes import ELEMENT_SIZES, dtype_name

# number -> (dtype at the source, dtype at the destination)
CASTS: dict[int, tuple[str, str]] = {
    1: ("float32", "bfloat16"),
    2: ("bfloat16", "float32"),
    3: ("float32", "float16"),
    4: ("float16", "float32"),
}

PAIRS = ", ".join(f"{held} to {wanted}" for held, wanted in CASTS.values())

# the types that can be cast
FLOATING = frozenset(name for pair in CASTS.values() for name in pair)

# bytes per element, indexed by conversion number; index 0 (no conversion) holds 0
SOURCE_SIZES = (0, *(ELEMENT_SIZES[held] for held, _ in CASTS.values()))
DESTINATION_SIZES = (0, *(ELEMENT_SIZES[wanted] for _, wanted in CASTS.values()))


def cast_number(held: str, wanted: str) -> int | None:
    """Return the number of the conversion from one dtype to another: 0 if they are equal, None if there is none."""
    if held == wanted:
        return 0
    return next((number for number, pair in CASTS.items() if pair == (held, wanted)), None)


def cast_problem(cast_from: object, dtype: object) -> str:
    """Return what is wrong with a declared cast to `dtype`, or ""."""
    wanted = dtype_name(str(dtype))
    if isinstance(cast_from, str) and cast_number(dtype_name(cast_from), wanted) is not None:
        return ""
    return f"is {cast_from!r} for a tensor of {wanted}, expected one of the casts that there are: {PAIRS}"
