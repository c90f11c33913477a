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


@pytest.mark.parametrize("capability", bench.CAPABILITIES)
def test_every_variant_compiles_without_spills_and_reads_in_wide_loads(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = [(case, bench.compiled(case, capability)) for case in bench.cases()]
    assert found
    for case, made in found:
        name = f"{case.kernel}, {case.variant}, sm_{capability}: {made}"
        assert not made.spilled_bytes and not made.local_bytes, f"{name} spills"
        assert not made.divides_64_bits, f"{name} divides in 64 bits"
        assert made.registers <= 128, f"{name} leaves room for fewer than 4 programs per multiprocessor"
        if case.is_aligned:
            assert made.body_loads == (128,), f"{name} has a body with narrow loads"
            assert min(made.loads) > 16, f"{name} has narrow loads"
            assert case.kernel == "digest" or max(made.stores) >= 64, f"{name} has no wide stores"


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


def test_widths_of_access_are_read_from_ptx() -> None:
    ptx = "\t@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];\n\tld.global.b16 { %rs1 }, [ %rd2 + 0 ];\n"
    assert [(guard.strip(), *rest) for guard, *rest in bench._ACCESS.findall(ptx)] == [
        ("@%p1", "ld", "4", "32"),
        ("", "ld", "", "16"),
    ]
