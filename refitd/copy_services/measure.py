"""Measures how fast another process can pull private tensors, compared to a copy by their own process."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from refitd.copy_services.process_memory import RemoteChunk
from refitd.errors import RefitdError, TransportError
from refitd.protocol.local import PullMeasured
from refitd.states import TransferMode

# A few milliseconds of copying; larger than the second-level cache.
SAMPLE_BYTES = 8 << 20
MAX_SPANS = 64
MAX_ROWS = 8192  # rows of one span: enough to show that short rows are slow

# A pull may take this much longer and still be better: workers share it, and it needs no slot and no time of the
# trainer.
CLEARLY_SLOWER = 2.0

HERE_ROW_BYTES = 32 << 10  # of the tensor made up by `measure_here`: a matrix with 16384 bfloat16 columns

_CHUNK_BYTES = 256 << 10  # what workers read at once
_REPEATS = 3
_CHILD_S = 10.0

Span = tuple[int, int, int]  # address, rows, bytes from one row to the next


@dataclass(frozen=True, slots=True)
class Choice:
    """How workers get lent tensors, and why."""

    mode: TransferMode
    reason: str


def sample(tensors: Iterable[Span]) -> tuple[Span, ...]:
    """Return parts of the largest of these contiguous tensors, SAMPLE_BYTES in all, with their row lengths."""
    spans: list[Span] = []
    left = SAMPLE_BYTES
    for address, rows, row in sorted(tensors, key=lambda t: t[1] * t[2], reverse=True):
        if left <= 0 or rows * row == 0 or len(spans) == MAX_SPANS:
            break
        # at most a quarter of the sample each, so that one embedding table does not decide alone
        most = min(left, SAMPLE_BYTES // 4)
        part = (address, min(rows, MAX_ROWS, max(1, most // row)), min(row, most))
        spans.append(part)
        left -= part[1] * part[2]
    return tuple(spans)


def payload(spans: Sequence[Span]) -> int:
    """Return the bytes that a measurement moves: half of every row, like a last dimension split in two."""
    return sum(rows * _half(row) for _, rows, row in spans)


def pull_measured(pid: int, spans: Sequence[Span]) -> PullMeasured:
    """Time reading a client's memory as a worker would, or say why it cannot be read.

    For the daemon, which has the same user and permissions as its workers. `pid` 0 is a process that it does not see.
    """
    if not pid:
        return PullMeasured(
            seconds=0.0, reason="the daemon is in another PID namespace, and sees no pid of this process"
        )
    try:
        return PullMeasured(seconds=pull_seconds(pid, spans))
    except (RefitdError, ValueError, MemoryError, OverflowError) as exc:
        return PullMeasured(seconds=0.0, reason=str(exc).partition(";")[0])


def pull_seconds(pid: int, spans: Sequence[Span]) -> float:
    """Time reading these spans of process `pid` as a worker does: each chunk twice, once to copy and once to verify.

    Raises:
        PeerLost: the process has ended.
        TransportError: the kernel forbids this process to read there.
    """
    chunks = [
        RemoteChunk(pid, address + first * row + at, [(count, row), (nbytes, 1)], 1)
        for address, rows, row in spans
        for first, count, at, nbytes in _chunks(rows, row)
    ]
    destination, scratch = np.zeros(_CHUNK_BYTES, np.uint8), np.zeros(_CHUNK_BYTES, np.uint8)

    def pull() -> None:
        for chunk in chunks:
            chunk.read_to(destination.ctypes.data)
            chunk.read_to(scratch.ctypes.data)

    return _fastest(pull)


def copy_seconds(spans: Sequence[Span]) -> float:
    """Time copying as much of these spans into shared memory, and from there on row by row, as a worker does.

    The addresses must be readable; this cannot be checked here.
    """
    longest = max((rows * row for _, rows, row in spans), default=1)
    shared = np.frombuffer(mmap.mmap(-1, longest), np.uint8)
    destination = np.zeros(_CHUNK_BYTES, np.uint8)

    def copy() -> None:
        for address, rows, row in spans:
            ctypes.memmove(shared.ctypes.data, address, rows * _half(row))
            for first, count, at, nbytes in _chunks(rows, row):
                start = first * row + at
                source = np.ndarray((count, nbytes), np.uint8, shared.data, start, (row, 1))
                np.copyto(destination[: count * nbytes].reshape(count, nbytes), source)

    return _fastest(copy)


def choose(spans: Sequence[Span], pulled_s: float, copied_s: float) -> Choice:
    """Choose between pulling and copying by two measurements of the same spans."""
    nbytes = payload(spans)
    reason = f"pulled at {_rate(nbytes, pulled_s)}, copied at {_rate(nbytes, copied_s)}"
    return Choice(TransferMode.COPIED if pulled_s > CLEARLY_SLOWER * copied_s else TransferMode.PULLED, reason)


def measure_here() -> Choice:
    """Measure on this machine, with a child process that reads this one.

    Raises:
        TransportError: the child may not read, or fails.
    """
    rows, row = SAMPLE_BYTES // HERE_ROW_BYTES, HERE_ROW_BYTES
    data = np.ones(SAMPLE_BYTES, np.uint8)
    span = (data.ctypes.data, rows, row)
    command = [sys.executable, "-m", "refitd.copy_services.measure", str(os.getpid()), *map(str, span)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    allow_reader(child.pid)
    try:
        found, error = child.communicate("go\n", timeout=_CHILD_S)  # it reads after this line, once allowed to
    except subprocess.TimeoutExpired as exc:
        child.kill()
        child.communicate()
        raise TransportError(f"the measuring process said nothing for {_CHILD_S:.0f} s") from exc
    if child.returncode != 0:
        raise TransportError(error.strip() or f"the measuring process ended with status {child.returncode}")
    return choose([span], float(found), copy_seconds([span]))


def allow_reader(pid: int) -> None:
    """Let process `pid` and its children read this process's memory, which the Yama module may forbid."""
    pr_set_ptracer = 0x59616D61
    ctypes.CDLL(None).prctl(ctypes.c_int(pr_set_ptracer), ctypes.c_ulong(pid), 0, 0, 0)


def _half(row: int) -> int:
    return max(1, row // 2)


def _chunks(rows: int, row: int) -> list[tuple[int, int, int, int]]:
    """Cut half rows into chunks: (first row, rows, bytes into the row, bytes of each row)."""
    half = _half(row)
    if half > _CHUNK_BYTES:
        return [(i, 1, at, min(_CHUNK_BYTES, half - at)) for i in range(rows) for at in range(0, half, _CHUNK_BYTES)]
    step = _CHUNK_BYTES // half
    return [(first, min(step, rows - first), 0, half) for first in range(0, rows, step)]


def _fastest(work: Callable[[], None]) -> float:
    """Return the shortest of a few runs: the first has page faults, and any may be interrupted."""
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return max(min(times), 1e-9)


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.1f} GB/s"


def main() -> int:
    """Run as `python -m refitd.copy_services.measure PID ADDRESS ROWS ROW`; print the seconds of a pull."""
    pid, address, rows, row = map(int, sys.argv[1:])
    sys.stdin.readline()
    try:
        print(pull_seconds(pid, [(address, rows, row)]))
    except RefitdError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
