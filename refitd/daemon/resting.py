"""What engines that have died leave behind: staging arenas that hold the version they served, kept for their return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from refitd.daemon.members import Member
from refitd.protocol.local import RegisterTarget


@dataclass(frozen=True, slots=True)
class _Rest:
    member: Member
    version: int
    uid: int
    until: float


class Resting:
    """The arenas by replica and rank. Those who own them free what `take` and `expire` do not give on."""

    def __init__(self, keep_s: float) -> None:
        """Keep each for so long."""
        self._keep_s = keep_s
        self._rests: dict[tuple[str, str, int], _Rest] = {}

    def keep(self, member: Member, uid: int, now: float) -> bool:
        """Keep a member's arena, if there is a whole version in it."""
        if not self._keep_s or member.is_source or member.in_place or member.holds is None:
            return False
        key = _key(member.registration, member.replica)
        if key in self._rests:
            return False
        self._rests[key] = _Rest(member, member.holds, uid, now + self._keep_s)
        return True

    def take(self, member: Member, uid: int) -> tuple[int, int | None]:
        """Return the arena (-1: none) that was kept for this rank, and the version that `member` has with it, if any.

        It fits a member of the same user that holds the same tensors in the same form. It is not kept any more.
        """
        if member.is_source:
            return -1, None
        rest = self._rests.pop(_key(member.registration, member.replica), None)
        if rest is None:
            return -1, None
        old, new = rest.member.registration, member.registration
        same = rest.uid == uid and rest.member.digest == member.digest and _form(old) == _form(new)
        if same:
            member.verifies = rest.member.verifies
            member.version = member.holds = rest.version
        return rest.member.staging, member.holds

    def expire(self, now: float) -> Iterator[int]:
        """Yield the arenas whose time is over."""
        for key, rest in list(self._rests.items()):
            if now >= rest.until:
                del self._rests[key]
                yield rest.member.staging

    def clear(self) -> Iterator[int]:
        """Yield all arenas: their memory is wanted for something else."""
        yield from self.expire(float("inf"))


def _key(registration: object, replica: str) -> tuple[str, str, int]:
    assert isinstance(registration, RegisterTarget)
    return registration.model, replica, registration.rank


def _form(registration: object) -> tuple[object, ...]:
    assert isinstance(registration, RegisterTarget)
    r = registration
    return r.held, r.conversions, r.device, r.world_size, r.in_place
