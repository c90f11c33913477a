"""Compare what source ranks hold of the same elements, by digests that came with each rank's first version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from refitd.describe.replica_pieces import piece_count
from refitd.describe.roster import Roster
from refitd.errors import PlanError, ProtocolError
from refitd.plan.replica_digests import differences, twins_of
from refitd.protocol.shards import Shard, metadata_of


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaDigests:
    """Digests of one rank's pieces at a version; 0 where none was taken."""

    version: int
    digests: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class HeldReplica:
    """One source rank."""

    rank: int
    label: str
    description: str  # the digest of its shard
    shard: Shard
    replicas: ReplicaDigests


@dataclass(slots=True)
class Compared:
    """Remembers what has been compared. Owned by the model; its swaps of some replicas share it."""

    _key: tuple[object, ...] = ()
    _problems: tuple[str, ...] = ()
    _kept: list[object] = field(default_factory=list)  # what the key names by identity

    def problems(self, held: Sequence[HeldReplica], wanted: Mapping[str, Shard]) -> tuple[str, ...]:
        """Return the tensors, of those that `wanted` shards want, whose bytes differ between ranks at one version."""
        if len(held) < 2:
            return ()
        key = (tuple((h.rank, h.label, h.description, id(h.replicas)) for h in held), tuple(sorted(wanted)))
        if key != self._key:
            self._problems = _problems(held, wanted)
            self._key, self._kept = key, [h.replicas for h in held]
        return self._problems


def read_digests(who: str, shard: Shard, version: int, packed: bytes) -> ReplicaDigests:
    """Decode the digests of a rank's pieces at a version.

    Raises:
        ProtocolError: there are not as many as the shard has pieces.
    """
    pieces = sum(map(piece_count, shard.tensors))
    if len(packed) != 8 * pieces:
        raise ProtocolError(f"{who}: {len(packed)} bytes of replica digests, expected 8 for each of {pieces} pieces")
    return ReplicaDigests(version, np.frombuffer(packed, "<u8"))


def _problems(held: Sequence[HeldReplica], wanted: Mapping[str, Shard]) -> tuple[str, ...]:
    # ranks that say and hold the same differ from others in the same places: one of them is looked at
    distinct = {(h.description, h.replicas.version, h.replicas.digests.tobytes()): h for h in reversed(held)}
    first = sorted(distinct.values(), key=lambda h: h.rank)
    if len(first) < 2:
        return ()
    rosters = [Roster(h.rank, metadata_of(h.shard, h.rank)) for h in first]
    at = max(h.rank for h in held) + 1
    rosters += [Roster(at + i, (), metadata_of(shard, at + i)) for i, shard in enumerate(wanted.values())]
    try:
        twins = twins_of(rosters)
    except PlanError:
        return ()  # what is wrong with descriptions is the planner's to say
    lines: list[str] = []
    for version in sorted({h.replicas.version for h in first}):
        same = [(h.label, twins.get(h.rank, []), h.replicas.digests) for h in first if h.replicas.version == version]
        lines = differences((label, mine, digests[[t.number for t in mine]]) for label, mine, digests in same)
        if lines:
            break
    return tuple(lines)
