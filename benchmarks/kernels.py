"""Compile every variant of the GPU kernels, which needs no GPU, and record the resources of each.

A variant's registers, spills and local memory come from `ptxas -v`, and its widths of access from its PTX.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine

CAPABILITIES = (80, 90, 100, 120)
_ACCESS = re.compile(r"^\s*(@!?%?\w+\s+)?(ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.[bsuf](\d+)\s", re.MULTILINE)
_DIVISION = re.compile(r"\b(?:div|rem)\.[su]64\b")


@dataclass(frozen=True, slots=True)
class Case:
    """A variant of a kernel, with all that triton needs to compile it.

    `parameter_loads` are the widths of loads that read its parameters from device memory, once per program.
    """

    kernel: str
    variant: str
    is_aligned: bool
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    parameter_loads: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Compiled:
    """The resources of a compiled variant; widths of access in bits, each once.

    `body_loads` are the loads without a predicate, or all loads if each has one: the tail of a tensor needs predicates.
    Loads of parameters are left out of both.
    """

    kernel: str
    variant: str
    capability: int
    registers: int
    spilled_bytes: int
    local_bytes: int
    body_loads: tuple[int, ...]
    loads: tuple[int, ...]
    stores: tuple[int, ...]
    divides_64_bits: bool


def run(json_output: bool, quick: bool = False, cases: machine.Cases = machine.EVERY) -> dict[str, Any]:
    """Compile all variants and return their resources."""
    import triton

    found = []
    for case in (one for one in variants() if f"{one.kernel}, {one.variant}" in cases):
        for capability in CAPABILITIES[:1] if quick else CAPABILITIES:
            print(f"  {case.kernel}, {case.variant}, sm_{capability}", file=sys.stderr, flush=True)
            found.append(asdict(compiled(case, capability)))
    results = {"machine": machine.describe(), "triton": triton.__version__, "variants": found}
    machine.record("kernels", results, markdown)
    if not json_output:
        print(markdown(results))
    return results


def variants() -> Iterator[Case]:
    """Yield every variant of every kernel."""
    from refitd.copy_services import copy_kernel, digest_kernel, digests
    from refitd.mxfp8 import kernels

    for variant in kernels.variants():
        called = "quantize + digest" if variant.has_sums else "quantize"
        name = f"{variant.rounding}, vectors of {variant.vector}, {64 if variant.is_wide else 32}-bit offsets"
        arguments = variant.signature, variant.constants(digests.BLOCK_WORDS)
        keys = (64,) if variant.has_sums else ()  # those of the scales
        yield Case(called, name, variant.vector == 8, kernels.quantize_kernel, *arguments, parameter_loads=keys)
    for placed in digest_kernel.variants():
        ends = "aligned" if placed.is_aligned else "words aligned" if placed.is_whole else "any address"
        signature, constants = placed.signature(digests.BLOCK_WORDS), placed.constants(digests.BLOCK_WORDS)
        yield Case("digest", ends, placed.is_aligned, digest_kernel.digest_kernel, signature, constants)
    for way in copy_kernel.variants():
        kind, does = way.kind, "compares" if way.is_check else "copies"
        shape = f"{'contiguous' if kind.is_flat else 'strided'}{', skewed' if kind.is_skewed else ''}"
        name = f"{does}, units of {kind.unit}, {shape}"
        yield Case(
            *("copy", name, kind.unit == 16, copy_kernel.copy_kernel, way.signature, way.constants),
            parameter_loads=(32, 64),
        )


def compiled(case: Case, capability: int) -> Compiled:
    """Compile a variant for a compute capability (90 is 9.0) and return its resources.

    Raises:
        triton.compiler.errors.CompilationError: triton refuses the kernel.
        ValueError: the output of ptxas has another form than expected.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(case.function, case.signature, case.constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    said = _assembled(ptx, capability)
    found = [(guard, way, int(count or 1) * int(bits)) for guard, way, count, bits in _ACCESS.findall(ptx)]
    found = [access for access in found if access[0] or access[2] not in case.parameter_loads]
    loads = {width for _, way, width in found if way == "ld"}
    body = {width for guard, way, width in found if way == "ld" and not guard} or loads
    stores = {width for _, way, width in found if way == "st"}
    return Compiled(
        case.kernel,
        case.variant,
        capability,
        _number(said, r"Used (\d+) registers"),
        _number(said, r"(\d+) bytes spill stores") + _number(said, r"(\d+) bytes spill loads"),
        _number(said, r"(\d+) bytes stack frame"),
        tuple(sorted(body)),
        tuple(sorted(loads)),
        tuple(sorted(stores)),
        bool(_DIVISION.search(ptx)),
    )


def _assembled(ptx: str, capability: int) -> str:
    """Return the report of triton's own ptxas on some PTX."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    if target is None:
        raise ValueError("the PTX names no target; see triton's output")
    with tempfile.TemporaryDirectory() as folder:
        read, written = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        read.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={target[1]}", str(read), "-o", str(written)]
        ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return ran.stdout + ran.stderr


def _number(said: str, pattern: str) -> int:
    found = re.search(pattern, said)
    if found is None:
        raise ValueError(f"ptxas -v printed no {pattern!r}: {said!r}; adapt benchmarks/kernels.py to its version")
    return int(found[1])


def markdown(results: dict[str, Any]) -> str:
    """Return the file for benchmarks/results."""
    lines = [
        "# GPU kernels, as compiled",
        "",
        f"Compiled by Triton {results['triton']} and its ptxas, without a GPU. No kernel has run on a GPU, so this",
        "page has no speeds. Widths are those of all accesses to device memory in the PTX, in bits. An aligned variant",
        "may use narrow accesses for the tail of a tensor, and for scales, which have one byte each.",
        "Written by `scripts/bench kernels`.",
        "",
        "| kernel | variant | sm | registers | spilled bytes | local bytes | loads of the body | all loads | stores |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["variants"]:
        body, loads, stores = (", ".join(map(str, row[kind])) for kind in ("body_loads", "loads", "stores"))
        lines.append(
            f"| {row['kernel']} | {row['variant']} | {row['capability']} | {row['registers']} | {row['spilled_bytes']} "
            f"| {row['local_bytes']} | {body} | {loads} | {stores} |"
        )
    return "\n".join(lines) + "\n"
