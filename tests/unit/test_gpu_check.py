"""scripts/gpu-check without a GPU: it reports that, does not fail, and has almost no dependencies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from refitd.buffers.cuda import visible_devices
from tests.support import programs

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu-check"
NAMES = [
    "arena",
    "digest",
    "swap",
    "copies",
    "graph",
    "flip",
    "mxfp8",
    "nccl-1",
    "nccl-2",
    "nvshmem-2",
    "service",
    "daemon-arenas",
    "daemon-modules",
    "daemon-mxfp8",
    "daemon-crossing",
]

no_gpu = pytest.mark.skipif(visible_devices() > 0, reason="there is a GPU")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return programs.run([str(SCRIPT), *arguments], env={**os.environ, "PYTHON": sys.executable, **environment})


@no_gpu
def test_without_a_gpu_everything_is_skipped_with_the_reason_and_nothing_fails(tmp_path):
    found = tmp_path / "found.json"
    ran = run("--json", "--output", str(found))
    assert ran.returncode == 0, ran.stderr
    *table, last = ran.stdout.splitlines()
    report = json.loads(last)
    assert json.loads(found.read_text()) == report
    assert [check["check"] for check in report["checks"]] == NAMES
    assert {check["state"] for check in report["checks"]} == {"skipped"}
    assert all("no GPU is visible" in check["why"] for check in report["checks"])
    assert table[0].split()[:3] == ["check", "result", "s"]
    assert [line.split()[:2] for line in table[1:]] == [[name, "skipped"] for name in NAMES]


@no_gpu
def test_checks_can_be_chosen_and_unknown_ones_are_refused():
    assert [line.split()[0] for line in run("graph", "copies").stdout.splitlines()] == ["check", "graph", "copies"]
    ran = run("grpah")
    assert ran.returncode == 2 and "grpah" in ran.stderr and "graph" in ran.stderr


def test_help_says_what_the_exit_status_means_and_how_to_carry_wheels():
    said = run("--help").stdout
    assert "exit status: 0" in said and "1 if a check failed" in said
    assert "pip download" in said and "PYTHONPATH=" in said
    assert all(f"\n  {name}" in said for name in NAMES)


def test_every_check_has_a_body():
    code = "import checks, check; assert list(checks.CHECKS) == list(check.CHECKS) == NAMES".replace(
        "NAMES", repr(NAMES)
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT / "tests" / "gpu",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "buffers.cuda",
        "buffers.handoff",
        "copy_services.nccl",
        "copy_services.nvshmem",
        "copy_services.cuda",
        "mxfp8.transform",
    ],
)
def test_what_it_checks_needs_no_packages_of_the_service(module):
    """A bare machine has torch and numpy, perhaps xxhash; messages and sockets are for the service."""
    absent = [
        "zmq",
        "msgspec",
        "msgpack",
        "click",
        "rich",
        *(["torch", "xxhash"] if module.startswith("buffers") else []),
    ]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import refitd.{module}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_check_that_hangs_or_crashes_ends_as_a_failure_of_its_own(tmp_path):
    (tmp_path / "checks.py").write_text(
        "import os, sys, time\n"
        "if sys.argv[1] == 'arena':\n    print('last words', file=sys.stderr, flush=True)\n    time.sleep(60)\n"
        "if sys.argv[1] == 'swap':\n    os.abort()\n"
        'print(\'{"state": "passed", "why": "", "figures": {"GB/s": 12.3456}}\')\n'
    )
    code = (
        "import check, pathlib, sys\n"
        "check.nothing_to_check_on = lambda: ''\n"
        f"check.HERE = pathlib.Path({str(tmp_path)!r})\n"
        "sys.argv = ['gpu-check', '--timeout', '4', 'arena', 'swap', 'copies']\n"
        "sys.exit(check.main())\n"
    )
    ran = programs.run([sys.executable, "-c", code], cwd=ROOT / "tests" / "gpu")
    assert ran.returncode == 1
    _, arena, swap, copies = ran.stdout.splitlines()
    assert "failed" in arena and "not done within 4 s; last words: last words" in arena
    assert "failed" in swap and "ended with status -6" in swap
    assert "passed" in copies and "GB/s 12.35" in copies
