"""The tensors that versions write into: live tensors, their conversions into MXFP8, and derived tensors.

`LiveChecks` digests and compares the live tensors for verification, on a separate thread, between commits.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from refitd.buffers.arena import MappedArena
from refitd.buffers.layout import Elements, blocks_of, compare, digest, extent, packed, row_major_strides
from refitd.client.arenas import Arena
from refitd.client.calls import Turn
from refitd.client.connection import Connection
from refitd.client.given import NONE, Keeps, Tensors, cuts_of, held_here, problem_of, refuse_all
from refitd.client.ownership import WrittenMemory
from refitd.client.tensors import TensorSet, fingerprint
from refitd.describe.layout import canonical_name, global_shape_of, tiles_of
from refitd.describe.memory import HOST, gpu_of, tensor_problem
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.renames import Names
from refitd.dtypes import FLOATING, cast_problem, dtype_name
from refitd.errors import CommitError, PlanError, RefitdError, RefusedError
from refitd.mxfp8.buffers import CheckedBuffer, held_of, holds_columns
from refitd.mxfp8.format import TILE, Rounding
from refitd.mxfp8.parts import DATA_DTYPE, SCALE_DTYPE, TILES, check_blocks, check_tiles, parts_of
from refitd.protocol import local
from refitd.protocol.shards import Conversion, DerivedTensor, HeldTensor, KeptTensor, shard_of, staged
from refitd.text import called, shown


@dataclass(frozen=True, eq=False)
class Derived:
    """A tensor computed from weights (a workspace, a fused or swizzled copy), which is stale when they change.

    Attributes:
        tensor: the tensor. Its memory must not move; a CUDA graph may have captured it.
        sources: names of the weights that it is computed from.
        refresh: called with `tensor` inside the commit, after the weights are written, to rewrite it in place. If it is
            None, swaps are refused.
    """

    tensor: torch.Tensor
    sources: tuple[str, ...] = ()
    refresh: Callable[[torch.Tensor], object] | None = None


class TargetTensors(TensorSet):
    """A target's live tensors, the tensors that arrive for it, and the conversions between them.

    Attributes:
        wire: descriptions of the tensors that arrive.
        held: the live tensors if they differ from the arriving ones; else empty.
        conversions: how the live tensors are computed from the arriving ones.
        derived: the derived tensors, in the form of the message to the coordinator.
        shared: names of tensors in memory that another target's versions write.
        written: the memory of live and derived tensors; no other registration may write it.
    """

    _writes = True

    def __init__(
        self,
        tensors: Tensors,
        rank: int,
        metadata: Sequence[ParameterMetadata] | None,
        pg_collection: Any,
        num_experts: int | None,
        convert_on_send: bool = False,
        derived: Mapping[str, Derived] | None = None,
        keeps: Keeps = NONE,
        names: Names | None = None,
    ) -> None:
        """Describe the tensors.

        Raises:
            RefusedError: as TensorSet; or the way that tensors are split does not allow MXFP8. Names all of them.
        """
        super().__init__(tensors, rank, metadata, pg_collection, num_experts, keeps, names)
        self.shared = keeps.shared
        if derived is not None and not isinstance(derived, Mapping):
            raise RefusedError(f"derived is {type(derived).__name__}, expected {{name: refitd.Derived}}")
        self._made = dict(derived or {})
        self.derived: tuple[DerivedTensor, ...] = check_derived(
            self._made, [*(m.name for m in self.metadata), *(one.name for one in self.kept)]
        )
        refuse_all(f"{name}: {problem}" for name, one in self._made.items() if (problem := tensor_problem(one.tensor)))
        self._made_prints = {name: fingerprint(one.tensor) for name, one in self._made.items()}
        self.wire: list[ParameterMetadata] = list(self.metadata)
        self.held: tuple[HeldTensor, ...] = ()
        self.conversions: tuple[Conversion, ...] = ()
        buffers = {m.name: held_of(m.name, self.values[m.name]) for m in self.metadata if m.name in self.quantized}
        if buffers:
            self._check(buffers)
            self._declare(buffers, convert_on_send)
            self.offsets = list(staged(shard_of(self.wire), self.held).held)
        made = {name: one.tensor for name, one in self._made.items()}
        self.written = WrittenMemory(self.names, self.tensors, self.metadata, made)
        self.written.check_kept(*self._live(self._unwritten))
        self._unwritten = {}  # so replaced tensors can be freed

    def kept_here(self) -> tuple[KeptTensor, ...]:
        """Return the kept tensors except the shared ones, which another target's versions write."""
        return tuple(one for one in self.kept if one.name not in self.shared)

    def unwritten(self) -> tuple[list[str], list[torch.Tensor]]:
        """Return names and current tensors of all kept tensors; empty lists if the module or dict cannot be read."""
        if not self.kept:
            return [], []
        try:
            raw = self._read()
            return self._live({one.name: held_here(raw[one.name]) for one in self.kept if one.name in raw})
        except (RefusedError, PlanError):
            return [], []

    def take_cast(self, offered: str | torch.dtype | Mapping[str, torch.dtype]) -> None:
        """Declare casts for tensors whose type differs from the offered one: one for all, or by canonical name.

        Raises:
            RefusedError: `offered` is not a floating type, or a tensor cannot be cast from the offered type.
        """
        if not isinstance(offered, Mapping) and dtype_name(offered) not in FLOATING:
            known = ", ".join(sorted(FLOATING))
            raise RefusedError(f"cast is {shown(offered)}, expected True, or the type that sources offer: {known}")
        problems = []
        for index, m in enumerate(self.wire):
            own = dtype_name(m.dtype)
            if m.cast_from is not None or own not in FLOATING:
                continue
            names = {tile.tensor for tile in m.tiles} if m.tiles else {canonical_name(m)}
            if isinstance(offered, Mapping):
                given = {dtype_name(offered[name]) for name in names if name in offered}
            else:
                given = {dtype_name(offered)}
            for held in sorted(given - {own}):
                if len(given) > 1 or (problem := cast_problem(held, own)):
                    several = f"is made of tensors of several types: {', '.join(sorted(given))}"
                    problems.append(f"{m.name}: {several if len(given) > 1 else f'cast {problem}'}")
                    break
                self.wire[index] = replace(m, cast_from=held)
        refuse_all(problems)

    def check_unmoved(self, when: str = "since registration", *, is_described: bool = False) -> None:
        """Raise CommitError if a registered or derived tensor was replaced, moved or reshaped; `when` goes in the text.

        If `is_described` is set, raise also if attributes or a DTensor's spec now describe a different split.
        """
        try:
            raw, _, captured, index = self._current()
            if index is None and is_described and not self._is_cut_as_before(raw):
                # skip tensors without attributes: each replaced one over the same memory and is written like it
                cuts = zip(raw, cuts_of(raw.values()), strict=True)
                said = {name for name, cut in cuts if any(each is not None for each in cut)}
                self._check_described(raw, said)
        except RefusedError as exc:
            raise CommitError(f"{exc}; it has changed {when}") from exc
        if index is not None:
            value: object = captured[index]
            is_tensor = isinstance(value, torch.Tensor) and not problem_of(value)
            now = fingerprint(captured[index]) if is_tensor else problem_of(value) or shown(value)
            raise CommitError(
                f"{self.names[index]}: its storage has changed {when} ({self._fingerprints[index]} is now {now}); keep "
                "parameters in place, or register again"
            )
        for name, one in self._made.items():
            if (found := fingerprint(one.tensor)) != self._made_prints[name]:
                raise CommitError(
                    f"{name}: the storage of this derived tensor has changed {when} ({self._made_prints[name]} is now "
                    f"{found}); write it in place, or register again"
                )

    def restore(self, arena: Arena) -> None:
        """Copy a retained target's weights from the staging arena into the live tensors, and compare them.

        Raises:
            CommitError: a tensor differs from the copied bytes, or a derived tensor's hook raised.
        """
        self.settle()
        self.copy(arena, into_arena=False)
        self.settle()
        if (name := self.differing(arena)) is not None:
            raise CommitError(f"{name}: it does not hold what was restored to it; something else writes to it")
        self.refresh()

    def refresh(self) -> None:
        """Recompute all derived tensors in their declared order.

        Raises:
            CommitError: a hook raised or is missing; the error names the tensor.
        """
        for name, one in self._made.items():
            if one.refresh is None:
                raise CommitError(f"{name}: it is derived from weights and has no refresh hook; register it with one")
            try:
                with torch.no_grad():
                    one.refresh(one.tensor)
            except Exception as exc:
                raise CommitError(f"{name}: its refresh hook raised {type(exc).__name__}: {exc}") from exc

    def _check(self, buffers: Mapping[str, CheckedBuffer]) -> None:
        problems = []
        for m in self.metadata:
            if m.name in buffers and holds_columns(self.values[m.name]):
                problems.append(
                    f"{m.name}: it holds column-wise data, too, which would stay as it is; make it row-wise only"
                )
            if m.name in buffers:
                try:
                    (check_tiles if buffers[m.name].is_tiled else check_blocks)(m)
                except RefusedError as exc:
                    problems.append(str(exc))
        swizzled = [name for name, held in buffers.items() if held.swizzled is not None]
        if swizzled and len(swizzled) < len(buffers):
            plain = next(name for name, held in buffers.items() if held.swizzled is None)
            problems.append(f"{swizzled[0]} has swizzled scales and {plain} has not; expected one layout for all")
        problems += _twice([m for m in self.metadata if m.name in buffers], buffers) if not problems else []
        if problems:
            raise RefusedError("; ".join(problems))

    def _declare(self, buffers: Mapping[str, CheckedBuffer], convert_on_send: bool) -> None:
        wire: list[ParameterMetadata] = []
        held: list[HeldTensor] = []
        conversions: list[Conversion] = []
        for m in self.metadata:
            if m.name not in buffers:
                held.append(HeldTensor(m.name, tuple(m.shape), dtype_name(m.dtype), len(wire)))
                wire.append(m)
                continue
            found = buffers[m.name]
            swizzled = found.swizzled is not None
            scale = found.swizzled if found.swizzled is not None else found.scale
            assert scale is not None
            at, made = len(wire), len(held)
            rounding = found.rounding or Rounding.RCEIL
            names, shapes = (f"{m.name}.data", f"{m.name}.scale"), (tuple(m.shape), tuple(scale.shape))
            whole = global_shape_of(m) or ()
            is_sent = convert_on_send and not any(n % TILE for n in (*whole[-2:], *m.shape[-2:]))
            if found.is_tiled and is_sent:
                wire += parts_of(m, TILES)
                held.append(HeldTensor(names[0], shapes[0], DATA_DTYPE, at))
                held.append(HeldTensor(names[1], shapes[1], "float32", at + 1))
                continue
            if found.is_tiled:
                wire.append(m)
                held += [HeldTensor(names[0], shapes[0], DATA_DTYPE), HeldTensor(names[1], shapes[1], "float32")]
                conversions.append(Conversion("quantize-tiles", at, (made, made + 1)))
                continue
            if not convert_on_send:
                wire.append(m)
                held += [HeldTensor(names[0], shapes[0], DATA_DTYPE), HeldTensor(names[1], shapes[1], SCALE_DTYPE)]
                conversions.append(Conversion("quantize", at, (made, made + 1), rounding, swizzled))
                continue
            wire += parts_of(m, rounding)
            held.append(HeldTensor(names[0], shapes[0], DATA_DTYPE, at))
            held.append(HeldTensor(names[1], shapes[1], SCALE_DTYPE, None if swizzled else at + 1))
            if swizzled:
                conversions.append(Conversion("swizzle", at + 1, (made + 1,)))
        self.wire, self.held, self.conversions = wire, tuple(held), tuple(conversions)


