"""Count the refitd functions that a process calls while a flag file says so.

The folder is put on PYTHONPATH by `tests.figures.traced_swap`. The first byte of the mapped file $FIGURES_FOLDER/flag
is "0" (wait), "1" (count) or "2" (write the counts). Each process writes one JSON file named by its pid.
"""

import json
import mmap
import os
import sys
import threading
import time
from collections import Counter

_FOLDER = os.environ.get("FIGURES_FOLDER", "")


def _install(folder: str) -> None:
    with open(os.path.join(folder, "flag"), "rb") as file:
        flag = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    calls: Counter[tuple[str, str, int]] = Counter()
    order: dict[tuple[str, str, int], float] = {}

    def called(frame, event, argument):  # type: ignore[no-untyped-def]
        if event != "call" or flag[0] != 49:
            return
        code = frame.f_code
        path = code.co_filename
        if "/refitd/" not in path or "/site-packages/" in path:
            return
        key = (path.rsplit("/refitd/", 1)[1], code.co_qualname, code.co_firstlineno)
        calls[key] += 1
        order.setdefault(key, time.monotonic())

    def write() -> None:
        while flag[0] != 50:
            time.sleep(0.02)
        rows = [[*key, count, order[key]] for key, count in list(calls.items())]
        target = os.path.join(folder, f"{os.getpid()}.json")
        with open(target + ".new", "w") as out:
            json.dump({"argv": sys.orig_argv, "rows": rows}, out)
        os.rename(target + ".new", target)

    threading.Thread(target=write, daemon=True).start()
    threading.setprofile(called)
    sys.setprofile(called)


if _FOLDER:
    _install(_FOLDER)
