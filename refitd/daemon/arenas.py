"""The arenas of one node: allocate within its limit, map in workers, retain for returning engines, close."""

from __future__ import annotations

import mmap
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace

from refitd.buffers.permits import PAGE_ARENA, PAGE_BYTES
from refitd.commit.target_state import Step, restoring
from refitd.daemon.actions import ArenasMade, ArenasRefused, CloseArena, MakeArenas, SwitchArenas
from refitd.daemon.effects import Effects, MemberArenas, WantedArenas
from refitd.daemon.jobs import JobTable, WorkerArenas
from refitd.daemon.links import ClientSession
from refitd.daemon.members import Arena, LocalMember
from refitd.errors import ArenaError, RefitdError, RefusedError
from refitd.protocol.local import RegisterTarget
from refitd.protocol.reports import GpuStatus


@dataclass(frozen=True, slots=True)
class Retained:
    """The arenas of a dead engine's rank. The staging arena contains the complete version `member.state.holds`."""

    member: LocalMember
    uid: int
    until: float


class RetainedTargets:
    """Retained targets by model, replica and rank. The caller frees the arenas that `expire` and `clear` return."""

    def __init__(self, keep_s: float) -> None:
        """Retain each target for `keep_s` seconds."""
        self._keep_s = keep_s
        self._kept: dict[tuple[str, str, int], Retained] = {}

    def keep(self, member: LocalMember, uid: int, now: float) -> bool:
        """Retain a dead process's member if its arenas contain a complete version; return whether it was retained."""
        r = member.registration
        if not self._keep_s or r.is_source or r.in_place or member.state.holds is None:
            return False
        # A flipping rank's version is in its live arena; to retain it, the caller exchanges the arenas. The live arena
        # is unusable if the engine has unmapped it, or may have died while copying a decided version there because it
        # could not exchange. While workers write the staging arena, the two must not be exchanged.
        step = member.state.step
        if r.flips and (member.state.suspended or step is Step.COMMITTING or step is Step.STAGING):
            return False
        key = _key(member)
        if key in self._kept:
            return False
        self._kept[key] = Retained(member, uid, now + self._keep_s)
        return True

    def fitting(self, member: LocalMember, uid: int) -> Retained | None:
        """Return this rank's retained target if the same user registers the same tensors with the same options."""
        found = None if member.registration.is_source else self._kept.get(_key(member))
        if found is None:
            return None
        same = found.uid == uid and found.member.registration.digest == member.registration.digest
        same = same and _form(found.member) == _form(member)
        return found if same and _is_laid_out_alike(found.member, member) else None

    def give(self, retained: Retained, member: LocalMember) -> None:
        """Move a retained target's arenas to a new member; the target is no longer retained."""
        del self._kept[_key(member)]
        before = retained.member
        assert before.state.holds is not None
        offsets = before.memory.content or _offsets(before)
        member.memory = replace(before.memory, content=offsets if offsets != _offsets(member) else ())
        member.proofs = replace(before.proofs, spare=None, spare_found=None)
        suspended, flips = member.state.suspended, member.registration.flips
        member.state = restoring(before.state.holds, before.state.run, flips=flips, suspended=suspended)

    def replaced_by(self, member: LocalMember) -> set[int]:
        """Stop retaining a target whose rank registers with other tensors or options; return its arenas, if any."""
        found = None if member.registration.is_source else self._kept.pop(_key(member), None)
        return set() if found is None else set(found.member.arenas())

    def forget(self, model: str) -> set[int]:
        """Stop retaining the targets of a model; return their arenas."""
        keys = [key for key in self._kept if key[0] == model]
        return {arena for key in keys for arena in self._kept.pop(key).member.arenas()}

    def expire(self, now: float) -> Iterator[int]:
        """Stop retaining targets after their `keep_s`; yield their arenas."""
        for key, retained in list(self._kept.items()):
            if now >= retained.until:
                del self._kept[key]
                yield from retained.member.arenas()

    def arenas(self) -> set[int]:
        """Return all retained arenas."""
        return {arena for retained in self._kept.values() for arena in retained.member.arenas()}

    def clear(self) -> Iterator[int]:
        """Stop retaining all targets, because their memory is needed; yield all arenas."""
        yield from self.expire(float("inf"))


def is_restoring(member: LocalMember) -> bool:
    """Whether a member's process still copies a retained target; do not announce it to the coordinator yet."""
    return member.state.step is Step.RESTORING


def _key(member: LocalMember) -> tuple[str, str, int]:
    return member.registration.request.model, member.registration.replica, member.registration.request.rank


