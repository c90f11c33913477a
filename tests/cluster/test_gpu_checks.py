"""scripts/gpu-check on an emulated GPU, to keep its checks working for machines with one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import programs

# NCCL and NVSHMEM are emulated in daemons only, torch's device tensors nowhere
NOT_EMULATED = {"nccl-1", "nccl-2", "nvshmem-2", "service"}


@pytest.mark.timeout(600)
def test_no_check_fails_on_an_emulated_gpu(tmp_path: Path) -> None:
    page = tmp_path / "emulated.md"
    command = [str(programs.ROOT / "scripts" / "gpu-check"), "--emulated", "--output", str(page)]
    ran = programs.run(command, env={**os.environ, "PYTHON": sys.executable}, timeout=600)
    found = json.loads(page.with_suffix(".json").read_text())
    assert found["emulated"] and found["is_complete"]
    states = {check["check"]: check["state"] for check in found["checks"]}
    assert ran.returncode == 0 and "failed" not in states.values(), ran.stderr
    not_run = {name for name, state in states.items() if state == "not run"}
    assert not_run - {"mxfp8"} == NOT_EMULATED & states.keys()  # triton may be missing
    assert "**Emulated**" in page.read_text()
