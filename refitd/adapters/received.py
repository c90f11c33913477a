"""A rank's copy of all tensors of a model, which an engine reads and the daemon's workers write."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

import refitd
from refitd.adapters.streams import Shapes


class ReceivedTensors:
    """Tensors that are registered as a replica of one rank, written in place. Reads and writes exclude each other.

    Attributes:
        shapes: {name: (shape, dtype)}.
        tensors: {name: tensor}, in the client's arenas.
    """

    def __init__(self, client: refitd.Client, shapes: Shapes, *, device: str = "cpu", timeout: float) -> None:
        """Allocate the tensors.

        Args:
            client: allocates and registers.
            shapes: see above.
            device: "cpu" or "cuda:N".
            timeout: seconds to allocate, to register, and that a swap waits for a read to end.
        """
        self.shapes = shapes
        self.tensors: dict[str, torch.Tensor] = client.allocate(shapes, device=device, timeout=timeout)
        self._client, self._timeout = client, timeout
        self._changed = threading.Condition()
        self._is_read = self._is_written = False
        self._target: refitd.Target | None = None
        self._registered = contextlib.ExitStack()

    def register(self, model: str, replica: str) -> None:
        """Register the tensors; an earlier registration ends.

        Raises:
            RefusedError: the name is taken, or the trainer offers other tensors.
        """
        self.leave()
        with contextlib.ExitStack() as opened:
            # first, because the trainer swaps as soon as the target is registered
            controller = self._client.control_replica(
                model, replica, pause=self._pause, commit=self._commit, resume=self._resume, timeout=self._timeout
            )
            opened.callback(controller.close)
            # the engine has its own weights, so these tensors need no staging arena
            target = self._client.register_target(
                model, self.tensors, replica=replica, mode="in-place", timeout=self._timeout
            )
            opened.callback(target.close)
            with self._changed:
                self._target = target
                self._changed.notify_all()
            self._registered = opened.pop_all()

    def leave(self) -> None:
        """End the registration; the tensors stay."""
        self._target = None
        with contextlib.suppress(refitd.RefitdError):  # the trainer may evict it, or the daemon may be lost
            self._registered.close()

    def free(self) -> None:
        """End the registration, and free the memory."""
        self.leave()
        with contextlib.suppress(refitd.RefitdError):  # the daemon may be lost
            self._client.free(self.tensors)

    @property
    def is_registered(self) -> bool:
        """Whether the tensors are registered."""
        return self._target is not None

    @property
    def version(self) -> int | None:
        """The version that the tensors hold."""
        return None if self._target is None else self._target.version

    @property
    def state(self) -> str:
        """Text for errors: the version, and why the tensors may not be read, if they may not."""
        if self._target is None:
            return "not registered"
        parts = (f"live: {self._target.version}", self._target.fenced, str(self._target.error or ""))
        return ", ".join(part for part in parts if part)

    def begin_to_read(self, is_wanted: Callable[[], bool], timeout: float = 0.0) -> bool:
        """Exclude writes until `reading` ends.

        Args:
            is_wanted: whether the tensors hold the wanted version; called while they do not change.
            timeout: seconds to wait for it.

        Returns:
            Whether the read has begun.
        """
        with self._changed:
            begins = self._changed.wait_for(lambda: not self._is_read and not self._is_written and is_wanted(), timeout)
            self._is_read = self._is_read or begins
            return begins

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Allow writes again when the block ends."""
        try:
            yield
        finally:
            with self._changed:
                self._is_read = False
                self._changed.notify_all()

    def _pause(self, version: int) -> None:
        """Wait until the tensors are not read; an error aborts the swap."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_read, self._timeout):
                raise refitd.DeadlineExceeded(f"the engine still reads its tensors after {self._timeout:.0f} s")
            self._is_written = True

    def _commit(self, version: int) -> None:
        with self._changed:  # a swap may begin before `register_target` has returned
            self._changed.wait_for(lambda: self._target is not None, self._timeout)
            target = self._target
        if target is not None:
            target.poll()

    def _resume(self, version: int | None) -> None:
        with self._changed:
            self._is_written = False
            self._changed.notify_all()
