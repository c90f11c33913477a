"""The tensors of one registration: describe them, find them in arenas, watch them for changes, copy them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import torch

from refitd.buffers.layout import extent, packed_offsets
from refitd.client.arena_copies import ArenaCopies, byte_strides, place_of, same_bytes
from refitd.client.cuts import chunks_of, copied_cut, cut_of, laid_out
from refitd.client.devices import Arena, Home, settle
from refitd.client.given import (
    Tensors,
    checked_tensors,
    described_again,
    described_dict,
    difference,
    held_here,
    matched_metadata,
    mismatch,
    problem_of,
    refuse_all,
)
from refitd.client.kept import NONE, Keeps, kept_tensor
from refitd.client.written_memory import one_of_each
from refitd.copy_services.measure import Span
from refitd.describe.layout import canonical_name
from refitd.describe.memory import (
    HOST,
    extents,
    gpu_of,
    out_of_reach,
    same_memory,
)
from refitd.describe.metadata import ParameterMetadata, plain
from refitd.describe.module import (
    describe_module,
    get_refit_tensor_dict,
    is_dtensor,
)
from refitd.describe.renames import Names, rename
from refitd.errors import CommitError, PlanError, ProtocolError, RefusedError
from refitd.protocol.shards import KeptTensor, Place
from refitd.text import shown
from refitd.transforms.mxfp8_buffers import MXFP8Buffer, held_of, is_quantized


class Fingerprint(NamedTuple):
    """The properties of a tensor that must not change, because a CUDA graph may have captured it.

    Every pause takes several of every tensor; making a named tuple takes a third of a dataclass's time.
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


