"""The daemon's record of each registered rank: its tensors, its versions and their places."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import xxhash

from refitd.addressing.places import Places
from refitd.buffers.layout import Written
from refitd.commit.target_state import Event, Step, TargetState
from refitd.protocol.cluster import Stage
from refitd.protocol.local import RegisterSource, RegisterTarget
from refitd.protocol.sidecar import HeldBase
from refitd.states import TransferMode
from refitd.text import brief, called

# limit on the consecutive full versions that a target gets after its base was found wrong
MOST_FULL = 64

BaseVersion = tuple[int | None, str]  # version, and the incarnation of its trainer


@dataclass(slots=True)
class BaseTrust:
    """Whether the live version of one target is the base of the next delta.

        a delta gave wrong bytes       -> `suspect`: this version is no base until its digest has been compared
        the digest matches             -> the delta was wrong: the version is a base again, once
        the digest differs             -> the base was wrong: the next 1, 2, 4, ... 64 versions come full

    The number of full versions doubles with each wrong base. An engine that keeps writing to its live tensors then
    seldom fails a swap.
    """

    suspect: BaseVersion | None = None
    cleared: BaseVersion | None = None  # its digest matched; see `doubt`
    wrong: int = 0  # bases of this target that differed from their digests
    full_due: int = 0  # full versions still to be sent before the next delta

    def comes_full(self, base: BaseVersion) -> bool:
        """Return whether the next version comes full: no delta on this base may be sent."""
        return base == self.suspect or self.full_due > 0

    def may_use(self, base: BaseVersion) -> bool:
        """Return whether a delta on this base may be sent; counts a full version that is sent instead."""
        comes_full = self.comes_full(base)
        if comes_full and base != self.suspect:
            self.full_due -= 1
        return not comes_full

    def doubt(self, base: BaseVersion) -> bool:
        """Suspect a base: a delta on it gave wrong bytes. Return whether its digest is to be compared.

        A base is cleared once. Its digest also matches if the engine wrote to it before the digest was taken.
        """
        is_new = base not in (self.suspect, self.cleared)
        self.suspect = base
        return is_new

    def matched(self, base: BaseVersion) -> None:
        """Use a base again: its digest is right."""
        self.cleared = base
        if self.suspect == base:
            self.suspect = None

    def differed(self) -> None:
        """Plan full versions: the base has changed since it was committed, or cannot be compared."""
        self.full_due = min(1 << self.wrong, MOST_FULL) - 1  # less the one due to `suspect`
        self.wrong += 1


@dataclass(slots=True)
class SourceSide:
    """The versions that a source has published. It has either slots, or live tensors in an arena, which it lends.

    `LocalRegistrations` sets it when the coordinator admits the source; then only `Publishing` and swaps change it.
    """

    slots: list[Slot] = field(default_factory=list)
    leases: dict[int, set[str]] = field(default_factory=dict)  # lent versions: the swaps that read each
    waiting: list[WaitingPublish] = field(default_factory=list)
    newest: int = -1  # highest version ever published
    first: int = 0  # the lowest version that it may publish, set by the coordinator
    run: str = ""  # the incarnation of its trainer
    may_drop: frozenset[int] = frozenset()  # versions that no other source rank needs
    lagging: str = ""  # the ranks that must publish before it may drop more

    def held(self) -> list[int]:
        """Return the versions that this source holds, ascending."""
        return sorted({s.version for s in self.slots if s.version is not None} | self.leases.keys())

    def free_slot(self, *, is_alone: bool, even_compared: bool = False) -> int | None:
        """Return the slot to write next: an empty slot, else the oldest that is neither read nor needed, else None.

        A slot that a newer version is being compared with is free only with `even_compared`.

        If the source is not alone, only versions in `may_drop` may be overwritten: other ranks may still have to
        publish a version, and the newest complete version must stay. One that is alone may overwrite any unread one.
        """
        free = [i for i, s in enumerate(self.slots) if s.writing is None and not s.readers]
        free = [i for i in free if even_compared or not self.slots[i].compared]
        if not is_alone:
            free = [i for i in free if (v := self.slots[i].version) is None or v in self.may_drop]
        return min(free, key=lambda i: -1 if (v := self.slots[i].version) is None else v, default=None)


# Limit on a member's stored events, for display and for the text of refusals.
MAX_EVENTS = 16


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
    since: float = 0.0  # when the client got the slot for it
    written: Written | None = None  # its bytes, as far as the client tells while it writes them
    readers: set[str] = field(default_factory=set)  # swaps
    compared: set[str] = field(default_factory=set)  # swaps that compare a newer version with this one


@dataclass(frozen=True, slots=True)
class Offered:
    """The arena of the slot that holds a version; -1: the live tensors, or a target's last complete version."""

    slot: int
    readers: set[str]  # the swaps that read it; swaps add themselves
    written: Written | None = None  # the bytes that the client has written; None: all


