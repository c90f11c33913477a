"""The GPU that the checks run on, or one emulated on the CPU: what they need of torch and cannot get from refitd."""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tests.gpu.outcomes import Skip

_T = TypeVar("_T", bound=torch.Tensor)
MIB = 1 << 20


class Gpu:
    """The first GPU that torch sees."""

    device = torch.device("cuda", 0)
    is_emulated = False
    warm_ups, repeats = 2, 7

    def start(self) -> None:
        """Make it the current device; raise Skip if torch cannot use it."""
        if not torch.cuda.is_available():
            raise Skip("torch finds no usable GPU: it or the driver is too old, or CUDA_VISIBLE_DEVICES hides it")
        torch.cuda.set_device(self.device)
        torch.zeros(1, device=self.device)

    def machine(self) -> dict[str, object]:
        """Return names and versions for the record."""
        _, total = self.memory()
        return {
            "device": torch.cuda.get_device_name(self.device),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(self.device))),
            "memory MiB": total // MIB,
            "torch": torch.__version__,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }

    def scaled(self, size: int) -> int:
        """Return the number of bytes, rows or elements to use in place of `size`."""
        return size

    def own(self, tensor: _T) -> _T:
        """Return a tensor that was made on `device`, known as private memory of the GPU."""
        return tensor

    def synchronize(self) -> None:
        """Wait for all queued work."""
        torch.cuda.synchronize()

    def memory(self) -> tuple[int, int]:
        """Return the free and all bytes of the GPU."""
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def allocated(self, peak: bool = False, resets_peak: bool = False) -> int:
        """Return the bytes of torch's tensors on it, or the most since the peak was reset."""
        if resets_peak:
            torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated())

    def count(self) -> int:
        """Return how many GPUs this process sees."""
        return torch.cuda.device_count()

    def empty_cache(self) -> None:
        """Return torch's unused memory to the driver."""
        torch.cuda.empty_cache()

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Capture `step` as a graph, warmed up first as torch asks; return replay and the tensor that it writes."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            y = step()
        return captured.replay, y

    def seconds(self, step: Callable[[], object]) -> float:
        """Return the median seconds of a step that queues work on the device, waiting included."""
        found = []
        for _ in range(self.warm_ups + self.repeats):
            self.synchronize()
            started = time.perf_counter()
            step()
            self.synchronize()
            found.append(time.perf_counter() - started)
        return statistics.median(found[self.warm_ups :])

    def copy_rate(self) -> float:
        """Return the GB/s, each byte counted once, of torch's copy of 1 GiB (or an eighth of what is free) on it."""
        nbytes = max(MIB, min(self.scaled(1 << 30), self.memory()[0] // 8))
        source = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return nbytes / self.seconds(lambda: target.copy_(source)) / 1e9


class EmulatedGpu(Gpu):
    """Tensors of the CPU, and arenas of the driver of tests/support/fake_cuda.c, which the environment names."""

    device = torch.device("cpu")
    is_emulated = True
    warm_ups, repeats = 0, 1

    def start(self) -> None:
        """See Gpu.start."""
        torch.set_num_threads(1)

    def machine(self) -> dict[str, object]:
        """See Gpu.machine."""
        return {"device": "emulated", "torch": torch.__version__}

    def scaled(self, size: int) -> int:
        """See Gpu.scaled."""
        return max(1, size // 256)

    def own(self, tensor: _T) -> _T:
        """See Gpu.own."""
        # the instance that sitecustomize has imported, not tests.support.fake_torch.device_shim
        found: _T = _shim().put_on_gpu(tensor, 0)
        return found

    def synchronize(self) -> None:
        """See Gpu.synchronize."""

    def memory(self) -> tuple[int, int]:
        """See Gpu.memory."""
        driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        statuses = [
            driver.cuInit(0),
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
            driver.cuCtxPushCurrent_v2(context),
            driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
            driver.cuCtxPopCurrent_v2(ctypes.byref(context)),
            driver.cuDevicePrimaryCtxRelease_v2(0),
        ]
        assert not any(statuses), statuses
        return free.value, total.value

    def allocated(self, peak: bool = False, resets_peak: bool = False) -> int:
        """See Gpu.allocated; it is not known of the CPU."""
        return 0

    def count(self) -> int:
        """See Gpu.count."""
        return len(os.environ["FAKE_CUDA_VISIBLE"].split(","))

    def empty_cache(self) -> None:
        """See Gpu.empty_cache."""

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See Gpu.capture: a replay runs the step again, at the addresses that it has."""
        y = step()

        def replay() -> None:
            y.copy_(step())

        return replay, y


def _shim() -> Any:
    return sys.modules["device_shim"]


GPU: Gpu = EmulatedGpu() if os.environ.get("FAKE_CUDA_TAG") else Gpu()
