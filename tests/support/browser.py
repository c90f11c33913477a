"""Chromium without a window, in a new profile, with no connections of its own."""

from __future__ import annotations

import shutil
import subprocess
import tempfile

CHROMIUM = shutil.which("chromium")
_QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=5000",
]


def chromium(url: str, *options: str) -> str:
    """Open a page; return what the options print."""
    assert CHROMIUM is not None, "no chromium on PATH (Debian: apt-get install chromium)"
    with tempfile.TemporaryDirectory(prefix="refitd-chromium", ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *_QUIET, f"--user-data-dir={profile}", *options, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
