"""A stand-in for torch's ProcessGroupNCCL on the memory of fake_cuda.c, over gloo, with NCCL's rules.

Every rank joins a collective before the first message between two ranks. The n-th send to a rank and its n-th receive
have equal sizes. Buffers are on the group's GPU: memory files of arenas in main memory, or on another GPU, are refused.
Group calls run in order, on a thread. If a peer dies they never end, as NCCL's without its error handling. As torch's
heartbeat, a thread calls the store through its part in C++ alone.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import device_shim
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

_HEAD, _BODY = 0x4E00, 0x4E01


class Work:
    """A group call that was issued."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.failure = ""

    def is_completed(self) -> bool:
        return self.over.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert self.over.is_set(), "refitd polls first"
        if self.failure:
            raise RuntimeError(self.failure)
        return True


class ProcessGroupNCCL:
    """See the module."""

    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        gloo: Any = c10d.ProcessGroupGloo
        chosen = gloo._Options()
        chosen._timeout = timedelta(seconds=60)
        chosen._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        self._store = dist.PrefixStore("nccl", store)
        self._gloo = gloo(self._store, rank, size, chosen)
        self._rank, self._size, self._gpu = rank, size, device_shim.current["gpu"]
        self._has_met = False
        self._calls: list[tuple[bool, torch.Tensor, int]] = []
        self._counts: Counter[tuple[bool, int]] = Counter()
        self._issued: queue.SimpleQueue[tuple[Work, list[tuple[bool, torch.Tensor, int]], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._perform, daemon=True).start()
        self._is_over = threading.Event()
        threading.Thread(target=_beat, args=(self._store, self._is_over), daemon=True).start()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "nccl"

    def _get_backend(self, device: torch.device) -> ProcessGroupNCCL:
        return self

    def abort(self) -> None:
        self._is_over.set()

    # --- collectives

    def _allgather_base(self, found: torch.Tensor, mine: torch.Tensor, options: Any) -> Any:
        self._check(found, mine)
        self._has_met = True
        return self._gloo.allgather([list(found.chunk(self._size))], [mine])

    def alltoall_base(self, found: torch.Tensor, mine: torch.Tensor, out: Any, into: Any, options: Any) -> Any:
        self._check(found, mine)
        self._has_met = True
        return self._gloo.alltoall_base(found, mine, out, into)

    # --- messages

    def _start_coalescing(self) -> None:
        self._calls = []

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> None:
        self._calls.append((True, device_shim.late().plain_of(tensors[0]), to))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> None:
        self._calls.append((False, device_shim.late().plain_of(tensors[0]), source))

    def _end_coalescing(self) -> Work:
        if not self._has_met:
            raise RuntimeError("NCCL: the first call of a group needs every rank")
        self._check(*(tensor for _, tensor, _ in self._calls))
        work, stream = Work(), device_shim.late().current()
        self._issued.put((work, self._calls, partial(stream.run, stream.issued)))
        return work

    def _perform(self) -> None:
        while True:
            work, calls, catch_up = self._issued.get()
            catch_up()  # NCCL's stream waits for the caller's
            try:
                work.failure = self._exchange(calls)
            except RuntimeError:
                return  # a peer has died: neither this call nor a later one ends
            work.over.set()

    def _exchange(self, calls: list[tuple[bool, torch.Tensor, int]]) -> str:
        kept: list[Any] = []
        receives = []
        for is_send, tensor, peer in calls:
            number = self._counts[is_send, peer]
            self._counts[is_send, peer] += 1
            head = torch.tensor([number, tensor.numel() * tensor.element_size()])
            if is_send:
                kept += [(head, self._gloo.send([head], peer, _HEAD)), (tensor, self._gloo.send([tensor], peer, _BODY))]
            else:
                receives.append((head, tensor, peer))
        for head, tensor, peer in receives:
            found = torch.zeros_like(head)
            self._gloo.recv([found], peer, _HEAD).wait()
            if not torch.equal(found, head):
                return (
                    f"NCCL: rank {peer} sends (number, bytes) {found.tolist()}, {self._rank} receives {head.tolist()}"
                )
            self._gloo.recv([tensor], peer, _BODY).wait()
        for _, sent in kept:
            sent.wait()
        return ""

    def _check(self, *tensors: torch.Tensor) -> None:
        with open("/proc/self/maps") as file:
            maps = [line.split(maxsplit=5) for line in file if "/memfd:" in line]
        for tensor in tensors:
            at = tensor.data_ptr()
            for bounds, *_, name in maps:
                first, end = (int(bound, 16) for bound in bounds.split("-"))
                if first <= at < end and f":{os.environ['FAKE_CUDA_TAG']}:{self._gpu}:" not in name:
                    raise RuntimeError(f"NCCL: invalid argument: {name.strip()} is not memory of GPU {self._gpu}")


def _beat(store: dist.Store, is_over: threading.Event) -> None:
    """Call a store as torch's heartbeat does; end the process if that fails, as torch does."""
    try:
        copy = store.clone()
        while not is_over.wait(0.05):
            copy.check(["dump"])
    except BaseException as exc:
        os.write(2, f"fake NCCL heartbeat: {exc}\n".encode())
        os._exit(70)


def install() -> None:
    """Give torch this class."""
    c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc]
