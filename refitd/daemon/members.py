"""The daemon's record of each registered rank: its tensors, its versions and where they lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from refitd.addressing.places import PROCESS_MEMORY, LocalTensor, Places, places_of
from refitd.buffers.layout import extent, row_major_strides
from refitd.daemon.base_trust import BaseTrust
from refitd.daemon.finishing import (
    TargetFigures,
    arriving_names,
    arriving_places,
    check_held,
    figures_of,
    form_of,
    held_of,
    held_places,
)
from refitd.daemon.target_state import Event, Step, Suspended, TargetState, fresh, step_of
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import IllegalTransition, RefusedError
from refitd.protocol.codec import digest_of, pack
from refitd.protocol.local import RegisterSource, RegisterTarget
from refitd.protocol.shards import Place, WireTensor, check_shard
from refitd.protocol.target_forms import HeldTensor, staged
from refitd.states import TransferMode
from refitd.text import brief

# Events of a member that are kept for display and for the text of refusals.
MAX_EVENTS = 16

# A rank's shard cannot be larger; a description that claims more is a mistake or an attack.
MAX_SHARD_BYTES = 1 << 46

# Characters of a registration's id: a name of the protocol, with room for the names of its arenas.
MAX_ID = 480


@dataclass(slots=True)
class Arena:
    """One arena of this node. `session` may fetch its descriptor, writable if `write`; `device` "" is main memory."""

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
    compared: set[str] = field(default_factory=set)  # swaps that compare a newer version with this one


@dataclass(slots=True)
class LentVersion:
    """Live tensors lent as a version."""

    version: int
    places: Places
    readers: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class WaitingPublish:
    """A client's request that waits for a slot."""

    session: int
    request: int
    version: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Proof:
    """The digests of a version as one target holds it, one for each block of its held tensors, in order."""

    version: int
    digests: bytes


@dataclass(frozen=True, slots=True)
class PermitSlot:
    """A slot in the page of permits (see `refitd.buffers.permits`) and the token that only this member has."""

    slot: int
    token: int


