"""Run the checks of scripts/gpu-check: each in a separate process, with time limits, and keep a record of all."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.record import Record, Result

HERE = Path(__file__).resolve().parent
TOTAL_S = 600.0  # of all checks
KILLED_S = 5.0  # a killed process may be inside the driver and never end
# name -> what it shows, in order of value; their bodies are in checks.py and the modules that it imports
CHECKS = {
    "arena": "GPU memory made by one process is mapped by another, for reading and for writing",
    "copies": "copies between arenas of one GPU are right, and their share of the device's copy bandwidth",
    "host-copies": "copies between main memory and an arena are right, and their share of torch's own copies",
    "flip-1": "two arenas of 1 GiB are exchanged: the pause, with and without a captured graph, which reads the other",
    "flip-4": "the same with 4 GiB",
    "flip-16": "the same with 16 GiB",
    "graph": "a CUDA graph captured before a swap replays with the new weights, bit for bit as eager",
    "mxfp8": "the MXFP8 kernel writes the bytes of the CPU; a captured graph replays with converted weights",
    "digest": "the device computes the digests that the CPU computes",
    "daemon-arenas": "a daemon that owns GPU arenas: swaps, how fast, a killed worker (about 3 GiB of the GPU)",
    "daemon-nccl": "two daemons with NCCL, two ranks on one GPU: from arena to arena, a cast on the way",
    "daemon-nvshmem": "two daemons with NVSHMEM, two PEs on one GPU: the same",
    "nccl-2": "NCCL, two ranks on one GPU",
    "nvshmem-2": "NVSHMEM, two PEs on one GPU",
    "daemon-mxfp8": "a daemon whose workers make MXFP8 on the GPU, row-major and swizzled",
    "daemon-modules": "models that are adopted on the GPU, or built in a block, flip under a captured graph",
    "daemon-crossing": "two daemons on one GPU: from arena to arena over gloo, a cast on the way",
    "nccl-1": "NCCL, one rank: communicators through a mailbox, exchanges with itself",
    "service": "trainer and engine with CUDA tensors through a daemon (pytest tests/gpu)",
}
ALONE = "the service alone, with an epoch of the check's own making: this does not show that a daemon can use it"
CAVEATS = {"nccl-1": ALONE, "nccl-2": ALONE, "nvshmem-2": ALONE}
NOT_EMULATED = {
    **dict.fromkeys(("nccl-1", "nccl-2"), "needs a GPU: only daemons have a stand-in for NCCL"),
    "nvshmem-2": "needs a GPU: only daemons have a stand-in for NVSHMEM",
    "service": "needs a GPU: torch's device tensors are not emulated",
}
ADVICE = """\
It needs Python 3.11 or newer, a CUDA build of torch (2.8 or newer) and numpy. A check that needs more (cryptography;
triton; nvshmem4py; pyzmq, msgspec, click, rich and others for daemons) is "not run: needs ..." where that is missing.
Nothing is installed.

the record: FILE (default gpu-check.md) has a table of all checks, and the same name with .json has the results. Both
are written again after each check, so an interrupted run leaves them. Send both. The record of a real GPU is
benchmarks/results/gpu.md (--output benchmarks/results/gpu.md).

exit status: 0 if nothing failed, also where no check ran because there is no GPU; 1 if a check failed; 2 for wrong
arguments. Speeds are reported, never judged. A check ends after 60 s at most, the script after 10 minutes.

