"""Run one check for scripts/gpu-check in this process: checks.py NAME SECONDS. It prints one JSON object.

Checks with several ranks start it again as: checks.py NAME SECONDS RANK SIZE FOLDER.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.gpu.copy_checks import copies, host_copies
from tests.gpu.device import GPU
from tests.gpu.flip_checks import flip_of
from tests.gpu.memory_checks import arena, arena_child, digest, graph
from tests.gpu.mxfp8_checks import mxfp8
from tests.gpu.outcomes import Outcome, Skip, need, need_daemon
from tests.gpu.rank_checks import nccl_one, nccl_two, nvshmem_two, rank_main


def service(seconds: float) -> Outcome:
    need_daemon()
    need(pytest="pytest", pytest_timeout="pytest-timeout", msgpack="msgpack")
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
    """Return a check that starts its own daemons."""

    def check(seconds: float) -> Outcome:
        need_daemon()
        from tests.gpu import module_checks, service_checks

        known = {**service_checks.CHECKS, "daemon-modules": module_checks.daemon_modules}
        return Outcome(known[name](seconds))

    return check


CHECKS: dict[str, Callable[[float], Outcome]] = {
    "arena": arena,
    "copies": copies,
    "host-copies": host_copies,
    "flip-1": flip_of(1),
    "flip-4": flip_of(4),
    "flip-16": flip_of(16),
    "graph": graph,
    "mxfp8": mxfp8,
    "digest": digest,
    "daemon-arenas": daemon_check("daemon-arenas"),
    "daemon-nccl": daemon_check("daemon-nccl"),
    "daemon-nvshmem": daemon_check("daemon-nvshmem"),
    "nccl-2": nccl_two,
    "nvshmem-2": nvshmem_two,
    "daemon-mxfp8": daemon_check("daemon-mxfp8"),
    "daemon-modules": daemon_check("daemon-modules"),
    "daemon-crossing": daemon_check("daemon-crossing"),
    "nccl-1": nccl_one,
    "service": service,
}


def main() -> int:
    name, seconds, *more = sys.argv[1:]
    machine: dict[str, object] = {}
    try:
        GPU.start()
        if name == "arena" and more:
            arena_child(int(more[0]), int(more[1]))
            return 0
        machine = GPU.machine()
        if more:
            found = rank_main(name, float(seconds), int(more[0]), int(more[1]), more[2])
        else:
            found = CHECKS[name](float(seconds))
    except Skip as exc:
        found = Outcome(why=str(exc), state="not run")
    except Exception as exc:
        from refitd.errors import RefitdError

        traceback.print_exc()
        kind = "" if isinstance(exc, RefitdError) else f"{type(exc).__name__}: "
        found = Outcome(why=f"{kind}{(str(exc).splitlines() or [''])[0]}"[:400], state="failed")
    sys.stderr.flush()
    print(
        json.dumps({"state": found.state, "why": found.why, "figures": found.figures, "machine": machine}), flush=True
    )
    # skip the destructors of communicators and contexts, some of which wait for other processes
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
