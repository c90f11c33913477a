"""The tensors of one registration: describe them, find them in arenas, detect changes, copy them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import torch

from refitd.buffers.cuda import is_capturing
from refitd.buffers.layout import extent, packed_offsets
from refitd.client.arenas import Arena, ArenaCopies, Home, Wrote, byte_strides, place_of, same_bytes, settle
from refitd.client.given import (
    NONE,
    PLAIN_TYPES,
    Keeps,
    Tensors,
    checked_tensors,
    chunks_of,
    copied_cuts,
    cuts_of,
    described_again,
    described_dict,
    held_here,
    kept_tensor,
    laid_out,
    matched_metadata,
    mismatch,
    problem_of,
    refuse_all,
)
from refitd.client.ownership import one_of_each
from refitd.describe.layout import canonical_name
from refitd.describe.memory import HOST, extents, gpu_of, out_of_reach, same_memory
from refitd.describe.metadata import ParameterMetadata, plain
from refitd.describe.module import (
    describe_module,
    get_refit_tensor_dict,
    is_dtensor,
)
from refitd.describe.renames import Names, rename
from refitd.errors import PlanError, ProtocolError, RefusedError
from refitd.mxfp8.buffers import MXFP8Buffer, held_of, is_quantized
from refitd.protocol.shards import KeptTensor, Place


class Fingerprint(NamedTuple):
    """The properties of a tensor that must not change, because a CUDA graph may have captured it.

    Every pause takes several fingerprints of every tensor. A named tuple takes a third of a dataclass's time to create.
    """

    data_ptr: int
    storage_bytes: int  # 0 once it has been freed
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_lazy: bool  # a lazy conjugate or negative view


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Return a tensor's fingerprint."""
    return Fingerprint(
        tensor.data_ptr(),
        int(tensor.untyped_storage().nbytes()),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_neg() or tensor.is_conj(),
    )


class Current(NamedTuple):
    """The registered module or dict as it is now.

    Attributes:
        raw: its values by name, in the registered order.
        named: the local tensors of `raw`.
        captured: the live tensors, in the order of `TensorSet.names`.
        changed: the index of the first of `captured` whose fingerprint has changed; None if none has.
    """

    raw: dict[str, Any]
    named: dict[str, Any]
    captured: list[torch.Tensor]
    changed: int | None


