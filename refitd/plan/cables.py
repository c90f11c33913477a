"""How fast the nodes' cables are, each way, and what a plan's bytes take on them.

    n0 sends      134 MB at 50 MB/s     2.7 s
    n2 receives   134 MB at 12.5 MB/s  10.7 s     the bytes need 10.7 s at least, n2 receiving

Both directions are independent, and nothing but the nodes' own cables is taken to limit a transfer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cables:
    """Bytes per second of each node's cable, in each direction. Nodes that are not listed have the default.

    Attributes:
        name: where the figures come from; "" if nothing is known, and all cables count as equally fast.
        default: of every node that is not listed, each way.
        send: node -> what it sends.
        receive: node -> what it receives.
    """

    name: str = ""
    default: float = 1.0
    send: Mapping[str, float] = field(default_factory=dict)
    receive: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for speed in (self.default, *self.send.values(), *self.receive.values()):
            if not (speed > 0 and math.isfinite(speed)):
                raise ValueError(f"a cable's speed must be finite and above 0 bytes per second, found {speed}")

    @property
    def are_known(self) -> bool:
        """Whether the figures are bytes per second, and not all alike because nothing is known."""
        return bool(self.name)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for cables by which every plan is the same."""
        return self.default, tuple(sorted(self.send.items())), tuple(sorted(self.receive.items()))

    def sends(self, nodes: Sequence[str]) -> Floats:
        """Return what each of these nodes sends."""
        return np.array([self.send.get(node, self.default) for node in nodes], np.float64)

    def receives(self, nodes: Sequence[str]) -> Floats:
        """Return what each of these nodes receives."""
        return np.array([self.receive.get(node, self.default) for node in nodes], np.float64)


EQUAL = Cables()


@dataclass(frozen=True, slots=True)
class CableLoad:
    """What a node's cable carries one way, and how long that takes at its speed."""

    node: str
    is_send: bool
    nbytes: int
    speed: float  # bytes per second

    @property
    def seconds(self) -> float:
        """The least time of these bytes."""
        return self.nbytes / self.speed


def loads_of(links: Iterable[tuple[str, str, int]], cables: Cables) -> list[CableLoad]:
    """Return what every cable carries, the one that takes longest first.

    Args:
        links: (from node, to node, bytes), of different nodes.
        cables: their speeds.
    """
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    for source, target, nbytes in links:
        sent[source] = sent.get(source, 0) + nbytes
        received[target] = received.get(target, 0) + nbytes
    found = [
        CableLoad(node, is_send, nbytes, speeds.get(node, cables.default))
        for is_send, through, speeds in ((True, sent, cables.send), (False, received, cables.receive))
        for node, nbytes in through.items()
    ]
    return sorted(found, key=lambda load: (-load.seconds, load.node, load.is_send))