def _form(member: LocalMember) -> tuple[object, ...]:
    r = member.registration.request
    assert isinstance(r, RegisterTarget)
    strides = tuple(place.strides for place in r.live) if r.flips else ()
    return r.held, r.conversions, r.device, r.world_size, r.in_place, r.flips, r.reads_live, strides


def _is_laid_out_alike(one: LocalMember, other: LocalMember) -> bool:
    """Return whether the arenas of two targets have the same layout.

    If an arena is mapped over the engine's memory (`reads_live`), a tensor's offset in its page follows from its
    address. The addresses of a restarted engine can differ, and so its offsets can differ by less than a page.
    """
    r = one.registration.request
    apart = mmap.PAGESIZE if isinstance(r, RegisterTarget) and r.reads_live else 1
    return all(abs(a - b) < apart for a, b in zip(_offsets(one), _offsets(other), strict=True))


def _offsets(member: LocalMember) -> tuple[int, ...]:
    r = member.registration.request
    assert isinstance(r, RegisterTarget)
    return tuple(place.offset for place in r.live) if r.flips else ()


class LocalArenas(dict[int, Arena]):
    """The arenas of this node, by id."""

    def __init__(
        self,
        node: str,
        max_bytes: int,
        sessions: Container[int],
        retained: RetainedTargets,
        jobs: JobTable,
        maps: WorkerArenas,
    ) -> None:
        super().__init__()
        self._node = node
        self._max_bytes = max_bytes
        self._sessions = sessions
        self._retained = retained
        self._jobs = jobs
        self._maps = maps
        self.requests: dict[int, WantedArenas] = {}  # by ticket
        self._tickets = 0
        self._frees: set[int] = set()  # tickets whose arenas, once made, replace retained targets

    # --- requests -----------------------------------------------------------------------------------------

    def ask(self, effects: Effects, wanted: WantedArenas) -> bool:
        """Request arenas; the request fails if they are not made within `wanted.within_s` seconds.

        Return False without a request if retained targets must be freed for a rank that the coordinator may refuse.
        Ask the coordinator about the rank first.

        Raises:
            ArenaError: the arenas exceed the node's limit, even after freeing all retained targets.
        """
        asked = [(nbytes, waiting.device) for waiting in self.requests.values() for nbytes, _ in waiting.wanted]
        used = self._used()
        more = sum(nbytes for nbytes, _ in wanted.wanted)
        kept = sum(self[arena].nbytes for arena in self._retained.arenas())
        frees = more > 0 and self._max_bytes < used + more <= self._max_bytes + kept
        if frees and _is_question(wanted):
            return False
        self.check_room(more, kept if frees else 0)
        self._tickets += 1
        self.requests[self._tickets] = wanted
        if frees:
            self._frees.add(self._tickets)
        held = tuple(0 if arena.device else arena.nbytes for arena in self.values())
        held += tuple(0 if gpu else nbytes for nbytes, gpu in asked)
        effects.append(MakeArenas(self._tickets, wanted.wanted, held, wanted.device, wanted.within_s))
        return True

    def check_room(self, more: int, freed: int = 0) -> None:
        """Check that `more` bytes of arenas fit the node's limit after `freed` bytes have been freed.

        Raises:
            ArenaError: they do not fit.
        """
        used = self._used() - freed
        if more <= 0 or used + more > self._max_bytes:
            raise ArenaError(
                f"{more} bytes of arenas asked for, {max(0, self._max_bytes - used)} are available on node "
                f"{self._node}: {used} are in use and the limit is {self._max_bytes} (node.max_arena_bytes); "
                "raise it, register a smaller shard here, lower `slots`, or close registrations"
            )

    def _used(self) -> int:
        asked = sum(nbytes for waiting in self.requests.values() for nbytes, _ in waiting.wanted)
        return asked + sum(arena.nbytes for arena in self.values())

    def made(self, effects: Effects, event: ArenasMade) -> WantedArenas | None:
        """Return the request that these arenas fulfil; if its client has left, close the arenas and return None."""
        wanted = self.requests.pop(event.ticket)
        if event.ticket in self._frees:
            self._frees.discard(event.ticket)
            self._free_retained(effects)  # not earlier: a refused request must not free retained targets
        if wanted.session and wanted.session not in self._sessions:
            for arena in event.arenas:  # the client left while they were being made
                effects.append(CloseArena(arena))
            return None
        return wanted

    def refused(self, effects: Effects, event: ArenasRefused) -> WantedArenas | None:
        """Free the retained targets and retry if they provide the missing bytes; else fail the request.

        Return the request if the coordinator must be asked first; see `ask`.
        """
        wanted = self.requests.pop(event.ticket)
        self._frees.discard(event.ticket)
        short = event.error.short if isinstance(event.error, ArenaError) else 0
        kept = (self[arena] for arena in self._retained.arenas())
        if not 0 < short <= sum(arena.nbytes for arena in kept if arena.device == wanted.device):
            effects.fail(wanted.session, wanted.request, event.error)
            return None
        if _is_question(wanted):
            return wanted
        self._free_retained(effects)
        try:
            self.ask(effects, wanted)
        except RefitdError as exc:
            effects.fail(wanted.session, wanted.request, exc)
        return None

    @property
    def asked(self) -> int:
        """How many requests wait for arenas."""
        return len(self.requests)

    # --- records ------------------------------------------------------------------------------------------

    def take(
        self,
        effects: Effects,
        arena: int,
        nbytes: int,
        label: str,
        session: int | None,
        *,
        write: bool,
        workers_write: bool,
        device: str = "",
    ) -> None:
        """Record a new arena and map it in the workers; `write` says whether its client may write."""
        self[arena] = Arena(arena, nbytes, label, session, write, device)
        self._maps.add(effects, arena, nbytes, device, write=workers_write)

    def rename(self, effects: Effects, arena: int, label: str, *, write: bool, workers_write: bool) -> None:
        """Record the new purpose of an arena that a client has handed over; arguments as for `take`."""
        known = self[arena]
        self._maps.remove(effects, arena)
        self.take(effects, arena, known.nbytes, label, known.session, write=write, workers_write=workers_write)

    def may_fetch(self, session: int, arena: int, write: bool, *, has_permits: bool = False) -> Arena:
        """Return the arena if this session may receive its descriptor.

        `has_permits`: the session has targets and may read the page of permits.

        Raises:
            RefusedError: it belongs to another session, or `write` is requested and it is read-only.
        """
        if arena == PAGE_ARENA and has_permits and not write:
            return Arena(PAGE_ARENA, PAGE_BYTES, "permits", session, write=False)
        found = self.get(arena)
        if found is None or found.session != session:
            raise RefusedError(f"arena {arena} is not one of this session's")
        if write and not found.write:
            raise RefusedError(f"arena {arena} ({found.label}) is handed out for reading only")
        return found

    def exchange(self, effects: Effects, arena: int, other: int) -> list[int]:
        """Exchange the memory of two arenas of equal size, here and in the workers; ids, owners and labels stay.

        Return the workers that must be replaced, because they have mapped only one of the two.
        """
        self._maps.pair(effects, arena, other)
        effects.append(SwitchArenas(arena, other))
        return self._maps.exchange(effects, arena, other)

    def gpus(self) -> Iterator[GpuStatus]:
        """Yield the arena count and bytes of each GPU."""
        for device in sorted({arena.device for arena in self.values()} - {""}):
            sizes = [arena.nbytes for arena in self.values() if arena.device == device]
            yield GpuStatus(device=device, arenas=len(sizes), arena_bytes=sum(sizes))

    # --- close and retain ---------------------------------------------------------------------------------

    def free(self, effects: Effects, arenas: set[int]) -> None:
        """Close the given arenas; ignore unknown ids."""
        arenas = arenas & self.keys()
        self._jobs.drop_arenas(effects, arenas)
        for arena in sorted(arenas):
            self._maps.remove(effects, arena)
            del self[arena]
            effects.append(CloseArena(arena))

    def free_own(self, effects: Effects, session: ClientSession, arena: int, members: Iterable[LocalMember]) -> None:
        """Close an arena of a client.

        Raises:
            RefusedError: the client does not own it, or it contains tensors of `members`.
        """
        if arena not in session.arenas:
            raise RefusedError(f"arena {arena} is not one that this client has allocated, or it is free already")
        for member in members:
            if arena in member.registration.live.arenas():
                raise RefusedError(f"arena {arena} holds tensors of {member.name}; close that registration first")
        session.arenas.discard(arena)
        self.free(effects, {arena})

    def retain(self, effects: Effects, arena: int) -> None:
        """Retain a dead engine's arena; it has no owner until that engine returns."""
        self[arena].session = None
        effects.log("kept", arena=arena, label=self[arena].label, bytes=self[arena].nbytes)

    def expire(self, effects: Effects) -> None:
        """Close the retained arenas whose time has expired."""
        self.free(effects, set(self._retained.expire(effects.now)))

    def _free_retained(self, effects: Effects) -> None:
        """Close all retained arenas."""
        self.free(effects, set(self._retained.clear()))


def _is_question(wanted: WantedArenas) -> bool:
    """Whether these arenas are for a rank that the coordinator has not accepted yet."""
    return isinstance(wanted.purpose, MemberArenas) and not wanted.purpose.is_admitted
