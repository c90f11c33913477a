"""Map an arena's pages over existing memory: the arena's pages replace whole pages; the edges are copied.

    memory   other's | head  page page page  tail | other's        addresses do not change
    arena              head [page page page] tail                  the bracket is a window

A window is a second mapping of the live file. For each window, a pair has a third mapping, of the staged file. A commit
exchanges the window and this mapping. Bytes that share a page with other memory (edges) stay private, and each commit
copies them.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from refitd.buffers.arena import MappedArena
from refitd.buffers.layout import ALIGNMENT
from refitd.buffers.mapping import (
    HUGE,
    Mapping,
    Move,
    SpareMappings,
    congruent,
    is_mapped,
    remap,
    reserved,
    show_again,
    show_private,
    touched,
    undo,
    unmapped_with,
)
from refitd.errors import ArenaError, CommitError

_log = logging.getLogger("refitd.client")

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

# A copy of less memory is as fast as moving two mappings (measured: 12 us).
LEAST = 256 << 10

# Mappings per window: the rest of the memory on both sides, the window, two in its pair, and gaps between those. The
# kernel's limit per process is `vm.max_map_count`.
_MAPPINGS_EACH = 8

# torch's alignment of small tensors: offsets are equal in every process, also in the successor after a crash.
_SMALL_ALIGNMENT = 64


class ArenaPart(NamedTuple):
    """Memory of this process, and the offset of its bytes in the arena."""

    address: int
    nbytes: int
    offset: int

    def window(self) -> ArenaPart | None:
        """Return its whole pages; None if it is too small for a window at any address."""
        if self.nbytes < LEAST:
            return None
        start = -(-self.address // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = (self.address + self.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        return ArenaPart(start, nbytes, self.offset + start - self.address)


def placed(memory: Sequence[tuple[int, int]]) -> tuple[list[ArenaPart], int]:
    """Place (address, bytes) one after the other in an arena; return the places and the arena's size.

    Memory with a window gets whole pages of the arena, and its offset in the first page equals its address's offset in
    a page. Other processes' offsets therefore differ by less than a page, and their arenas have equal sizes.
    """
    page = mmap.PAGESIZE
    parts, end = [], 0
    for address, nbytes in memory:
        if ArenaPart(address, nbytes, 0).window():
            start = -(-end // page) * page
            offset, end = start + address % page, start + -(-nbytes // page) * page + page
        else:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            offset = start + address % _SMALL_ALIGNMENT
            end = offset + nbytes
        parts.append(ArenaPart(address, nbytes, offset))
    return parts, max(page, -(-end // page) * page)


def most_windows() -> int:
    """Return how many windows this process can add to its present mappings."""
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        return max(0, limit - Path("/proc/self/maps").read_bytes().count(b"\n")) // _MAPPINGS_EACH
    except OSError as exc:
        raise ArenaError(f"this process's mappings cannot be counted: {exc}; adopt without keep_addresses") from exc


_SHOWN: set[_Windows] = set()  # keeps `_held` alive: memory must not be freed while an arena's pages are mapped there


class _Windows:
    """The windows of one arena; a separate object, because they are closed when the arena is garbage collected."""

    def __init__(self, plain: Mapping, parts: Sequence[ArenaPart], held: object) -> None:
        self.plain = plain  # the whole live file
        self.parts = parts
        self.shown: list[ArenaPart] = []
        self._held = held
        # Plain attributes, tested and set without a call in between: no other thread and no interrupt can run between.
        # If an interrupt came between acquiring a lock and entering the guarded block, the lock would stay locked.
        self.is_busy = self.ends = False
        self.find_edges()

    def show(self, window: ArenaPart) -> str:
        """Map the arena's pages into a window; return the reason if this fails, else ""."""
        _SHOWN.add(self)
        self.shown.append(window)
        there, nbytes, offset = window
        here = self.plain.address + offset
        try:
            # map at another address first: the move itself then allocates no memory, mappings or address space
            with congruent(there, nbytes) as beside:
                show_again(here, nbytes, beside)
                touched(beside, nbytes, write=True)
                remap([(beside, there, nbytes)], [])
        except OSError as exc:
            if not is_mapped(there, nbytes):
                try:
                    show_private(here, nbytes, there)
                except OSError as again:
                    raise CommitError(
                        f"the kernel has unmapped {nbytes} bytes at {there:#x} and cannot map them again "
                        f"({again.strerror}); end this process"
                    ) from again
            self.shown.pop()
            return f"the kernel does not replace its pages ({exc.strerror}; huge pages, or a limit)"
        return ""

    def find_edges(self) -> None:
        """Find the parts of the memory outside all windows."""
        windows = {window.address: window for window in self.shown}
        edges: list[ArenaPart] = []
        for part in self.parts:
            found = part.window()
            if found is None or found.address not in windows:
                edges.append(part)
                continue
            head, end = found.address - part.address, found.address + found.nbytes
            tail = part.address + part.nbytes - end
            edges += [ArenaPart(part.address, head, part.offset)] if head else []
            edges += [ArenaPart(end, tail, part.offset + end - part.address)] if tail else []
        self._edges = np.array(edges, np.int64).reshape(-1, 3).T
        self.edge_bytes = sum(edge.nbytes for edge in edges)

    def copy_edges(self, source: Mapping) -> None:
        """Copy the edges out of a mapping of the arena; an interrupt is raised before or after all copies."""
        there, here, sizes = self._edges_in(source)
        deque(map(ctypes.memmove, there, here, sizes), maxlen=0)

    def keep_edges(self) -> None:
        """Copy the edges into the live file. The owner's writes to edges are then preserved, as its writes to pages."""
        here, there, sizes = self._edges_in(self.plain)
        deque(map(ctypes.memmove, there, here, sizes), maxlen=0)

    def _edges_in(self, file: Mapping) -> tuple[list[int], list[int], list[int]]:
        """Return the edges' addresses, the addresses of their bytes in a mapping of the arena, and their sizes."""
        addresses, sizes, offsets = self._edges
        return addresses.tolist(), (offsets + file.address).tolist(), sizes.tolist()

    def close(self) -> None:
        """Replace every window by private pages with the live bytes; during an exchange, the exchanging thread does it.

        Never wait: the caller may be a signal handler, or Python's garbage collector, in the middle of an exchange.
        """
        self.ends = True
        if self.is_busy:
            return
        self.is_busy = True
        try:
            while self.shown:
                there, nbytes, offset = self.shown[-1]
                show_private(self.plain.address + offset, nbytes, there)
                self.shown.pop()
            self._held = None
            _SHOWN.discard(self)
        except OSError as exc:
            _log.error(
                "%d ranges of tensors adopted with keep_addresses stay pages of an arena (%s); they are never freed",
                len(self.shown),
                exc.strerror,
            )
        finally:
            self.is_busy = False


