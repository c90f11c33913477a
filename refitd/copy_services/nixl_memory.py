"""NIXL's library, and the memory that it reads and writes: a slab for parts of messages, and the arenas of the jobs.

An arena is registered once, as a whole, and again after its contents were exchanged with another arena's: a network
card keeps the old memory. A peer is told of an arena before the first read from it. NIXL takes no second description
of one address and size from an agent, so each registration of main memory has another number; a GPU's memory has that
of the GPU. A GPU arena that was told and then exchanged is therefore only written directly, and read through the slab.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from refitd.buffers import cuda
from refitd.buffers.arena import MappedArena
from refitd.copy_services.waits import DeviceStream
from refitd.errors import ConfigError

# places of the slab for each peer and direction, and their size
PARTS = 2
LEAST_PART_BYTES, MOST_PART_BYTES = 4096, 4 << 20


def load() -> Any:
    """Import NIXL's Python interface.

    Raises:
        ConfigError: it is not installed, or its libraries cannot be loaded.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # else it prints every agent's start
    # over TCP, by default 8 KiB: much of the time went into cutting reads into so many segments
    os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", "64k")
    try:
        return importlib.import_module("nixl._api")
    except (ImportError, OSError, RuntimeError) as exc:
        raise ConfigError(f"NIXL cannot be loaded: {exc}; pip install 'refitd[nixl]'") from exc


def new_slab(nbytes: int, device: str) -> tuple[torch.Tensor, DeviceStream | None, str, int]:
    """Return a slab of uint8 on a device, a stream for copies to and from it, its kind for NIXL, and its GPU's number.

    Raises:
        ArenaError: the GPU has too little memory.
    """
    if device == "cpu" or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8), None, "DRAM", 0
    gpu = torch.device(device)
    with open(cuda.create(nbytes, "slab of NIXL", gpu.index), "rb", buffering=0) as file:
        slab = cuda.MappedDeviceArena(file.fileno(), nbytes, gpu.index, write=True)
    return slab.tensor, DeviceStream(gpu), "VRAM", gpu.index


def part_bytes(size: int, slab_bytes: int) -> int:
    """Return the bytes of each place in the slabs of an epoch of `size` workers.

    Raises:
        ConfigError: there are too many workers for so many bytes.
    """
    count = 2 * PARTS * max(1, size - 1)
    found = min(MOST_PART_BYTES, slab_bytes // count) // LEAST_PART_BYTES * LEAST_PART_BYTES
    if not found:
        raise ConfigError(
            f"NIXL: {size} workers in one lane need {count * LEAST_PART_BYTES} bytes of buffers, half of "
            f"[transport] staging_bytes, and have {slab_bytes}; set it to at least {2 * count * LEAST_PART_BYTES}, or "
            'service = "gloo"'
        )
    return found


@dataclass(slots=True, eq=False)
class Region:
    """A registered arena. `number` is NIXL's device number of it; `told` are the peers that know it."""

    address: int
    nbytes: int
    number: int
    handle: Any
    told: set[int] = field(default_factory=set)


class Regions:
    """The arenas that are registered with an agent, by their ids."""

    def __init__(self, agent: Any, kind: str, gpu: int) -> None:
        self._agent, self._kind, self._gpu = agent, kind, gpu
        self._of: dict[int, Region] = {}
        self._refused: set[int] = set()
        self._known: set[tuple[int, int, int]] = set()  # told to a peer at some time
        self._count = 0

    def use(self, arenas: Mapping[int, MappedArena | cuda.MappedDeviceArena]) -> None:
        """Register the arenas on this agent's device that are not registered; NIXL may refuse some of them."""
        for arena, mapped in arenas.items():
            if arena in self._of or arena in self._refused or mapped.device != (self._gpu if self._is_gpu else -1):
                continue
            self._count += 1
            number = self._gpu if self._is_gpu else self._count
            try:
                handle = self._agent.register_memory([(mapped.address, mapped.nbytes, number, "")], self._kind)
            except Exception:  # memory that a card cannot use, for instance because it is mapped for reading only
                self._refused.add(arena)
            else:
                self._of[arena] = Region(mapped.address, mapped.nbytes, number, handle)

    def drop(self, arena: int) -> None:
        """End the registration of an arena, before its memory is exchanged or unmapped."""
        self._refused.discard(arena)
        if (region := self._of.pop(arena, None)) is not None:
            if region.told:
                self._known.add((region.address, region.nbytes, region.number))
            self._agent.deregister_memory(region.handle)

    def at(self, tensor: torch.Tensor, *, to_read: bool = False) -> Region | None:
        """Return the region that has all bytes of a contiguous tensor; `to_read`: only if peers may be told of it."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for region in self._of.values():
            if region.address <= begin and end <= region.address + region.nbytes:
                is_known = (region.address, region.nbytes, region.number) in self._known
                return None if to_read and is_known else region
        return None

    def tell(self, region: Region, peer: int) -> bytes:
        """Return the description of a region for a peer; b"" if the peer has it."""
        if peer in region.told:
            return b""
        region.told.add(peer)
        return bytes(self._agent.get_partial_agent_metadata(region.handle, False, ["UCX"]))

    def close(self) -> None:
        """End all registrations, and forget the agent."""
        agent, self._agent = self._agent, None
        regions, self._of = self._of, {}
        for region in regions.values():
            agent.deregister_memory(region.handle)

    @property
    def _is_gpu(self) -> bool:
        return self._kind == "VRAM"
