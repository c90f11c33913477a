"""Engines that a trainer drives: called only once a version has been decided, they stand still for its commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import refitd


def swap_and_drive(
    client: refitd.Client,
    model: str,
    version: int,
    take_over: Callable[[], None],
    *,
    wait: float = 0.0,
    timeout: float | None = None,
) -> refitd.SwapReport:
    """Swap, and call `take_over` on another thread as soon as the version is decided; return when both are done.

    While the version is staged nobody calls the engines, and they go on. `take_over` has every engine wait for the
    version. It is not called where the swap ends before its decision.

    Args:
        client: who asks for the swap.
        model: the model's name.
        version: the version, published by this rank.
        take_over: raises what an engine answers.
        wait: as in `Client.swap`.
        timeout: likewise.

    Raises:
        RefusedError, SwapFailed, DeadlineExceeded: as `Client.swap`; anything that `take_over` raises comes first.
    """
    failed: list[Exception] = []
    driving: list[threading.Thread] = []

    def drive() -> None:
        try:
            take_over()
        except Exception as exc:
            failed.append(exc)

    def heard(progress: Any) -> None:
        if progress.phase == "commit" and not driving:
            driving.append(threading.Thread(target=drive, name="refitd-drive", daemon=True))
            driving[0].start()

    try:
        report = client.swap(model, version, wait=wait, timeout=timeout, queue=True, on_progress=heard)
    finally:
        for thread in driving:
            thread.join()
        if failed:
            raise failed[0]
    return report
