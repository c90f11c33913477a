"""scripts/gpu-check without a GPU: it reports that, does not fail, and has almost no dependencies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from refitd.buffers.cuda import visible_devices
from tests.gpu.emulation import emulated
from tests.support import programs

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu-check"
_FIRST = "arena copies host-copies flip-1 flip-4 flip-16 graph mxfp8 digest daemon-arenas daemon-nccl daemon-nvshmem"
_LAST = "nccl-2 nvshmem-2 daemon-mxfp8 daemon-modules daemon-crossing nccl-1 service"
NAMES = [*_FIRST.split(), *_LAST.split()]

no_gpu = pytest.mark.skipif(visible_devices() > 0, reason="there is a GPU")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return programs.run([str(SCRIPT), *arguments], env={**os.environ, "PYTHON": sys.executable, **environment})


@no_gpu
def test_without_a_gpu_no_check_runs_and_the_record_has_the_reason(tmp_path):
    page, found = tmp_path / "found.md", tmp_path / "found.json"
    ran = run("--json", "--output", str(page))
    assert ran.returncode == 0, ran.stderr
    *table, last = ran.stdout.splitlines()
    report = json.loads(last)
    assert json.loads(found.read_text()) == report
    assert report["is_complete"] and not report["emulated"]
    assert [check["check"] for check in report["checks"]] == NAMES
    assert {check["state"] for check in report["checks"]} == {"not run"}
    assert all("no GPU is visible" in check["why"] for check in report["checks"])
    assert table[0].split()[:3] == ["check", "result", "s"]
    assert [line.split()[:3] for line in table[1:]] == [[name, "not", "run"] for name in NAMES]
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [row[0].removeprefix("| ") for row in rows] == ["check", "---", *NAMES]


@no_gpu
def test_checks_can_be_chosen_and_unknown_ones_are_refused(tmp_path):
    ran = run("graph", "copies", "--output", str(tmp_path / "a.md"))
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["check", "copies", "graph"]
    ran = run("grpah")
    assert ran.returncode == 2 and "grpah" in ran.stderr and "graph" in ran.stderr
    ran = run("graph", "--output", "found.txt")
    assert ran.returncode == 2 and "ends in .md" in ran.stderr


def test_help_says_what_the_exit_status_means_and_how_to_carry_wheels():
    said = run("--help").stdout
    assert "exit status: 0" in said and "1 if a check failed" in said
    assert "pip download" in said and "PYTHONPATH=" in said
    assert all(f"\n  {name}" in said for name in NAMES)


def test_every_check_has_a_body():
    code = f"from tests.gpu import checks, check; assert list(checks.CHECKS) == list(check.CHECKS) == {NAMES}"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


# every package of pyproject.toml that these processes could import, but torch and numpy
HIDDEN = "click cryptography lazy_loader msgpack msgspec nvshmem prometheus_client pytest rich triton xxhash zmq"
BARE = """
import sys
from importlib.machinery import PathFinder

class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {hidden}:
            return None
        found = PathFinder.find_spec(name, [folder for folder in sys.path if folder.endswith("/stand_ins")])
        if found is None:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return found

sys.meta_path.insert(0, Hider())
import device_shim
device_shim.install()
"""


@pytest.mark.slow
def test_with_torch_and_numpy_only_checks_run_or_name_what_they_need(tmp_path):
    """The GPU is emulated, but the script is not told so."""
    environment = emulated({**os.environ, "PYTHON": sys.executable})
    (tmp_path / "sitecustomize.py").write_text(BARE.format(hidden=set(HIDDEN.split())))
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    ran = run("--json", "--output", str(tmp_path / "bare.md"), "flip-1", "mxfp8", "daemon-arenas", **environment)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    flip, mxfp8, arenas = report["checks"]
    assert report["emulated"] and flip["state"] == "passed", flip
    assert mxfp8["state"] == arenas["state"] == "not run"
    assert mxfp8["why"].startswith("needs triton: `pip install triton`, or carry a folder of wheels")
    assert arenas["why"].startswith("needs pyzmq, msgspec, lazy_loader, xxhash, cryptography, click, rich")


def test_a_check_that_hangs_or_crashes_ends_as_a_failure_of_its_own(tmp_path):
    (tmp_path / "checks.py").write_text(
        "import os, sys, time\n"
        "if sys.argv[1] == 'arena':\n    print('last words', file=sys.stderr, flush=True)\n    time.sleep(60)\n"
        "if sys.argv[1] == 'copies':\n    os.abort()\n"
        'print(\'{"state": "passed", "why": "", "figures": {"GB/s": 12.3456}}\')\n'
    )
    page = tmp_path / "found.md"
    code = (
        "import pathlib, sys\n"
        "from tests.gpu import check\n"
        "check.nothing_to_check_on = lambda: ''\n"
        f"check.HERE = pathlib.Path({str(tmp_path)!r})\n"
        "kept = check.Record.add\n"
        "def add(record, result):\n"
        "    kept(record, result)\n"
        "    print(record.path.read_text().count('has not reached'), file=sys.stderr)\n"
        "check.Record.add = add\n"
        f"sys.argv = ['gpu-check', '--timeout', '15', '--output', {str(page)!r}, 'arena', 'copies', 'digest']\n"
        "sys.exit(check.main())\n"
    )
    ran = programs.run([sys.executable, "-c", code], cwd=ROOT)
    assert ran.returncode == 1
    _, arena, copies, digest = ran.stdout.splitlines()
    assert "failed" in arena and "not done within 15 s; last words: last words" in arena
    assert "failed" in copies and "ended with status -6" in copies
    assert "passed" in digest and "GB/s 12.35" in digest
    assert [line for line in ran.stderr.splitlines() if line.isdigit()] == ["2", "1", "0"], (
        "the record after each check"
    )
    assert json.loads(page.with_suffix(".json").read_text())["is_complete"]
    assert "| failed |" in page.read_text() and "| passed |" in page.read_text()


def test_checks_that_the_total_leaves_no_time_for_are_named(tmp_path):
    code = (
        "import sys\n"
        "from tests.gpu import check\n"
        "check.nothing_to_check_on, check.TOTAL_S = lambda: '', 0.5\n"
        f"sys.argv = ['gpu-check', '--output', {str(tmp_path / 'late.md')!r}, 'arena']\n"
        "sys.exit(check.main())\n"
    )
    ran = programs.run([sys.executable, "-c", code], cwd=ROOT)
    assert ran.returncode == 0 and "minutes of all checks are over" in ran.stdout, ran.stderr
