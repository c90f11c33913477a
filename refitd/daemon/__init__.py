"""The daemon process: one per node, owns the arenas and the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refitd.config import Config


def run(config: Config, *, standalone: bool, ready_fd: int | None = None) -> int:
    """Run the daemon until it is told to stop; returns the exit status. See refitd.daemon.main.run."""
    from refitd.daemon.beside import CoordinatorBeside

    # before anything heavy is imported here: both processes then start at the same time
    beside = CoordinatorBeside(config) if standalone else None
    try:
        from refitd.daemon.main import run as run_daemon

        return run_daemon(config, beside, ready_fd)
    finally:
        if beside is not None:
            beside.stop()