@dataclass(slots=True)
class LocalMember:
    """One registered rank."""

    id: str
    session: int | None  # None: the source's client is gone
    pid: int
    registration: RegisterSource | RegisterTarget
    digest: str  # of its shard
    # where tensors arrive in arenas that refitd lays out; the arena number is still 0, or 1 for the landing arena
    packed: Places
    to_commit: Places  # the same for what is committed; differs from `packed` only if some tensors are converted
    live: Places  # of arena-backed live tensors, else empty
    figures: TargetFigures
    form: str  # key of its held form, see `finishing.form_of`
    slots: list[Slot] = field(default_factory=list)
    leases: dict[int, LentVersion] = field(default_factory=dict)
    waiting: list[WaitingPublish] = field(default_factory=list)
    staging: int = -1
    landing_bytes: int = 0
    landing: int = -1  # target that flips: the arena in which tensors arrive that are converted, if there are any
    state: TargetState = field(default_factory=TargetState)  # a source's never changes
    history: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))  # its last events
    is_told: bool = False  # whether the coordinator has the current `state` and `history`
    on_move: Callable[[LocalMember], None] = lambda member: None
    boot: str = ""  # of the coordinator that admitted it
    permit: PermitSlot | None = None  # the slot from which its process reads until when it may serve
    suspended: bool = False  # target: its process has put the tensors away
    content: tuple[int, ...] = ()  # target: where in its staging arena a predecessor left each tensor, if elsewhere
    exchanged: str = ""  # target: the last swap that exchanged its arenas
    controlled: str = ""  # target: the last swap for which a controller calls it to its commit point
    seeding: set[str] = field(default_factory=set)  # target: catch-ups of other replicas that read what it holds
    verifies: bool = True  # whether staging is compared with the source, and digests are taken
    bases: BaseTrust = field(default_factory=BaseTrust)  # target: whether what it holds may be the base of a delta
    proof: Proof | None = None  # of the version that it serves, once taken
    spare_proof: Proof | None = None  # of the version that its other arena holds, if taken
    spare_found: str | None = None  # what is wrong with that version, "" if nothing is; None until it was compared
    newest: int = -1  # highest version ever published
    first: int = 0  # source: the lowest version that it may publish, set by the coordinator
    run: str = ""  # source: the incarnation of its trainer
    may_drop: frozenset[int] = frozenset()  # versions that no other source rank needs
    lagging: str = ""  # the ranks that must publish before it may drop more
    mode: TransferMode = TransferMode.NONE  # how the newest version is transferred
    mode_reason: str = ""  # the measurement that chose between pulling and copying
    described: bytes = b""  # its shard, packed for the coordinator

    def move(self, event: Event) -> None:
        """Apply an event to a target's state.

        Raises:
            IllegalTransition: the event cannot happen now; nothing has changed. The text includes the last events.
        """
        try:
            state = step_of(self.state, event)
        except IllegalTransition as exc:
            before = "; ".join(self.history) or "none"
            raise IllegalTransition(f"{self.id}: {exc}; its last events: {before}") from None
        self.state = state
        self.history.append(brief(f"{event} -> {state}"))
        self.is_told = False
        self.on_move(self)

    @property
    def is_source(self) -> bool:
        """Whether this rank is a source."""
        return isinstance(self.registration, RegisterSource)

    @property
    def flips(self) -> bool:
        """Whether commits exchange its staging arena with the arena of its live tensors."""
        return isinstance(self.registration, RegisterTarget) and self.registration.flips

    @property
    def is_proven_live(self) -> bool:
        """Whether digests are taken of its live tensors: no other arena holds the version that it serves."""
        return self.flips or self.in_place

    @property
    def is_read_by_workers(self) -> bool:
        """Whether workers can read all of its live tensors."""
        return bool(self.live) and not getattr(self.registration, "reads_live", False)

    @property
    def live_arena(self) -> int:
        """The arena of a flipping target's live tensors: all of them lie there."""
        return int(self.live.arena[0])

    @property
    def in_place(self) -> bool:
        """Whether staging writes its live tensors directly."""
        return isinstance(self.registration, RegisterTarget) and self.registration.in_place

    def destinations(self) -> Places:
        """Return where a target's tensors arrive."""
        return self.live if self.in_place else self.packed.in_arenas(self.staging, self.landing)

    @property
    def replica(self) -> str:
        """The replica's name; "" for a source."""
        return "" if isinstance(self.registration, RegisterSource) else self.registration.replica

    @property
    def seeds(self) -> bool:
        """Whether others can be given the version that this target serves: an arena holds it whole, as it arrived."""
        r, state = self.registration, self.state
        is_converted = not isinstance(r, RegisterTarget) or bool(r.conversions)
        return not is_converted and state.version is not None and state.holds == state.version

    def offers(self, version: int, run: str) -> bool:
        """Whether swaps can read this version here: a source holds it, or a target serves it and can seed others."""
        if self.is_source:
            return self.run == run and version in self.held()
        state = self.state
        return self.seeds and (state.version, state.run) == (version, run) and state.step is Step.IDLE

    def held(self) -> list[int]:
        """Return the versions this source holds."""
        return sorted({s.version for s in self.slots if s.version is not None} | self.leases.keys())

    def arenas(self) -> list[int]:
        """Return the arenas that refitd allocated for this rank."""
        return [slot.arena for slot in self.slots] + [n for n in (self.staging, self.landing) if n >= 0]

    def source_places(self, version: int) -> Places:
        """Return the places of the tensors of a version that this rank offers."""
        if not self.is_source:
            return self.decided_places()
        if version in self.leases:
            return self.leases[version].places
        return self.packed.in_arena(next(slot.arena for slot in self.slots if slot.version == version))

    def mode_of(self, version: int) -> TransferMode:
        """Return how workers read a version."""
        lease = self.leases.get(version)
        if lease is None:
            return TransferMode.COPIED
        return TransferMode.PULLED if PROCESS_MEMORY in lease.places.arena else TransferMode.ARENA

    def where(self, version: int) -> Hashable:
        """Return a key that is equal for two versions exactly if their tensors lie in the same places."""
        if not self.is_source:
            return self.id, "decided"
        if version in self.leases:
            return (self.id, "live") if self.live else (self.id, "lent", version)
        return self.id, next(slot.arena for slot in self.slots if slot.version == version)

    def held_places(self) -> Places:
        """Return the places, in the staging arena, of the tensors to commit."""
        return self.live.in_arena(self.staging) if self.flips else self.to_commit.in_arena(self.staging)

    def decided_places(self) -> Places:
        """Return the locations of the last complete version, which `state.holds` names."""
        return self.live if self.in_place or self.flips else self.held_places()

    def read_by(self) -> set[str]:
        """Return the swaps that read any of its versions."""
        held = [slot.readers | slot.compared for slot in self.slots] + [lease.readers for lease in self.leases.values()]
        return self.seeding.union(*held)

    def readers_of(self, version: int) -> set[str] | None:
        """Return the (mutable) set of swaps that read a version, None if it is not held."""
        if not self.is_source:
            return self.seeding
        if version in self.leases:
            return self.leases[version].readers
        return next((slot.readers for slot in self.slots if slot.version == version), None)

    def free_slot(self, *, even_compared: bool = False) -> int | None:
        """Return the slot to write next: an empty one, else the oldest that is neither read nor needed, else None.

        One that a newer version is being compared with is free only with `even_compared`.

        With several ranks, only versions in `may_drop` may be overwritten: other ranks may still have to publish a
        version, and the newest complete one must stay. With one rank any unread version may be overwritten.
        """
        free = [i for i, s in enumerate(self.slots) if s.writing is None and not s.readers]
        free = [i for i in free if even_compared or not self.slots[i].compared]
        if self.registration.world_size > 1:
            free = [i for i in free if (v := self.slots[i].version) is None or v in self.may_drop]
        return min(free, key=lambda i: -1 if (v := self.slots[i].version) is None else v, default=None)


