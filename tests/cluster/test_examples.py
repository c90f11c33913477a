"""The examples run as their docstrings say, and both sides print the same weights."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import refitd
from refitd.testing import Daemon

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 3
WAIT_S = 120


def start(daemon: Daemon, *arguments: str | Path) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("REFITD_")}
    env |= {"REFITD_RUNTIME_DIR": str(daemon.directory), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *arguments], env=env, stdout=subprocess.PIPE, text=True)


def printed(output: str) -> list[str]:
    return re.findall(r"version (\d+ weights \w+)", output)


@pytest.mark.own_daemon
@pytest.mark.parametrize(
    "script",
    ["fsdp2_trainer.py", pytest.param("fsdp1_trainer.py", marks=pytest.mark.slow)],  # the same amount again
)
def test_a_trainer_of_two_ranks_gives_an_engine_every_step(daemon: Daemon, script: str) -> None:
    engine = start(daemon, EXAMPLES / "engine.py", "--versions", str(STEPS))
    trainer = None
    try:
        assert engine.stdout is not None
        assert "registered" in engine.stdout.readline()
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        trainer = start(daemon, *run, EXAMPLES / script, "--steps", str(STEPS))
        gave, _ = trainer.communicate(timeout=WAIT_S)
        assert trainer.returncode == 0
        took, _ = engine.communicate(timeout=WAIT_S)
    finally:
        for process in (engine, trainer):
            if process is not None:
                process.kill()
                process.wait()
    assert engine.returncode == 0
    assert len(printed(gave)) == len(set(printed(gave))) == STEPS
    assert printed(took) == printed(gave)


@pytest.mark.parametrize("chosen", ["refusals or capabilities", pytest.param("", marks=pytest.mark.slow)])
def test_the_copy_service_of_another_package_passes_the_suite_away_from_the_checkout(
    tmp_path: Path, chosen: str
) -> None:
    """The package is installed as pip does: its module, and a folder with its metadata."""
    project = tomllib.loads((EXAMPLES / "copy_service/pyproject.toml").read_text())["project"]
    info = tmp_path / "refitd_folder-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: refitd-folder\nVersion: 0.1.0\n")
    ((group, points),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    shutil.copy(EXAMPLES / "copy_service/refitd_folder.py", tmp_path)
    path = os.pathsep.join([str(tmp_path), str(Path(refitd.__file__).parents[1])])
    which = "folder" + (chosen and f" and ({chosen})")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--pyargs", "refitd.testing.conformance", "-k", which],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "REFITD_FOLDER": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert ran.returncode == 0 and passed, ran.stdout
    assert int(passed[1]) > (15 if chosen else 100)
