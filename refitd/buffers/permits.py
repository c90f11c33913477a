"""The page of permits: until when each registered engine rank may serve, readable by its process without a call.

A permit is a lease in the sense of Gray and Cheriton (Leases, SOSP 1989): the daemon renews it as long as a coordinator
renews the daemon's own, and a coordinator that loses a node decides nothing new before that node's permits have ended.
An engine whose daemon or coordinator is stopped, cut off or dead therefore stops serving by itself, in time.

Every slot is two aligned 64-bit words: the token of the rank that the slot belongs to, and nanoseconds of
CLOCK_MONOTONIC until which it may serve (0: not at all). Slots are used again under other tokens.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena

SLOTS = 65_536
PAGE_BYTES = SLOTS * 16

# The page is fetched as an arena is; no arena has this number.
PAGE_ARENA = 1 << 40


class PermitPage:
    """The daemon's end."""

    def __init__(self, fd: int) -> None:
        """Map the memory file behind `fd`, of PAGE_BYTES, for writing."""
        self._arena = MappedArena(fd, PAGE_BYTES, write=True)
        self._words: npt.NDArray[np.uint64] = self._arena.bytes.view(np.uint64).reshape(SLOTS, 2)

    def write(self, slot: int, token: int, until_s: float) -> None:
        """Let the rank with this token serve until `until_s` of the monotonic clock; 0 withdraws its permit."""
        words = self._words[slot]
        if words[0] != token:
            words[1] = 0  # never may the next owner be seen with the last one's time
            words[0] = token
        words[1] = max(0, int(until_s * 1e9))


class Permit:
    """An engine rank's end: one slot of the page."""

    def __init__(self, page: MappedArena | MappedDeviceArena, slot: int, token: int) -> None:
        """Watch a slot of a page that is mapped for reading."""
        assert isinstance(page, MappedArena)
        # a memoryview's items are read in a tenth of the time of numpy's
        self._words = memoryview(page.bytes.data)[slot * 16 : slot * 16 + 16].cast("Q")
        self._token = token

    def left_s(self) -> float:
        """Return for how many seconds this rank may serve yet; 0 or less: it may not."""
        until = self._words[1]
        if self._words[0] != self._token:  # read last: the time may be the next owner's
            return 0.0
        return (until - time.monotonic_ns()) / 1e9