a machine without a network: download wheels elsewhere, for its Python and platform, carry them, unpack them into a
folder and name the folder in PYTHONPATH:

  pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels \\
      xxhash cryptography cffi msgspec pyzmq lazy_loader click rich nvshmem4py-cu13
  pip install --no-index --no-deps --target /tmp/site wheels/*.whl
  PYTHONPATH=/tmp/site scripts/gpu-check

An nvidia-nccl-cu13 (or -cu12) of 2.30 or newer that is found there serves in place of torch's own: it allows two
ranks on one GPU.

checks, in the order in which they run:
"""


def main() -> int:
    lines = "".join(f"  {name:<16} {what}\n" for name, what in CHECKS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check",
        description="Try everything of refitd that needs a GPU, on one GPU.",
        epilog=ADVICE + lines,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="which ones; all by default")
    parser.add_argument(
        "--emulated", action="store_true", help="on an emulated GPU, with small sizes: it tests the checks themselves"
    )
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object last")
    parser.add_argument(
        "--output", type=Path, default=Path("gpu-check.md"), metavar="FILE", help="the record (default gpu-check.md)"
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for each check (default 60)")
    options = parser.parse_args()
    if unknown := set(options.checks) - set(CHECKS):
        parser.error(f"no such check: {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    if options.timeout <= 0:
        parser.error("--timeout must be above 0")
    if options.output.suffix != ".md":
        parser.error(f"--output is {options.output}, expected a name that ends in .md; results go to .json beside it")
    if sys.version_info < (3, 11):  # noqa: UP036 - it is started with whatever python3 there is
        parser.error(f"this is Python {platform.python_version()}; name a newer one: PYTHON=/path/to/python3.12")

    is_emulated = "FAKE_CUDA_TAG" in os.environ
    if options.emulated and not is_emulated:
        from tests.gpu.emulation import emulated

        # the driver and the stand-ins for torch must be there when Python starts
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], emulated(os.environ))
    missing = "" if options.emulated else nothing_to_check_on()
    whats = {name: CHECKS[name] for name in CHECKS if name in (options.checks or CHECKS)}
    record, ends = Record(options.output, whats, is_emulated), time.monotonic() + TOTAL_S
    record.write()
    for name in record.whats:
        left = min(options.timeout, ends - time.monotonic())
        why = missing or (NOT_EMULATED.get(name, "") if is_emulated else "")
        if why or left < 1:
            why = why or f"the {TOTAL_S / 60:g} minutes of all checks are over"
            record.add(Result(name, "not run", why))
            continue
        print(f"==> {name}: {CHECKS[name]}", file=sys.stderr, flush=True)
        found = run(name, left, fork if options.emulated else spawn)
        if name in CAVEATS and found.state == "passed":
            found.why = f"{CAVEATS[name]}{'; ' * bool(found.why)}{found.why}"
        record.add(found)
        print(f"    {found.state} {found.why}", file=sys.stderr, flush=True)
    print(record.table())
    if options.json:
        print(json.dumps(record.values()))
    return int(any(each.state == "failed" for each in record.results))


def nothing_to_check_on() -> str:
    """Return the reason if no check can run here, before slow imports."""
    for module in ("torch", "numpy"):
        if importlib.util.find_spec(module) is None:
            return f"{sys.executable} has no {module}; name another Python: PYTHON=/path/to/python3 scripts/gpu-check"
    from refitd.buffers.cuda import visible_devices
    from refitd.copy_services.registry import torch_cuda

    if not visible_devices():
        return "no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    return "" if torch_cuda() else f"the torch of {sys.executable} has no CUDA; name another Python with PYTHON="


def spawn(name: str, timeout: float, out: int, err: int) -> subprocess.Popen[bytes]:
    """Start a check in a process and a session of its own."""
    command = [sys.executable, str(HERE / "checks.py"), name, str(timeout)]
    return subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)


class fork:
    """A check in a fork of this process, as `spawn` returns one: on an emulated GPU all is imported once."""

    def __init__(self, name: str, timeout: float, out: int, err: int) -> None:
        from tests.gpu import checks
        from tests.support import forked

        forked.prepare()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            forked.split([out, err])
            os.dup2(out, 1)
            os.dup2(err, 2)
            sys.argv = ["checks.py", name, str(timeout)]
            try:
                checks.main()
            finally:
                os._exit(1)

    def wait(self, timeout: float) -> int:
        """See Popen.wait."""
        until = time.monotonic() + timeout
        while not (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(self.pid, timeout)
            time.sleep(0.02)
        return os.waitstatus_to_exitcode(found[1])


def run(name: str, timeout: float, start: Callable[[str, float, int, int], Any]) -> Result:
    """Run one check in a separate process group; return a result however it ends, at most KILLED_S late."""
    started = time.monotonic()
    # files, because processes that a check has left behind would keep pipes open
    with tempfile.TemporaryFile() as out_file, tempfile.TemporaryFile() as err_file:
        child = start(name, timeout, out_file.fileno(), err_file.fileno())
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(timeout)
        finally:
            # ranks that it started are in its group, also when it has crashed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        if status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(KILLED_S)
        out, err = (_text(each.fileno()) for each in (out_file, err_file))
    seconds = time.monotonic() - started
    sys.stderr.write("".join(f"    {line}\n" for line in err.splitlines()[-40:]))
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            found = json.loads(line)
            return Result(name, found["state"], found["why"], found["figures"], seconds, found.get("machine", {}))
    said = (err.strip().splitlines() or ["it printed no error"])[-1][:300]
    if status is None:
        return Result(name, "failed", f"not done within {timeout:.3g} s; last words: {said}", {}, seconds)
    return Result(name, "failed", f"ended with status {status}: {said}", {}, seconds)


def _text(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0).decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
