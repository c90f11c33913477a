"""Partial sources: check that they and the targets that keep the rest agree on the parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from msgspec.structs import replace

from refitd.coordinator.requirements import canonical_names
from refitd.describe.mxfp8 import MARK
from refitd.protocol.shards import KeptTensor, Shard, WireTensor

# Kept tensors that a status names.
MAX_NAMED = 8


def part_problems(sources: Iterable[Shard], ranks: Iterable[Shard]) -> list[str]:
    """Return why a replica cannot follow these sources, [] if it can or if neither side speaks of a part.

    Args:
        sources: the shards of all source ranks.
        ranks: the shards of all ranks of the replica.
    """
    sources, ranks = list(sources), list(ranks)
    kept = [tensor for shard in ranks for tensor in shard.kept]
    if not any(shard.is_partial for shard in sources):
        if not kept:
            return []
        return [
            f"it keeps {_named(kept)}, and the sources do not say that they offer a part of the model; "
            "register them with partial=True, or the target without keeps"
        ]
    offered = names_of(sources)
    if overlap := [tensor for tensor in kept if not offered.isdisjoint(tensor.tensors)]:
        return [f"it keeps {_named(overlap)}, which the sources offer; register the target again without that"]
    return _missing(offered, ranks) or _untaken(sources, ranks, kept)


def as_offered(seeds: Iterable[Shard], ranks: Iterable[Shard]) -> list[Shard]:
    """Return the shards of serving ranks as those of sources, for `part_problems` of a replica's ranks.

    Nobody knows any more whether the sources offered a part: if the replica keeps something, it is asked what a
    replica is asked that follows a part.
    """
    is_partial = any(shard.kept or shard.keeps_rest for shard in ranks)
    return [replace(shard, is_partial=is_partial) for shard in seeds]


def names_of(shards: Iterable[Shard]) -> set[str]:
    """Return the canonical tensors of shards and their aliases; the parts of one in MXFP8 count as that tensor."""
    return {
        name.partition(MARK)[0]
        for shard in shards
        for tensor in shard.tensors
        for name in (*canonical_names(tensor), *tensor.aliases)
    }


def kept_names(kept: Sequence[KeptTensor]) -> tuple[str, ...]:
    """Return the names of the first kept tensors, as a status shows them."""
    return tuple(tensor.name for tensor in kept[:MAX_NAMED])


def _missing(offered: set[str], ranks: Iterable[Shard]) -> list[str]:
    """Return a problem for each tensor that is not, or not completely, offered."""
    found: dict[str, None] = {}
    for tensor in (tensor for shard in ranks for tensor in shard.tensors if prod(tensor.shape)):
        names = {name.partition(MARK)[0] for name in (*canonical_names(tensor), *tensor.aliases)}
        lacking, there = ", ".join(sorted(names - offered)), ", ".join(sorted(names & offered))
        if not there:
            found[
                f"{tensor.name}: no source offers it, and the sources say that they offer a part of the model; where "
                "the target is to keep it as it is, register it with keeps=True, or with its name in keeps"
            ] = None
        elif lacking and tensor.aliases:
            # the offered one may be trained and the other frozen: the target would hold one value for two
            found[
                f"{tensor.name}: it is tied with {lacking} there, and the sources offer {there} and say nothing of the "
                "tie; declare the aliases at the source, or register an untied model"
            ] = None
        elif lacking:
            found[
                f"{tensor.name}: it is made of several tensors, and the sources offer {there} and not {lacking}; a "
                "target keeps a tensor as a whole: offer all of its parts"
            ] = None
    return list(found)


def _untaken(sources: Iterable[Shard], ranks: Sequence[Shard], kept: Sequence[KeptTensor]) -> list[str]:
    """Return what is wrong with a replica that takes nothing, or not all that is offered where it keeps the rest."""
    taken = names_of(ranks)
    # each is one weight, under all of its names
    weights = [
        {name.partition(MARK)[0] for name in names}
        for shard in sources
        for tensor in shard.tensors
        for names in ([{*canonical_names(tensor), *tensor.aliases}] if tensor.aliases else _each(tensor))
    ]
    unused = sorted({min(names) for names in weights if taken.isdisjoint(names)})
    if kept and all(taken.isdisjoint(names) for names in weights):
        return [f"it keeps all that it has ({_named(kept)}) and takes nothing; do its names differ from the sources'?"]
    if unused and any(shard.keeps_rest for shard in ranks):
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        return [
            f"it keeps {_named(kept) if kept else 'nothing'}, and does not take {unused[0]!r}{more}, which is offered; "
            "do the names differ? If it is right so, name what it keeps: keeps=(...)"
        ]
    return []


def _each(tensor: WireTensor) -> list[set[str]]:
    return [{name} for name in canonical_names(tensor)]


def _named(kept: Sequence[KeptTensor]) -> str:
    more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
    return f"{kept[0].name!r}{more}"
