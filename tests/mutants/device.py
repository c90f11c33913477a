"""Remove each wait, event and driver call of the GPU code in turn, and record which tests notice.

usage: python -m tests.mutants.device [--write] [NAME ...]    (--write: benchmarks/results/device-mutants.md)

Each mutant is one replacement of text in a copy of the tree; the copy is removed at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "device-mutants.md"
LATE, FLIPS, STREAMS = (f"tests/unit/test_{name}.py" for name in ("late_work", "device_flips", "copy_engines"))
_BETWEEN = "tests/cluster/device_arenas/test_between_gpus.py::"
_BETWEEN += "test_weights_cross_between_gpus_and_from_main_memory_in_the_lanes[{}]"
NCCL, NVSHMEM, NIXL = (_BETWEEN.format(service) for service in ("nccl", "nvshmem", "nixl"))
WAITS, ARENAS = "copy_services/waits.py", "buffers/cuda.py"
ENGINES, DRIVER, HOST = "copy_services/copy_engines.py", "buffers/cuda_driver.py", "buffers/arena.py"


class Mutant(NamedTuple):
    """`old` becomes `new` in a file of refitd, everywhere; `tests` should fail. `why`: why none can."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str = ""


MUTANTS = [
    Mutant(
        "a stream waits for the caller's",
        WAITS,
        "self._stream.wait_stream(torch.cuda.current_stream())",
        "pass",
        (LATE,),
    ),
    Mutant(
        "work is on the stream",
        WAITS,
        "with torch.cuda.stream(self._stream):\n                yield",
        "with self.queue():\n                pass\n            if True:\n                yield",
        (LATE, NVSHMEM),
    ),
    Mutant("a block settles at its end", WAITS, "                self.settle(deadline, subject)\n", "", (LATE,)),
    Mutant("an event is recorded", WAITS, "        event.record(self._stream)\n", "", (LATE,)),
    Mutant("settling polls the event", WAITS, "poll(self.mark().query, deadline,", "str(", (LATE,)),
    Mutant(
        "NCCL works on its stream",
        "copy_services/nccl.py",
        "return self._stream.work(deadline, self.peers.label(self.peers.index))",
        "return nullcontext()",
        (NCCL,),
        "a worker runs its job on a stream of its own already (on_streams)",
    ),
    Mutant(
        "NCCL's call is over",
        "copy_services/nccl.py",
        "                poll(partial(self._is_over, issued), move.deadline, subject)\n",
        "",
        (NCCL,),
    ),
    Mutant(
        "NCCL's call is waited for on the stream",
        "copy_services/nccl.py",
        "            issued.wait()\n",
        "            pass\n",
        (NCCL,),
        "the host has seen the end of the call already; the wait only reports its failure",
    ),
    Mutant(
        "NVSHMEM works on its stream",
        "copy_services/nvshmem.py",
        "return self._stream.work(deadline, self.peers.label(self.peers.index))",
        "return nullcontext()",
        (NVSHMEM,),
    ),
    Mutant(
        "NVSHMEM's first words are settled",
        "copy_services/nvshmem.py",
        'with self._stream.work(Deadline.after(_WAIT_S), f"{self.peers.label(self.peers.index)}: first words"):',
        "with self._stream.queue():",
        (NVSHMEM,),
    ),
    Mutant(
        "NVSHMEM waits for an arrival",
        "copy_services/nvshmem.py",
        "    return word == number + 1\n",
        "    return True\n",
        (NVSHMEM,),
    ),
    Mutant(
        "NVSHMEM waits for a free slot",
        "copy_services/nvshmem.py",
        "    return word >= number + 1 - WINDOW\n",
        "    return True\n",
        (NVSHMEM, "tests/unit/test_group_calls.py"),
    ),
    Mutant(
        "a copy for NIXL is settled",
        "copy_services/nixl.py",
        "with self._stream.work(Deadline.after(_COPY_S), self.label(self.index)):",
        "with self._stream.queue():",
        (NIXL,),
    ),
    Mutant("a read of NIXL is done", "copy_services/nixl.py", 'if state == "DONE":', 'if state != "ERR":', (NIXL,)),
    Mutant(
        "an arena is registered again after a flip",
        "worker/main.py",
        "                self._exchanges.let_go(arena, other)\n",
        "",
        ("tests/cluster/device_arenas/test_registered.py",),
    ),
    Mutant(
        "a peer is told of main memory once",
        "copy_services/nixl_memory.py",
        "            number = self._gpu if self._is_gpu else self._count",
        "            number = self._gpu",
        ("tests/cluster/device_arenas/test_registered.py",),
        "such an arena then goes by the slab, which is only slower; no test reads from a replica that has flipped",
    ),
    Mutant(
        "jobs on streams settle before they check",
        "copy_services/cuda.py",
        "            self._stream.settle(deadline, subject)\n            if wrong",
        "            if wrong",
        (LATE,),
        "the check reads its result, which waits, and the block settles",
    ),
    Mutant(
        "the context is synchronised before a flip",
        ARENAS,
        "        context.synchronize()\n",
        "        pass\n",
        (FLIPS, LATE),
    ),
    Mutant(
        "captures are looked for",
        ARENAS,
        "    if context.is_capturing(torch_streams(gpu)):\n",
        "    if False:\n",
        (FLIPS,),
    ),
    Mutant("access is set", ARENAS, 'self._driver.call("cuMemSetAccess", ', "str(", (FLIPS,)),
]