class WindowedArena:
    """An arena whose live bytes are mapped at the addresses of existing memory.

    When it is collected or left, the addresses get private pages again.

    Attributes:
        refused: {index of a part: reason} for parts whose pages could not be replaced.
        edge_bytes: the bytes that each commit copies.
    """

    device = -1  # main memory

    def __init__(self, arena: MappedArena, parts: Sequence[ArenaPart], may_show: Sequence[bool], held: object) -> None:
        """Copy the parts' bytes into the arena, and map its pages over the parts that `may_show` allows.

        `held` keeps the parts' memory allocated. No thread may use the parts during the call.

        Raises:
            CommitError: the kernel has unmapped memory and cannot map it again.
        """
        self.nbytes = arena.nbytes
        self._windows = windows = _Windows(arena.mapping, parts, held)
        weakref.finalize(self, windows.close)  # also at exit: the interpreter may free the memory then
        self.refused: dict[int, str] = {}
        by_address = sorted(parts)
        self._starts, self._by_address = [part.address for part in by_address], by_address
        try:
            for part in parts:
                ctypes.memmove(arena.address + part.offset, part.address, part.nbytes)
            for index, part in enumerate(parts):
                if may_show[index] and (window := part.window()) and (reason := windows.show(window)):
                    self.refused[index] = reason
            windows.find_edges()
        except BaseException:
            windows.close()
            raise

    @property
    def edge_bytes(self) -> int:
        """The bytes that each commit copies."""
        return self._windows.edge_bytes

    @property
    def address(self) -> int:
        """The address of this process's mapping of the whole live arena, which is separate from the windows."""
        return self._windows.plain.address

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return the offset in the arena of `nbytes` at this process's `address`; None if no part contains them."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        part = self._by_address[index]
        return part.offset + address - part.address if address + nbytes <= part.address + part.nbytes else None

    def leave(self) -> None:
        """Replace the windows by private pages with the live bytes."""
        self._windows.close()


