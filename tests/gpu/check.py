"""Run the checks of scripts/gpu-check: each in a separate process, with a time limit, and print a table at the end."""

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
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# name -> what it shows; their bodies are in checks.py and the modules that it imports
CHECKS = {
    "arena": "GPU memory made by one process is mapped by another, for reading and for writing",
    "digest": "the device computes the digests that the CPU computes",
    "swap": "tensors in an arena keep their addresses while their content changes",
    "copies": "copies between arenas of one GPU are right, and how fast they are",
    "graph": "a CUDA graph captured before a swap replays with the new weights, bit for bit as eager",
    "flip": "a captured graph reads the other weights once two arenas are exchanged",
    "mxfp8": "the MXFP8 kernel writes the bytes of the CPU; a captured graph replays with converted weights",
    "nccl-1": "NCCL, one rank: communicators through a mailbox, exchanges with itself",
    "nccl-2": "NCCL, two ranks on one GPU",
    "nvshmem-2": "NVSHMEM, two PEs on one GPU",
    "service": "trainer and engine with CUDA tensors through a daemon (pytest tests/gpu)",
    "daemon-arenas": "a daemon that owns GPU arenas: swaps, how fast, a killed worker (about 3 GiB of the GPU)",
    "daemon-modules": "models that are adopted on the GPU, or built in a block, flip under a captured graph",
    "daemon-mxfp8": "a daemon whose workers make MXFP8 on the GPU, row-major and swizzled",
    "daemon-crossing": "two daemons on one GPU: from arena to arena over gloo, a cast on the way",
}
ADVICE = """\
It needs Python 3.11 or newer, a CUDA build of torch (2.8 or newer) and numpy. Some checks need more (xxhash,
cryptography; nvshmem4py; pyzmq, msgpack, msgspec, click, rich, pytest, pytest-timeout) and are skipped, with the
command, where that is missing. Nothing is installed.

exit status: 0 if nothing failed, also where everything was skipped because there is no GPU; 1 if a check failed;
2 for wrong arguments. Speeds are reported, never judged.

a machine without a network: download wheels elsewhere, for its Python and platform, carry them, unpack them into a
folder and name the folder in PYTHONPATH:

  pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels \\
      xxhash cryptography cffi msgspec pyzmq nvshmem4py-cu13
  pip install --no-index --no-deps --target /tmp/site wheels/*.whl
  PYTHONPATH=/tmp/site scripts/gpu-check

An nvidia-nccl-cu13 (or -cu12) of 2.30 or newer that is found there serves in place of torch's own: it allows two
ranks on one GPU.

checks:
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
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write that object to a file, too")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="for each check (default 120)")
    options = parser.parse_args()
    if unknown := set(options.checks) - set(CHECKS):
        parser.error(f"no such check: {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    if options.timeout <= 0:
        parser.error("--timeout must be above 0")
    if sys.version_info < (3, 11):  # noqa: UP036 - it is started with whatever python3 there is
        parser.error(f"this is Python {platform.python_version()}; name a newer one: PYTHON=/path/to/python3.12")

    missing = nothing_to_check_on()
    results = []
    for name in options.checks or CHECKS:
        if missing:
            results.append(result(name, "skipped", missing, {}, 0.0))
            continue
        print(f"==> {name}: {CHECKS[name]}", file=sys.stderr, flush=True)
        results.append(run(name, options.timeout))
        print(f"    {results[-1]['state']} {results[-1]['why']}", file=sys.stderr, flush=True)
    report = {"python": platform.python_version(), "kernel": platform.release(), "checks": results}
    print_table(results)
    if options.json:
        print(json.dumps(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(each["state"] == "failed" for each in results))


def nothing_to_check_on() -> str:
    """Return the reason if no check can run here, before slow imports."""
    from refitd.buffers.cuda import visible_devices
    from refitd.copy_services.registry import torch_cuda

    if not visible_devices():
        return "no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    for module in ("torch", "numpy"):
        if importlib.util.find_spec(module) is None:
            return f"{sys.executable} has no {module}; name another Python: PYTHON=/path/to/python3 scripts/gpu-check"
    return "" if torch_cuda() else f"the torch of {sys.executable} has no CUDA; name another Python with PYTHON="


def result(name: str, state: str, why: str, figures: dict[str, object], seconds: float) -> dict[str, object]:
    return {"check": name, "state": state, "why": why, "figures": figures, "seconds": round(seconds, 1)}


def run(name: str, timeout: float) -> dict[str, object]:
    """Run one check in a separate process group; return a result however it ends."""
    started = time.monotonic()
    command = [sys.executable, str(HERE / "checks.py"), name, str(timeout)]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        out, err = child.communicate(timeout=timeout)
        late = False
    except subprocess.TimeoutExpired:
        late = True
    finally:
        # ranks that it started are in its group, also when it has crashed
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    if late:
        out, err = child.communicate()
    seconds = time.monotonic() - started
    sys.stderr.write("".join(f"    {line}\n" for line in err.splitlines()[-40:]))
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            found = json.loads(line)
            return result(name, found["state"], found["why"], found["figures"], seconds)
    said = (err.strip().splitlines() or ["it said nothing"])[-1][:300]
    if late:
        return result(name, "failed", f"not done within {timeout:g} s; last words: {said}", {}, seconds)
    return result(name, "failed", f"ended with status {child.returncode}: {said}", {}, seconds)


def print_table(results: list[dict[str, object]]) -> None:
    rows = [("check", "result", "s", "why, figures")]
    for each in results:
        figures = each["figures"]
        assert isinstance(figures, dict)
        told = [str(each["why"])] if each["why"] else []
        told += [
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
        ]
        rows.append((str(each["check"]), str(each["state"]), f"{each['seconds']:.0f}", ", ".join(told)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), "", row[3])


if __name__ == "__main__":
    sys.exit(main())
