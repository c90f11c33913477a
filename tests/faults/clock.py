"""A movable wall clock: a small library, compiled here, that is loaded into a process at its start."""

from __future__ import annotations

import atexit
import functools
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """The wall clock of one process; start that process with `environment`."""

    def __init__(self, library: Path, path: Path) -> None:
        self._path = path
        self.move(0)
        self.environment = {"LD_PRELOAD": str(library), "FAULTS_CLOCK": str(path)}

    def move(self, seconds: int) -> None:
        """Move the clock by this many seconds from the real time."""
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.write(struct.pack("q", seconds))


def why_not() -> str:
    """Return the reason if clocks cannot be moved here, else ""."""
    return "" if shutil.which("cc") else "no C compiler (cc) to make the library that moves a process's clock"


@functools.cache
def build(source: Path = SOURCE) -> Path:
    """Compile the library, or another one; it is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="refitd-preloaded")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder) / f"{source.stem}.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return library
