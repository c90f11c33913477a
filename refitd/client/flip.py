"""Commits by exchange: whether a target's tensors allow it, and the exchange of its live and its staging arena."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena
from refitd.buffers.windows import WindowedArena, WindowPair
from refitd.client.devices import Arena, Home
from refitd.client.mxfp8 import TargetTensors
from refitd.describe.memory import gpu_of
from refitd.errors import ArenaError, CommitError
from refitd.protocol.shards import Place

_log = logging.getLogger("refitd.client")

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

# The tensors that were placed in an arena: name -> (offset, bytes of its elements, without gaps between them).
Contents = Mapping[str, tuple[int, int]]


def obstacle(
    tensors: TargetTensors, places: tuple[Place, ...], contents: Mapping[int, Contents], device: int | None
) -> str:
    """Return why these tensors cannot go live by exchanging arenas; "" if they can.

    An exchange moves everything in the arena, so everything there must be registered. `device` is where the staging
    arena is wanted, if not beside the tensors.
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
    # registered tensors share no elements, unless they are the same ones, so that their sizes add up
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
        """Both are of one size and on one device; raises ArenaError if the kernel refuses mappings beside windows."""
        self._live = live
        self._staging = staging
        self._windows: WindowPair | None = None
        if isinstance(live, WindowedArena):
            assert isinstance(staging, MappedArena)
            self._windows = WindowPair(live, staging)

    @property
    def exchanges(self) -> int:
        """How often the arenas were exchanged."""
        if self._windows is not None:
            return self._windows.exchanges
        assert not isinstance(self._live, WindowedArena)
        return self._live.exchanges

    @property
    def staging(self) -> tuple[int, int]:
        """The (address, bytes) at which this process shows the whole staging arena."""
        if self._windows is not None:
            return self._windows.staging_address, self._staging.nbytes
        return (0, 0) if isinstance(self._staging, MappedDeviceArena) else (self._staging.address, self._staging.nbytes)

    def flip(self) -> None:
        """Make what is staged live. The bytes were copied if that is no exchange.

        Raises:
            CommitError: the exchange failed half way; nothing may be served.
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
        except ArenaError as exc:
            if isinstance(live, MappedDeviceArena):
                raise CommitError(f"the arenas on GPU {live.device} could not be exchanged: {exc}") from exc
            _log.warning("%s; the version is copied", exc)
            self._copy()

    def restore(self, moved: Sequence[tuple[int, int, int]] = ()) -> None:
        """Copy what a predecessor left in the staging arena into the live one, and compare.

        Args:
            moved: (offset, offset in the staging arena, bytes) of each tensor, if these are not the same everywhere.

        Raises:
            CommitError: the live arena does not hold what was copied into it.
        """
        if self._windows is not None:
            differs = not self._windows.restore(moved)
        elif moved:
            raise CommitError("what a predecessor left lies elsewhere; register again")
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