def member_id(model: str, who: str, node: str, number: int) -> str:
    """Return a registration's id, which no other one has.

    Raises:
        RefusedError: the names in it are too long to travel.
    """
    found = f"{model}/{who}@{node}#{number}"
    if len(found) > MAX_ID:
        raise RefusedError(
            f"model {brief(model)!r}: the names of model, replica and node have {len(found)} characters together, at "
            f"most {MAX_ID} can be; choose shorter ones"
        )
    return found


def new_member(
    member_id: str,
    session: int,
    pid: int,
    registration: RegisterSource | RegisterTarget,
    arenas: Mapping[int, Arena],
) -> tuple[LocalMember, int]:
    """Check a registration; return the member and the bytes that each of its arenas needs.

    Raises:
        RefusedError: ranks, shapes, sizes or places are invalid; nothing has been allocated.
        ProtocolError: a dtype or group is unknown, or a name occurs twice.
    """
    r = registration
    if not 0 <= r.rank < r.world_size:
        raise RefusedError(f"model {r.model!r}: rank {r.rank} is not in 0..{r.world_size - 1} (world_size)")
    check_shard(r.shard)
    if isinstance(r, RegisterTarget):
        check_held(r)
        is_placed = bool(r.live) or not any(prod(tensor.shape) for tensor in r.shard.tensors)
        if r.in_place and (not is_placed or not r.pauses or r.conversions):
            raise RefusedError(
                f"model {r.model!r} replica {r.replica!r} rank {r.rank}: to be written in place, tensors must lie in "
                "arenas (client.allocate) and be held as they arrive (no MXFP8), and it must stand still (on_pause)"
            )
    lies = staged(r.shard, r.held if isinstance(r, RegisterTarget) else ())
    offsets, nbytes = lies.wire, lies.nbytes
    landing_bytes, figures = 0, figures_of(r)
    if isinstance(r, RegisterTarget) and r.flips:
        nbytes = _twin_bytes(r, arenas)
    if nbytes > MAX_SHARD_BYTES:
        raise RefusedError(
            f"model {r.model!r} rank {r.rank}: {nbytes} bytes in one shard, the limit is {MAX_SHARD_BYTES}"
        )
    packed = places_of(
        (
            LocalTensor(0, offset, t.shape, row_major_strides(t.shape, ELEMENT_SIZES[t.dtype]))
            for offset, t in zip(offsets, r.shard.tensors, strict=True)
        ),
        {t.name: row for row, t in enumerate(r.shard.tensors)},
    )
    live = _live_places(r, session, arenas)
    to_commit = held_places(r) if isinstance(r, RegisterTarget) and r.held else packed
    if isinstance(r, RegisterTarget) and r.flips:
        packed, landing_bytes = arriving_places(r)
        figures = replace(figures, staging_bytes=nbytes + landing_bytes)
    member = LocalMember(
        id=member_id,
        session=session,
        pid=pid,
        registration=r,
        digest=digest_of(r.shard),
        packed=packed,
        to_commit=to_commit,
        live=live,
        landing_bytes=landing_bytes,
        figures=figures,
        form=form_of(r),
        described=pack(r.shard),
    )
    if isinstance(r, RegisterTarget):
        member.state = fresh(in_place=r.in_place, version=r.version, run=r.run, flips=r.flips)
        if r.suspended:
            member.suspended, member.state = True, step_of(member.state, Suspended())
    return member, nbytes