@dataclass(frozen=True, slots=True)
class WaitingPublish:
    """A client's request that waits for a slot."""

    session: int
    request: int
    version: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Proof:
    """The digests of one target's copy of a version: one for each block of its held tensors, in order."""

    version: int
    digests: bytes


@dataclass(frozen=True, slots=True)
class PermitSlot:
    """A slot in the page of permits (see `refitd.buffers.permits`) and the token that only this member has."""

    slot: int
    token: int


@dataclass(frozen=True, slots=True)
class TargetFigures:
    """Figures that the coordinator gets with a target's shard: byte counts, and derived tensors without a hook."""

    held_bytes: int = 0
    staging_bytes: int = 0
    converted_bytes: int = 0
    stale: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Registration:
    """A rank's request to register, once checked, and the values that follow from it. It never changes.

    `new_members.checked` makes it. The arena numbers in `packed` and `to_commit` are 0, or 1 for a landing arena.
    """

    request: RegisterSource | RegisterTarget
    pid: int
    replica: str  # "" for a source
    nbytes: int  # of each slot, or of the staging arena
    digest: str  # of its shard
    described: bytes  # its shard, packed for the coordinator
    form: str  # key of its held form, see `new_members.form_of`
    packed: Places  # at which tensors arrive in arenas that refitd lays out
    to_commit: Places  # of the tensors to commit; differs from `packed` only if some tensors are converted
    live: Places  # of arena-backed live tensors, else empty
    figures: TargetFigures
    is_source: bool
    flips: bool  # commits exchange its staging arena with the arena of its live tensors
    in_place: bool  # staging writes its live tensors directly
    is_proven_live: bool  # its digests are computed from its live tensors: no other arena holds the served version
    in_lockstep: bool  # it commits in the same poll as the other ranks of its replica

    @property
    def is_read_by_workers(self) -> bool:
        """Whether workers can read all of its live tensors."""
        return bool(self.live) and not getattr(self.request, "reads_live", False)

    @property
    def live_arena(self) -> int:
        """The arena that holds all live tensors of a flipping target."""
        return int(self.live.arena[0])


@dataclass(frozen=True, slots=True)
class TargetMemory:
    """The arenas that refitd allocated for a target; -1: none."""

    staging: int = -1
    landing: int = -1  # if it flips: for arriving tensors that are then converted
    content: tuple[int, ...] = ()  # offsets of its predecessor's tensors in the staging arena, if they differ


@dataclass(frozen=True, slots=True)
class RankProofs:
    """The proofs of a target's versions, by their digests."""

    verifies: bool = True  # whether staging is compared with the source, and digests are computed
    live: Proof | None = None  # of the version that it serves, once computed
    spare: Proof | None = None  # of the version in its other arena, if computed
    spare_found: str | None = None  # the error found in that version, "" if it is right; None until compared

    def exchanged(self) -> RankProofs:
        """Return the proofs after the two arenas were exchanged."""
        return RankProofs(self.verifies, live=self.spare, spare=self.live)


