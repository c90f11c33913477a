"""Real engines (scripts/try-engines installs them), refitted with exactly the bytes that their loaders produce."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("REFITD_ENGINES_VENV", ROOT / ".venv-engines")) / "bin/python"

pytestmark = [
    pytest.mark.slow,  # each starts vLLM, which takes a minute
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM (5 GB) is installed by scripts/try-engines"),
]


@pytest.mark.parametrize(
    "case",
    [
        "llama-tp1-driven",
        "llama-tp2-driven",
        "qwen2-tp2-driven",
        "llama-tp2-follow",
        "llama-tp1-trl",
        "llama-tp1-native",
    ],
)
def test_an_engine_holds_what_its_own_loader_gives(case: str) -> None:
    command = [PYTHON, "-m", "benchmarks.engines", "--quick", "--only", case]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_served_model_gets_better_while_a_trainer_learns() -> None:
    command = [PYTHON, "-m", "benchmarks.engines.learn"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
