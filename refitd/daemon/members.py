"""What the daemon keeps for each registered rank: where its tensors and their versions lie."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from refitd.buffers.layout import extent, row_major_strides
from refitd.daemon.held import check_held, held_of, held_places
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import RefusedError
from refitd.execute.copies import PROCESS_MEMORY, LocalTensor
from refitd.protocol.codec import digest_of
from refitd.protocol.held import HeldTensor, staged
from refitd.protocol.local import RegisterSource, RegisterTarget
from refitd.protocol.shards import Place, metadata_of

# No shard of one rank is larger; a description that claims more is a mistake or an attack.
MAX_SHARD_BYTES = 1 << 46


@dataclass(slots=True)
class Arena:
    """One arena of this node. `session` may fetch its descriptor, `write` says how; "" is no GPU's name."""

    id: int
    nbytes: int
    label: str
    session: int | None
    write: bool
    device: str = ""


@dataclass(slots=True)
class Slot:
    """A place for one published version of a source."""

    arena: int
    version: int | None = None
    writing: int | None = None  # the version that the client is copying in
    readers: set[str] = field(default_factory=set)  # swaps


@dataclass(slots=True)
class Lease:
    """Live tensors lent as a version."""

    version: int
    places: tuple[LocalTensor, ...]
    readers: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class WaitingPublish:
    """A client that waits for a slot."""

    session: int
    request: int
    version: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Proof:
    """The digests of a version as one target holds it: of every block of its held tensors, in order."""

    version: int
    digests: bytes


@dataclass(slots=True)
class Member:
    """One registered rank."""

    id: str
    session: int | None  # None: the source's client is gone
    pid: int
    registration: RegisterSource | RegisterTarget
    digest: str  # of its shard
    names: tuple[str, ...]
    packed: tuple[LocalTensor, ...]  # places in an arena that refitd lays out, arena still 0
    to_commit: tuple[LocalTensor, ...]  # likewise for what is committed, which is `packed` unless some is converted
    live: tuple[LocalTensor, ...]  # places of arena-backed live tensors, else empty
    slots: list[Slot] = field(default_factory=list)
    leases: dict[int, Lease] = field(default_factory=dict)
    waiting: list[WaitingPublish] = field(default_factory=list)
    staging: int = -1
    version: int | None = None
    staged: str | None = None  # swap whose bytes are in the staging arena and verified
    staged_version: int | None = None
    committing: str | None = None  # swap that is decided and that it has been told to take over
    paused: str | None = None  # swap that it has been asked to stand still for
    writing: str | None = None  # swap that writes its live tensors in place
    poisoned: str = ""  # why these hold parts of two versions
    fenced: str = ""  # "doubt" or "behind": it has been told to serve nothing, and why
    holds: int | None = None  # the version that its staging arena (in place: its live tensors) was last given whole
    verifies: bool = True  # whether what it is staged is compared with its source, and digests are taken
    proof: Proof | None = None  # of the version that it serves, once it has been taken
    newest: int = -1  # highest version ever published
    way: str = ""  # how the newest version is given: "arena", "pulled" or "copied"
    why: str = ""  # the measurement that chose between pulling and copying

    @property
    def is_source(self) -> bool:
        """Whether this rank offers rather than wants."""
        return isinstance(self.registration, RegisterSource)

    @property
    def in_place(self) -> bool:
        """Whether its live tensors are written while staging."""
        return isinstance(self.registration, RegisterTarget) and self.registration.in_place

    def destinations(self) -> dict[str, LocalTensor]:
        """Return where a target's tensors arrive."""
        if self.in_place:
            return dict(zip(self.names, self.live, strict=True))
        return self.packed_places(self.staging)

    @property
    def replica(self) -> str:
        """The replica's name; "" for a source."""
        return "" if isinstance(self.registration, RegisterSource) else self.registration.replica

    def held(self) -> list[int]:
        """Return the versions this source holds."""
        return sorted({s.version for s in self.slots if s.version is not None} | self.leases.keys())

    def arenas(self) -> list[int]:
        """Return the arenas that refitd made for it."""
        return [slot.arena for slot in self.slots] + ([self.staging] if self.staging >= 0 else [])

    def source_places(self, version: int) -> dict[str, LocalTensor] | None:
        """Return where this version's tensors lie, None when it is not held."""
        if version in self.leases:
            return dict(zip(self.names, self.leases[version].places, strict=True))
        for slot in self.slots:
            if slot.version == version:
                return self.packed_places(slot.arena)
        return None

    def way_of(self, version: int) -> str:
        """Return how workers get a version: from the live "arena", "pulled" out of the client, or "copied" by it."""
        lease = self.leases.get(version)
        if lease is None:
            return "copied"
        return "pulled" if any(place.arena == PROCESS_MEMORY for place in lease.places) else "arena"

    def where(self, version: int) -> Hashable:
        """Return a key that is equal for two versions exactly if their tensors lie in the same places."""
        if version in self.leases:
            return (self.id, "live") if self.live else (self.id, "lent", version)
        return self.id, next(slot.arena for slot in self.slots if slot.version == version)

    def held_places(self) -> list[LocalTensor]:
        """Return where what is committed lies in the staging arena."""
        return [LocalTensor(self.staging, t.offset, t.shape, t.strides) for t in self.to_commit]

    def decided_places(self) -> list[LocalTensor]:
        """Return where the version lies that it `holds`."""
        return list(self.live) if self.in_place else self.held_places()

    def packed_places(self, arena: int) -> dict[str, LocalTensor]:
        """Return the places of all tensors in an arena of refitd's own layout."""
        return {
            name: LocalTensor(arena, t.offset, t.shape, t.strides)
            for name, t in zip(self.names, self.packed, strict=True)
        }

    def read_by(self) -> set[str]:
        """Return the swaps that are reading any version."""
        held = [slot.readers for slot in self.slots] + [lease.readers for lease in self.leases.values()]
        return set().union(*held)

    def readers_of(self, version: int) -> set[str] | None:
        """Return the set of swaps reading a version (to be changed in place), None when it is not held."""
        if version in self.leases:
            return self.leases[version].readers
        return next((slot.readers for slot in self.slots if slot.version == version), None)

    def free_slot(self) -> int | None:
        """Return the slot to write next: an empty one, else the oldest version nobody reads; None if all are read."""
        free = [i for i, s in enumerate(self.slots) if s.writing is None and not s.readers]
        return min(free, key=lambda i: -1 if (v := self.slots[i].version) is None else v, default=None)


