"""The wheel, away from the checkout: its commands, and the pages and configurations that its errors name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "refitd", "cli", "docs", "configs")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel in a copy of the tree, and unpack it, as an installer does."""
    there = tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, there / part)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    ran = subprocess.run([sys.executable, "-c", build], cwd=there, check=True, capture_output=True, text=True)
    with zipfile.ZipFile(there / ran.stdout.split()[-1]) as wheel:
        wheel.extractall(there / "site")
    return there / "site"


def printed(site: Path, *words: str) -> str:
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from refitd_cli.control import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", program, site, *words], cwd="/", check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_what_errors_and_the_install_page_name_is_in_the_wheel_and_printed_by_it(installed: Path) -> None:
    listed = printed(installed, "docs")
    texts = [path.read_text() for folder in ("refitd", "cli") for path in (ROOT / folder).rglob("*.py")]
    texts += [(ROOT / page).read_text() for page in ("README.md", "docs/tutorial.md", "docs/operate.md")]
    named = {name for text in texts for name in re.findall(r"refitctl docs ([\w./-]*\w)", text)}
    assert {"operate", "runbook", "configs/laptop.toml"} <= named
    for name in named:
        assert name in listed
    assert printed(installed, "docs", "configs/laptop.toml") == (ROOT / "configs/laptop.toml").read_text()
    assert printed(installed, "docs", "docs/runbook.md#handle-alarms") == (ROOT / "docs/runbook.md").read_text()
    for folder in ("docs", "configs"):
        for path in (ROOT / folder).rglob("*.*"):
            assert (installed / "refitd_cli/shipped" / path.relative_to(ROOT)).is_file(), path
    assert (installed / "refitd/testing/conformance/test_faults.py").is_file()
