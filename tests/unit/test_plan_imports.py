"""Describing and planning need no tensors, no sockets and no process group."""

from __future__ import annotations

import subprocess
import sys


def test_planning_loads_neither_torch_nor_zmq() -> None:
    code = (
        "import sys, pkgutil, importlib, refitd.describe, refitd.plan\n"
        "for package in (refitd.describe, refitd.plan):\n"
        "    for found in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(found.name)\n"
        "print(sorted({'torch', 'zmq', 'socket'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
