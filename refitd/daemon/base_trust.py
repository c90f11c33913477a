"""Decide whether the version that a target holds may be the base of a delta."""

from __future__ import annotations

from dataclasses import dataclass

# the most full versions that a target gets after its base was found wrong
MOST_FULL = 64

BaseVersion = tuple[int | None, str]  # version, and the incarnation of its trainer


@dataclass(slots=True)
class BaseTrust:
    """Whether the live version of one target is the base of the next delta.

        a delta gave wrong bytes       -> `suspect`: this version is no base until its digest has been compared
        the digest matches             -> the delta was wrong: the version is a base again, once
        the digest differs             -> the base was wrong: the next 1, 2, 4, ... 64 versions come full

    The number of full versions doubles with each wrong base, so that an engine which keeps writing to its live tensors
    seldom fails a swap.
    """

    suspect: BaseVersion | None = None
    cleared: BaseVersion | None = None  # its digest matched; see `doubt`
    wrong: int = 0  # bases of this target that differed from their digests
    full_due: int = 0  # full versions still to be sent before the next delta

    def may_use(self, base: BaseVersion) -> bool:
        """Return whether a delta on this base may be sent; counts a full version that is sent instead."""
        if base == self.suspect:
            return False
        if self.full_due:
            self.full_due -= 1
            return False
        return True

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
        self.full_due = min(1 << self.wrong, MOST_FULL) - 1  # one more is sent because its base is `suspect`
        self.wrong += 1
