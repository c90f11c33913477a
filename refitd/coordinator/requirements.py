"""A swap's requirements besides a plan: MXFP8 offers for targets that want them, hooks for derived tensors."""

from __future__ import annotations

from collections.abc import Iterable

from refitd.describe.mxfp8 import MARK, part_name, part_of
from refitd.protocol.shards import Shard, WireTensor

_SHOWN = 5


def canonical_names(tensor: WireTensor) -> set[str]:
    """Return the canonical tensors that a local tensor holds (parts of)."""
    if tensor.tiles is not None:
        return {tile.tensor for tile in tensor.tiles}
    return {tensor.resolved_name or tensor.name}


def wanted_parts(shard: Shard) -> frozenset[tuple[str, str]]:
    """Return (canonical tensor, rounding) of all that arrives in MXFP8. Aliased tensors are left to the planner."""
    found = set()
    for tensor in shard.tensors:
        if MARK in tensor.name and not tensor.aliases:
            parts = [part_of(name) for name in canonical_names(tensor)]
            found |= {(part.tensor, part.rounding) for part in parts if part is not None}
    return frozenset(found)


def offer_problems(sources: Iterable[Shard], wanted: Iterable[tuple[str, str]]) -> list[str]:
    """Return the `wanted_parts` that no source offers in MXFP8, each with advice."""
    parts = sorted(set(wanted))
    if not parts:
        return []
    offered: set[str] = set()
    for shard in sources:
        for tensor in shard.tensors:
            offered |= canonical_names(tensor) | set(tensor.aliases)
    found = []
    for tensor_name, rounding in parts:
        if part_name(tensor_name, rounding, "data") in offered:
            continue
        others = sorted({p.rounding for name in offered if (p := part_of(name)) and p.tensor == tensor_name})
        if others:
            found.append(
                f"{tensor_name}: sources round its scales {', '.join(others)}, wanted is {rounding}; declare one "
                "rounding on both sides"
            )
        else:
            found.append(
                f"{tensor_name}: it is wanted in MXFP8 and no source offers it so; declare it there "
                "(register_source(mxfp8=...)), or register the target with convert_on_send=False"
            )
    return found


def shortened(problems: list[str]) -> str:
    """Return the first few problems in one line."""
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more
