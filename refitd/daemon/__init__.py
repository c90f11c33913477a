"""The daemon process: one per node; it owns the arenas and the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refitd.config import Config


def run(config: Config, *, standalone: bool, ready_fd: int | None = None) -> int:
    """Run the daemon until SIGTERM or SIGINT; return the exit status. See refitd.daemon.main.run."""
    import time

    from refitd.buffers import capacity
    from refitd.daemon.coordinator import CoordinatorProcess
    from refitd.security import daemon_keys
    from refitd.service import DirectoryLock, make_runtime_dir

    capacity.require_descriptors(capacity.SERVER_DESCRIPTORS, "a daemon", raised=False)
    daemon_keys(config)  # refuse bad keys before anything is created
    make_runtime_dir(config.runtime_dir, opened=bool(config.node.allowed_uids))
    # Take the lock before starting or binding anything: if two daemons start together, only one continues.
    lock = DirectoryLock(config.runtime_dir)
    try:
        # Start the coordinator before the slow imports below, because both processes can then start in parallel.
        coordinator = CoordinatorProcess(config, time.monotonic) if standalone else None
        try:
            from refitd.daemon.main import run as run_daemon

            return run_daemon(config, coordinator, ready_fd)
        finally:
            if coordinator is not None:
                coordinator.stop()
    finally:
        lock.release()
