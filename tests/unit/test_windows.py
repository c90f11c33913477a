"""Arena pages mapped over existing memory: values, neighbours and addresses are preserved through all failures."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import signal
import subprocess
import sys
import time
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from refitd.buffers import mapping, windows
from refitd.buffers.arena import MappedArena
from refitd.buffers.windows import ArenaPart, WindowedArena, WindowPair, placed
from refitd.errors import ArenaError, CommitError
from tests.support.arenas import arena_of
from tests.support.mapped import is_arena

SIZES = (300 << 10, 5 << 20, 100, (1 << 20) + 17, 4096)
FOREIGN = 9


class Memory:
    """Ordinary memory; some spans belong to an arena, with foreign bytes before, between and after them."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        self.all = np.full(sum(sizes) + 1000 * (len(sizes) + 1), FOREIGN, np.uint8)
        self.spans: list[npt.NDArray[np.uint8]] = []
        at = 1000
        for size in sizes:
            self.spans.append(self.all[at : at + size])
            at += size + 1000
        self.parts, self.nbytes = placed([(span.ctypes.data, span.nbytes) for span in self.spans])
        self.fill(1)
        self.arena = WindowedArena(arena_of(self.nbytes), self.parts, [True] * len(self.parts), self.all)

    def fill(self, value: int) -> None:
        for span in self.spans:
            span[:] = value

    def staging(self, value: int) -> MappedArena:
        found = arena_of(self.nbytes)
        for part in self.parts:
            found.bytes[part.offset : part.offset + part.nbytes] = value
        return found

    def pair(self, value: int = 2) -> WindowPair:
        return WindowPair(self.arena, self.staging(value))

    def values(self) -> set[int]:
        found = {int(value) for span in self.spans for value in np.unique(span)}
        rest = np.ones(len(self.all), bool)
        for span in self.spans:
            at = span.ctypes.data - self.all.ctypes.data
            rest[at : at + span.nbytes] = False
        assert (self.all[rest] == FOREIGN).all(), "bytes of others"
        return found

    def shown(self) -> list[bool]:
        return [is_arena(span.ctypes.data + span.nbytes // 2) for span in self.spans]


def test_a_window_keeps_its_place_in_the_page_and_small_parts_are_packed() -> None:
    page, large, small = 4096, 1 << 20, 100
    parts, nbytes = placed([(7 * page + 64, large), (3 * page + 300, small), (40 * page, large)])
    assert parts[0] == ArenaPart(7 * page + 64, large, 64)
    assert parts[0].window() == ArenaPart(8 * page, large - page, page)
    # it reserves the pages for the worst address: 1 MiB and one; 300 is 44 beyond a multiple of 64
    assert parts[1] == ArenaPart(3 * page + 300, small, (1 << 20) + page + 44) and parts[1].window() is None
    assert parts[2] == ArenaPart(40 * page, large, (1 << 20) + 2 * page) and nbytes == (2 << 20) + 3 * page
    elsewhere = placed([(9 * page + 4000, large), (64 + 44, small), (5 * page + 12, large)])
    assert elsewhere[1] == nbytes and [part.offset for part in elsewhere[0]] == [
        4000,
        (1 << 20) + page + 44,
        (1 << 20) + 2 * page + 12,
    ]
    assert placed([]) == ([], page)


def test_values_and_neighbours_stay_and_exchanges_go_back_and_forth() -> None:
    memory = Memory()
    assert memory.values() == {1} and memory.shown() == [True, True, False, True, False]
    assert memory.arena.refused == {}
    assert 100 + 4096 < memory.arena.edge_bytes < 100 + 4096 + 3 * 2 * 4096
    pair = memory.pair()
    for number in range(5):
        assert memory.values() == {1 + number % 2} and pair.exchanges == number
        pair.exchange()
    memory.spans[1][:] = 7  # through to the arena that is live
    pair.exchange()
    assert memory.values() == {1}
    pair.exchange()
    assert (memory.spans[1] == 7).all(), "an exchange moves pages and edges with what was written to them"
    pair.copy()
    memory.fill(3)
    assert pair.restore() and memory.values() == {1}
    first = memory.parts[1].offset
    memory.fill(3)
    assert pair.restore([(first + 10, memory.parts[3].offset, 9000)]), "from elsewhere in the staging arena"
    assert set(memory.spans[1][10:9010]) == {1} and memory.spans[1][9010] == 3
    pair.copy()
    memory.arena.leave()
    assert memory.values() == {1} and not any(memory.shown())
    with pytest.raises(CommitError, match="given back"):
        pair.exchange()
    with pytest.raises(CommitError, match="given back"):
        pair.copy()
    memory.fill(4)
    assert memory.values() == {4}


def test_places_are_found_by_address() -> None:
    memory = Memory()
    for part in memory.parts:
        assert memory.arena.offset_of(part.address, part.nbytes) == part.offset
        assert memory.arena.offset_of(part.address + 5, 3) == part.offset + 5
        assert memory.arena.offset_of(part.address + 5, part.nbytes) is None
        assert memory.arena.offset_of(part.address - 1, 2) is None
    assert memory.arena.offset_of(0, 1) is None


class Kernel:
    """A kernel that refuses its `refuses`-th mremap, with an error or an interrupt."""

    refuses = 0
    error: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL, name)

    def mremap(self, *given: int) -> int:
        self.refuses -= 1
        if self.refuses == 0:
            if self.error is not None:
                raise self.error
            return ctypes.c_void_p(-1).value or 0
        return int(REAL.mremap(*given))


REAL = mapping._libc


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_an_exchange_that_is_refused_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException | None
) -> None:
    memory = Memory()
    pair, kernel = memory.pair(), Kernel()
    for before in (0, 1):
        kernel.refuses, kernel.error = step, error
        monkeypatch.setattr(mapping, "_libc", kernel)
        with pytest.raises(ArenaError if error is None else KeyboardInterrupt):
            pair.exchange()
        monkeypatch.undo()
        assert memory.values() == {1 + before} and pair.exchanges == before
        pair.exchange()
        assert memory.values() == {2 - before}


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_what_the_kernel_does_not_replace_is_copied_and_says_so(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    kernel = Kernel()
    kernel.refuses = step
    monkeypatch.setattr(mapping, "_libc", kernel)
    memory = Memory()
    monkeypatch.undo()
    assert [*memory.arena.refused] == [0 if step <= 2 else 1] and memory.values() == {1}
    assert "the kernel does not replace its pages" in str(memory.arena.refused)
    assert memory.shown()[memory.arena.refused.popitem()[0]] is False
    memory.pair().exchange()
    assert memory.values() == {2}


def test_an_interrupt_at_any_moment_leaves_one_version() -> None:
    memory = Memory((300 << 10, 700 << 10, 50) * 6)
    pair = memory.pair()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, caught, began = signal.signal(signal.SIGALRM, interrupt), 0, time.monotonic()
    try:
        # a busy machine may not get through an exchange, or to an interrupt, for a while
        while (took_s := time.monotonic() - began) < 0.4 or (not (caught and pair.exchanges) and took_s < 30):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.choice([1e-5, 1e-4, 4e-4, 1e-2]))
                for _ in range(2):
                    pair.exchange()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                caught += 1
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert memory.values() == {1 + pair.exchanges % 2}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert caught and pair.exchanges