def check_derived(derived: Mapping[str, Derived], weights: Collection[str]) -> tuple[DerivedTensor, ...]:
    """Check the derived tensors, and return their descriptions for the coordinator.

    Raises:
        RefusedError: an entry is malformed, has an unregistered source, or has the name of a weight.
    """
    for name, one in derived.items():
        if not isinstance(name, str) or not name or not isinstance(one, Derived):
            raise RefusedError(f"derived[{shown(name)}] is {type(one).__name__}, expected {{name: refitd.Derived}}")
        if not isinstance(one.sources, Sequence | Set) or isinstance(one.sources, str | bytes):
            raise RefusedError(f"{name}: sources are {shown(one.sources)}, expected a tuple of names")
        if not all(isinstance(source, str) for source in one.sources):
            raise RefusedError(f"{name}: sources are {shown(one.sources)}, expected a tuple of names")
        if one.refresh is not None and not callable(one.refresh):
            raise RefusedError(f"{name}: refresh is {shown(one.refresh)}, expected a function")
        if unknown := [source for source in one.sources if source not in weights]:
            raise RefusedError(f"{name}: it is declared to be made of {unknown}, which are not registered here")
        if name in weights:
            raise RefusedError(f"{name}: a weight is called so; give the derived tensor a name of its own")
    return tuple(
        DerivedTensor(name=name, sources=tuple(one.sources), is_refreshed=one.refresh is not None)
        for name, one in derived.items()
    )


