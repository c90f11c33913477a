"""Put each GPU defect that the project once had back into a copy of the tree, and record which tests notice.

usage: python -m tests.mutants.defects [--write] [NUMBER ...]    (4, 5 and 8 need triton)

They are numbered as in the issue that listed them. The page of `tests.mutants.device` has their table.
"""

from __future__ import annotations

import sys

from tests.mutants.device import ARENAS, ENGINES, FLIPS, NCCL, NIXL, PAGE, STREAMS, Mutant, outcome

RULES, FORMAT = (f"tests/unit/test_{name}.py" for name in ("fake_driver", "mxfp8_format"))
KERNELS = "tests/unit/test_kernels.py::test_every_variant_compiles_without_spills_and_reads_in_wide_loads[90-quantize]"
CHECKS, QUANTIZE = "tests/unit/test_gpu_check.py", "mxfp8/kernels.py"
FAKE, CHECK = "../tests/support/fake_cuda.c", "../tests/gpu"

DEFECTS = [
    Mutant("1 an epoch has no device", "worker/exchanges.py", "            device=device,\n", "", (NCCL,)),
    Mutant(
        "2 one worker has the rows of all GPUs",
        "daemon/jobs.py",
        "        found = self._homes.get(device)\n",
        "        found = 0\n",
        ("tests/unit/test_gpu_copies.py", "tests/cluster/device_arenas/test_lanes.py"),
    ),
    Mutant(
        "2 an arena is mapped for one GPU only",
        ARENAS,
        "            self._set_access([*self._access, other])",
        "            pass",
        (STREAMS,),
    ),
    Mutant(
        "3 no GPU memory reaches a card",
        "copy_services/nixl_memory.py",
        'if device == "cpu" or not nbytes:',
        "if True:",
        (NIXL,),
    ),
    Mutant(
        "4 the kernel has a type that triton refuses",
        QUANTIZE,
        "    words,\n    data,",
        "    words: Any,\n    data,",
        (KERNELS,),
    ),
    Mutant("5 every tensor is read without vectors", QUANTIZE, "VECTORS = (8, 2, 1)", "VECTORS = (1,)", (FORMAT,)),
    Mutant("5 no alignment is known to the compiler", QUANTIZE, ", 2 * VECTOR)", ", 1)", (KERNELS,)),
    Mutant(
        "6 NCCL's store is dropped",
        "copy_services/nccl.py",
        "        service._store = store",
        "        pass",
        ("tests/unit/test_mailbox_store.py",),
    ),
    Mutant(
        "6 the store has no `clone`",
        "copy_services/peers.py",
        "    def clone(self)",
        "    def cloned(self)",
        ("tests/unit/test_mailbox_store.py",),
    ),
    Mutant(
        "7 main memory is not pinned",
        ENGINES,
        "                arena.pin = Pin(self.gpu, arena)",
        "                return False",
        (STREAMS,),
    ),
    Mutant(
        "7 one window at a time",
        ENGINES,
        "        if (stream, slot) not in self._windows:",
        "        slot = 0\n        if (stream, slot) not in self._windows:",
        (STREAMS,),
    ),
    Mutant(
        "8 digests are tensor operations",
        "copy_services/digests.py",
        '    return buffer.is_cuda and importlib.util.find_spec("triton") is not None',
        "    return False",
        ("tests/unit/test_digests.py",),
    ),
    Mutant("9 arenas are not made for cards", "buffers/cuda_driver.py", "self._can(_HAS_RDMA)", "False", (FLIPS,)),
    Mutant("9 arenas have no fabric handles", "buffers/cuda_driver.py", "self._can(_HAS_FABRIC)", "False", (FLIPS,)),
    Mutant(
        "10 a failed flip is not undone",
        ARENAS,
        "for wanted in (after, before, after, before):",
        "for wanted in (after,):",
        (FLIPS,),
    ),
    Mutant(
        "11 a finalizer synchronises",
        ARENAS,
        "        if self._mapping is not None:\n            _dropped.append(self._mapping)",
        "        self.close()",
        (FLIPS,),
    ),
    Mutant(
        "11 a flip runs into a capture", ARENAS, "if context.is_capturing(torch_streams(gpu)):", "if False:", (FLIPS,)
    ),
    *(
        Mutant(f"12 the fake driver allows {what}", FAKE, old, new, (RULES,))
        for what, old, new in (
            ("a map over a mapping", "    if (overlapping(mapped, address, size)) return INVALID_VALUE;\n", ""),
            ("an unmap during work", "    if (is_in_use(address, size)) return INVALID_VALUE;\n", ""),
            (
                "a free while mapped",
                " || overlapping(mapped, address, size)) return INVALID_VALUE;",
                ") return INVALID_VALUE;",
            ),
            (
                "a partial unmap",
                "    if (!range || range->size != size) return INVALID_VALUE;\n    if (is_in",
                "    if (is_in",
            ),
        )
    ),
    Mutant(
        "13 the script needs lazy_loader",
        f"{CHECK}/check.py",
        "import argparse\n",
        "import argparse\nimport lazy_loader\n",
        (CHECKS, "--override-ini=addopts="),
    ),
    Mutant(
        "13 the record is written at the end",
        f"{CHECK}/record.py",
        "        self.results.append(result)\n        self.write()",
        "        self.results.append(result)\n        if len(self.results) == len(self.whats):\n"
        "            self.write()",
        (CHECKS,),
    ),
    Mutant("13 small flips only", f"{CHECK}/check.py", '    "flip-16": "the same with 16 GiB",\n', "", (CHECKS,)),
    Mutant(
        "13 a hang ends the script",
        f"{CHECK}/check.py",
        "with contextlib.suppress(subprocess.TimeoutExpired):\n                status",
        "if True:\n                status",
        (CHECKS,),
    ),
]


def main() -> int:
    """Print a line for each defect; return 1 if one was not found."""
    wanted = {each for each in sys.argv[1:] if each.isdecimal()}
    lines = []
    for mutant in DEFECTS:
        if not wanted or mutant.name.split()[0] in wanted:
            lines.append(f"| {mutant.name} | {outcome(mutant)} |")
            print(lines[-1], flush=True)
    if "--write" in sys.argv:
        before, mark, after = PAGE.read_text().partition("| defect put back | outcome |\n| --- | --- |\n")
        rest = after.partition("\n\n")[2]
        PAGE.write_text(before + mark + "\n".join(lines) + ("\n\n" + rest if rest else "\n"))
    return int(any("**" in line or "any more" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