def test_leaving_in_the_middle_of_an_exchange_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    pair, copy = memory.pair(), memory.arena._windows.copy_edges

    def leaves(source: mapping.Mapping) -> None:
        memory.arena.leave()  # as a signal handler, or another thread
        assert any(memory.shown())
        with pytest.raises(CommitError):
            pair.exchange()
        copy(source)

    monkeypatch.setattr(memory.arena._windows, "copy_edges", leaves)
    pair.exchange()
    assert memory.values() == {2} and not any(memory.shown())


def test_memory_is_held_until_its_pages_are_private() -> None:
    memory = Memory()
    pair, held = memory.pair(), weakref.ref(memory.all)
    pair.exchange()
    at = [span.ctypes.data + span.nbytes // 2 for span in memory.spans]
    del memory.all, memory.spans
    gc.collect()
    assert held() is not None and is_arena(at[1])
    arena, mine = memory.arena, memory.arena._windows
    del memory
    del pair
    gc.collect()
    assert is_arena(at[1])
    del arena
    assert held() is None and mine not in windows._SHOWN


LIMITS = """
import resource
from pathlib import Path
from refitd.buffers import windows
from refitd.errors import ArenaError
from tests.support.mapped import fill_mappings
from tests.unit.test_windows import Memory

def limited(what):
    if what == "maps":
        return fill_mappings(5)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now - (1 << 20 if what == "below" else 0), resource.RLIM_INFINITY))

def free():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def adopt(what):
    plain = windows._Windows.show
    def shows(self, window):
        taken = limited(what)
        found = plain(self, window)
        free()
        return found
    windows._Windows.show = shows
    memory = Memory()
    windows._Windows.show = plain
    assert set(memory.arena.refused) == {0, 1, 3} and memory.values() == {1}, memory.arena.refused
    memory.pair().exchange()
    assert memory.values() == {2}

def pair(what):
    memory = Memory()
    staging = memory.staging(2)
    taken = limited(what)
    try:
        windows.WindowPair(memory.arena, staging)
    except ArenaError as exc:
        assert "mode='copy'" in str(exc)
    else:
        raise AssertionError("it was not refused")
    free()
    assert memory.values() == {1}

def exchange(what):
    memory = Memory()
    pair = memory.pair()
    taken = limited(what)
    try:
        pair.exchange()
    except ArenaError as exc:
        assert "check `ulimit -v`" in str(exc)
    else:
        raise AssertionError("it was not refused")
    free()
    assert memory.values() == {1}
    pair.copy()
    assert memory.values() == {2}

def leave(what):
    memory = Memory()
    taken = limited(what)
    memory.arena.leave()
    free()
    del taken
    assert memory.values() == {1} and any(memory.shown()) == (what == "below")
    memory.fill(5)
    assert memory.values() == {5}

for what in ("maps", "space", "below"):
    for tried in (exchange, leave) if what == "maps" else (adopt, pair, exchange, leave):
        tried(what)
        print(what, tried.__name__, flush=True)
"""


@pytest.mark.slow
def test_limits_refuse_and_nothing_is_lost() -> None:
    """vm.max_map_count is reached, address space is full, or its limit is below the current use."""
    done = subprocess.run([sys.executable, "-c", LIMITS], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 10
    assert "adopted with keep_addresses stay pages of an arena" in done.stderr
