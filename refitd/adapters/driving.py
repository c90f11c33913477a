"""Engines that a trainer drives: called only once a version has been decided, they stand still for its commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import refitd


class Fleet:
    """The engines of a model as the trainer that drives them has last seen them.

    A call costs more than its answer: workers of vLLM spin for a second after each. So engines are called before the
    decision only where the cluster's status says that one of them needs it.
    """

    def __init__(self, client: refitd.Client, model: str) -> None:
        self._client, self._model = client, model
        self._seen: set[tuple[str, int]] | None = None

    def prepare(self, register: Callable[[], None], catch_up: Callable[[], None]) -> None:
        """Have the engines register if one that was there is gone, and take over what nobody has driven them to.

        Args:
            register: has every engine register that has not; called the first time, too.
            catch_up: has every engine take over a version that is decided and not live there.
        """
        if self._seen is None or not self._seen <= {(t.replica, t.rank) for t in self._targets()}:
            register()
            self._seen = {(t.replica, t.rank) for t in self._targets()}
        if any(target.staged is not None for target in self._targets()):
            catch_up()

    def _targets(self) -> tuple[Any, ...]:
        found = (model.targets for model in self._client.status().models if model.model == self._model)
        return next(found, ())


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