class WindowPair:
    """A windowed live arena and its staging arena.

    Attributes:
        exchanges: how often the two were exchanged; correct even if an interrupt follows immediately.
    """

    def __init__(self, live: WindowedArena, staging: MappedArena) -> None:
        """Map the staging arena once more beside each window.

        Raises:
            ArenaError: the kernel refuses.
        """
        self.exchanges = 0
        self._live = live
        self._staged = staging.mapping
        windows = live._windows
        self._shown = tuple(windows.shown)
        places, end = [], 0
        for window in self._shown:
            # the same offset in a page table: whole tables can then be moved
            end += (window.address - end) % (HUGE if window.nbytes >= HUGE else mmap.PAGESIZE)
            places.append(end)
            end += window.nbytes
        try:
            bases = [reserved(end, HUGE) for _ in range(2)] if end else [0, 0]
            self._beside, self._spare = ([base + offset for offset in places] for base in bases)
            for base in bases:
                unmapped_with(self, base, end)
            for (_, nbytes, offset), here, spare in zip(self._shown, self._beside, self._spare, strict=True):
                show_again(self._staged.address + offset, nbytes, spare)  # unread; exchanges then create no mappings
                show_again(self._staged.address + offset, nbytes, here)
                touched(here, nbytes, write=True)
        except OSError as exc:
            raise ArenaError(
                f"the staging arena cannot be mapped beside {len(self._shown)} ranges of tensors: {exc.strerror}; "
                "check `ulimit -v` and the sysctl vm.max_map_count, or register with mode='copy'"
            ) from exc

    @property
    def staging_address(self) -> int:
        """The address of this process's mapping of the whole staging arena."""
        return self._staged.address

    def exchange(self) -> None:
        """Exchange the contents of the tensors and the staging arena.

        Raises:
            ArenaError: the kernel refuses; the contents are unchanged.
            CommitError: the kernel refuses half way and also refuses to undo the first half; or the tensors have
                private pages again.
        """
        windows, done = self._live._windows, list[int]()
        moves: list[Move] = []
        room: SpareMappings | None = None
        self._check_shown(windows)
        windows.is_busy = True
        try:
            for window, beside, spare in zip(self._shown, self._beside, self._spare, strict=True):
                moves += (window.address, spare, window.nbytes), (beside, window.address, window.nbytes)
            try:
                if self._shown:  # the kernel may reach a limit after it has already unmapped a range
                    room = SpareMappings(max(window.nbytes for window in self._shown))
                windows.keep_edges()
                remap(moves, done)
                windows.copy_edges(self._staged)
                self._beside, self._spare = self._spare, self._beside
                windows.plain, self._staged = self._staged, windows.plain
                self.exchanges += 1
            except BaseException as exc:
                if room is not None:
                    room.free()
                undo(moves[: len(done)], exc)
                if len(done) == len(moves):
                    windows.copy_edges(windows.plain)
                if not isinstance(exc, OSError):
                    raise
                raise ArenaError(
                    f"the kernel does not exchange {len(self._shown)} ranges of pages: {exc.strerror}; check "
                    "`ulimit -v` and the sysctl vm.max_map_count"
                ) from exc
        finally:
            windows.is_busy = False
            if room is not None:
                room.free()
            if windows.ends:
                windows.close()

    def copy(self) -> None:
        """Copy the staging arena's bytes into the tensors; raises CommitError if they have private pages again."""
        windows = self._live._windows
        self._check_shown(windows)
        windows.is_busy = True
        try:
            ctypes.memmove(windows.plain.address, self._staged.address, self._staged.nbytes)
            windows.copy_edges(windows.plain)
        finally:
            windows.is_busy = False
            if windows.ends:
                windows.close()

    def _check_shown(self, windows: _Windows) -> None:
        if windows.ends or windows.is_busy:
            raise CommitError("the tensors' memory is given back to them, or is being exchanged; register again")

    def restore(self, moved: Sequence[tuple[int, int, int]] = ()) -> bool:
        """Copy the tensors' bytes from the staging into the live arena, then all edges; return whether all match.

        Args:
            moved: (offset, offset in the staging arena, bytes) of each range to copy; if empty, all parts are copied.

        Raises:
            CommitError: the tensors have private pages again.
        """
        windows, staged = self._live._windows, self._staged.address
        moved = moved or [(part.offset, part.offset, part.nbytes) for part in windows.parts]
        self._check_shown(windows)
        windows.is_busy = True
        try:
            live = windows.plain.address
            for offset, left, nbytes in moved:
                ctypes.memmove(live + offset, staged + left, nbytes)
            windows.copy_edges(windows.plain)
        finally:
            windows.is_busy = False
            if windows.ends:
                windows.close()
        return not (
            any(_libc.memcmp(live + offset, staged + left, nbytes) for offset, left, nbytes in moved)
            or any(_libc.memcmp(part.address, live + part.offset, part.nbytes) for part in windows.parts)
        )
