"""GPU work that runs as late as it may: streams, events, and tensors whose operations wait in a queue.

An operation on a LateTensor waits on its thread's current stream. It runs when a synchronise, an event or a read of
the host needs it, or after LATE_S: a GPU makes progress by itself. Streams do not wait for each other unless they are
told to. A copy from main memory takes its bytes when it is queued; with `non_blocking`, when it runs. An operation
that makes a tensor runs twice: when it is queued, with the bytes that are there, for the shape; and late, for the
values. Import this module only after torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map

LATE_S = 0.02
_lock = threading.RLock()
_here = threading.local()
_streams: dict[int, Stream] = {}
_numbers = itertools.count(1)


class Stream:
    """Replaces torch.cuda.Stream."""

    def __init__(self, device: object = None) -> None:
        self.cuda_stream = next(_numbers)
        self._queue: deque[tuple[float, Callable[[], object]]] = deque()
        self.issued = self._done = 0
        with _lock:
            _streams[self.cuda_stream] = self
            if len(_streams) == 1:
                threading.Thread(target=_progress, daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        with _lock:
            self._queue.append((time.monotonic(), work))
            self.issued += 1

    def run(self, until: int) -> None:
        """Perform what was queued, up to this number."""
        with _lock:
            while self._done < until:
                self._done += 1
                self._queue.popleft()[1]()

    def run_old(self, before: float) -> None:
        with _lock:
            while self._queue and self._queue[0][0] < before:
                self.run(self._done + 1)

    def is_done(self, until: int) -> bool:
        return self._done >= until

    def wait_stream(self, other: Stream) -> None:
        until = other.issued
        self.put(lambda: other.run(until))

    def synchronize(self) -> None:
        self.run(self.issued)


class Event:
    """Replaces torch.cuda.Event; the first question comes too early."""

    def __init__(self) -> None:
        self._stream, self._until, self._asked = default, 0, 0

    def record(self, stream: Stream) -> None:
        self._stream, self._until = stream, stream.issued

    def query(self) -> bool:
        self._asked += 1
        if self._asked > 1:
            self._stream.run(self._until)
        return self._stream.is_done(self._until)


def current(device: object = None) -> Stream:
    """Replaces torch.cuda.current_stream."""
    found: Stream = getattr(_here, "stream", default)
    return found


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Replaces torch.cuda.stream."""
    before, _here.stream = current(), stream
    try:
        yield
    finally:
        _here.stream = before


def synchronize(device: object = None) -> None:
    """Perform all that was queued: torch.cuda.synchronize, or the driver's."""
    with _lock:
        for stream in list(_streams.values()):
            stream.synchronize()


def queue_on(handle: int, work: Callable[[], object]) -> None:
    """Perform a library's work in the order of a stream."""
    _streams[handle].put(work)


def _progress() -> None:
    pause = threading.Event()  # tests replace time.sleep
    while not pause.wait(LATE_S / 4):
        for stream in list(_streams.values()):
            stream.run_old(time.monotonic() - LATE_S)


class LateTensor(torch.Tensor):
    """A tensor on an emulated GPU, over the memory of `plain`."""

    plain: torch.Tensor

    @staticmethod
    def over(plain: torch.Tensor) -> LateTensor:
        _load()
        made: LateTensor = torch.Tensor._make_subclass(LateTensor, plain)
        made.plain = plain
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:  # the host reads: torch waits for the current stream
            current().synchronize()
            return func(*tree_map(plain_of, args), **(kwargs or {}))
        if func is torch.Tensor.cpu:
            current().synchronize()
            return plain_of(args[0]).clone()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, stream = kwargs or {}, current()
        plain, named = tree_map(plain_of, args), tree_map(plain_of, kwargs)
        if func.is_view or func.overloadpacket in _WITHOUT_VALUES:
            return tree_map(_late, func(*plain, **named))
        is_copy = func.overloadpacket is torch.ops.aten.copy_
        is_async = is_copy and bool((args[2] if len(args) > 2 else False) or kwargs.get("non_blocking"))
        if func._schema.is_mutable:
            if not isinstance(args[0], LateTensor) and not is_async:
                stream.synchronize()
                return func(*plain, **named)
            if not is_async:
                plain = [plain[0], *tree_map(_kept, list(zip(args[1:], plain[1:], strict=True)), is_leaf=_is_pair)]
            stream.put(lambda: func(*plain, **named))
            return args[0]
        now = func(*plain, **named)
        if not isinstance(now, torch.Tensor):
            stream.synchronize()
            return func(*plain, **named)
        stream.put(lambda: now.copy_(func(*plain, **named)))
        return _late(now)


@functools.cache
def _load() -> None:
    """Load what torch loads for the first subclass of its tensors; workers have left out the first of these."""
    for name in ("torch._meta_registrations", "torch.distributed.tensor"):
        importlib.import_module(name)


_WITHOUT_VALUES = {
    getattr(torch.ops.aten, name)
    for name in ("detach", "alias", "set_", "new_empty", "empty_like", "new_empty_strided")
}
_READS = {
    *(torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__int__),
    *(torch.Tensor.__repr__, torch.Tensor.__format__, torch.equal),
}


def plain_of(value: Any) -> Any:
    """Return a LateTensor as a tensor that torch works on immediately, anything else as it is."""
    return value.plain if isinstance(value, LateTensor) else value


def _late(value: Any) -> Any:
    return LateTensor.over(value) if isinstance(value, torch.Tensor) else value


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple)


def _kept(pair: tuple[Any, Any]) -> Any:
    """Keep the bytes that a tensor in main memory has now."""
    given, plain = pair
    is_host = isinstance(given, torch.Tensor) and not isinstance(given, LateTensor)
    return plain.clone() if is_host else plain


default = Stream()
_on_synchronize = ctypes.CFUNCTYPE(None)(synchronize)
with contextlib.suppress(OSError):  # no driver
    ctypes.CDLL("libcuda.so.1").fakeCudaOnSynchronize(_on_synchronize)

CUDA = SimpleNamespace(
    Stream=Stream,
    Event=Event,
    stream=on,
    current_stream=current,
    device=lambda device: nullcontext(),
    set_device=lambda device: None,
    synchronize=synchronize,
    is_available=lambda: False,
)


class Torch:
    """Replaces torch in refitd's modules about streams: GPUs are emulated, all else is torch's."""

    cuda = CUDA

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*names: Any) -> torch.device:
        return torch.device("cpu")
