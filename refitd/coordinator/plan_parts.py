"""A plan's parts on the wire: packed once for all nodes, and sent to each node once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from refitd.caches import BoundedCache
from refitd.plan.parts import PartRows
from refitd.protocol.cluster import EpochPart, EpochPlan, PlanPart
from refitd.protocol.codec import digest_of, pack

# Parts that a node is taken to hold; of one that holds fewer, or has lost some, `PartsMissing` says so.
MAX_HELD = 1 << 14


@dataclass(frozen=True, slots=True)
class Packed:
    """A part as it travels, and the digest that names it."""

    digest: str
    data: bytes


class HeldParts:
    """The parts that a node has been sent."""

    def __init__(self) -> None:
        self._digests: BoundedCache[str, bool] = BoundedCache(MAX_HELD)

    def lacking(self, parts: Iterable[Packed]) -> dict[str, bytes]:
        """Return those that it has not been sent; they count as sent from now on."""
        found: dict[str, bytes] = {}
        for part in parts:
            if self._digests.get(part.digest) is None:
                found[part.digest] = part.data
                self._digests.put(part.digest, True)
        return found

    def forget(self) -> None:
        """Note that it may hold none of them."""
        self._digests.clear()


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
    """

    epoch: EpochPlan
    position: dict[str, int]
    bare: EpochPlan
    parts: tuple[Packed, ...]

    @staticmethod
    def of(epoch: EpochPlan) -> PackedEpoch:
        """Pack an epoch: about as many parts as each has nodes, and each node in the part that its name says."""
        buckets = 1 << max(0, round(math.log2(max(1, len(epoch.nodes))) / 2))
        found: dict[int, list[tuple[str, str]]] = {}
        for node, host in zip(epoch.nodes, epoch.hosts, strict=True):
            found.setdefault(xxhash.xxh3_64_intdigest(node.encode()) % buckets, []).append((node, host))
        parts = [_packed(EpochPart(*map(tuple, zip(*found[bucket], strict=True)))) for bucket in sorted(found)]
        position = {name: i for i, name in enumerate(epoch.nodes)}
        return PackedEpoch(epoch, position, msgspec.structs.replace(epoch, nodes=(), hosts=()), tuple(parts))


def _packed(part: PlanPart | EpochPart) -> Packed:
    return Packed(digest_of(part), pack(part))
