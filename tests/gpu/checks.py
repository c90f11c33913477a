"""The bodies of scripts/gpu-check, one function a check. Run as: checks.py NAME SECONDS, which prints one JSON object.

Checks with several ranks start themselves again as: checks.py NAME SECONDS RANK SIZE FOLDER.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from refitd.buffers import cuda as memory
from refitd.buffers.layout import packed_offsets, row_major_strides
from refitd.copy_services.epoch import Epoch, Mailbox
from refitd.errors import DeadlineExceeded, RefitdError
from refitd.mxfp8 import Rounding

MIB = 1 << 20
AIM = 0.9  # of the plain copy's bandwidth
DEVICE = torch.device("cuda", 0)


class Skip(Exception):
    """A check cannot be done here; the text says why and what to do."""


@dataclass
class Outcome:
    """What a check found, if it did not raise."""

    figures: dict[str, object] = field(default_factory=dict)
    why: str = ""
    state: str = "passed"


def need(**packages: str) -> None:
    """Raise Skip unless these modules (name=package) are there."""
    missing = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise Skip(f"missing: {', '.join(missing)}; `pip install {' '.join(missing)}`, or carry wheels (--help)")


# --- one process ------------------------------------------------------------------------------------------------


def arena(seconds: float) -> Outcome:
    from refitd.buffers import handoff

    nbytes = 64 * MIB + 12345
    fd = memory.create(nbytes, "gpu-check")
    here = memory.MappedDeviceArena(fd, nbytes, write=True)
    pattern = torch.arange(nbytes, device=DEVICE).remainder(251).to(torch.uint8)
    here.tensor.copy_(pattern)
    torch.cuda.synchronize()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, __file__, "arena", str(seconds), str(theirs.fileno()), str(nbytes)],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        ours.settimeout(seconds)
        handoff.send(ours, b"arena", (fd,))
        os.close(fd)
        said, _ = handoff.receive(ours)
        assert said == b"written", said
        assert torch.equal(here.tensor, pattern + 1), "what the other process wrote is not seen here"
        here.close()
        handoff.send(ours, b"closed")
        said, _ = handoff.receive(ours)
        assert said == b"still there", said
        assert child.wait(seconds) == 0
    return Outcome({"MiB": nbytes / MIB})


def arena_child(connection: int, nbytes: int) -> None:
    from refitd.buffers import handoff

    with socket.socket(fileno=connection) as there:
        _, (fd,) = handoff.receive(there)
        pattern = torch.arange(nbytes, device=DEVICE).remainder(251).to(torch.uint8)
        with memory.MappedDeviceArena(fd, nbytes, write=False) as reading:
            assert torch.equal(reading.tensor, pattern), "the arena holds something else in another process"
        writing = memory.MappedDeviceArena(fd, nbytes, write=True)
        os.close(fd)
        writing.tensor.add_(1)
        torch.cuda.synchronize()
        handoff.send(there, b"written")
        handoff.receive(there)
        assert torch.equal(writing.tensor, pattern + 1), "the arena went with the process that had made it"
        writing.close()
        handoff.send(there, b"still there")


def digest(seconds: float) -> Outcome:
    from refitd.copy_services.device_digest import DeviceDigests

    data = torch.randint(0, 256, (33 * MIB + 7,), dtype=torch.uint8)
    there, device, host = data.to(DEVICE), DeviceDigests(DEVICE), DeviceDigests(torch.device("cpu"))
    for start, end in ((0, len(data)), (0, 0), (5, 6), (3, 9 * MIB), (4, 4 * MIB + 4)):
        found, expected = device.new(), host.new()
        found.update(there[start:end])
        for at in range(start, end, 5 * MIB + 1):
            expected.update(data[at : min(end, at + 5 * MIB + 1)])
        assert found.digest() == expected.digest(), (start, end)
    whole = there[: 32 * MIB]

    def once() -> None:
        made = device.new()
        made.update(whole)
        made.sums()

    return Outcome({"GB/s": len(whole) / timed(once) / 1e9})


def timed(step: Callable[[], object], repeats: int = 7) -> float:
    """Return the median seconds of a step that queues work on the device, waiting included."""
    found = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found[2:])


@dataclass
class Shard:
    """Tensors in an arena of their own."""

    number: int
    arena: memory.MappedDeviceArena
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def make(cls, number: int, shapes: Mapping[str, tuple[int, ...]]) -> Shard:
        _, total = packed_offsets([2 * torch.Size(shape).numel() for shape in shapes.values()])
        fd = memory.create(total, f"shard {number}")
        made = memory.MappedDeviceArena(fd, total, write=True)
        os.close(fd)
        return cls(number, made, shapes)

    def offsets(self) -> dict[str, int]:
        offsets, _ = packed_offsets([2 * torch.Size(shape).numel() for shape in self.shapes.values()])
        return dict(zip(self.shapes, offsets, strict=True))

    def tensors(self) -> dict[str, torch.Tensor]:
        whole, offsets = self.arena.tensor, self.offsets()
        return {
            name: whole[offsets[name] : offsets[name] + 2 * torch.Size(shape).numel()].view(torch.bfloat16).view(shape)
            for name, shape in self.shapes.items()
        }

    def place(self, name: str) -> Any:
        from refitd.addressing.places import LocalTensor

        shape = self.shapes[name]
        return LocalTensor(self.number, self.offsets()[name], shape, row_major_strides(shape, 2))


def mlp_shapes(width: int, layers: int) -> dict[str, tuple[int, ...]]:
    return {f"{i}.{kind}": shape for i in range(layers) for kind, shape in (("w", (width, width)), ("b", (width,)))}


def run_mlp(tensors: Mapping[str, torch.Tensor], x: torch.Tensor, layers: int) -> torch.Tensor:
    for i in range(layers):
        x = torch.nn.functional.gelu(torch.nn.functional.linear(x, tensors[f"{i}.w"], tensors[f"{i}.b"]))
    return x


def copy_all(source: Shard, target: Shard, verify: bool = True) -> Any:
    from refitd.copy_services.cuda import CudaCopyService
    from tests.support.places import copies_of

    copies = copies_of([(source.place(name), target.place(name), 2) for name in source.shapes])
    job = CudaCopyService().prepare(copies, {shard.number: shard.arena for shard in (source, target)})
    return job.run(verify=verify, on_progress=lambda done: None, timeout=60)


def swap(seconds: float) -> Outcome:
    shapes = mlp_shapes(1024, 4)
    source, live = Shard.make(1, shapes), Shard.make(2, shapes)
    tensors = live.tensors()
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for version in range(3):
        for tensor in source.tensors().values():
            tensor.normal_(version)
        torch.cuda.synchronize()
        copy_all(source, live)
        for name, tensor in source.tensors().items():
            assert torch.equal(tensor, tensors[name]), f"version {version}: {name} differs"
    assert pointers == {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert pointers == {name: tensor.data_ptr() for name, tensor in live.tensors().items()}
    return Outcome({"tensors": len(shapes), "versions": 3})


def copies(seconds: float) -> Outcome:
    from refitd.addressing.copies import cut
    from refitd.addressing.places import LocalTensor
    from refitd.copy_services.cuda import CudaCopyService
    from tests.support.places import copies_of

    free, _ = torch.cuda.mem_get_info()
    columns = 16384
    rows = max(64, min(131072, free // 8 // (2 * columns)) // 64 * 64)
    source, target = Shard.make(1, {"w": (rows, columns)}), Shard.make(2, {"w": (rows, columns)})
    a, b = source.tensors()["w"], target.tensors()["w"]
    a.view(torch.int16).random_()
    nbytes = a.numel() * 2
    service = CudaCopyService()
    arenas = {1: source.arena, 2: target.arena}
    plain = timed(lambda: b.copy_(a))
    figures: dict[str, object] = {"MiB": nbytes // MIB, "plain GB/s": nbytes / plain / 1e9}

    half = columns // 2  # a rank's half of the columns, out of the whole into a tensor of its own
    ends = LocalTensor(1, 2 * half, (rows, half), (2 * columns, 2)), LocalTensor(2, 0, (rows, half), (2 * half, 2))
    packed = b.view(-1)[: rows * half].view(rows, half)
    strided = timed(lambda: packed.copy_(a[:, half:]))
    figures["plain strided GB/s"] = nbytes / 2 / strided / 1e9
    for name, pair, expected, reference in (
        ("whole", (source.place("w"), target.place("w")), lambda: (a, b), plain),
        ("columns", ends, lambda: (a[:, half:], packed), strided),
    ):
        job = service.prepare(cut(copies_of([(*pair, 2)]))[0], arenas)
        for verify in (False, True):
            b.zero_()
            torch.cuda.synchronize()
            job.run(verify=verify, on_progress=lambda done: None, timeout=60)
            read, written = expected()
            # as integers: random bits may be no numbers
            assert torch.equal(read.view(torch.int16), written.view(torch.int16)), f"{name}: the copy differs"
            taken = timed(lambda job=job, verify=verify: job.run(verify=verify, on_progress=lambda done: None))
            figures[f"{name}{' proven' if verify else ''}, of plain"] = reference / taken
    slow = [
        key for key, value in figures.items() if key.endswith("of plain") and isinstance(value, float) and value < AIM
    ]
    return Outcome(figures, f"below the aim of {AIM}: {'; '.join(slow)}" if slow else "")


def graph(seconds: float) -> Outcome:
    layers, shapes = 4, mlp_shapes(512, 4)
    source, live = Shard.make(1, shapes), Shard.make(2, shapes)
    for tensor in live.tensors().values():
        tensor.normal_(0, 0.05)
    tensors = live.tensors()
    x = torch.randn(16, 512, device=DEVICE, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run_mlp(tensors, x, layers)
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = run_mlp(tensors, x, layers)
    for version in range(3):
        for tensor in source.tensors().values():
            tensor.normal_(0, 0.05)
        torch.cuda.synchronize()
        copy_all(source, live)
        captured.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in source.tensors().items())
        assert torch.equal(y, run_mlp(tensors, x, layers)), f"version {version}: the replay differs from eager"
    return Outcome({"versions": 3})


def mxfp8(seconds: float) -> Outcome:
    need(triton="triton")
    from refitd.transforms import mxfp8_triton
    from refitd.transforms.mxfp8 import MXFP8ReshardTransform
    from refitd.transforms.mxfp8_buffers import MXFP8Buffer

    # any bits, so NaNs, infinities and subnormals too; and weights
    torch.manual_seed(3)
    words = torch.randint(-(1 << 15), 1 << 15, (1000, 4096), dtype=torch.int16)
    words[:500] = (torch.randn(500, 4096) * 0.02).to(torch.bfloat16).view(torch.int16)
    for rounding in Rounding:
        for is_swizzled in (False, True):
            here = MXFP8Buffer.empty((1000, 4096), is_swizzled=is_swizzled)
            here = MXFP8Buffer(here.data, here.scale, rounding)
            here.quantize(words.view(torch.bfloat16))
            data, scale = (torch.full_like(part, 0xEE, device=DEVICE) for part in (here.data, here.scale))
            mxfp8_triton.quantize(words.to(DEVICE), data, scale, rounding, is_swizzled=is_swizzled)
            assert torch.equal(data.cpu(), here.data), f"{rounding}, swizzled {is_swizzled}: data differs"
            assert torch.equal(scale.cpu(), here.scale), f"{rounding}, swizzled {is_swizzled}: scales differ"

    large = (torch.randn(8192, 16384, device=DEVICE) * 0.02).to(torch.bfloat16)
    other = torch.empty_like(large)
    copied = 4 * large.numel() / timed(lambda: other.copy_(large)) / 1e9  # read and written
    figures: dict[str, object] = {"copy GB/s": copied}
    for is_swizzled in (False, True):
        room = MXFP8Buffer.empty((8192, 16384), is_swizzled=is_swizzled, device=DEVICE)
        arguments = large.view(torch.int16), room.data, room.scale, Rounding.RCEIL
        step = functools.partial(mxfp8_triton.quantize, *arguments, is_swizzled=is_swizzled)
        kind = "swizzled" if is_swizzled else "row-major"
        # two bytes read and one written, and a scale for 32
        moved = large.numel() * (3 + 1 / 32) / timed(step) / 1e9
        figures[f"{kind} GB/s"], figures[f"{kind}, of copy"] = moved, moved / copied

    buffer = MXFP8Buffer.empty((512, 512), device=DEVICE)
    transform = MXFP8ReshardTransform({"w"}, {"w": buffer})
    x = torch.randn(16, 512, device=DEVICE)
    pointers = buffer.data.data_ptr(), buffer.scale.data_ptr()

    def run() -> torch.Tensor:
        exponent = buffer.scale.to(torch.float32) - 127
        elements = buffer.data.view(torch.float8_e4m3fn).to(torch.float32).view(512, 16, 32)
        return x @ (elements * torch.exp2(exponent)[..., None]).view(512, 512).t()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = run()
    for version in range(3):
        weights = (torch.randn(512, 512, device=DEVICE) * 0.02).to(torch.bfloat16)
        halves = [(slice(0, 512), slice(0, 250)), (slice(0, 512), slice(250, 512))]  # which cut a block
        transform.begin_recv("w", halves)
        for half in halves:
            (arrived,) = transform.prepare_recv("w", half)
            arrived.copy_(weights[half])
            transform.finalize_recv("w", half, [arrived])
        transform.finish_recv("w")
        captured.replay()
        torch.cuda.synchronize()
        expected = MXFP8Buffer.empty((512, 512))
        expected.quantize(weights.cpu())
        assert torch.equal(buffer.data.cpu(), expected.data), f"version {version}: data differs"
        assert torch.equal(buffer.scale.cpu(), expected.scale), f"version {version}: scales differ"
        assert torch.equal(y, run()), f"version {version}: the replay differs from eager"
    assert pointers == (buffer.data.data_ptr(), buffer.scale.data_ptr())
    return Outcome(figures)


def service(seconds: float) -> Outcome:
    need(
        pytest="pytest",
        pytest_timeout="pytest-timeout",
        zmq="pyzmq",
        msgpack="msgpack",
        msgspec="msgspec",
        xxhash="xxhash",
    )
    need(click="click", rich="rich")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory(prefix="refitd-gpu-check") as folder:
        Path(folder, "refitd_cli").symlink_to(root / "cli")  # which is installed under this name
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", str(root))])
        ran = subprocess.run(
            command,
            cwd=root,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=seconds * 0.9,
            check=False,
        )
    said = (ran.stdout.strip().splitlines() or ["pytest said nothing"])[-1]
    if ran.returncode:
        sys.stderr.write(ran.stdout[-8000:] + ran.stderr[-2000:])
        return Outcome(why=said, state="failed")
    return Outcome(why=said)


def daemon_check(name: str) -> Callable[[float], Outcome]:
    """A check that starts daemons of its own."""

    def check(seconds: float) -> Outcome:
        need(zmq="pyzmq", msgpack="msgpack", msgspec="msgspec", xxhash="xxhash", click="click", rich="rich")
        sys.path.insert(0, str(Path(__file__).parent))
        import service_checks

        return Outcome(service_checks.CHECKS[name](seconds))

    return check


# --- several ranks ----------------------------------------------------------------------------------------------


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
                raise DeadlineExceeded(f"nobody left {key!r} within {timeout:.1f} s")
            time.sleep(0.005)
        return target.read_bytes()


def epoch_of(rank: int, size: int, folder: str, seconds: float) -> Epoch:
    labels = tuple(f"rank {i}" for i in range(size))
    return Epoch("check", rank, labels, "127.0.0.1", 256 * MIB, Folder(Path(folder)), seconds, str(DEVICE))


def exchange(made: Any, seconds: float) -> dict[str, object]:
    """Have all ranks send each other, and themselves, tensors of many kinds; return figures."""
    me, size = made.peers.index, len(made.peers)
    torch.manual_seed(1)
    shapes = [(), (3,), (0, 4), (129, 65), (1024, 1024), (1 << 20,), (3, 5 << 20)]
    values = [
        [
            torch.randint(0, 100, shape, device=DEVICE, dtype=dtype)
            for shape in shapes
            for dtype in (torch.int16, torch.int64)
        ]
        for _ in range(size)
    ]

    def as_sent(value: torch.Tensor, task: int) -> torch.Tensor:
        return value.t() if value.dim() == 2 and task % 3 == 0 else value  # some do not lie together

    for verify in (True, False):
        landed = []
        for other in range(size):
            for task, value in enumerate(values[me]):
                made.send(task, as_sent(value, task), other)
            for task, value in enumerate(values[other]):
                expected = as_sent(value, task)
                room = torch.zeros(*expected.shape, 1 + task % 2, device=DEVICE, dtype=value.dtype)[..., 0]
                made.receive(task, room, other)
                landed.append((room, expected))
        result = made.run(seconds, verify=verify)
        for number, (room, expected) in enumerate(landed):
            assert torch.equal(room, expected), f"tensor {number} differs"
    if size == 1:
        return {"tensors": len(landed), "local MiB": result.local_bytes / MIB}
    big = torch.randint(0, 100, (64 * MIB,), device=DEVICE, dtype=torch.int64)
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
    """Start this file once a rank; return what each found, raising what stopped the first that failed."""
    with tempfile.TemporaryDirectory(prefix="refitd-gpu-check") as folder:
        children = [
            subprocess.Popen(
                [sys.executable, __file__, name, str(seconds), str(rank), str(size), folder],
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
    need(xxhash="xxhash")
    library, version = nccl_library()
    (found,) = ranks("nccl-1", 1, seconds * 0.9, [nccl_environment(library)])
    return Outcome({"NCCL": ".".join(map(str, version)), **found["figures"]})


def nccl_two(seconds: float) -> Outcome:
    need(xxhash="xxhash")
    library, version = nccl_library()
    shown = ".".join(map(str, version))
    base = nccl_environment(library)
    if version >= (2, 30, 0):
        environments = [{**base, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}] * 2
        found = ranks("nccl-2", 2, seconds * 0.9, environments)
        return Outcome({"NCCL": shown, **found[0]["figures"]})
    # older ones refuse two ranks on one GPU of one host; of two hosts they do not, and then use sockets
    try:
        found = ranks("nccl-2", 2, seconds * 0.7, [{**base, "NCCL_HOSTID": f"refitd-{rank}"} for rank in range(2)])
    except RuntimeError as exc:
        raise Skip(
            f"NCCL {shown} does not run two ranks on one GPU here ({exc}); carry nvidia-nccl-cu13>=2.30 (--help)"
        ) from exc
    return Outcome(
        {"NCCL": shown, **found[0]["figures"]},
        "as if on two hosts (NCCL_HOSTID): over sockets, so the rate says nothing",
    )


def nvshmem_two(seconds: float) -> Outcome:
    major = (torch.version.cuda or "13").partition(".")[0]
    need(xxhash="xxhash", nvshmem=f"nvshmem4py-cu{major}")
    found = ranks("nvshmem-2", 2, seconds * 0.9, [{"NVSHMEM_REMOTE_TRANSPORT": "none"}] * 2)
    return Outcome(found[0]["figures"])


def rank_main(name: str, seconds: float, rank: int, size: int, folder: str) -> Outcome:
    """Be one rank of a check with several."""
    if name.startswith("nccl"):
        from refitd.copy_services.nccl import join as joined
    else:
        from refitd.copy_services.nvshmem import join as joined  # type: ignore[assignment]
    made = joined(epoch_of(rank, size, folder, seconds / 2))
    try:
        return Outcome(exchange(made, seconds / 4))
    finally:
        made.close()


CHECKS: dict[str, Callable[[float], Outcome]] = {
    "arena": arena,
    "digest": digest,
    "swap": swap,
    "copies": copies,
    "graph": graph,
    "mxfp8": mxfp8,
    "nccl-1": nccl_one,
    "nccl-2": nccl_two,
    "nvshmem-2": nvshmem_two,
    "service": service,
    "daemon-arenas": daemon_check("daemon-arenas"),
    "daemon-mxfp8": daemon_check("daemon-mxfp8"),
    "daemon-crossing": daemon_check("daemon-crossing"),
}


def main() -> int:
    name, seconds, *more = sys.argv[1:]
    try:
        if name == "arena" and more:
            arena_child(int(more[0]), int(more[1]))
            return 0
        if not torch.cuda.is_available():
            raise Skip("torch finds no usable GPU: it or the driver is too old, or CUDA_VISIBLE_DEVICES hides it")
        torch.cuda.set_device(DEVICE)
        if more:
            found = rank_main(name, float(seconds), int(more[0]), int(more[1]), more[2])
        else:
            found = CHECKS[name](float(seconds))
    except Skip as exc:
        found = Outcome(why=str(exc), state="skipped")
    except Exception as exc:
        traceback.print_exc()
        kind = "" if isinstance(exc, RefitdError) else f"{type(exc).__name__}: "
        found = Outcome(why=f"{kind}{(str(exc).splitlines() or [''])[0]}"[:400], state="failed")
    sys.stderr.flush()
    print(json.dumps({"state": found.state, "why": found.why, "figures": found.figures}), flush=True)
    # without the destructors of communicators and contexts, some of which wait for others
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
