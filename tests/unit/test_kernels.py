"""The kernels for GPUs: every variant compiles to code that is fit for its purpose. No GPU takes part."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks import kernels as bench

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
            assert max(made.loads) == 128, f"{name} has no loads of 16 bytes"
            assert min(made.loads) > 16, f"{name} has narrow loads"
            assert max(made.stores) >= 64, f"{name} has no wide stores"


def test_widths_of_access_are_read_from_ptx() -> None:
    ptx = "\t@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];\n\tld.global.b16 { %rs1 }, [ %rd2 + 0 ];\n"
    assert [(way, count, bits) for way, count, bits in bench._ACCESS.findall(ptx)] == [
        ("ld", "4", "32"),
        ("ld", "", "16"),
    ]
