"""Targets whose controller, in the same process, pauses them, has them polled and resumes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import refitd

REGISTERED_S = 60.0


def nothing(version: int | None) -> None:
    """Pause or resume an engine that is idle between commits."""


class Controlled:
    """The controller of one replica; `add` adds its ranks."""

    def __init__(
        self,
        client: refitd.Client,
        model: str,
        replica: str,
        world_size: int = 1,
        *,
        pause: Callable[[int], object] | None = nothing,
        commit: Callable[[int], object] | None = None,
        resume: Callable[[int | None], object] | None = None,
    ) -> None:
        """`commit` instead of polling all ranks."""
        self.targets: list[refitd.Target] = []
        self._world_size, self._all = world_size, threading.Event()
        self._model, self._replica = model, replica
        self.controller = client.control_replica(
            model, replica, pause=pause, commit=commit or self._commit, resume=resume
        )

    def add(self, client: refitd.Client, tensors: Any, **options: Any) -> refitd.Target:
        """Register the next rank."""
        rank, world_size = len(self.targets), self._world_size
        target = client.register_target(
            self._model, tensors, replica=self._replica, rank=rank, world_size=world_size, **options
        )
        self.targets.append(target)
        if len(self.targets) == world_size:
            self._all.set()
        return target

    def _commit(self, version: int) -> None:
        assert self._all.wait(REGISTERED_S), "its ranks are registered"
        for target in self.targets:
            target.poll()


def controlled(
    client: refitd.Client,
    model: str,
    tensors: Any,
    *,
    replica: str,
    pause: Callable[[int], object] | None = nothing,
    commit: Callable[[int], object] | None = None,
    resume: Callable[[int | None], object] | None = None,
    **options: Any,
) -> refitd.Target:
    """Register a replica of one rank with its own controller."""
    replicas = Controlled(client, model, replica, pause=pause, commit=commit, resume=resume)
    return replicas.add(client, tensors, **options)
