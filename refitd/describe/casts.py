"""Conversions that a destination may declare: which there are, and the numbers they have in plans.

A plan says of each copy which of them it performs; 0 means that bytes stay as they are. Numbers are never given
anew, so that plans of one version are read right by another.
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

# bytes per element, by number; 0 where nothing is converted
SOURCE_SIZES = (0, *(ELEMENT_SIZES[held] for held, _ in CASTS.values()))
DESTINATION_SIZES = (0, *(ELEMENT_SIZES[wanted] for _, wanted in CASTS.values()))


def cast_number(held: str, wanted: str) -> int | None:
    """Return the number of the conversion from one dtype to another, 0 where they are equal, None where none is."""
    if held == wanted:
        return 0
    return next((number for number, pair in CASTS.items() if pair == (held, wanted)), None)


def cast_problem(cast_from: object, dtype: object) -> str:
    """Return what is wrong with a declared cast to `dtype`, or ""."""
    wanted = dtype_name(str(dtype))
    if isinstance(cast_from, str) and cast_number(dtype_name(cast_from), wanted) is not None:
        return ""
    pairs = ", ".join(f"{a} to {b}" for a, b in CASTS.values())
    return f"is {cast_from!r} for a tensor of {wanted}, expected one of the casts that there are: {pairs}"
