"""The examples run as their docstrings say, and both sides print the same weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from refitd.testing import Daemon

pytestmark = pytest.mark.own_daemon

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 3
WAIT_S = 120


def start(daemon: Daemon, *arguments: str | Path) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("REFITD_")}
    env |= {"REFITD_RUNTIME_DIR": str(daemon.directory), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *arguments], env=env, stdout=subprocess.PIPE, text=True)


def printed(output: str) -> list[str]:
    return re.findall(r"version (\d+ weights \w+)", output)


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
