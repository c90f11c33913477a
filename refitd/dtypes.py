"""Names and sizes of element types, for processes that do not load torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# bytes per element, by the name torch uses without its "torch." prefix
ELEMENT_SIZES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a torch dtype (or of a name) without the "torch." prefix."""
    return str(dtype).removeprefix("torch.")


def element_size(dtype: torch.dtype | str) -> int:
    """Return the bytes per element; raises ValueError for an unknown dtype."""
    name = dtype_name(dtype)
    if name not in ELEMENT_SIZES:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(ELEMENT_SIZES)}")
    return ELEMENT_SIZES[name]
