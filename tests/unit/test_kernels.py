"""The kernels for GPUs: every variant compiles to code that is fit for its purpose. No GPU takes part."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from benchmarks import kernels as bench
from tests.support import programs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: pip install --no-deps triton"
)

STORES = {"quantize": {8, 64}, "quantize + digest": {8, 64}, "copy": {128}}  # scales have one byte each


@pytest.mark.parametrize("kernel", ["quantize", "quantize + digest", "digest", "copy"])
@pytest.mark.parametrize("capability", bench.CAPABILITIES)
def test_every_variant_compiles_without_spills_and_reads_in_wide_loads(
    kernel: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = [(case, bench.compiled(case, capability)) for case in bench.variants() if case.kernel == kernel]
    assert found
    for case, made in found:
        name = f"{case.kernel}, {case.variant}, sm_{capability}: {made}"
        assert not made.spilled_bytes and not made.local_bytes, f"{name} spills"
        assert not made.divides_64_bits, f"{name} divides in 64 bits"
        assert made.registers <= 128, f"{name} leaves room for fewer than 4 programs per multiprocessor"
        if case.is_aligned:
            assert made.body_loads == (128,), f"{name} has a body with narrow loads"
            assert min(made.loads) > 16, f"{name} has narrow loads"
            writes = {
                "quantize": {8, 64},
                "quantize + digest": {8, 64},
                "copy": set() if "compares" in case.variant else {128},
                "digest": set(),
            }
            assert set(made.stores) == writes[case.kernel], f"{name} has narrow stores"


DIGESTS = """
import random, torch
from refitd.copy_services import digest_kernel, digests

WORDS = 64
digests.BLOCK_WORDS, digests.BLOCK_BYTES = WORDS, 4 * WORDS
digest_kernel.TILE, digest_kernel.BLOCKS_PER_PROGRAM = 16, 2
keys, rng = digests.make_keys(WORDS), random.Random(0)
data = torch.randint(0, 256, (9 * 4 * WORDS,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))

def sums(parts, has_kernel):
    digests._has_kernel = lambda buffer: has_kernel
    made = digests.DeviceDigest(keys)
    for part in parts:
        made.update(part)
    return made.sums()

for case in range(80):
    parts = [data[at : at + rng.choice([0, 1, 5, 64, 300, 1500])] for at in rng.choices(range(70), k=3)]
    assert torch.equal(sums(parts, True), sums(parts, False)), [(len(part), part.storage_offset()) for part in parts]
print("same sums")
"""


def test_the_digest_kernel_gives_the_sums_of_tensor_operations_in_the_interpreter() -> None:
    ran = programs.run([sys.executable, "-c", DIGESTS], env={**os.environ, "TRITON_INTERPRET": "1"})
    assert ran.stdout.strip() == "same sums", ran.stderr


COPIES = """
import random, numpy as np, torch
from refitd.copy_services import boxes, copy_kernel
from tests.unit.test_gpu_copies import ROOM, random_tensor
from tests.support.places import copies_of

boxes.UNITS.update({16: 8, 4: 32, 2: 32, 1: 64})
boxes._LEAST_BODY = 2
kinds = set()

def run(tables, differing=None):
    for table in tables:
        kinds.add(table.kind)
        half = len(table.tiles) // 2
        for first, count in ((0, half), (half, len(table.tiles) - half)):
            if count:
                parts = torch.from_numpy(table.entries), torch.from_numpy(table.tiles)
                copy_kernel.launch(table.kind, *parts, first, count, differing)

def nbytes(tables):
    return sum(int(table.tile_bytes.sum()) for table in tables)

