"""Fake GPUs for machines without one: a CUDA driver over memory files, built with the machine's C compiler."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.fake_torch import device_shim

HERE = Path(__file__).parent
PAGE = 2 << 20  # granularity of arenas


@dataclass(frozen=True)
class FakeGpus:
    """The GPUs of one test."""

    tag: str
    nbytes: int

    def used(self, gpu: int | None = None) -> int:
        """Bytes of a GPU (None: of all) that some process has a descriptor or a mapping of."""
        prefix = f"/memfd:fake-cuda:{self.tag}:"
        found: dict[int, tuple[int, int]] = {}
        for process in Path("/proc").iterdir():
            if not process.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                for link in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        if (name := os.readlink(link)).startswith(prefix):
                            found[link.stat().st_ino] = _read_name(name, prefix)
            with contextlib.suppress(OSError):
                for line in (process / "maps").read_text().splitlines():
                    if prefix in line:
                        fields = line.split()
                        found[int(fields[4])] = _read_name(fields[5], prefix)
        return sum(size for whose, size in found.values() if gpu in (None, whose))

    def name(self, gpu: int) -> str:
        """The name of a GPU, as processes see it."""
        return f"GPU-{uuid.UUID(bytes=bytes([0xFA] * 15 + [gpu]))}"


def _read_name(name: str, prefix: str) -> tuple[int, int]:
    gpu, size, _ = name.removeprefix(prefix).split()[0].split(":")
    return int(gpu), int(size)


@functools.cache  # a process loads a library of one name only once
def driver() -> Path:
    """Return the compiled driver; skip the test if it cannot be compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc) to build the driver with")
    folder = tempfile.mkdtemp(prefix="refitd-fake-cuda")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder) / "libcuda.so.1"
    command = [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    command += ["-Wl,-soname,libcuda.so.1", "-o", str(library), str(HERE / "fake_cuda.c")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return library


def install(monkeypatch: pytest.MonkeyPatch, nbytes: int, visible: str = "0,1") -> FakeGpus:
    """Give this process, and those it starts, GPUs of `nbytes` each until the test ends."""
    library = driver()
    maps = Path("/proc/self/maps").read_text().splitlines()
    if any("libcuda.so" in line and str(library) not in line for line in maps):
        pytest.skip("this process has loaded another driver already")
    gpus = FakeGpus(uuid.uuid4().hex[:12], nbytes)
    for name, value in {
        "FAKE_CUDA_TAG": gpus.tag,
        "FAKE_CUDA_VISIBLE": visible,
        "FAKE_CUDA_BYTES": str(nbytes),
        "LD_LIBRARY_PATH": _first(library.parent, "LD_LIBRARY_PATH"),
        "PYTHONPATH": _first(HERE / "fake_torch", "PYTHONPATH"),
    }.items():
        monkeypatch.setenv(name, value)
    # later loads of a library of this name get this one
    ctypes.CDLL(str(library))
    device_shim.apply(monkeypatch.setattr)
    return gpus


def _first(path: Path, variable: str) -> str:
    return os.pathsep.join([str(path), *filter(None, [os.environ.get(variable, "")])])