def new_member(
    member_id: str,
    session: int,
    pid: int,
    registration: RegisterSource | RegisterTarget,
    arenas: Mapping[int, Arena],
) -> tuple[Member, int]:
    """Check a registration and return the member with the bytes that each of its arenas needs.

    Raises:
        RefusedError: ranks, shapes, sizes or places are impossible; nothing has been allocated.
        ProtocolError: a dtype or group is unknown, or a name occurs twice.
    """
    r = registration
    if not 0 <= r.rank < r.world_size:
        raise RefusedError(f"model {r.model!r}: rank {r.rank} is not in 0..{r.world_size - 1} (world_size)")
    if not r.shard.tensors:
        raise RefusedError(f"model {r.model!r} rank {r.rank}: no tensors to register")
    metadata_of(r.shard, r.rank)
    if isinstance(r, RegisterTarget):
        check_held(r)
        if r.in_place and (not r.live or not r.pauses or r.conversions):
            raise RefusedError(
                f"model {r.model!r} replica {r.replica!r} rank {r.rank}: to be written in place, tensors must lie in "
                "arenas (client.allocate) and be held as they arrive (no MXFP8), and it must stand still (on_pause)"
            )
    lies = staged(r.shard, r.held if isinstance(r, RegisterTarget) else ())
    offsets, nbytes = lies.wire, lies.nbytes
    if nbytes > MAX_SHARD_BYTES:
        raise RefusedError(
            f"model {r.model!r} rank {r.rank}: {nbytes} bytes in one shard, the limit is {MAX_SHARD_BYTES}"
        )
    packed = tuple(
        LocalTensor(0, offset, t.shape, row_major_strides(t.shape, ELEMENT_SIZES[t.dtype]))
        for offset, t in zip(offsets, r.shard.tensors, strict=True)
    )
    member = Member(
        id=member_id,
        session=session,
        pid=pid,
        registration=r,
        digest=digest_of(r.shard),
        names=tuple(t.name for t in r.shard.tensors),
        packed=packed,
        to_commit=held_places(r, 0),
        live=_live_places(r, session, arenas),
        version=r.version if isinstance(r, RegisterTarget) else None,
    )
    return member, nbytes


def lease_places(member: Member, addresses: Sequence[int]) -> tuple[LocalTensor, ...]:
    """Return where lent tensors lie: in their arenas, or at addresses of the client's process.

    Raises:
        RefusedError: addresses are missing or too many.
    """
    if member.live and not addresses:
        return member.live
    if len(addresses) != len(member.names):
        raise RefusedError(f"{member.id}: {len(addresses)} addresses for {len(member.names)} tensors")
    return tuple(
        LocalTensor(PROCESS_MEMORY, at, t.shape, t.strides, pid=member.pid)
        for at, t in zip(addresses, member.packed, strict=True)
    )


def _live_places(
    r: RegisterSource | RegisterTarget, session: int, arenas: Mapping[int, Arena]
) -> tuple[LocalTensor, ...]:
    if not r.live:
        return ()
    held = held_of(r)
    if len(r.live) != len(held):
        raise RefusedError(f"model {r.model!r} rank {r.rank}: {len(r.live)} places for {len(held)} tensors")
    return tuple(_live_place(place, tensor, session, arenas) for place, tensor in zip(r.live, held, strict=True))


def _live_place(place: Place, tensor: HeldTensor, session: int, arenas: Mapping[int, Arena]) -> LocalTensor:
    arena = arenas.get(place.arena)
    if arena is None or arena.session != session or not arena.write:
        raise RefusedError(f"{tensor.name}: arena {place.arena} is not one of this client's; allocate it first")
    if len(place.strides) != len(tensor.shape):
        raise RefusedError(f"{tensor.name}: {len(place.strides)} strides for shape {tensor.shape}")
    end = place.offset + extent(tensor.shape, place.strides, ELEMENT_SIZES[tensor.dtype])
    if end > arena.nbytes:
        raise RefusedError(f"{tensor.name}: ends at byte {end} of arena {arena.id}, which has {arena.nbytes}")
    return LocalTensor(place.arena, place.offset, tensor.shape, place.strides)
