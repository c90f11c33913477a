"""Compare what source ranks hold of the same elements: ranks that differ there have a wrong description."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refitd.describe.layout import canonical_name
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.replica_pieces import Piece, PlaceNumbers, enumerated
from refitd.describe.roster import Roster
from refitd.describe.tiles import Tile
from refitd.plan.aliases import tied_name
from refitd.plan.completion import completed
from refitd.plan.shared import GlobalPlan

MAX_NAMED = 5  # tensors that one refusal names

ADVICE = (
    "replicas of one tensor must be equal. If each rank holds a part, its description lacks that: check "
    "tensor_model_parallel, partition_dim and partition_stride on the parameter, allreduce = False on experts, the "
    "parallel groups, or describe it with tiles; if the ranks have drifted apart, synchronise them"
)


@dataclass(frozen=True, slots=True)
class Twin:
    """Piece `number` of a rank (its description `local`) belongs to `group`, which holds `tensor`.

    With a `tile` it is that part of the local tensor, and no piece.
    """

    number: int
    local: str
    group: int
    tensor: str
    tile: Tile | None = None


def twins_of(rosters: Sequence[Roster]) -> dict[int, list[Twin]]:
    """Return, by rank, the source pieces that several ranks hold and some destination wants.

    Tied weights are one tensor.
    """
    rosters, _ = completed(rosters)
    places = PlaceNumbers()
    root = _roots(rosters)
    wanted = {root.get(name, name) for r in rosters for m in r.destination for name in _names(m)}
    holders: dict[tuple[str, int], list[tuple[int, int, str, str]]] = defaultdict(list)
    read: dict[int, tuple[object, list[Piece]]] = {}
    for roster in rosters:
        if id(roster.source) not in read:
            read[id(roster.source)] = roster.source, list(enumerated(roster.source, places))
        for number, meta, key in read[id(roster.source)][1]:
            if key is not None and (name := root.get(key[0], key[0])) in wanted:
                holders[name, key[1]].append((roster.rank, number, meta.name, key[0]))
    found: dict[int, list[Twin]] = defaultdict(list)
    shared = [pieces for pieces in holders.values() if len({rank for rank, *_ in pieces}) > 1]
    for group, pieces in enumerate(shared):
        for rank, number, local, tensor in pieces:
            found[rank].append(Twin(number, local, group, tensor))
    return found


def source_twins(rosters: Sequence[Roster], plan: GlobalPlan) -> dict[int, list[Twin]]:
    """Return, by rank, the pieces of `twins_of` and the regions that sources hold as parts of different cuts."""
    found = twins_of(rosters)
    regions = plan.regions
    groups = 1 + max((twin.group for twins in found.values() for twin in twins), default=-1)
    lead = (0,) * regions.size.shape[1]
    for row in range(len(regions)):
        tensor, local = regions.tensors[int(regions.tensor[row])], regions.locals[int(regions.local[row])]
        size, stride = tuple(regions.size[row].tolist()), tuple(regions.stride[row].tolist())
        tile = Tile(tensor, lead, size, int(regions.offset[row]), stride)
        twin = Twin(0, local, groups + int(regions.group[row]), tensor, tile)
        found.setdefault(int(regions.rank[row]), []).append(twin)
    return found


def differences(held: Iterable[tuple[str, Sequence[Twin], npt.NDArray[np.uint64]]]) -> list[str]:
    """Return what is wrong, by tensor.

    Args:
        held: of each rank what messages call it, its twins, and the digest of each of these; 0 where none was taken.
    """
    first: dict[int, tuple[int, str]] = {}
    wrong: dict[str, str] = {}
    for label, twins, digests in held:
        for twin, digest in zip(twins, digests.tolist(), strict=True):
            if not digest:
                continue
            known, other = first.setdefault(twin.group, (digest, label))
            if known != digest and twin.tensor not in wrong:
                wrong[twin.tensor] = (
                    f"{twin.tensor}: {other} and {label} describe the same elements of it and hold different values"
                )
    lines = list(wrong.values())
    if len(lines) > MAX_NAMED:
        lines = [*lines[:MAX_NAMED], f"and {len(lines) - MAX_NAMED} more tensors"]
    return [*lines[:-1], f"{lines[-1]}; {ADVICE}"] if lines else []


def _names(meta: ParameterMetadata) -> Collection[str]:
    return {tile.tensor for tile in meta.tiles} if meta.tiles else (canonical_name(meta),)


def _roots(rosters: Sequence[Roster]) -> dict[str, str]:
    """Return one name for each tied weight, by every name that a source, or a destination, ties it to."""
    root: dict[str, str] = {}
    for roster in rosters:
        for metas in (roster.source, roster.destination):
            for meta in metas:
                if meta.aliases:
                    names = {tied_name(meta), *meta.aliases}
                    names |= {name for name, known in root.items() if known in {root.get(n, n) for n in names}}
                    root.update(dict.fromkeys(names, min(names)))
    return root