def _twice(metas: Sequence[ParameterMetadata], buffers: Mapping[str, CheckedBuffer]) -> list[str]:
    """Return an error text for each pair of MXFP8 parameters with the same memory or common elements."""
    problems = []
    memory: dict[int, str] = {}
    boxes: dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = {}
    for m in metas:
        if (other := memory.setdefault(buffers[m.name].data.data_ptr(), m.name)) != m.name:
            problems.append(f"{m.name} and {other} are the same memory; register each MXFP8 tensor once")
            continue
        for tile in tiles_of(m):
            end = tuple(low + size for low, size in zip(tile.offset, tile.size, strict=True))
            for name, low, high in boxes.setdefault(tile.tensor, []):
                meets = all(a < d and c < b for a, b, c, d in zip(tile.offset, end, low, high, strict=True))
                if name != m.name and len(low) == len(end) and meets:
                    problems.append(f"{m.name} and {name} both hold {tile.tensor} in MXFP8; register it once")
            boxes[tile.tensor].append((m.name, tile.offset, end))
    return problems


# --- checks between commits -------------------------------------------------------------------------------

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
        self._still = Turn(f"the tensors of {called(member)} are being taken over, or looked at,")

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
            raise CommitError("its engine is suspended, and its tensors are unmapped")
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
