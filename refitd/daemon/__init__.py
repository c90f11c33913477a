"""The daemon process: one per node, owns the arenas and the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refitd.config import Config


def run(config: Config, *, standalone: bool, ready_fd: int | None = None) -> int:
    """Run the daemon until it is told to stop; returns the exit status. See refitd.daemon.main.run."""
    import time

    from refitd.buffers import capacity
    from refitd.daemon.coordinator_process import CoordinatorProcess
    from refitd.protocol.directory import DirectoryLock, make_runtime_dir
    from refitd.security import daemon_keys

    capacity.require_descriptors(capacity.SERVER_DESCRIPTORS, "a daemon", raised=False)
    daemon_keys(config)  # what is refused must leave nothing behind
    make_runtime_dir(config.runtime_dir, opened=bool(config.node.allowed_uids))
    # before anything is started or bound: of two daemons that start at once one goes on
    lock = DirectoryLock(config.runtime_dir)
    try:
        # before anything heavy is imported here: both processes then start at the same time
        beside = CoordinatorProcess(config, time.monotonic) if standalone else None
        try:
            from refitd.daemon.main import run as run_daemon

            return run_daemon(config, beside, ready_fd)
        finally:
            if beside is not None:
                beside.stop()
    finally:
        lock.release()
