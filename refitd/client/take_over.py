"""Commit a decided version to the live tensors, by copy or by exchange of arenas, and report the result."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena, release_dropped
from refitd.buffers.windows import WindowedArena, WindowPair
from refitd.client.arenas import Arena, Home
from refitd.client.calls import check_process
from refitd.client.commit_state import CommitState
from refitd.client.ownership import SharedOwners
from refitd.client.reconnect import Give
from refitd.client.target_tensors import LiveChecks, TargetTensors
from refitd.commit.rank_state import (
    Begun,
    Exchanged,
    Interrupted,
    RankStep,
    Reported,
    WriteBegan,
    WriteFailed,
    Written,
)
from refitd.describe.memory import gpu_of
from refitd.errors import ArenaError, CommitError, RefitdError, RefusedError
from refitd.protocol import local
from refitd.protocol.shards import Place
from refitd.text import called

# The application configures this logger. Lines carry the swap's id, as in the other processes' logs.
_log = logging.getLogger("refitd.client")

# A check of the tensors stays valid this long for a commit by exchange.
LOOKED_S = 1.0

# How long a poll waits for another thread's commit of the same version.
APPLY_TIMEOUT_S = 60.0

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

# The tensors placed in an arena: name -> (offset, bytes of the elements; gaps between elements do not count).
Contents = Mapping[str, tuple[int, int]]


class TakeOver:
    """Commits versions of one target, on the thread that reaches a commit point.

    Attributes:
        checks: reads of the live tensors between commits.
        staging: the mapped staging arena, if commits copy from one; otherwise None, and None after `release`.
        pair: the live and the staging arena of a target that flips; None after `release`.
    """

    def __init__(
        self,
        state: CommitState,
        tensors: TargetTensors,
        staging: Arena | None,
        pair: ArenaPair | None,
        owners: SharedOwners,
    ) -> None:
        self.staging = staging
        self.pair = pair
        self.checks = LiveChecks(state.connection, state.rank.member, tensors, lambda: self.staging)
        self._state = state
        self._tensors = tensors
        self._owners = owners
        self._looked_at, self._looked_until = "", 0.0  # the swap whose tensors were checked in advance, and until when

    def look_before(self, prepare: local.PrepareCommit) -> None:
        """Check a flipping target's tensors before its commit point: the check takes longer than the exchange."""
        with contextlib.suppress(CommitError):  # the commit checks again, and fails
            self._tensors.check_unmoved(is_described=True)
            self._looked_at, self._looked_until = prepare.swap, time.monotonic() + LOOKED_S

    def give_staging(self, give: Give) -> int | None:
        """Hand the staging arena over to the next daemon; return its number there, or None if it needs a new one.

        Raises:
            ArenaError: the daemon does not adopt the memory that commits exchange.
        """
        if self.pair is None:
            return None if self.staging is None else give(self.staging.address, self.staging.nbytes)
        given = give(*self.pair.staging)
        if given is None:
            raise ArenaError("the memory that its commits exchange could not be given back to the daemon")
        return given

    def release(self) -> None:
        """Drop the arenas; later commits fail."""
        self.staging = self.pair = None
        self.checks.release()

    def apply(self, prepare: local.PrepareCommit, given_up: threading.Event | None = None) -> int | None:
        """Commit a version and return it.

        If `given_up` is set, return None without committing. An interrupt (KeyboardInterrupt, SystemExit) is raised
        once the version is live or its failure has been reported. If the interrupt comes before the first write, the
        version stays pending.

        Raises:
            CommitError: the commit failed; or the version is no longer pending, and the tensors are unchanged.
            RefusedError: another thread applies it; or a GPU of the tensors captures a CUDA graph, and the version
                stays pending; or this is a forked child. The tensors are unchanged.
        """
        check_process(self._state.pid)
        started = time.perf_counter()
        state, is_taker = self._state, False
        what = f"{state.who}: the commit of version {prepare.version}"
        try:
            with state.lock:
                if given_up is not None and given_up.is_set():
                    return None
                # this thread's commit of another swap has ended, but an interrupt prevented it from clearing `taker`
                is_stale = state.rank.taking is not prepare and state.taker == threading.get_ident()
                if state.taker and not is_stale:
                    raise RefusedError(f"{what} is being applied already, on another thread or below this call")
                if state.rank.pending is not prepare:
                    raise CommitError(
                        f"{what} (swap {prepare.swap}) is over; a commit can be applied once, while it is pending"
                    )
                gpu = None if state.rank.owes_report or not self._tensors.gpus else self._tensors.capturing_gpu()
                if gpu is not None:
                    raise RefusedError(
                        f"{what} waits: a CUDA graph is being captured on GPU {gpu}, and nothing was changed; poll "
                        "again after the capture, before the next step"
                    )
                is_taker = True
                state.taker = threading.get_ident()
                if state.rank.step is RankStep.IDLE:
                    state.step(Begun())
            with self.checks.committing():
                self._to_its_end(prepare, started)
        finally:
            if is_taker:
                with state.lock:
                    state.taker = 0
                    if state.rank.step is RankStep.BEGUN:
                        state.step(Interrupted())
                    state.changed.notify_all()
        if self._tensors.gpus:
            release_dropped()  # after the pause; an engine that only polls gives its dropped arenas back here
        return prepare.version

    def ends_elsewhere(self, prepare: local.PrepareCommit) -> bool:
        """Wait for another thread's commit of this version; return whether it made the version live.

        Raises:
            CommitError: that commit failed, or has not ended in time.
        """
        state, until = self._state, time.monotonic() + APPLY_TIMEOUT_S
        with state.lock:
            while state.taker not in (0, threading.get_ident()) and state.rank.taking is prepare:
                if (left := until - time.monotonic()) <= 0:
                    raise CommitError(
                        f"{state.who}: another thread has been committing version {prepare.version} for "
                        f"{APPLY_TIMEOUT_S:.0f} s; look at that thread's stack"
                    )
                state.changed.wait(left)
            rank = state.rank
            if rank.pending is prepare:
                return False  # still pending, or an interrupted report is missing
            if isinstance(rank.last, local.CommitFailed) and rank.last.swap == prepare.swap:
                raise CommitError(rank.last.reason)
            return rank.taken == prepare.swap

    def _to_its_end(self, prepare: local.PrepareCommit, started: float) -> None:
        try:
            self._take_over(prepare, started)
        except Exception:
            raise
        except BaseException:
            # Finish the commit now: the engine may never poll again, and the swap would wait for it. Completed steps
            # are skipped; bytes may be copied twice.
            with contextlib.suppress(RefitdError):
                self._take_over(prepare, started, is_last=True)
            raise

    def _take_over(self, prepare: local.PrepareCommit, started: float, *, is_last: bool = False) -> None:
        """Commit and report the result. A call that was interrupted may be repeated; the last call must report."""
        state = self._state
        try:
            last = state.rank.last
            if state.rank.step is RankStep.FAILED and isinstance(last, local.CommitFailed):
                raise CommitError(last.reason)  # its report is missing
            if state.rank.step is not RankStep.LIVE:
                state.step(WriteBegan())
                exchanged = self._write(prepare)
                state.last_pause_s = time.perf_counter() - started
                if state.steps.flip_at is not None:
                    state.steps.flipped()
                if self._owners.needed:
                    self._owners.committed(prepare.beside)  # before this rank's version is set
                state.step(Written(state.last_pause_s, exchanged))
        except BaseException as exc:
            if not (is_last or isinstance(exc, Exception)):
                raise
            if not state.rank.owes_report:
                reason = str(exc) if isinstance(exc, Exception) else f"it was interrupted twice: {exc!r}"
                _log.error(
                    "swap=%s member=%s version=%s failed: %s",
                    prepare.swap,
                    called(state.rank.member),
                    prepare.version,
                    reason,
                )
                state.step(WriteFailed(reason))
            self._report()
            if isinstance(exc, CommitError):
                raise
            raise CommitError(f"version {prepare.version} could not be taken over: {exc}") from exc
        _log.info(
            "swap=%s member=%s version=%s committed paused_s=%.4f",
            prepare.swap,
            called(state.rank.member),
            prepare.version,
            state.last_pause_s,
        )
        self._report()

    def _write(self, prepare: local.PrepareCommit) -> bool:
        """Make the staged version live; return whether this exchanged the arenas."""
        exchanged = False
        if not prepare.flips or prepare.swap != self._looked_at or time.monotonic() > self._looked_until:
            self._tensors.check_unmoved(is_described=True)
        self._tensors.settle()  # kernels may still read the old version on a GPU
        if prepare.flips:
            exchanged = self._flip(prepare.swap)
        elif not prepare.in_place:
            if self.staging is None:
                raise CommitError("this target has been closed")
            self._tensors.copy(self.staging, into_arena=False)
            self._tensors.settle()
        self._tensors.refresh()
        if not prepare.flips:  # an exchange is too short for tensors to move during it
            self._tensors.check_unmoved("during the commit")
        return exchanged

    def _flip(self, swap: str) -> bool:
        """Exchange the live and the staging arena once for each swap; return whether they are exchanged."""
        pair, state = self.pair, self._state
        if pair is None:
            raise CommitError("this target has been closed")
        if state.rank.flipped != swap:  # an interrupted commit is repeated, but its exchange must not be
            before = pair.exchanges
            try:
                pair.flip()
            finally:
                if pair.exchanges != before:
                    state.step(Exchanged())
        return state.rank.flipped == swap

    def _report(self) -> None:
        """Report a commit's result. If interrupted, the commit stays pending, and the next poll only reports."""
        state, last = self._state, self._state.rank.last
        assert last is not None
        try:
            state.tell(last)
        except Exception:
            state.step(Reported())
            raise
        state.step(Reported())