for case in range(125, 149):
    rng = random.Random(case)
    boxes._MOST_UNITS = 200 if case % 2 else 1 << 30  # cut as boxes of many gigabytes are
    es = rng.choice([1, 2, 4, 8, 16])
    shape = tuple(rng.choice([1, 2, 3, 8, 5, 40]) for _ in range(rng.randrange(6)))
    while np.prod(shape, dtype=int) * es > 1500:
        shape = shape[1:]
    ends = [random_tensor(rng, arena, shape, es) for arena in (1, 2)]
    here, there = rng.randrange(16), rng.choice([0, 0, 0, 2, 3, 8])
    source = torch.from_numpy(np.random.default_rng(case).integers(0, 256, ROOM + 64, dtype=np.uint8))
    target = torch.zeros(ROOM + 64, dtype=torch.uint8)
    expected = target.numpy().copy()
    places = source.data_ptr() + here, target.data_ptr() + here + there
    views = [(source.numpy(), here, ends[0]), (expected, here + there, ends[1])]
    read, written = (np.ndarray(shape, f"V{es}", a.data, at + end.offset, end.strides) for a, at, end in views)
    written[...] = read
    rows = boxes.rows(copies_of([(*ends, es)] * 2), {1: ROOM, 2: ROOM}, {2})
    all_boxes = [boxes.box(row).moved(*places) for row in rows]
    tables = boxes.tables(all_boxes)
    assert nbytes(tables) == sum(box.nbytes for box in all_boxes) == 2 * np.prod(shape, dtype=int) * es
    run(boxes.tables(all_boxes[:1]))
    assert np.array_equal(target.numpy(), expected), case
    differing = torch.zeros(2, dtype=torch.int32)
    run(tables, differing)
    assert differing.tolist() == [0, 0], case
    at = rng.choice(np.flatnonzero(expected)) if expected.any() else None
    if at is not None:
        target[int(at)] ^= 1
        run(boxes.tables(all_boxes[1:]), differing)
        assert differing.tolist() == [0, 1], case
assert len(kinds) == 10, kinds
print("same bytes")
"""


def test_the_copy_kernel_copies_every_byte_and_finds_a_wrong_one_in_the_interpreter() -> None:
    ran = programs.run([sys.executable, "-c", COPIES], env={**os.environ, "TRITON_INTERPRET": "1"})
    assert ran.stdout.strip() == "same bytes", ran.stderr


JOB = """
import contextlib, torch
from types import SimpleNamespace
from refitd.addressing.places import LocalTensor
from refitd.copy_services import DigestMismatch, boxes, copy_kernel, cuda
from tests.support.places import LateWriter, copies_of

class Stream:
    device = torch.device("cpu")
    work = lambda self, deadline, subject: contextlib.nullcontext()
    settle = lambda self, deadline, subject: None
    mark = lambda self: SimpleNamespace(query=lambda: True)

cuda.PROGRESS_BYTES = 1 << 16
size = 1 << 18
memory = {arena: torch.randint(0, 256, (size,), dtype=torch.uint8) for arena in (1, 2)}
arenas = {n: SimpleNamespace(address=m.data_ptr()) for n, m in memory.items()}
places = [[LocalTensor(arena, at, (25000,), (4,)) for arena in (1, 2)] for at in (0, 100000)]
found = list(boxes.rows(copies_of([(*ends, 4) for ends in places]), {1: size, 2: size}, {2}))
job = cuda._KernelJob(cuda.Path.KERNEL, found, arenas, Stream())
told = []
assert job.run(verify=True, on_progress=told.append).bytes == 200000
assert len(told) >= 3 and told[-1] == 200000 and told == sorted(told), told
assert torch.equal(memory[1][:200000], memory[2][:200000])
launches, launch = [], copy_kernel.launch
copy_kernel.launch = lambda *given: (launches.append(given[3]), launch(*given))
writer = LateWriter(1, lambda begin, end: (memory[1][begin:end].add_(1), len(launches))[1])
assert job.follow(writer)
job.run(verify=False, on_progress=told.append)
assert list(writer.waits) == [(0, 100000), (100000, 200000)] and [*writer.waits.values()][1] > 0, writer.waits
assert torch.equal(memory[1][:200000], memory[2][:200000])
job.follow(None)

def spoiled(kind, entries, tiles, first, count, differing):
    if differing is not None:
        memory[2][150000] = memory[1][150000] + 1
    launch(kind, entries, tiles, first, count, differing)

copy_kernel.launch = spoiled
try:
    job.run(verify=True, on_progress=told.append)
except DigestMismatch as exc:
    print("row", exc.copy)
"""


def test_a_job_of_the_copy_kernel_reports_progress_and_names_the_row_that_differs() -> None:
    ran = programs.run([sys.executable, "-c", JOB], env={**os.environ, "TRITON_INTERPRET": "1"})
    assert ran.stdout.strip() == "row 1", ran.stderr


def test_widths_of_access_are_read_from_ptx() -> None:
    ptx = "\t@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];\n\tld.global.b16 { %rs1 }, [ %rd2 + 0 ];\n"
    assert [(guard.strip(), *rest) for guard, *rest in bench._ACCESS.findall(ptx)] == [
        ("@%p1", "ld", "4", "32"),
        ("", "ld", "", "16"),
    ]