MUTANTS += [
    Mutant(
        "`cuStreamWaitEvent`",
        ENGINES,
        "                gpu.wait(self.streams[stream], after)",
        "                pass",
        (STREAMS,),
    ),
    Mutant(
        "`cuEventRecord` after a chunk",
        ENGINES,
        "            gpu.record(self._events[stream][slot], self.streams[stream])",
        "            pass",
        (STREAMS,),
    ),
    Mutant(
        "the wait for a chunk's copies",
        ENGINES,
        "        last.await_event(last.event(_COPIES, slot), deadline)\n",
        "",
        (STREAMS,),
    ),
    Mutant(
        "the wait for a chunk's bytes read back",
        ENGINES,
        "            engine.await_event(engine.event(_READS, slot), deadline)",
        "            pass",
        (STREAMS,),
    ),
    Mutant(
        "the wait for queued copies after an error",
        ENGINES,
        "                engine.settle(deadline)  #",
        "                pass  #",
        (STREAMS,),
    ),
    Mutant(
        "`cuEventRecord` in the wait after an error",
        ENGINES,
        "                self.gpu.record(self._events[stream][0], handle)",
        "                pass",
        (STREAMS,),
    ),
    Mutant(
        "the current context of `queue`",
        ENGINES,
        "        gpu = self.gpu\n        with gpu.context.current():",
        "        gpu = self.gpu\n        if True:",
        (STREAMS,),
    ),
    Mutant(
        "the second of two windows",
        ENGINES,
        "        if (stream, slot) not in self._windows:",
        "        slot = 0\n        if (stream, slot) not in self._windows:",
        (STREAMS,),
    ),
    Mutant(
        "the check for all pins",
        ENGINES,
        "        return all([engine.pin(arena) for arena in hosts.values()])",
        "        return True",
        (STREAMS,),
    ),
    Mutant("the pins' end in `close`", ENGINES, "            pin.close()", "            pass", (STREAMS,)),
    Mutant(
        "`cuMemFreeHost`",
        DRIVER,
        '        self._gpu.driver.call("cuMemFreeHost", self.address)',
        "        pass",
        (STREAMS,),
    ),
    Mutant(
        "`cuStreamDestroy`",
        DRIVER,
        '                self.driver.call("cuStreamDestroy_v2", stream)',
        "                pass",
        (STREAMS,),
    ),
    Mutant(
        "`cuEventDestroy`",
        DRIVER,
        '                self.driver.call("cuEventDestroy_v2", event)',
        "                pass",
        (STREAMS,),
    ),
    Mutant(
        "`cuMemHostRegister`",
        DRIVER,
        '        gpu.driver.call("cuMemHostRegister_v2", self.address, arena.nbytes, flags)',
        "        pass",
        (STREAMS,),
    ),
    Mutant(
        "`cuMemHostUnregister`",
        DRIVER,
        '                self._gpu.driver.call("cuMemHostUnregister", self.address)',
        "                pass",
        (STREAMS,),
    ),
    Mutant(
        "the second mapping of a pin",
        DRIVER,
        "            show_again(arena.address, arena.nbytes, self.address)",
        "            self.address = arena.address",
        (STREAMS,),
    ),
    Mutant("the exchange of pins", HOST, "        self.pin, other.pin = other.pin, self.pin\n", "", (STREAMS,)),
    Mutant(
        "the flag for reading only",
        DRIVER,
        "_FOR_ALL_GPUS if arena.writable else _FOR_ALL_GPUS | _READ_ONLY",
        "_FOR_ALL_GPUS",
        (STREAMS,),
    ),
    Mutant(
        "the flag for all GPUs, of windows",
        DRIVER,
        "ctypes.byref(found), nbytes, _FOR_ALL_GPUS)",
        "ctypes.byref(found), nbytes, 0)",
        (STREAMS,),
    ),
    Mutant("the retained context of a GPU", DRIVER, "        self.context.keep()", "        pass", (STREAMS,)),
    Mutant(
        "the release of a GPU's context",
        DRIVER,
        '                self.driver.call("cuEventDestroy_v2", event)\n        self.context.let_go()',
        '                self.driver.call("cuEventDestroy_v2", event)',
        (STREAMS,),
    ),
    Mutant(
        "the retained context of a pin",
        DRIVER,
        "        gpu.context.keep()\n        self.is_open",
        "        self.is_open",
        (STREAMS,),
    ),
    Mutant("the release of a pin's context", DRIVER, "            self._gpu.context.let_go()\n", "", (STREAMS,)),
    Mutant(
        "the flag that a stream waits for no other",
        DRIVER,
        "ctypes.byref(made), _NON_BLOCKING)",
        "ctypes.byref(made), 0)",
        (STREAMS,),
    ),
    Mutant(
        "`cuMemSetAccess` for a peer",
        ARENAS,
        "            self._set_access([*self._access, other])",
        "            pass",
        (STREAMS,),
    ),
    Mutant(
        "the peer's access after an exchange",
        ARENAS,
        "            self._access.append(other)",
        "            pass",
        (STREAMS,),
    ),
    Mutant(
        "`cuDeviceCanAccessPeer`",
        ARENAS,
        "            if not driver.reaches(gpu, self.device):",
        "            if False:",
        (STREAMS,),
        "`cuMemSetAccess` refuses the same",
    ),
]


