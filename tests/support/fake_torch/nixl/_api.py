"""Stands in for nixl._api, with NIXL's rules.

Memory is registered with its kind (DRAM or VRAM) and its GPU's number, and both must be true. A read needs registered
memory at both ends, equal sizes, and the other agent's metadata. It takes its bytes as late as it can: until then its
destination has rubbish. A dead agent is an error of the read, or of the notification. A registration is of the memory
that was mapped then: a read fails if other memory is there now. An agent's second description of a place with another
key is refused. $FAKE_NIXL_LOG gets a line for each read: its kind, its bytes, and those of
the registered memory at both ends.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import queue
import socket
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
_LATE = 3  # looks at a read before it is done
Desc = tuple[int, int, int]  # address, bytes, GPU


class nixl_agent_config(SimpleNamespace):
    pass


@dataclass
class _Descs:
    kind: str
    items: list[Desc]


@dataclass
class _Read:
    here: Desc
    there: Desc
    pid: int
    looks: int = field(default=-1)


class _Region(NamedTuple):
    kind: str
    key: int
    file: str


_keys = itertools.count()


class nixl_agent:
    def __init__(self, name: str, config: nixl_agent_config) -> None:
        self._name, self._regions = name, dict[Desc, _Region]()
        self._known: dict[str, dict[str, Any]] = {}
        self._heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_at(name))
        threading.Thread(target=_listen, args=(self._socket, self._heard), daemon=True).start()

    def register_memory(self, items: list[tuple[int, int, int, str]], kind: str) -> _Descs:
        for address, nbytes, gpu, _ in items:
            found = _gpu_at(address)
            wanted = int(os.environ["FAKE_CUDA_VISIBLE"].split(",")[gpu]) if kind == "VRAM" else -1
            if found != wanted:
                raise RuntimeError(f"NIXL_ERR_INVALID_PARAM: {kind} {gpu} registered, the memory is of GPU {found}")
            self._regions[address, nbytes, gpu] = _Region(kind, next(_keys), _file_at(os.getpid(), address))
        return _Descs(kind, [item[:3] for item in items])

    def deregister_memory(self, descs: _Descs) -> None:
        for item in descs.items:
            del self._regions[item]

    def get_agent_metadata(self) -> bytes:
        return self._told(self._regions)

    def get_partial_agent_metadata(self, descs: _Descs, with_address: bool, backends: list[str]) -> bytes:
        return self._told({item: self._regions[item] for item in descs.items})

    def _told(self, regions: dict[Desc, _Region]) -> bytes:
        told = [[*place, *region] for place, region in regions.items()]
        return json.dumps({"name": self._name, "pid": os.getpid(), "regions": told}).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        found = json.loads(metadata)
        known = self._known.setdefault(found["name"], {"pid": found["pid"], "regions": {}})["regions"]
        for address, nbytes, gpu, *region in found["regions"]:
            if known.setdefault((address, nbytes, gpu), _Region(*region)).key != region[1]:
                raise RuntimeError("NIXL_ERR_NOT_ALLOWED: another description of the same memory")
        return str(found["name"])

    def remove_remote_agent(self, name: str) -> None:
        del self._known[name]

    def send_notif(self, name: str, note: bytes) -> None:
        if name not in self._known:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        mine = self._name.encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(bytes([len(mine)]) + mine + note, _at(name))
        except OSError as exc:
            raise RuntimeError(f"NIXL_ERR_REMOTE_DISCONNECT: {exc}") from exc

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        while not self._heard.empty():
            said = self._heard.get()
            found.setdefault(said[1 : 1 + said[0]].decode(), []).append(said[1 + said[0] :])
        return found

    def get_xfer_descs(self, items: list[Desc], kind: str) -> _Descs:
        return _Descs(kind, items)

    def initialize_xfer(self, what: str, here: _Descs, there: _Descs, name: str) -> _Read:
        if name not in self._known:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        (mine,), (other,) = here.items, there.items
        theirs, pid = self._known[name]["regions"], self._known[name]["pid"]
        sizes: list[int] = []
        if what != "READ" or mine[1] != other[1]:
            raise RuntimeError(f"NIXL_ERR_INVALID_PARAM: {what} of {mine[1]} and {other[1]} bytes")
        for item, kind, regions, at in (
            (mine, here.kind, self._regions, os.getpid()),
            (other, there.kind, theirs, pid),
        ):
            held = {region: known for region, known in regions.items() if _has(region, item) and known.kind == kind}
            if not held:
                raise RuntimeError(f"NIXL_ERR_NOT_FOUND: {kind} {item} is not registered")
            if _file_at(at, item[0]) not in [known.file for known in held.values()]:
                raise RuntimeError(f"NIXL_ERR_BACKEND: other memory than was registered is at {item}")
            sizes.append(max(nbytes for _, nbytes, _ in held))
        if log := os.environ.get("FAKE_NIXL_LOG"):
            with open(log, "a") as file:
                file.write(" ".join(map(str, (here.kind, mine[1], *sizes))) + "\n")
        return _Read(mine, other, pid)

    def transfer(self, read: _Read) -> str:
        ctypes.memset(read.here[0], 0xEE, read.here[1])
        read.looks = 0
        return "PROC"

    def check_xfer_state(self, read: _Read) -> str:
        read.looks += 1
        if read.looks < _LATE:
            return "PROC"
        if read.looks == _LATE and not _read(read.pid, read.there[0], read.here[0], read.here[1]):
            return "ERR"
        return "DONE"

    def release_xfer_handle(self, read: _Read) -> None:
        pass


def _listen(heard: socket.socket, into: queue.SimpleQueue[bytes]) -> None:
    while True:
        into.put(heard.recv(1 << 16))


def _at(name: str) -> str:
    return f"\0fake-nixl-{name}"


def _has(region: tuple[int, ...], item: Desc) -> bool:
    return region[2] == item[2] and region[0] <= item[0] and item[0] + item[1] <= region[0] + region[1]


class _Vector(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _read(pid: int, address: int, to: int, nbytes: int) -> bool:
    """Copy from another process's memory; return whether all of it could be read."""
    here, there = _Vector(to, nbytes), _Vector(address, nbytes)
    return bool(_libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == nbytes)


def _file_at(pid: int, address: int) -> str:
    """Return the device and inode of the memory that a process has mapped at an address; "" if there is none."""
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            bounds, _, _, device, inode, *_ = line.split(maxsplit=5)
            first, end = (int(bound, 16) for bound in bounds.split("-"))
            if first <= address < end:
                return f"{device} {inode}"
    return ""


def _gpu_at(address: int) -> int:
    """Return the fake GPU whose memory is mapped at an address, -1 for none."""
    prefix = f"/memfd:fake-cuda:{os.environ['FAKE_CUDA_TAG']}:"
    with open("/proc/self/maps") as file:
        for line in file:
            bounds, *_, name = line.split(maxsplit=5)
            first, end = (int(bound, 16) for bound in bounds.split("-"))
            if first <= address < end:
                return int(name.removeprefix(prefix).split(":")[0]) if name.startswith(prefix) else -1
    return -1
