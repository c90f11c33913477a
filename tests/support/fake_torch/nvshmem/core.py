"""Stands in for nvshmem.core: the id, and what every PE of it does together."""

from __future__ import annotations

import ctypes
import json
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

_world: dict[str, Any] = {}


class UniqueId:
    """128 bytes: the port at which PE 0 listens."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(128)
        self.ptr = ctypes.addressof(self._bytes)


def get_unique_id(empty: bool = False) -> UniqueId:
    made = UniqueId()
    if not empty:
        _world["root"] = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        ctypes.memmove(made.ptr, _world["root"].port.to_bytes(8, "little"), 8)
    return made


def init(*, uid: UniqueId, rank: int, nranks: int, initializer_method: str) -> None:
    assert initializer_method == "uid" and "store" not in _world, "NVSHMEM is initialised once"
    port = int.from_bytes(ctypes.string_at(uid.ptr, 8), "little")
    _world.update(
        calls=0, store=TCPStore("127.0.0.1", port, None, False, wait_for_workers=False), rank=rank, size=nranks
    )
    meet("init", None)


def finalize() -> None:
    meet("finalize", None)
    _world.pop("store")


def meet(what: str, mine: object) -> list[Any]:
    """Return what each PE has brought. All must do the same; if one has died, this never ends."""
    number = _world["calls"] = _world["calls"] + 1
    store, found = _world["store"], []
    try:
        store.set(f"{number}/{_world['rank']}", json.dumps([what, mine]))
        for rank in range(_world["size"]):
            store.wait([f"{number}/{rank}"], timedelta(hours=1))
            found.append(json.loads(store.get(f"{number}/{rank}")))
    except RuntimeError:
        threading.Event().wait()
    if {each[0] for each in found} != {what}:
        raise RuntimeError(f"NVSHMEM: PEs do different things: {found}")
    return [each[1] for each in found]