def outcome(mutant: Mutant) -> str:
    """Return what the tests say about a mutant."""
    with tempfile.TemporaryDirectory(prefix="refitd-mutant") as folder:
        tree = Path(folder, "tree")
        ignored = shutil.ignore_patterns(".git", "build", "__pycache__", ".venv", ".*_cache")
        shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)
        file = tree / "refitd" / mutant.file
        text = file.read_text()
        if mutant.old not in text:
            return "the text is not in the file any more"
        file.write_text(text.replace(mutant.old, mutant.new))
        site = Path(folder, "site")
        site.mkdir()
        (site / "refitd_cli").symlink_to(tree / "cli")
        path = os.pathsep.join([str(tree), str(site), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        options = [given for given in mutant.tests if given.startswith("-")]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--timeout",
            "120",
            *options,
            "--",
            *(given for given in mutant.tests if given not in options),
        ]
        try:
            ran = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
        except subprocess.TimeoutExpired:
            return "found: no end"
        failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if ran.returncode == 0:
            return f"not found: {mutant.why}" if mutant.why else "**not found**"
        return (
            "found by " + failed[0].split("::")[1].split(" ")[0].split("[")[0]
            if failed
            else f"found: status {ran.returncode}"
        )


def main() -> int:
    """Print a line for each mutant; return 1 if one without a reason was not found."""
    names = [name for name in sys.argv[1:] if not name.startswith("-")]
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    lines = []
    for mutant in chosen:
        lines.append(f"| {mutant.name} | `{mutant.file}` | {outcome(mutant)} |")
        print(lines[-1], flush=True)
    if "--write" in sys.argv:
        head = PAGE.read_text().partition("| removed | in | outcome |")[0]
        PAGE.write_text(f"{head}| removed | in | outcome |\n| --- | --- | --- |\n" + "\n".join(lines) + "\n")
    return int(any("**" in line or "any more" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
