"""Digest and compare a target's live tensors for verification, on a separate thread, between commits."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch

from refitd.buffers.arena import MappedArena
from refitd.buffers.blocks import Elements, blocks_of, compare, digest, packed
from refitd.buffers.layout import extent, row_major_strides
from refitd.client.arenas import Arena
from refitd.client.connection import Connection
from refitd.client.target_tensors import TargetTensors
from refitd.client.threads import Turn
from refitd.describe.memory import HOST, gpu_of
from refitd.errors import CommitError, RefitdError
from refitd.protocol import local

# Longer than any commit: a commit waits up to a minute for a worker's copy.
STILL_S = 600.0


class _Overtaken(Exception):
    """A commit happened between reads of the tensors."""


class LiveChecks:
    """Answers DigestLive and CompareLive for one target. The daemon sends one such request at a time."""

    def __init__(
        self, connection: Connection, member: str, tensors: TargetTensors, staging: Callable[[], Arena | None]
    ) -> None:
        """`staging` returns the staging arena, or None when it is not mapped."""
        self._connection = connection
        self._member = member
        self._tensors = tensors
        self._staging = staging
        self._commits = 0
        self.suspended = False  # the engine may have unmapped the tensors: reading them may crash the process
        self._still = Turn(f"the tensors of {member} are being taken over, or looked at,")

    def release(self) -> None:
        """Drop the reference to the target, because a cycle would keep its tensors until the garbage collector runs."""
        self._staging = lambda: None

    def registered_again(self, connection: Connection, member: str) -> None:
        """Send later answers over another connection, as another member."""
        self._connection, self._member = connection, member

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Block checks during a commit. Entering waits until a running check has finished its current block.

        Raises:
            RefusedError: this thread is already committing, and the caller is a signal handler that interrupted it.
        """
        with self._still.taken(STILL_S):
            self._commits += 1
            yield

    def let_commit_end(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for a commit that another thread is running."""
        with contextlib.suppress(RefitdError), self._still.taken(timeout):
            pass

    def start(self, message: local.CheckLive) -> None:
        """Answer the message on a new thread."""
        threading.Thread(target=self._answer, args=(message,), name="refitd-verify", daemon=True).start()

    def _answer(self, message: local.CheckLive) -> None:
        reason, again, digests = "", False, b""
        found: tuple[tuple[int, int, int], ...] = ()
        try:
            if not message.blocks:
                digests = self._digests(message.steps)
            else:
                found = self._compared(message.blocks)
        except _Overtaken:
            reason, again = "a version was taken over meanwhile", True
        except Exception as exc:  # the daemon waits for an answer after any failure
            reason = str(exc) if isinstance(exc, RefitdError) else f"{type(exc).__name__}: {exc}"
        reply = local.LiveChecked(self._member, message.check, digests, found, reason, again)
        with contextlib.suppress(RefitdError):  # if the daemon has ended, the answer is not needed
            self._connection.tell(reply)

    def _digests(self, steps: tuple[int, ...]) -> bytes:
        tensors = self._tensors.tensors
        if len(steps) != len(tensors):
            raise CommitError(f"{len(steps)} tensors are to be checked, {len(tensors)} are registered")
        began = self._commits
        # if a parameter was replaced, the engine serves from other memory than this check reads
        self._tensors.check_unmoved()
        found = []
        for tensor, step in zip(tensors, steps, strict=True):
            for first, count in blocks_of(tensor.numel(), step):
                with self._still.taken(STILL_S):
                    self._check_same(began)
                    found.append(digest(_parts(tensor, first, count)))
        return b"".join(found)

    def _compared(self, blocks: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
        began, arena = self._commits, self._staging()
        if not isinstance(arena, MappedArena):
            raise CommitError("there is no staging arena in main memory to compare with")
        self._tensors.check_unmoved()  # a parameter may have been replaced since the digests were taken
        found = []
        for index, first, count in blocks:
            tensor, offset = self._tensors.tensors[index], self._tensors.offsets[index]
            shape, element = tuple(tensor.shape), tensor.element_size()
            expected: Elements = np.ndarray(
                shape, f"V{element}", arena.bytes, offset, row_major_strides(shape, element)
            )
            with self._still.taken(STILL_S):
                self._check_same(began)
                found.append(compare(_parts(tensor, first, count), packed(expected, first, count), first))
        return tuple(found)

    def _check_same(self, began: int) -> None:
        if self.suspended:
            raise CommitError("its engine is suspended, and its tensors are put away")
        if self._commits != began:
            raise _Overtaken


def _parts(tensor: torch.Tensor, first: int, count: int) -> Iterator[Elements]:
    """Yield `count` elements of a tensor from `first` on, row-major, in contiguous pieces in main memory."""
    element = tensor.element_size()
    if tensor.device.type == "cpu" and gpu_of(tensor) == HOST:
        strides = tuple(stride * element for stride in tensor.stride())
        shape = tuple(tensor.shape)
        memory = (ctypes.c_uint8 * extent(shape, strides, element)).from_address(tensor.data_ptr())
        yield from packed(np.ndarray(shape, f"V{element}", memoryview(memory), 0, strides), first, count)
        return
    with torch.no_grad():
        block = tensor.reshape(-1)[first : first + count].contiguous().cpu()
    yield from packed(block.view(torch.uint8).numpy().view(f"V{element}"), 0, count)
