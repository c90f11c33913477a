"""A worker's arenas on GPUs and the services that copy to and from them. The first GPU arena imports torch."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from refitd.addressing.copies import ConversionList, CopyList
from refitd.buffers.arena import MappedArena
from refitd.copy_services import MappedCopyService, PreparedJob
from refitd.copy_services.parts import Part, PartsJob
from refitd.copy_services.registry import Registry
from refitd.dtypes import BLOCK_CASTS, TILE_ITEMS
from refitd.errors import ArenaError, ConfigError, RefitdError

if TYPE_CHECKING:
    from refitd.buffers.cuda import MappedDeviceArena


class Devices:
    """The GPUs on which this worker has arenas."""

    def __init__(self, registry: Registry, host_arenas: Mapping[int, MappedArena]) -> None:
        self._registry = registry
        self._host_arenas = host_arenas
        self._arenas: dict[int, MappedDeviceArena] = {}
        self._lacking: dict[int, str] = {}  # arena that could not be mapped -> reason
        self._services: dict[int, MappedCopyService] = {}

    def map(self, arena: int, fd: int, nbytes: int, device: str, *, write: bool) -> None:
        """Map an arena on a GPU, unless it is mapped already. If this fails, the jobs that need the arena report it."""
        from refitd.buffers.cuda import MappedDeviceArena, index_of

        if arena in self._arenas:
            return
        self._lacking.pop(arena, None)
        try:
            make = self._registry.find("cuda").on_device
            if make is None:
                raise ConfigError("copy service 'cuda' works for no single GPU; uninstall what replaces it")
            index = index_of(device)
            torch_with_one_thread()
            if index not in self._services:
                self._services[index] = make(index)
            self._arenas[arena] = MappedDeviceArena(fd, nbytes, index, write=write)
        except Exception as exc:  # torch raises half a dozen types if a GPU or a driver is faulty
            reason = str(exc) if isinstance(exc, RefitdError) else f"{type(exc).__name__}: {exc}"
            self._lacking[arena] = f"arena {arena} on {device} cannot be used by this worker: {reason}"

    def unmap(self, arena: int) -> None:
        """Unmap an arena; its jobs have been dropped."""
        from refitd.buffers.cuda import release_dropped

        self._lacking.pop(arena, None)
        if self._arenas.pop(arena, None) is not None:  # unmapped with its last view
            release_dropped()

    def exchange(self, arena: int, other: int) -> None:
        """Exchange the contents of two arenas on one GPU; raises ArenaError if one is unmapped or the driver fails."""
        mine = self.mapped({arena, other})
        mine[arena].exchange(mine[other])

    @property
    def arenas(self) -> Mapping[int, MappedDeviceArena]:
        """The mapped arenas by id."""
        return self._arenas

    def mapped(self, arenas: set[int]) -> dict[int, MappedDeviceArena]:
        """Return the given arenas that are on GPUs; ignore arenas in main memory.

        Raises:
            ArenaError: a given arena could not be mapped.
        """
        for arena in sorted(arenas & self._lacking.keys()):
            raise ArenaError(self._lacking[arena])
        return {number: self._arenas[number] for number in sorted(arenas & self._arenas.keys())}

    def prepare_conversions(self, pieces: ConversionList) -> PreparedJob:
        """Build a job that runs each conversion on the device of its arena.

        Raises:
            TransportError: a piece leaves its arena, or the arena is not writable.
            ArenaError: an arena could not be mapped.
            RefusedError: a GPU has no kernel for a conversion.
        """
        from refitd.worker.host_jobs import ConversionJob

        mine = self.mapped(pieces.arenas())
        if not mine:
            return ConversionJob(pieces, self._host_arenas)
        from refitd.worker.device_conversions import DeviceConversionJob

        on_gpus = np.isin(pieces.arena, list(mine))
        here, there = np.flatnonzero(~on_gpus), np.flatnonzero(on_gpus)
        parts = [Part(DeviceConversionJob(pieces.select(there), mine), there)]
        if len(here):
            parts.append(Part(ConversionJob(pieces.select(here), self._host_arenas), here))
        return PartsJob(parts)

    def prepare(self, copies: CopyList, in_main_memory: MappedCopyService) -> PreparedJob:
        """Build a job for these copies.

        A copy to a GPU uses that GPU's service. A copy from a GPU to main memory uses the GPU that it reads.

        Raises:
            TransportError: a copy leaves its arena, or its service cannot perform it.
            ArenaError: an arena could not be mapped.
        """
        mine = self.mapped(copies.arenas())
        if not mine:
            return in_main_memory.prepare(copies, self._host_arenas)
        gpu = np.full(len(copies), -1, dtype=np.int64)
        for end in (copies.src_arena, copies.dst_arena):
            for number, mapped in mine.items():
                gpu[end == number] = mapped.device
        arenas: dict[int, MappedArena | MappedDeviceArena] = {**self._host_arenas, **mine}
        parts = []
        is_of_blocks = np.isin(copies.cast, list(BLOCK_CASTS)) | np.isin(copies.element_size, list(TILE_ITEMS))
        is_of_blocks &= gpu >= 0
        if is_of_blocks.any():
            from refitd.worker.device_conversions import BlockCopyJob

            rows = np.flatnonzero(is_of_blocks)
            parts.append(Part(BlockCopyJob(copies.select(rows), arenas), rows))
        for index in np.unique(gpu[~is_of_blocks]).tolist():
            rows = np.flatnonzero((gpu == index) & ~is_of_blocks)
            service = in_main_memory if index < 0 else self._services[index]
            parts.append(Part(service.prepare(copies.select(rows), arenas), rows))  # type: ignore[arg-type]
        return PartsJob(parts)


def torch_with_one_thread() -> None:
    """Import torch for a worker, with one thread.

    The import skips the operators for tensors without memory (the meta device), which take a third of its time. Workers
    have no such tensors; a later import loads that module.
    """
    unneeded = "torch._meta_registrations"
    is_first = "torch" not in sys.modules
    if is_first:
        sys.modules[unneeded] = ModuleType(unneeded)
        gc.disable()  # the import creates half a million objects, none of them garbage
    try:
        torch = importlib.import_module("torch")
    finally:
        if is_first:
            del sys.modules[unneeded]
            gc.enable()
            gc.freeze()
    # on busy cores, OpenMP threads make small strided copies many times slower
    torch.set_num_threads(1)
