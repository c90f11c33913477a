"""The coordinator process: one per cluster, plans and decides every swap."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refitd.config import Config


def run(config: Config, *, with_parent: bool = False) -> int:
    """Run the coordinator until a signal stops it; returns the exit status."""
    from refitd.coordinator.main import run as run_coordinator

    return run_coordinator(config, with_parent=with_parent)