@dataclass(slots=True)
class LocalMember:
    """One registered rank."""

    id: str
    session: int | None  # None: the source's client has left
    registration: Registration
    source: SourceSide | None = None  # None for a target
    memory: TargetMemory = TargetMemory()
    state: TargetState = field(default_factory=TargetState)  # a source's never changes
    # its last events, each with the state that followed
    history: deque[tuple[Event, TargetState]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    seeding: set[str] = field(default_factory=set)  # target: catch-ups of other replicas that read its version
    bases: BaseTrust = field(default_factory=BaseTrust)  # target: whether its version may be the base of a delta
    proofs: RankProofs = RankProofs()

    @property
    def name(self) -> str:
        """Its name in errors."""
        return called(self.id)

    @property
    def mode(self) -> TransferMode:
        """How workers read its published versions; NONE without any."""
        if self.source is None or self.source.newest < self.source.first:
            return TransferMode.NONE
        return TransferMode.ARENA if self.registration.request.live else TransferMode.COPIED

    def events(self) -> tuple[str, ...]:
        """Return its last events as texts, the oldest first."""
        return tuple(brief(f"{event} -> {state}") for event, state in self.history)

    def destinations(self) -> Places:
        """Return the places at which a target's tensors arrive."""
        r, memory = self.registration, self.memory
        return r.live if r.in_place else r.packed.in_arenas(memory.staging, memory.landing)

    @property
    def lacks_base(self) -> bool:
        """Whether a target's next version comes full, because its base was found wrong or is suspected."""
        return self.bases.comes_full((self.state.holds, self.state.run))

    @property
    def seeds(self) -> bool:
        """Whether other replicas can read its version here: an arena holds the whole served version, unconverted."""
        r, state = self.registration.request, self.state
        is_converted = not isinstance(r, RegisterTarget) or bool(r.conversions)
        return not is_converted and state.version is not None and state.holds == state.version

    def offered(self, version: int, run: str, *, even_begun: bool = False) -> Offered | None:
        """Return where swaps can read this version, None if they cannot.

        A source holds it, or with `even_begun` writes it; a target serves it and can seed others.
        """
        source, state = self.source, self.state
        if source is None:
            serves = (state.version, state.run) == (version, run) and state.step is Step.IDLE
            return Offered(-1, self.seeding) if serves and self.seeds else None
        if source.run != run:
            return None
        if version in source.leases:
            return Offered(-1, source.leases[version])
        for slot in source.slots:
            if slot.version == version:
                return Offered(slot.arena, slot.readers)
            if even_begun and slot.writing == version:
                slot.written = slot.written or Written()
                return Offered(slot.arena, slot.readers, slot.written)
        return None

    def held(self) -> list[int]:
        """Return the versions that a source holds, ascending; none for a target."""
        return self.source.held() if self.source is not None else []

    def arenas(self) -> list[int]:
        """Return the arenas that refitd allocated for this rank."""
        if self.source is not None:
            return [slot.arena for slot in self.source.slots]
        return [n for n in (self.memory.staging, self.memory.landing) if n >= 0]

    def source_places(self, offered: Offered) -> Places:
        """Return the places of the tensors of a version that this rank offers."""
        if self.source is None:
            return self.decided_places()
        return self.registration.live if offered.slot < 0 else self.registration.packed.in_arena(offered.slot)

    def held_places(self) -> Places:
        """Return the places, in the staging arena, of the tensors to commit."""
        r = self.registration
        return (r.live if r.flips else r.to_commit).in_arena(self.memory.staging)

    def decided_places(self) -> Places:
        """Return the locations of the last complete version, which `state.holds` names."""
        return self.registration.live if self.registration.is_proven_live else self.held_places()

    def read_by(self) -> set[str]:
        """Return the swaps that read any of its versions."""
        if self.source is None:
            return set(self.seeding)
        slots = [slot.readers | slot.compared for slot in self.source.slots]
        return set[str]().union(*slots, *self.source.leases.values())

    def readers_of(self, version: int) -> set[str] | None:
        """Return the (mutable) set of swaps that read a version, None if it is neither held nor written."""
        if self.source is None:
            return self.seeding
        if version in self.source.leases:
            return self.source.leases[version]
        return next((s.readers for s in self.source.slots if version in (s.version, s.writing)), None)

    def source_base(self, stage: Stage) -> HeldBase | None:
        """Return the slots of the base and of the version to send, None if one is missing; mark the base's slot."""
        source = self.source
        if source is None or stage.base is None or source.run != stage.base_run or source.waiting:
            return None  # a waiting publish needs the slot
        slots = {slot.version if slot.writing is None else slot.writing: slot for slot in source.slots}
        new, base = slots.get(stage.version), slots.get(stage.base)
        if new is None or base is None:
            return None
        base.compared.add(stage.swap)
        return HeldBase(new.arena, base.arena, self._base_name(stage))

    def target_base(self, stage: Stage) -> HeldBase | None:
        """Return the arenas that hold `stage.base` on this target, None if a delta must not be sent.

        Call it before staging overwrites the base. Counts a full version that is sent instead. A rank that is
        written in place always gets full versions: a wrong base would leave it poisoned.
        """
        is_base = (self.state.holds, self.state.run) == (stage.base, stage.base_run)
        if self.registration.in_place or stage.base is None or not is_base:
            return None
        if not self.bases.may_use((stage.base, stage.base_run)):
            return None
        staging = self.memory.staging
        held_in = self.registration.live_arena if self.registration.flips else staging
        return HeldBase(staging, held_in, self._base_name(stage))

    def _base_name(self, stage: Stage) -> str:
        """Return a key of model, version number and trainer incarnation, unique in the cluster."""
        return xxhash.xxh3_128_hexdigest(repr((self.registration.request.model, stage.base, stage.base_run)).encode())