def flip_obstacle(
    tensors: TargetTensors, places: tuple[Place, ...], contents: Mapping[int, Contents], device: int | None
) -> str:
    """Return why versions of these tensors cannot be committed by exchanging arenas; "" if they can.

    An exchange replaces the whole arena, so every tensor in the arena must be registered. `device` is the device of
    the staging arena; None: the device of the tensors.
    """
    numbers = sorted({place.arena for place in places})
    if not places:
        return "its tensors do not lie in memory of client.allocate() or client.adopt()"
    if len(numbers) > 1:
        return f"its tensors lie in {len(numbers)} arenas; allocate all of them with one call"
    made = {index for conversion in tensors.conversions for index in conversion.held}
    if scattered := [tensors.held[index].name for index in sorted(made) if not tensors.tensors[index].is_contiguous()]:
        return f"{scattered[0]} is made by a conversion (MXFP8) and is not contiguous"
    if device is not None and any(gpu_of(tensor) != device for tensor in tensors.tensors if tensor.numel()):
        return "its staging arena is wanted on another device"
    there = contents.get(numbers[0], {})
    names, begins = list(there), np.array([offset for offset, _ in there.values()], np.int64)
    order = np.argsort(begins)
    # equal tensors count once; all others share no elements, so their sizes add up
    held = {
        (place.offset, place.strides, tuple(tensor.shape)): tensor.numel() * tensor.element_size()
        for place, tensor in zip(places, tensors.tensors, strict=True)
    }
    starts, sizes = np.array([offset for offset, *_ in held], np.int64), np.array([*held.values()], np.int64)
    which = np.searchsorted(begins[order], starts, side="right") - 1
    found = np.bincount(which[which >= 0], weights=sizes[which >= 0], minlength=len(names))
    wanted = np.array([nbytes for _, nbytes in there.values()], np.int64)[order]
    for index in np.flatnonzero(found < wanted)[:1].tolist():
        return f"{names[order[index]]} lies in the same arena, and is not registered, or not all of it"
    return ""


