"""Find the tensors that a source rounds and that some target needs unrounded."""

from __future__ import annotations

from collections import defaultdict

from refitd.coordinator.members import Member
from refitd.coordinator.membership import Membership
from refitd.coordinator.requirements import canonical_names
from refitd.plan.conversions import Offered, unrounded
from refitd.protocol.shards import Shard


def unrounded_by(membership: Membership, source: Member) -> tuple[str, ...]:
    """Return the canonical tensors that a source rank rounds and that some target of its model needs unrounded.

    Equal descriptions are compared once.
    """
    offered: dict[str, Offered] | None = None
    needed: set[str] = set()
    for digest, shard in {m.added.digest: m.shard for m in membership.targets.values()}.items():
        key = source.added.digest, digest
        found = membership.unrounded.get(key)
        if found is None:
            offered = _offered(source.shard) if offered is None else offered
            membership.unrounded.put(key, found := frozenset(unrounded(offered, _held(shard, offered))))
        needed |= found
    return tuple(sorted(needed))


def _offered(shard: Shard) -> dict[str, Offered]:
    return {
        name: Offered(tensor.dtype, tensor.cast_from)
        for tensor in shard.tensors
        if tensor.cast_from is not None
        for name in (*canonical_names(tensor), *tensor.aliases)
    }


def _held(shard: Shard, offered: dict[str, Offered]) -> dict[str, set[tuple[str, str | None]]]:
    held: dict[str, set[tuple[str, str | None]]] = defaultdict(set)
    for tensor in shard.tensors if offered else ():
        for name in (*canonical_names(tensor), *tensor.aliases):
            if name in offered:
                held[name].add((tensor.dtype, tensor.cast_from))
    return held