class TensorSet:
    """The tensors of one registration, in a fixed order, and their descriptions.

    The registered module or dict is read again before every use: see `follow` and `check_unmoved`.

    Attributes:
        metadata: one description per registered value; an MXFP8 value is described as its bfloat16 tensor.
        values: the registered values by name.
        quantized: the names of the MXFP8 values.
        names, tensors: all live tensors; an MXFP8 value has two, its data and its scales.
        kept: what keeps its own values, or is left out. Nothing else here has it: it is neither copied nor watched.
    """

    # whether commits write the tensors; then two names for one memory must be one weight
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
        """Describe a module, or take a dict with (or, for whole tensors, without) explicit metadata.

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
        self._cuts = [copied_cut(cut_of(value)) for value in raw.values()]
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
        self._settled: Sequence[torch.Tensor] = ()  # the tensors whose GPUs `_gpus` are
        self._gpus: set[int] = set()
        self.arena_places: tuple[Place, ...] = ()  # set by the client that knows the arenas
        self._fingerprints = [fingerprint(tensor) for tensor in self._captured(named)]
        self.offsets, self.packed_bytes = packed_offsets([t.numel() * t.element_size() for t in self.tensors])

    def places(self, arenas: Mapping[int, Home]) -> tuple[Place, ...]:
        """Return every tensor's place in the arenas; () unless all lie in arenas. Empty tensors fit anywhere.

        A set of only empty tensors has no place: its arena would be one of other registrations.
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
            ProtocolError: there is not one offset for each tensor, or one lies outside the `nbytes` of the arena.
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

    def addresses(self) -> tuple[int, ...]:
        """Return each tensor's start address in this process.

        Raises:
            RefusedError: a tensor is not contiguous CPU memory, so that other processes cannot read it in place.
        """
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if tensor.device.type != "cpu" or gpu_of(tensor) != HOST or not tensor.is_contiguous():
                raise RefusedError(
                    f"{name}: only contiguous CPU tensors can be pulled (found {tensor.device}, strides "
                    f"{tuple(tensor.stride())}); publish a snapshot instead"
                )
        return tuple(tensor.data_ptr() for tensor in self.tensors)

    def spans(self) -> tuple[Span, ...]:
        """Return each nonempty tensor's memory: (address, rows, bytes per row). Raises as `addresses`."""
        found = []
        for address, tensor in zip(self.addresses(), self.tensors, strict=True):
            row = (tensor.shape[-1] if tensor.dim() > 1 else tensor.numel()) * tensor.element_size()
            if row:
                found.append((address, tensor.numel() * tensor.element_size() // row, row))
        return tuple(found)

    def check_unmoved(self, when: str = "since registration", *, is_described: bool = False) -> None:
        """Raise CommitError if a registered tensor was replaced, moved or reshaped; `when` goes into the message.

        With `is_described`, also if attributes or a DTensor's spec now say that a tensor is split differently.
        """
        try:
            raw = self._read()
            current = self._captured(self._named_again(raw))
            index = self._first_changed(current)
            if index is None and is_described:
                self._check_specs(raw, self._specs)
                if not self._is_cut_as_before(raw):
                    # skip tensors that say nothing: one replaced another over the same memory and is written like it
                    said = {name for name, value in raw.items() if any(each is not None for each in cut_of(value))}
                    self._check_described(raw, said)
        except RefusedError as exc:
            raise CommitError(f"{exc}; it has changed {when}") from exc
        if index is not None:
            value: object = current[index]
            is_tensor = isinstance(value, torch.Tensor) and not problem_of(value)
            now = fingerprint(current[index]) if is_tensor else problem_of(value) or shown(value)
            raise CommitError(
                f"{self.names[index]}: its storage has changed {when} ({self._fingerprints[index]} is now {now}); keep "
                "parameters in place, or register again"
            )

    def follow(self) -> bool:
        """Adopt tensors that have replaced registered ones of the same description; return whether there were any.

        The registered module or dict is read again. Replaced parameters and dict entries are published from now on.

        Raises:
            RefusedError: names, shapes, dtypes or layouts are not those registered, memory was freed, or a tensor has
                left the arena that it is lent from. Names the tensor; nothing has changed.
        """
        raw = self._read()
        named = self._named_again(raw)
        replaced = [
            name for name, old, new in zip(raw, self._raw.values(), raw.values(), strict=True) if new is not old
        ]
        captured = self._captured(named)
        if self._first_changed(captured) is None and not replaced:
            self._check_specs(raw, self._specs)
            if not self._is_cut_as_before(raw):
                self._check_described(raw)
                self._cuts = [copied_cut(cut_of(value)) for value in raw.values()]
            return False
        for m in self.metadata:
            problem = problem_of(raw[m.name]) or difference(m, named[m.name])
            if problem:
                was_cut, is_cut = m.name in self._specs, is_dtensor(raw[m.name])
                todo = "register the source again"
                if was_cut and not is_cut:
                    todo = (
                        "it was a DTensor, and is none now: where FSDP has gathered it (after a forward pass, the "
                        "outermost module and those with reshard_after_forward=False), call reshard() on that module, "
                        "which does not reshard those inside, before you publish"
                    )
                elif is_cut and not was_cut:
                    todo = (
                        "it is a DTensor, and was none then: where FSDP had gathered it (after a forward pass), call "
                        "reshard() on that module, and register the source again"
                    )
                raise RefusedError(f"{m.name}: {problem}; it has changed since registration; {todo}")
        self._check_specs(raw, {**dict.fromkeys(replaced), **self._specs})
        # not if only memory has moved: describing 100,000 tensors takes as long as registering them
        if replaced or not self._is_cut_as_before(raw):
            self._check_described(raw)
        self._check_one_memory(raw)
        prints = [fingerprint(tensor) for tensor in captured]
        names, tensors = self._live(named)
        if self.arena_places:
            for name, was, now in zip(names, self._fingerprints, prints, strict=True):
                if was != now:
                    raise RefusedError(
                        f"{name}: it has left the arena that it is lent from ({was} is now {now}); write tensors of "
                        "client.allocate() in place, or register the source again"
                    )
        lies = extents(tensors)
        if unreadable := out_of_reach(lies, write=False):
            raise RefusedError(f"{names[unreadable[0]]}: its memory cannot be read; register the source again")
        self._raw, self.values, self.tensors = raw, named, tensors
        self._fingerprints, self._copies = prints, None
        self._cuts = [copied_cut(cut_of(value)) for value in raw.values()]
        return True

    def check_still(self, when: str) -> None:
        """Raise RefusedError if a tensor was replaced, moved or freed since `follow`; `when` goes into the message."""
        raw = self._read()
        index = self._first_changed(self._captured(self._named_again(raw)))
        if index is not None:
            raise RefusedError(
                f"{self.names[index]}: it was replaced, moved or freed {when}; publish between two changes of the "
                "tensors, not beside them"
            )

    def _read(self) -> dict[str, Any]:
        """Return the current values of the registered module or dict; DTensors stay DTensors."""
        if isinstance(self._given, Mapping):
            try:
                return dict(self._given)
            except Exception as exc:
                kind = type(self._given).__name__
                raise RefusedError(f"module_or_tensors: this {kind} raised {type(exc).__name__} when read") from exc
        return get_refit_tensor_dict(self._given)

    def _named_again(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the local tensors of `raw`, after removing tied and kept names from it and restoring its order.

        The order differs if an entry was removed and added again under its name.

        Raises:
            RefusedError: the names are not those registered, or a tied name no longer shares its memory.
        """
        if self._tied:
            for other, first in self._tied.items():
                if other in raw and first in raw and not _is_same_memory(raw[other], raw[first]):
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
        return {name: held_here(value) for name, value in raw.items()}

    def _first_changed(self, current: Sequence[torch.Tensor]) -> int | None:
        """Return the index of the first live tensor whose fingerprint has changed, None if there is none."""
        if len(current) != len(self._fingerprints):
            return 0
        index = 0
        try:
            # field by field, without making tuples: this loop dominates the check of 100,000 tensors
            for index, (tensor, (ptr, held, shape, strides, dtype, lazy)) in enumerate(
                zip(current, self._fingerprints, strict=True)
            ):
                if (
                    tensor.data_ptr() != ptr
                    or tensor.untyped_storage().nbytes() != held
                    or tensor.shape != shape
                    or tensor.stride() != strides
                    or tensor.dtype is not dtype
                    or (tensor.is_neg() or tensor.is_conj()) is not lazy
                ):
                    return index
        except Exception:  # not a tensor, or one without memory: the caller finds out which
            return index
        return None

    def _check_specs(self, raw: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        """Compare the meshes and placements of DTensors with those at registration."""
        for name in names:
            was, now = self._specs.get(name), getattr(raw[name], "_spec", None)
            if now is not was and now != was:
                raise RefusedError(
                    f"{name}: it is laid out otherwise than at registration ({laid_out(was)} is now "
                    f"{laid_out(now)}); keep the layout, or register again"
                )

    def _is_cut_as_before(self, raw: Mapping[str, Any]) -> bool:
        """Return whether all cuts are as at the last look. It must be fast: it runs each time, for 100,000 tensors."""
        try:
            return [cut_of(value) for value in raw.values()] == self._cuts
        except Exception:  # arrays cannot be compared so; the caller compares descriptions instead
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
            # more shared memory is harmless, less is found by _check_one_memory; a target's tied names are in _tied
            if "aliases" in changed and (self._tied or set(m.aliases) - memory_names <= set(now.aliases)):
                changed.remove("aliases")
            if changed:
                raise RefusedError(
                    f"{m.name}: it is described otherwise than at registration ({', '.join(changed)}: "
                    f"{[getattr(m, f) for f in changed]} is now {[getattr(now, f) for f in changed]}); a parameter "
                    "that replaces another needs its attributes; set them, or register again"
                )

    def _check_one_memory(self, raw: Mapping[str, Any]) -> None:
        """Refuse names that were tied by their memory and no longer share it: targets hold one value for them."""
        for first, *others in self._one_memory:
            for other in others:
                if not _is_same_memory(raw[first], raw[other]):
                    raise RefusedError(
                        f"{other}: it is no longer the memory of {first}, which it was tied to at registration; keep "
                        "them tied, or register the source again"
                    )

    def _renamed(self, metas: list[ParameterMetadata]) -> list[ParameterMetadata]:
        names = self._canonical_names
        return metas if names is None else rename(metas, names, is_target=self._writes)

    def _captured(self, named: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the original tensors in the order of `names`; `self.tensors` holds views of them."""
        if not self.quantized:
            return list(named.values())
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
        if self._settled is not self.tensors:
            self._settled, self._gpus = self.tensors, {gpu_of(tensor) for tensor in self.tensors}
        for gpu in self._gpus:
            settle(gpu)

    def write_to(self, arena: Arena) -> None:
        """Copy every tensor into an arena in refitd's layout; call `follow` first."""
        self._known_copies().perform(arena, into_arena=True)

    def read_from(self, arena: Arena) -> None:
        """Copy every tensor out of an arena in refitd's layout, in place; call `check_unmoved` first."""
        self._known_copies().perform(arena, into_arena=False)

    def _known_copies(self) -> ArenaCopies:
        if self._copies is None:
            self._copies = ArenaCopies(*self._moved())
        return self._copies

    def _moved(self) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
        """Return the tensors that are copied unconverted, and their offsets in an arena."""
        return self.tensors, self.offsets

    def differing(self, arena: Arena) -> str | None:
        """Return the name of the first tensor whose bytes differ from an arena in refitd's layout, None if none do."""
        for name, tensor, offset in zip(self.names, self.tensors, self.offsets, strict=True):
            if not same_bytes(tensor, arena, offset):
                return name
        return None


def _is_same_memory(one: Any, other: Any) -> bool:
    return same_memory(held_here(one), held_here(other))
