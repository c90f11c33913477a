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
import torch

import refitd
from refitd.testing import Cluster, Daemon, Engine

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 3
WAIT_S = 120


def start(daemon: Daemon, *arguments: str | Path) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("REFITD_")}
    env |= {"REFITD_RUNTIME_DIR": str(daemon.directory)}
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


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The example package, installed as pip does: its module, and a folder with its metadata."""
    project = tomllib.loads((EXAMPLES / "copy_service/pyproject.toml").read_text())["project"]
    info = tmp_path / "refitd_folder-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: refitd-folder\nVersion: 0.1.0\n")
    ((group, points),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    shutil.copy(EXAMPLES / "copy_service/refitd_folder.py", tmp_path)
    return tmp_path


@pytest.mark.parametrize("chosen", ["refusals or capabilities", pytest.param("", marks=pytest.mark.slow)])
def test_the_copy_service_of_another_package_passes_the_suite_away_from_the_checkout(site: Path, chosen: str) -> None:
    path = os.pathsep.join([str(site), str(Path(refitd.__file__).parents[1])])
    which = "folder" + (chosen and f" and ({chosen})")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--pyargs", "refitd.testing.conformance", "-k", which],
        cwd=site,
        env={**os.environ, "PYTHONPATH": path, "REFITD_FOLDER": str(site)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert ran.returncode == 0 and passed, ran.stdout
    assert int(passed[1]) > (10 if chosen else 100)


@pytest.mark.slow
def test_three_nodes_swap_over_the_copy_service_of_another_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("REFITD_FOLDER", str(site))
    weights, live = torch.arange(1 << 18, dtype=torch.float32), [torch.zeros(1 << 18) for _ in range(2)]
    with Cluster(("n0", "n1", "n2"), '[transport]\nservice = "folder"\n') as cluster:
        trainer, *engines = (cluster.daemons[name].connect() for name in ("n0", "n1", "n2"))
        source = trainer.register_source("policy", {"w": weights})
        targets = [
            engine.register_target("policy", {"w": tensor}, replica=name)
            for engine, tensor, name in zip(engines, live, "ab", strict=True)
        ]
        with Engine(*targets):
            for version in (1, 2):
                weights += 1
                source.publish(version)
                assert trainer.swap("policy", version, timeout=WAIT_S).outcome == "committed"
        assert all(torch.equal(tensor, weights) for tensor in live)
        for client in (trainer, *engines):
            client.close()