class TensorSet:
    """The tensors of one registration, in a fixed order, and their descriptions.

    The registered module or dict is read again before every use: see `SourceTensors.follow` and
    `TargetTensors.check_unmoved`.

    Attributes:
        metadata: one description per registered value; an MXFP8 value is described as its bfloat16 tensor.
        values: the registered values by name.
        quantized: the names of the MXFP8 values.
        names, tensors: all live tensors; an MXFP8 value has two, its data and its scales.
        gpus: the GPUs of `tensors`.
        kept: tensors that keep their own values or are skipped. They are not in the other attributes, and are neither
            copied nor checked.
    """

    # whether commits write the tensors; if so, two names for the same memory must be the same weight
    _writes = False

    def __init__(
        self,
        tensors: Tensors,
        rank: int,
        metadata: Sequence[ParameterMetadata] | None,
        pg_collection: Any,
        num_experts: int | None,
        keeps: Keeps = NONE,
        names: Names | None = None,
    ) -> None:
        """Describe a module or a dict of tensors. A dict may omit the metadata if its tensors are not sharded.

        Raises:
            RefusedError: tensors and metadata disagree, or a tensor cannot be read (or written).
            PlanError: a tensor cannot be described.
        """
        self._given: Mapping[str, Any] | torch.nn.Module | Sequence[torch.nn.Module] = checked_tensors(tensors)
        self._describe: Callable[[Mapping[str, Any]], list[ParameterMetadata]] | None = None
        self._canonical_names = names
        self._tied: dict[str, str] = {}
        self._one_memory: list[list[str]] = []  # groups of names that were tied because they share memory
        raw = self._read()
        refuse_all(f"{name}: {problem}" for name, value in raw.items() if (problem := problem_of(value)))
        if metadata is None and isinstance(self._given, Mapping):
            metadata = described_dict(raw, rank, num_experts)
            self._describe = partial(described_again, metadata, rank, num_experts)
        elif metadata is None and not isinstance(self._given, Mapping):
            module = self._given
            self._describe = lambda raw: describe_module(module, rank, pg_collection, num_experts)
            metadata = self._describe(raw)
        self.metadata = self._renamed(matched_metadata(metadata, raw))
        if self._writes:
            self.metadata, self._tied = one_of_each(self.metadata, raw)
            raw = {name: value for name, value in raw.items() if name not in self._tied}
        keeping = keeps.of(self.metadata)
        kept = {m.name for m in keeping}
        self._unwritten: dict[str, Any] = {name: held_here(value) for name, value in raw.items() if name in kept}
        self.kept: tuple[KeptTensor, ...] = tuple(kept_tensor(m) for m in keeping)
        if kept:
            self.metadata = [m for m in self.metadata if m.name not in kept]
            raw = {name: value for name, value in raw.items() if name not in kept}
        self._raw = raw
        self._specs = {name: value._spec for name, value in raw.items() if is_dtensor(value)}
        self._cuts = copied_cuts(raw.values())
        named = {name: held_here(value) for name, value in raw.items()}
        self.values: dict[str, Any] = named
        self.quantized = frozenset(n for n, value in (*named.items(), *self._unwritten.items()) if is_quantized(value))
        self.names, self.tensors = self._live(named)
        problems = [mismatch(m, named[m.name]) for m in self.metadata]
        refuse_all(problem for problem in problems if problem)
        lies = extents(self.tensors)
        self._copies: ArenaCopies | None = None  # made at the first copy, and again after tensors have moved
        refuse_all(
            f"{self.names[i]}: its memory cannot be {'written' if self._writes else 'read'} (a file that is mapped for "
            "reading, say); clone the tensor"
            for i in out_of_reach(lies, write=self._writes)
        )
        self.gpus = gpus_of(self.tensors)
        self.arena_places: tuple[Place, ...] = ()  # set by the client that knows the arenas
        self._fingerprints = [fingerprint(tensor) for tensor in self._captured(named)]
        self.offsets, self.packed_bytes = packed_offsets([t.numel() * t.element_size() for t in self.tensors])

    def places(self, arenas: Mapping[int, Home]) -> tuple[Place, ...]:
        """Return every tensor's place in the arenas; () unless all are in arenas. Empty tensors fit anywhere.

        A set of only empty tensors gets (), because it would otherwise use another registration's arena.
        """
        found: list[Place | None] = []
        for tensor in self.tensors:
            place = place_of(tensor, arenas) if tensor.numel() else None
            if place is None and tensor.numel():
                return ()
            found.append(place)
        home = next((place.arena for place in found if place is not None), None)
        if home is None:
            return ()
        return tuple(
            Place(home, 0, byte_strides(tensor)) if place is None else place
            for tensor, place in zip(self.tensors, found, strict=True)
        )

    def spans_in(self, content: Sequence[int], nbytes: int) -> list[tuple[int, int, int]]:
        """Return each tensor's (offset in its arena, offset in `content`, bytes); [] if `content` is empty.

        Raises:
            ProtocolError: the number of offsets and of tensors differ, or a tensor exceeds the arena's `nbytes`.
        """
        if not content:
            return []
        found = []
        if len(content) == len(self.arena_places):
            for tensor, place, left in zip(self.tensors, self.arena_places, content, strict=True):
                size = extent(tensor.shape, place.strides, tensor.element_size())
                found.append((place.offset, left, size))
        if len(found) != len(self.tensors) or any(left + size > nbytes for _, left, size in found):
            raise ProtocolError(
                f"{len(content)} places of what a predecessor left do not fit {len(self.tensors)} tensors"
            )
        return found

    def _read(self) -> dict[str, Any]:
        """Return the current values of the registered module or dict; DTensors are not converted."""
        if isinstance(self._given, Mapping):
            try:
                return dict(self._given)
            except Exception as exc:
                kind = type(self._given).__name__
                raise RefusedError(f"module_or_tensors: this {kind} raised {type(exc).__name__} when read") from exc
        return get_refit_tensor_dict(self._given)

    def _current(self) -> Current:
        """Read the registered module or dict again, and compare its live tensors with their fingerprints.

        Tied and kept names are removed. The order is restored: it differs if an entry was removed and added again.

        Raises:
            RefusedError: the names differ from the registration, or a tied name no longer shares its memory.
        """
        raw = self._read()
        if self._tied:
            for other, first in self._tied.items():
                if other in raw and first in raw and not is_one_memory(raw[other], raw[first]):
                    raise RefusedError(f"{other}: it is no longer the memory of {first}, which it is tied to")
                raw.pop(other, None)
        for one in self.kept:
            raw.pop(one.name, None)
        if list(raw) != list(self._raw):
            if changed := sorted(set(raw) ^ set(self._raw), key=str)[:10]:
                whose = "dict" if isinstance(self._given, Mapping) else "module"
                raise RefusedError(
                    f"the {whose}'s tensors are not those registered (changed: {changed}); register it again"
                )
            for name in self._raw:
                raw[name] = raw.pop(name)
        # most values have a plain type, which needs no call
        named = {name: value if type(value) in PLAIN_TYPES else held_here(value) for name, value in raw.items()}
        captured = self._captured(named) if self.quantized else list(named.values())
        if len(captured) != len(self._fingerprints):
            return Current(raw, named, captured, 0)
        index = 0
        try:
            # field by field, without making tuples: this loop dominates the check of 100,000 tensors
            for index, (tensor, (ptr, held, shape, strides, dtype, lazy)) in enumerate(
                zip(captured, self._fingerprints, strict=True)
            ):
                if (
                    tensor.data_ptr() != ptr
                    or tensor.untyped_storage().nbytes() != held
                    or tensor.shape != shape
                    or tensor.stride() != strides
                    or tensor.dtype is not dtype
                    or (tensor.is_neg() or tensor.is_conj()) is not lazy
                ):
                    return Current(raw, named, captured, index)
        except Exception:  # this value is not a tensor, or has no memory: the caller finds the reason
            return Current(raw, named, captured, index)
        return Current(raw, named, captured, None)

    def _is_cut_as_before(self, raw: Mapping[str, Any], replaced: Sequence[str] = ()) -> bool:
        """Return whether all cuts equal those at the last check. Must be fast: each check covers 100,000 tensors.

        Raises:
            RefusedError: a DTensor's mesh or placements differ from the registration, or one of `replaced` is now one.
        """
        for name in (*replaced, *self._specs):
            was, now = self._specs.get(name), getattr(raw[name], "_spec", None)
            if now is not was and now != was:
                raise RefusedError(
                    f"{name}: it is laid out otherwise than at registration ({laid_out(was)} is now "
                    f"{laid_out(now)}); keep the layout, or register again"
                )

        try:
            return cuts_of(raw.values()) == self._cuts
        except Exception:  # `==` of arrays has no truth value; the caller compares descriptions instead
            return False

    def _check_described(self, raw: Mapping[str, Any], names: Container[str] | None = None) -> None:
        """Refuse tensors (those in `names`, or all) whose descriptions have changed since registration."""
        if self._describe is None:
            for (name, value), was in zip(raw.items(), self._cuts, strict=True):
                # for tensors that the caller described, chunks are the only sign that a shard has moved
                if is_dtensor(value) and (now := chunks_of(value)) != was[-1]:
                    raise RefusedError(
                        f"{name}: its chunk metadata is {now}, and was {was[-1]} at registration; register again"
                    )
            return
        try:
            described = {m.name: m for m in self._renamed(self._describe(raw))}
        except PlanError as exc:
            raise RefusedError(f"{exc}; it has changed since registration") from exc
        one_memory = {name for names in self._one_memory for name in names}
        memory_names = {canonical_name(m) for m in self.metadata if m.name in one_memory}
        for m in self.metadata:
            if (said := described.get(m.name)) is None or (now := plain(said)) == m:
                continue
            if names is not None and m.name not in names:
                continue
            changed = [f.name for f in fields(m) if getattr(now, f.name) != getattr(m, f.name)]
            # more shared memory is harmless; _check_one_memory finds less; a target's tied names are in _tied
            if "aliases" in changed and (self._tied or set(m.aliases) - memory_names <= set(now.aliases)):
                changed.remove("aliases")
            if changed:
                raise RefusedError(
                    f"{m.name}: it is described otherwise than at registration ({', '.join(changed)}: "
                    f"{[getattr(m, f) for f in changed]} is now {[getattr(now, f) for f in changed]}); a parameter "
                    "that replaces another needs its attributes; set them, or register again"
                )

    def _renamed(self, metas: list[ParameterMetadata]) -> list[ParameterMetadata]:
        names = self._canonical_names
        return metas if names is None else rename(metas, names, is_target=self._writes)

    def _captured(self, named: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the original tensors in the order of `names`; `self.tensors` holds views of them."""
        found: list[torch.Tensor] = []
        for name, value in named.items():
            if name not in self.quantized:
                found.append(value)
            elif isinstance(value, MXFP8Buffer):
                found += [value.data, value.scale]
            else:
                found += self._live({name: value})[1]
        return found

    def _live(self, named: Mapping[str, Any]) -> tuple[list[str], list[torch.Tensor]]:
        """Return the names (as in messages) and the tensors of all live tensors."""
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        for name, value in named.items():
            if name not in self.quantized:
                names.append(name)
                tensors.append(value.detach())
                continue
            held = held_of(name, value)
            scale = held.scale if held.scale is not None else held.swizzled
            assert scale is not None
            names += [f"{name}.data", f"{name}.scale"]
            tensors += [held.data, scale]
        return names, tensors

    def settle(self) -> None:
        """Wait until the tensors' GPUs have finished this process's work."""
        for gpu in self.gpus:
            settle(gpu)

    def capturing_gpu(self) -> int | None:
        """Return a GPU of the tensors that captures a CUDA graph; None if no GPU does. A wait would break the graph."""
        return next((gpu for gpu in self.gpus if is_capturing(gpu)), None)

    def check_no_capture(self, what: str) -> None:
        """Refuse a call that waits for GPUs while one captures.

        Raises:
            RefusedError: a GPU of the tensors captures a CUDA graph; nothing was changed.
        """
        if (gpu := self.capturing_gpu()) is not None:
            raise RefusedError(
                f"{what}: a CUDA graph is being captured on GPU {gpu}, and nothing was changed; call again after the "
                "capture"
            )

    def copy(self, arena: Arena, *, into_arena: bool, wrote: Wrote = None) -> None:
        """Copy every tensor into an arena in refitd's layout, or out of it; check first that no tensor has moved.

        `wrote`: see ArenaCopies.perform.
        """
        if self._copies is None:
            self._copies = ArenaCopies(*self._moved())
        self._copies.perform(arena, into_arena=into_arena, wrote=wrote)

    def _moved(self) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
        """Return the tensors that are copied unconverted, and their offsets in an arena."""
        return self.tensors, self.offsets

    def differing(self, arena: Arena) -> str | None:
        """Return the name of the first tensor whose bytes differ from an arena in refitd's layout, None if none do."""
        for name, tensor, offset in zip(self.names, self.tensors, self.offsets, strict=True):
            if not same_bytes(tensor, arena, offset):
                return name
        return None


def gpus_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the GPUs of these tensors."""
    return {gpu_of(tensor) for tensor in tensors} - {HOST}


def is_one_memory(one: Any, other: Any) -> bool:
    """Return whether two registered values are the same memory, with the same shape, strides and dtype."""
    return same_memory(held_here(one), held_here(other))
