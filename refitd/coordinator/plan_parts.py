"""A plan's parts on the wire: packed once for all nodes, and sent to each node once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import xxhash

from refitd.caches import BoundedCache
from refitd.plan.parts import PartRows, Uses
from refitd.plan.table import Int32
from refitd.protocol.cluster import (
    EpochPart,
    EpochParts,
    EpochPlan,
    LoadPlan,
    LoadShare,
    NodeShare,
    PlanPart,
    ShareRanks,
)
from refitd.protocol.codec import digest_of, pack

# Parts that a node is taken to hold; of one that holds fewer, or has lost some, `PartsMissing` says so.
MAX_HELD = 1 << 14

# Shares, ranks and lists of epochs' parts that it is taken to hold: each change of a fleet may make new ones, of which
# few come back.
MAX_SHARES = 64

# The version of the protocol from which on daemons know LoadShare.
SHARES_SINCE = 3_003


@dataclass(frozen=True, slots=True)
class Packed:
    """A part as it travels, and the digest that names it."""

    digest: str
    data: bytes


class HeldParts:
    """The parts that a node has been sent.

    `takes_shares`: it knows LoadShare, so that shares of plans are parts, too.
    """

    def __init__(self, *, takes_shares: bool = True) -> None:
        self.takes_shares = takes_shares
        self._digests: dict[str, None] = {}  # the oldest first
        self._shares: BoundedCache[str, bool] = BoundedCache(MAX_SHARES)

    def lacking(self, parts: Iterable[Packed]) -> dict[str, bytes]:
        """Return those that it has not been sent; they count as sent from now on."""
        found = {part.digest: part.data for part in parts if part.digest not in self._digests}
        self._digests.update(dict.fromkeys(found))
        while len(self._digests) > MAX_HELD:
            del self._digests[next(iter(self._digests))]
        return found

    def lacks_share(self, digest: str) -> bool:
        """Return whether it has not been sent a share, or what goes with one, which counts as sent from now on."""
        is_new = self._shares.get(digest) is None
        self._shares.put(digest, True)
        return is_new

    def forget(self) -> None:
        """Note that it may hold none of them."""
        self._digests.clear()
        self._shares.clear()


class PackedParts:
    """Packs the parts of tables; what it has packed lately is not packed again."""

    def __init__(self) -> None:
        self._packed: BoundedCache[bytes, Packed] = BoundedCache(MAX_HELD)

    def of(self, parts: PartRows[Any]) -> tuple[Packed, ...]:
        """Return the parts of a table as they travel."""
        found = []
        for number, content in enumerate(parts.contents):
            packed = self._packed.get(content)
            if packed is None:
                packed = _packed(PlanPart(parts.part(number).to_wire()))
                self._packed.put(content, packed)
            found.append(packed)
        return tuple(found)


@dataclass(frozen=True, eq=False, slots=True)
class PackedEpoch:
    """An epoch, with its nodes in parts: a node that comes or goes changes one of them.

    Attributes:
        epoch: the epoch.
        position: of each node.
        bare: the epoch without nodes and hosts.
        parts: the nodes and hosts.
        listed: the digests of these, by one digest.
    """

    epoch: EpochPlan
    position: dict[str, int]
    bare: EpochPlan
    parts: tuple[Packed, ...]
    listed: Packed

    @staticmethod
    def of(epoch: EpochPlan) -> PackedEpoch:
        """Pack an epoch: about as many parts as each has nodes, and each node in the part that its name says."""
        buckets = 1 << max(0, round(math.log2(max(1, len(epoch.nodes))) / 2))
        found: dict[int, list[tuple[str, str]]] = {}
        for node, host in zip(epoch.nodes, epoch.hosts, strict=True):
            found.setdefault(xxhash.xxh3_64_intdigest(node.encode()) % buckets, []).append((node, host))
        parts = [_packed(EpochPart(*map(tuple, zip(*found[bucket], strict=True)))) for bucket in sorted(found)]
        listed = _packed(EpochParts(tuple(part.digest for part in parts)))
        position = {name: i for i, name in enumerate(epoch.nodes)}
        return PackedEpoch(epoch, position, msgspec.structs.replace(epoch, nodes=(), hosts=()), tuple(parts), listed)


def in_parts(
    load: LoadPlan, uses: Mapping[str, Uses], parts: Sequence[Packed], epoch: PackedEpoch | None, held: HeldParts
) -> LoadPlan:
    """Return a message with the uses of parts, and those parts that the node lacks."""
    of_epoch = epoch.parts if epoch is not None else ()
    return msgspec.structs.replace(
        load,
        epoch=epoch.bare if epoch is not None else None,
        uses={name: some.to_wire() for name, some in uses.items()},
        parts=tuple(part.digest for part in parts),
        epoch_parts=tuple(part.digest for part in of_epoch),
        given=held.lacking([*parts, *of_epoch]),
    )


def in_shares(
    load: LoadPlan,
    uses: Mapping[str, Uses],
    parts: Sequence[Packed],
    nodes: tuple[tuple[str, ...], tuple[int, ...]],
    epoch: PackedEpoch | None,
    held: HeldParts,
) -> LoadShare:
    """Return a message by digests. Rank load.ranks[i] is on node nodes[0][nodes[1][i]].

    A node that has been sent a share has been sent all that it is made of, and says so if it has lost some.
    """
    ranks = np.array(load.ranks, np.int32)
    share = NodeShare(
        members=load.members,
        nodes=nodes[0],
        at=nodes[1],
        seeds=tuple(np.searchsorted(ranks, load.seeds).tolist()),
        uses={name: _without_ranks(some, ranks).to_wire() for name, some in uses.items()},
        parts=tuple(part.digest for part in parts),
    )
    numbers, given = ShareRanks(load.ranks), dict[str, bytes]()
    if held.lacks_share(digest := digest_of(share)):
        given = {digest: pack(share)} | held.lacking(parts)
    if held.lacks_share(of_ranks := digest_of(numbers)):
        given[of_ranks] = pack(numbers)
    if epoch is not None and held.lacks_share(epoch.listed.digest):
        given = given | {epoch.listed.digest: epoch.listed.data} | held.lacking(epoch.parts)
    return LoadShare(
        plan=load.plan,
        model=load.model,
        share=digest,
        ranks=of_ranks,
        epoch_parts=epoch.listed.digest if epoch is not None else "",
        epoch=epoch.bare if epoch is not None else None,
        given=given,
    )


def _without_ranks(uses: Uses, ranks: Int32) -> Uses:
    """Return uses with positions in `ranks`, which are ascending and have all of theirs, instead of ranks."""
    return replace(uses, ranks=np.searchsorted(ranks, uses.ranks).astype(np.int32))


def _packed(part: PlanPart | EpochPart | EpochParts) -> Packed:
    return Packed(digest_of(part), pack(part))
