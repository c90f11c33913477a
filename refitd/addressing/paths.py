"""The paths of bytes within one node: which way a copy takes, by the memories at its ends and the node's abilities.

`copy_services/cuda.py` copies on these paths. Reports show their names. Paths between nodes have the names of services.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAIN_MEMORY = ""  # the device of an arena in main memory; other arenas have a GPU's name


class Path(StrEnum):
    """A way from one memory to another of the node; the value is its name in reports."""

    SHARED = "shared memory"
    KERNEL = "same GPU, one kernel"
    TENSORS = "tensor operations"
    PEER = "peer GPU, one kernel"
    PINNED = "pinned"
    WINDOWS = "pinned windows"


@dataclass(frozen=True)
class Abilities:
    """The abilities of a node's GPUs and driver.

    Attributes:
        has_kernels: Triton is installed, which compiles the copy kernel.
        can_pin: the driver pins arenas in main memory (cuMemHostRegister).
        peers: pairs of GPU names; the first GPU may access the memory of the second.
    """

    has_kernels: bool = True
    can_pin: bool = True
    peers: frozenset[tuple[str, str]] = frozenset()


def path(source: str, destination: str, abilities: Abilities) -> Path:
    """Return the path between the memories of two devices: MAIN_MEMORY or a GPU's name.

    The GPU that is written copies; if main memory is written, the GPU that is read. Converted elements always take
    the path of tensor operations, between two memories through pageable memory.
    """
    if MAIN_MEMORY in (source, destination):
        if source == destination:
            return Path.SHARED
        return Path.PINNED if abilities.can_pin else Path.WINDOWS
    if source == destination:
        return Path.KERNEL if abilities.has_kernels else Path.TENSORS
    is_peer = abilities.has_kernels and (destination, source) in abilities.peers
    return Path.PEER if is_peer else Path.WINDOWS
