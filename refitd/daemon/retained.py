"""Retained targets: staging arenas of dead engines, kept for engines that register the same ranks again."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

from refitd.daemon.members import LocalMember
from refitd.daemon.target_state import Step, restoring
from refitd.protocol.local import RegisterTarget


@dataclass(frozen=True, slots=True)
class Retained:
    """The arenas of a dead engine's rank; the staging arena holds version `member.state.holds` whole."""

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
        """Retain a dead process's member if its staging arena holds a whole version; return whether it was."""
        if not self._keep_s or member.is_source or member.in_place or member.state.holds is None:
            return False
        # What a rank that flips holds lies in its live arena. Its engine may have put that away, or may have died while
        # it copied a decided version there, because it could not exchange. While workers write its staging arena, the
        # two must not be exchanged.
        step = member.state.step
        if member.flips and (member.suspended or step.is_decided or step is Step.STAGING):
            return False
        key = _key(member)
        if key in self._kept:
            return False
        self._kept[key] = Retained(member, uid, now + self._keep_s)
        return True

    def fitting(self, member: LocalMember, uid: int) -> Retained | None:
        """Return the retained target of this rank, if the same user registers the same tensors in the same form."""
        found = None if member.is_source else self._kept.get(_key(member))
        if found is None:
            return None
        same = found.uid == uid and found.member.digest == member.digest and _form(found.member) == _form(member)
        return found if same and _is_laid_out_alike(found.member, member) else None

    def give(self, retained: Retained, member: LocalMember) -> None:
        """Give a retained target's arenas to a new member. It is no longer retained."""
        del self._kept[_key(member)]
        before = retained.member
        assert before.state.holds is not None
        member.staging, member.landing = before.staging, before.landing
        member.verifies, member.proof = before.verifies, before.proof
        offsets = before.content or _offsets(before)
        member.content = offsets if offsets != _offsets(member) else ()
        member.state = restoring(before.state.holds, before.state.run, flips=member.flips)

    def replaced_by(self, member: LocalMember) -> set[int]:
        """Stop retaining a target whose rank has registered in another form; return its arenas, if any."""
        found = None if member.is_source else self._kept.pop(_key(member), None)
        return set() if found is None else set(found.member.arenas())

    def forget(self, model: str) -> set[int]:
        """Stop retaining the targets of a model; return their arenas."""
        keys = [key for key in self._kept if key[0] == model]
        return {arena for key in keys for arena in self._kept.pop(key).member.arenas()}

    def expire(self, now: float) -> Iterator[int]:
        """Stop retaining targets whose time has expired; yield their arenas."""
        for key, retained in list(self._kept.items()):
            if now >= retained.until:
                del self._kept[key]
                yield from retained.member.arenas()

    def arenas(self) -> set[int]:
        """Return all retained arenas."""
        return {arena for retained in self._kept.values() for arena in retained.member.arenas()}

    def clear(self) -> Iterator[int]:
        """Stop retaining everything; yield all arenas. Their memory is needed elsewhere."""
        yield from self.expire(float("inf"))


def is_restoring(member: LocalMember) -> bool:
    """Whether a member's process still copies a retained target; the coordinator must not know of it yet."""
    return member.state.step is Step.RESTORING


def _key(member: LocalMember) -> tuple[str, str, int]:
    return member.registration.model, member.replica, member.registration.rank


def _form(member: LocalMember) -> tuple[object, ...]:
    r = member.registration
    assert isinstance(r, RegisterTarget)
    strides = tuple(place.strides for place in r.live) if r.flips else ()
    return r.held, r.conversions, r.device, r.world_size, r.in_place, r.flips, r.reads_live, strides


def _is_laid_out_alike(one: LocalMember, other: LocalMember) -> bool:
    """Return whether two targets lay their arenas out alike.

    Where an arena is shown under memory, tensors lie at their address's place in a page: it may be a new one.
    """
    r = one.registration
    apart = mmap.PAGESIZE if isinstance(r, RegisterTarget) and r.reads_live else 1
    return all(abs(a - b) < apart for a, b in zip(_offsets(one), _offsets(other), strict=True))


def _offsets(member: LocalMember) -> tuple[int, ...]:
    r = member.registration
    assert isinstance(r, RegisterTarget)
    return tuple(place.offset for place in r.live) if r.flips else ()
