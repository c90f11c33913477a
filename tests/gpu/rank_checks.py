"""Checks with several ranks, each a process that starts checks.py again: NCCL and NVSHMEM by a mailbox of files."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from refitd.copy_services import Epoch, Mailbox
from refitd.errors import DeadlineExceeded
from tests.gpu.device import GPU
from tests.gpu.outcomes import CHECKS_FILE, MIB, Outcome, Skip, need


class Folder(Mailbox):
    """A mailbox of files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, key: str, value: bytes) -> None:
        """See Mailbox.put."""
        target = self._path / key.replace("/", "_")
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        part.write_bytes(value)
        part.rename(target)

    def get(self, key: str, timeout: float) -> bytes:
        """See Mailbox.get."""
        target, until = self._path / key.replace("/", "_"), time.monotonic() + timeout
        while not target.exists():
            if time.monotonic() > until:
                raise DeadlineExceeded(f"no rank has left {key!r} within {timeout:.1f} s")
            time.sleep(0.005)
        return target.read_bytes()


def epoch_of(rank: int, size: int, folder: str, seconds: float) -> Epoch:
    labels = tuple(f"rank {i}" for i in range(size))
    return Epoch(
        "check", rank, labels, "127.0.0.1", 256 * MIB, Folder(Path(folder)), seconds, bytes(32), str(GPU.device)
    )


def exchange(made: Any, seconds: float) -> dict[str, object]:
    """Have all ranks exchange tensors of many kinds with all ranks, including themselves; return figures."""
    me, size = made.peers.index, len(made.peers)
    torch.manual_seed(1)
    shapes = [(), (3,), (0, 4), (129, 65), (1024, 1024), (1 << 20,), (3, 5 << 20)]
    values = [
        [
            torch.randint(0, 100, shape, device=GPU.device, dtype=dtype)
            for shape in shapes
            for dtype in (torch.int16, torch.int64)
        ]
        for _ in range(size)
    ]

    def as_sent(value: torch.Tensor, task: int) -> torch.Tensor:
        return value.t() if value.dim() == 2 and task % 3 == 0 else value  # some are not contiguous

    for verify in (True, False):
        landed = []
        for other in range(size):
            for task, value in enumerate(values[me]):
                made.send(task, as_sent(value, task), other)
            for task, value in enumerate(values[other]):
                expected = as_sent(value, task)
                room = torch.zeros(*expected.shape, 1 + task % 2, device=GPU.device, dtype=value.dtype)[..., 0]
                made.receive(task, room, other)
                landed.append((room, expected))
        result = made.run(seconds, verify=verify)
        for number, (room, expected) in enumerate(landed):
            assert torch.equal(room, expected), f"tensor {number} differs"
    if size == 1:
        return {"tensors": len(landed), "local MiB": result.local_bytes / MIB}
    big = torch.randint(0, 100, (64 * MIB,), device=GPU.device, dtype=torch.int64)
    room = torch.zeros_like(big)
    figures: dict[str, object] = {"tensors": len(landed), "messages": result.messages}
    for verify in (False, True):
        rates = []
        for _ in range(3):
            made.send(0, big, (me + 1) % size)
            made.receive(0, room, (me - 1) % size)
            done = made.run(seconds, verify=verify)
            rates.append(done.received_bytes / done.seconds / 1e9)
        figures["proven GB/s" if verify else "GB/s"] = statistics.median(rates)
        assert torch.equal(room, big)
    return figures


