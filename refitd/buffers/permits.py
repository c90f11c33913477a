"""The page of permits: until when each engine rank may serve. The rank's process reads it without a system call.

A permit is a lease in the sense of Gray and Cheriton (Leases, SOSP 1989). The daemon renews it as long as a coordinator
renews the daemon's lease. If a coordinator loses a node, it makes no new decision before the node's permits have ended.
If its daemon or coordinator is stopped, disconnected or dead, an engine therefore stops serving in time by itself.

A slot is two aligned 64-bit words: the token of the rank that owns it, and the time of CLOCK_MONOTONIC, in
nanoseconds, until which the rank may serve (0: not at all). Slots are reused under new tokens.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena

SLOTS = 65_536
PAGE_BYTES = SLOTS * 16

# Clients request the page like an arena, under a number that no arena has.
PAGE_ARENA = 1 << 40


class PermitPage:
    """The daemon's writable mapping of the page."""

    def __init__(self, fd: int) -> None:
        """Map the memory file behind `fd`, of PAGE_BYTES, for writing."""
        self._arena = MappedArena(fd, PAGE_BYTES, write=True)
        self._words: npt.NDArray[np.uint64] = self._arena.bytes.view(np.uint64).reshape(SLOTS, 2)

    def write(self, slot: int, token: int, until_s: float) -> None:
        """Let the rank with this token serve until `until_s` of the monotonic clock; 0 revokes its permit."""
        words = self._words[slot]
        if words[0] != token:
            words[1] = 0  # a new owner must never see its predecessor's time
            words[0] = token
        words[1] = max(0, int(until_s * 1e9))


class Permit:
    """An engine rank's view of its slot."""

    def __init__(self, page: MappedArena | MappedDeviceArena, slot: int, token: int) -> None:
        """Watch a slot of a page that is mapped for reading."""
        assert isinstance(page, MappedArena)
        # reading a memoryview item takes a tenth of the time of a numpy item
        self._words = memoryview(page.bytes.data)[slot * 16 : slot * 16 + 16].cast("Q")
        self._token = token

    @property
    def is_given(self) -> bool:
        """Whether this rank has a permit, even if it has ended; False if it was revoked or not given yet."""
        until = self._words[1]
        return self._words[0] == self._token and until > 0

    def left_s(self) -> float:
        """Return for how many more seconds this rank may serve; 0 or less: it may not."""
        until = self._words[1]
        if self._words[0] != self._token:  # read after the time, which may be the next owner's
            return 0.0
        return (until - time.monotonic_ns()) / 1e9