def _twin_bytes(r: RegisterTarget, arenas: Mapping[int, Arena]) -> int:
    """Return the size of the staging arena of a target whose commits exchange arenas: that of its live one.

    Raises:
        RefusedError: its live tensors do not lie in one arena, or workers cannot convert into them.
    """
    numbers = {place.arena for place in r.live}
    if len(numbers) != 1 or r.in_place or not numbers <= arenas.keys():
        raise RefusedError(
            f"model {r.model!r} replica {r.replica!r} rank {r.rank}: to flip, its tensors must be all of one arena "
            f"(found {len(numbers)} arenas)"
        )
    for index in sorted({index for conversion in r.conversions for index in conversion.held}):
        held, place = r.held[index], r.live[index] if index < len(r.live) else None
        if place is not None and place.strides != row_major_strides(held.shape, ELEMENT_SIZES[held.dtype]):
            raise RefusedError(f"{held.name}: to flip, what is made by a conversion must be contiguous")
    return arenas[numbers.pop()].nbytes


def lease_places(member: LocalMember, addresses: Sequence[int]) -> Places:
    """Return where lent tensors lie: in the member's arenas, or at addresses in the client's process.

    Raises:
        RefusedError: the number of addresses is wrong.
    """
    if member.live and not addresses:
        return member.live
    if len(addresses) != len(member.packed):
        raise RefusedError(f"{member.id}: {len(addresses)} addresses for {len(member.packed)} tensors")
    return member.packed.at(addresses, member.pid)


def _live_places(r: RegisterSource | RegisterTarget, session: int, arenas: Mapping[int, Arena]) -> Places:
    if not r.live:
        return places_of(())
    held = held_of(r)
    if len(r.live) != len(held):
        raise RefusedError(f"model {r.model!r} rank {r.rank}: {len(r.live)} places for {len(held)} tensors")
    placed = (_live_place(place, tensor, session, arenas) for place, tensor in zip(r.live, held, strict=True))
    return places_of(placed, {name: row for row, name in enumerate(arriving_names(r)) if name is not None})


def _live_place(
    place: Place, tensor: HeldTensor | WireTensor, session: int, arenas: Mapping[int, Arena]
) -> LocalTensor:
    arena = arenas.get(place.arena)
    if arena is None or arena.session != session or not arena.write:
        raise RefusedError(f"{tensor.name}: arena {place.arena} is not one of this client's; allocate it first")
    if len(place.strides) != len(tensor.shape):
        raise RefusedError(f"{tensor.name}: {len(place.strides)} strides for shape {tensor.shape}")
    end = place.offset + extent(tensor.shape, place.strides, ELEMENT_SIZES[tensor.dtype])
    if end > arena.nbytes:
        raise RefusedError(f"{tensor.name}: ends at byte {end} of arena {arena.id}, which has {arena.nbytes}")
    return LocalTensor(place.arena, place.offset, tensor.shape, place.strides)
