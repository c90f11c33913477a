"""An engine's process ends with its server: no other process can reach it.

    API server (or a script's LLM) -> EngineCore -> workers, with tensor parallelism

Each process watches its parent. A worker watches the API server, too: EngineCore may take seconds to end.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping

import refitd

log = logging.getLogger("vllm.refitd")

# vLLM's names for its processes, and the names of their parents.
STARTED_BY = {"EngineCore": "the API server", "VllmWorker": "EngineCore"}

# Tells EngineCore's workers the pid of the API server.
SERVER = "REFITD_VLLM_SERVER"

# How long a process that is asked to end may take.
ENDS_S = 10.0


class ServerLifeline(refitd.Lifeline):
    """Ends this process after its server: by SIGTERM, which vLLM handles, then by SIGKILL."""

    def __init__(self, processes: Mapping[int, str]) -> None:
        super().__init__(processes)
        self.on_end(self._exit)

    def _exit(self, error: refitd.Orphaned) -> None:
        log.error("refitd: %s", error)
        killer = threading.Timer(ENDS_S, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
        os.kill(os.getpid(), signal.SIGTERM)


def live_with_server(*, starts_workers: bool = False) -> ServerLifeline | None:
    """Watch the process that started this one of vLLM; None if that is not vLLM, or the kernel has no pidfds.

    With `starts_workers`, this process is an EngineCore with worker processes, which watch the server, too.

    An engine that runs in a script's own process (VLLM_ENABLE_V1_MULTIPROCESSING=0) ends with it anyway. An actor of
    Ray is started by a raylet, which ends it with its owner.

    Raises:
        Orphaned: that process has ended already.
    """
    name = multiprocessing.current_process().name
    what = next((what for prefix, what in STARTED_BY.items() if name.startswith(prefix)), "")
    parent = multiprocessing.parent_process()
    if parent is None or not what:
        return None
    if starts_workers:
        os.environ[SERVER] = str(parent.pid)
    server = os.environ.get(SERVER, "") if name.startswith("VllmWorker") else ""
    try:
        return ServerLifeline.of_parent(what, {int(server): STARTED_BY["EngineCore"]} if server.isdecimal() else None)
    except refitd.RefusedError as exc:
        log.warning("refitd: %s; if it is killed, this engine keeps its replica's name", exc)
        return None