def ranks(name: str, size: int, seconds: float, environments: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Start checks.py once for each rank; return the results, or raise the error of the first failed rank."""
    with tempfile.TemporaryDirectory(prefix="refitd-gpu-check") as folder:
        children = [
            subprocess.Popen(
                [sys.executable, CHECKS_FILE, name, str(seconds), str(rank), str(size), folder],
                env={**os.environ, **environments[rank]},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        until, found = time.monotonic() + seconds, []
        try:
            for rank, child in enumerate(children):
                out, _ = child.communicate(timeout=max(0.1, until - time.monotonic()))
                last = next((line for line in reversed(out.splitlines()) if line.startswith("{")), "")
                if not last:
                    raise RuntimeError(f"rank {rank} ended with status {child.returncode} and no result")
                found.append(json.loads(last))
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the ranks were not done within {seconds:.0f} s") from None
        finally:
            for child in children:
                child.kill()
                child.wait()
    for rank, each in enumerate(found):
        if each["state"] == "failed":
            raise RuntimeError(f"rank {rank}: {each['why']}")
    return found


def nccl_library() -> tuple[str, tuple[int, int, int]]:
    """Return the newest NCCL on the path and its version."""
    best = "", (0, 0, 0)
    for folder in sys.path:
        path = Path(folder or ".", "nvidia", "nccl", "lib", "libnccl.so.2")
        if path.exists():
            number = ctypes.c_int()
            ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
            version = number.value // 10000, number.value // 100 % 100, number.value % 100
            best = max(best, (str(path), version), key=lambda each: each[1])
    if best[0]:
        return best
    return "", torch.cuda.nccl.version()[:3]


def nccl_environment(library: str) -> dict[str, str]:
    made = {"NCCL_NVLS_ENABLE": "0", "NCCL_IB_DISABLE": "1", "NCCL_MAX_CTAS": "4"}
    if library:
        made["LD_PRELOAD"] = ":".join(part for part in (library, os.environ.get("LD_PRELOAD", "")) if part)
    return {**made, "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo")}


def nccl_one(seconds: float) -> Outcome:
    need(xxhash="xxhash", cryptography="cryptography")
    library, version = nccl_library()
    (found,) = ranks("nccl-1", 1, seconds * 0.9, [nccl_environment(library)])
    return Outcome({"NCCL": ".".join(map(str, version)), **found["figures"]})


def environments(service: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environments in which two ranks, or two daemons, use one GPU over a service."""
    if GPU.is_emulated or service == "gloo":
        return {}, {}
    if service == "nvshmem":
        return {"NVSHMEM_REMOTE_TRANSPORT": "none"}, {"NVSHMEM_REMOTE_TRANSPORT": "none"}
    library, version = nccl_library()
    base = nccl_environment(library)
    if version >= (2, 30, 0):
        return {**base, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}, {**base, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    # older ones refuse two ranks on one GPU of one host; of two hosts they do not, and then use sockets
    return {**base, "NCCL_HOSTID": "refitd-0"}, {**base, "NCCL_HOSTID": "refitd-1"}


def nccl_two(seconds: float) -> Outcome:
    need(xxhash="xxhash", cryptography="cryptography")
    _, version = nccl_library()
    shown, is_old = ".".join(map(str, version)), version < (2, 30, 0)
    try:
        found = ranks("nccl-2", 2, seconds * (0.7 if is_old else 0.9), environments("nccl"))
    except RuntimeError as exc:
        if not is_old:
            raise
        raise Skip(
            f"NCCL {shown} does not run two ranks on one GPU here ({exc}); carry nvidia-nccl-cu13>=2.30 (--help)"
        ) from exc
    why = "as if on two hosts (NCCL_HOSTID): over sockets, so the rate says nothing" if is_old else ""
    return Outcome({"NCCL": shown, **found[0]["figures"]}, why)


def need_nvshmem() -> None:
    """Raise Skip unless nvshmem4py is installed."""
    major = (torch.version.cuda or "13").partition(".")[0]
    need(xxhash="xxhash", cryptography="cryptography", nvshmem=f"nvshmem4py-cu{major}")


def nvshmem_two(seconds: float) -> Outcome:
    need_nvshmem()
    found = ranks("nvshmem-2", 2, seconds * 0.9, environments("nvshmem"))
    return Outcome(found[0]["figures"])


def rank_main(name: str, seconds: float, rank: int, size: int, folder: str) -> Outcome:
    """Run one rank of a check with several ranks."""
    if name.startswith("nccl"):
        from refitd.copy_services.nccl import join as joined
    else:
        from refitd.copy_services.nvshmem import join as joined  # type: ignore[assignment]
    made = joined(epoch_of(rank, size, folder, seconds / 2))
    try:
        return Outcome(exchange(made, seconds / 4))
    finally:
        made.close()