class ArenaPair:
    """A target's live arena and its staging arena, mapped in this process."""

    def __init__(self, live: Home, staging: Arena) -> None:
        """Pair two arenas of one size on one device; raises ArenaError if the kernel refuses to map."""
        self._live = live
        self._staging = staging
        self._windows: WindowPair | None = None
        if isinstance(live, WindowedArena):
            assert isinstance(staging, MappedArena)
            self._windows = WindowPair(live, staging)

    @property
    def exchanges(self) -> int:
        """The number of exchanges so far."""
        if self._windows is not None:
            return self._windows.exchanges
        assert not isinstance(self._live, WindowedArena)
        return self._live.exchanges

    @property
    def staging(self) -> tuple[int, int]:
        """The (address, bytes) at which this process maps the whole staging arena; (0, 0) on a GPU."""
        if self._windows is not None:
            return self._windows.staging_address, self._staging.nbytes
        return (0, 0) if isinstance(self._staging, MappedDeviceArena) else (self._staging.address, self._staging.nbytes)

    def flip(self) -> None:
        """Make the staged version live: exchange the arenas, or copy the bytes if arenas in main memory refuse.

        Raises:
            CommitError: the exchange failed; the error says whether both arenas have their old contents.
        """
        live, staging = self._live, self._staging
        try:
            if self._windows is not None:
                self._windows.exchange()
            elif isinstance(live, MappedArena) and isinstance(staging, MappedArena):
                live.exchange(staging)
            else:
                assert isinstance(live, MappedDeviceArena) and isinstance(staging, MappedDeviceArena)
                live.exchange(staging)
        except (ArenaError, RefusedError) as exc:
            if isinstance(live, MappedDeviceArena):
                raise CommitError(f"the arenas on GPU {live.device} could not be exchanged: {exc}") from exc
            _log.warning("%s; the version is copied", exc)
            self._copy()

    def restore(self, moved: Sequence[tuple[int, int, int]] = ()) -> None:
        """Copy a predecessor's version from the staging arena into the live one, and compare the two.

        Args:
            moved: (offset, offset in the staging arena, bytes) of each tensor; empty if no offset has changed.

        Raises:
            CommitError: the arenas differ after the copy, or offsets have changed and the live arena has no windows.
        """
        if self._windows is not None:
            differs = not self._windows.restore(moved)
        elif moved:
            raise CommitError(
                "the restored weights have other offsets than this rank's tensors, and its arena has no windows to "
                "move them; register again"
            )
        else:
            self._copy()
            differs = self._differs()
        if differs:
            raise CommitError("the live arena does not hold what was restored to it; something else writes to it")

    def _differs(self) -> bool:
        live, staging = self._live, self._staging
        if isinstance(live, MappedArena) and isinstance(staging, MappedArena):
            return bool(_libc.memcmp(live.address, staging.address, live.nbytes))
        assert isinstance(live, MappedDeviceArena) and isinstance(staging, MappedDeviceArena)
        return not torch.equal(live.tensor, staging.tensor)

    def _copy(self) -> None:
        live, staging = self._live, self._staging
        if self._windows is not None:
            self._windows.copy()
        elif isinstance(live, MappedArena) and isinstance(staging, MappedArena):
            ctypes.memmove(live.address, staging.address, live.nbytes)
        else:
            assert isinstance(live, MappedDeviceArena) and isinstance(staging, MappedDeviceArena)
            live.tensor.copy_(staging.tensor)
