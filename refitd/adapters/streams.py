"""The tensors that a trainer yields one by one, and a rank's copy of all of them, which an engine reads.

The trainer's side has checks of the items, the first update's copies and the shares of the ranks. The daemon's workers
write the engine's copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

import torch

import refitd

Weights = Iterable[tuple[str, torch.Tensor]]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class FirstStream:
    """The tensors of a first update, copied into main memory, because shapes are declared before tensors are published.

    Attributes:
        shapes: {name: (shape, dtype)}.
    """

    def __init__(self, weights: Weights) -> None:
        """Copy all tensors; each may be overwritten when the next one is requested.

        Raises:
            RefusedError: an item is not (name, tensor), a name comes twice, or there are no tensors.
        """
        share = PublishedShare(0, 1)
        self._copies = {name: copied(tensor) for name, tensor in share.first(weights)}
        self.shapes = share.shapes

    def drained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, and free each one afterwards."""
        while self._copies:
            name = next(iter(self._copies))
            yield name, self._copies.pop(name)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in main memory."""
    return tensor.detach().to("cpu", copy=True)


class PublishedShare:
    """The tensors that one policy rank publishes: each tensor goes to the rank with the fewest bytes so far.

    All ranks see all tensors in the same order, so they agree without communication.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.shapes: Shapes = {}
        self._rank, self._bytes, self._mine = rank, [0] * world_size, set[str]()
        self.holders = 0  # the number of ranks that publish anything; they are the first ones

    def first(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Record all tensors of the first refit; yield this rank's tensors."""
        for name, tensor in pairs(weights):
            if name in self.shapes:
                raise refitd.RefusedError(f"{name}: the iterator yields it twice")
            self.shapes[name] = tuple(tensor.shape), tensor.dtype
            owner = self._bytes.index(min(self._bytes))
            self._bytes[owner] += max(1, tensor.nbytes)
            self.holders = max(self.holders, owner + 1)
            if owner == self._rank:
                self._mine.add(name)
                yield name, tensor
        if not self.shapes:
            raise refitd.RefusedError("the iterator yields no tensors")

    def again(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Check that the tensors match the first refit; yield this rank's tensors."""
        left = dict(self.shapes)
        for name, tensor in pairs(weights):
            if name not in left:
                how = "yields it twice" if name in self.shapes else "has not yielded it in the first refit"
                raise refitd.RefusedError(f"{name}: the iterator {how}")
            shape, dtype = left.pop(name)
            if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
                raise refitd.RefusedError(
                    f"{name}: it is {list(tensor.shape)} {tensor.dtype}, "
                    f"in the first refit it was {list(shape)} {dtype}"
                )
            if name in self._mine:
                yield name, tensor
        if left:
            raise refitd.RefusedError(
                f"the iterator has ended without {len(left)} of {len(self.shapes)} tensors: {[*left][:10]}"
            )

    def check_offered(self, offered: Shapes, mark: str) -> None:
        """Raise RefusedError if policy ranks yielded different tensors: some of them would reach no engine."""
        theirs = {name: what for name, what in offered.items() if name != mark}
        if theirs != self.shapes:
            differ = [n for n in {**self.shapes, **theirs} if self.shapes.get(n) != theirs.get(n)]
            raise refitd.RefusedError(
                f"the policy ranks do not yield the same tensors in the same order: {len(differ)} differ: "
                f"{differ[:10]}; shut the weight synchronizer down, so that all ranks are prepared anew"
            )


def pairs(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the iterator's items; raise RefusedError for an item that is not (name, tensor)."""
    for item in weights:
        try:
            name, tensor = item
        except (TypeError, ValueError):
            raise refitd.RefusedError(f"the iterator yields a {type(item).__name__}, expected (name, tensor)") from None
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise refitd.RefusedError(f"the iterator yields {name!r:.100} with a {type(tensor).__name__}")
        yield name, tensor


# --- an engine's copy of all tensors ----------------------------------------------------------------------


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
