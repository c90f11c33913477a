"""Serves a process's metrics over HTTP, for Prometheus."""

from __future__ import annotations

import os


def keep_apart() -> None:
    """Keep prometheus_client, which reads this when it is imported, from sharing values through files.

    vLLM and others set the variable for their own processes, and whoever starts a daemon may have it, too.
    """
    for variable in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        os.environ.pop(variable, None)
