"""Swap versions into engines that a trainer drives: they pause only for the commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import refitd

# How long a driven engine waits, when it registers, for the version that the other engines serve.
CATCH_UP_S = 20.0


def live_version(client: refitd.Client, model: str) -> int | None:
    """Return the version that a model's replicas serve; None if there is none."""
    return next((found.live for found in client.status().models if found.model == model), None)


def tied_names(client: refitd.Client, model: str) -> set[str]:
    """Return the names of tensors that are one memory with others in the trainer."""
    tensors = (tensor for shard in client.describe(model).shards for tensor in shard.tensors if tensor.aliases)
    return {name for tensor in tensors for name in (tensor.resolved_name or tensor.name, *tensor.aliases)}


class Fleet:
    """The engines of a model, as their trainer last saw them.

    A call is expensive: vLLM's workers spin for a second after each. Before the decision, engines are called only if
    the cluster's status shows that one of them needs it.
    """

    def __init__(self, client: refitd.Client, model: str) -> None:
        self._client, self._model = client, model
        self._seen: set[tuple[str, int]] | None = None

    def prepare(self, register: Callable[[], None], catch_up: Callable[[], None]) -> None:
        """Make the engines register if one is lost, and commit versions that are still staged.

        Args:
            register: registers every unregistered engine; also called the first time.
            catch_up: commits decided versions that are not live yet, on every engine.
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

    Engines keep running while the version is staged. `take_over` makes every engine wait for the version. It is not
    called if the swap ends before its decision.

    Args:
        client: requests the swap.
        model: the model's name.
        version: the version, published by this rank.
        take_over: raises the error of an engine that fails.
        wait: as in `Client.swap`.
        timeout: as in `Client.swap`.

    Raises:
        RefusedError, SwapFailed, DeadlineExceeded: as `Client.swap`; an error of `take_over` has priority.
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
