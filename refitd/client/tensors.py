"""A client's tensors: described, recognised in arenas, fingerprinted, copied to and from arenas."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from refitd.buffers.cuda import MappedDeviceArena
from refitd.buffers.layout import packed_offsets
from refitd.client.arguments import MAX_NAME, whole
from refitd.client.devices import Arena, settle
from refitd.copy_services.measure import Span
from refitd.describe.layout import canonical_name, same_elements, same_places
from refitd.describe.memory import (
    HOST,
    extents,
    files_mapped_twice,
    gpu_of,
    lie_in,
    mapped_twice,
    met,
    out_of_reach,
    overlapping,
    overlaps_itself,
    same_memory,
)
from refitd.describe.metadata import ParameterMetadata, plain
from refitd.describe.module import (
    describe_module,
    extract_param_metadata,
    get_refit_tensor_dict,
    is_dtensor,
    local_tensor,
)
from refitd.describe.usable import lazy_problem, tensor_problem
from refitd.describe.wrappers import unwrapped_name, without_module
from refitd.dtypes import ELEMENT_SIZES, dtype_name
from refitd.errors import CommitError, PlanError, RefusedError
from refitd.protocol.shards import Place
from refitd.text import shown
from refitd.transforms.mxfp8_buffers import MXFP8Buffer, held_of, is_quantized

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_EXACT = (torch.Tensor, torch.nn.Parameter)
# attributes of a parameter that its description is made of
_CUT = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "partition_sizes",
    "allreduce",
    "shared_embedding",
    "shared",
)
Tensors = torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.Tensor] | Mapping[str, Any]


class Fingerprint(NamedTuple):
    """What must not change about a tensor that a CUDA graph may have captured.

    They are taken several times in a pause, of every tensor: a named tuple is made in a third of a dataclass's time.
    """

    data_ptr: int
    storage_bytes: int  # 0 once it has been freed
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_lazy: bool  # a conjugate or negative that has not been written out


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Take a tensor's fingerprint."""
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

    What was registered, a module or a dict, is read again before every use: see `follow` and `check_unmoved`.

    Attributes:
        metadata: one for each value that was registered; of one in MXFP8, of the bfloat16 tensor that it stands for.
        values: what was registered, by name.
        quantized: the names of those in MXFP8.
        names, tensors: all that is live: of a value in MXFP8 its data and its scales.
    """

    # whether the tensors are written, so that two names of one memory must be one weight
    _writes = False

    def __init__(
        self,
        tensors: Tensors,
        rank: int,
        metadata: Sequence[ParameterMetadata] | None,
        pg_collection: Any,
        num_experts: int | None,
    ) -> None:
        """Describe a module, or take a dict with (or, for whole tensors, without) explicit metadata.

        Raises:
            RefusedError: tensors and metadata do not belong together, or a tensor is none that can be read or written.
            PlanError: a description is impossible.
        """
        self._given: Mapping[str, Any] | torch.nn.Module | Sequence[torch.nn.Module] = _checked(tensors)
        self._describe: Callable[[Mapping[str, Any]], list[ParameterMetadata]] | None = None
        self._tied: dict[str, str] = {}
        self._one_memory: list[list[str]] = []  # names that were tied because they are one memory
        raw = self._read()
        refuse_all(f"{name}: {problem}" for name, value in raw.items() if (problem := _problem(value)))
        if metadata is None and isinstance(self._given, Mapping):
            metadata = _described(raw, rank, num_experts)
            self._describe = partial(_described_again, metadata, rank, num_experts)
        elif metadata is None and not isinstance(self._given, Mapping):
            module = self._given
            self._describe = lambda raw: describe_module(module, rank, pg_collection, num_experts)
            metadata = self._describe(raw)
        self.metadata = _matched(metadata, raw)
        if self._writes:
            raw = self._without_tied(raw)
        self._raw = raw
        self._specs = {name: value._spec for name, value in raw.items() if is_dtensor(value)}
        self._cuts = [_copied(_cut(value)) for value in raw.values()]
        named = {name: _held_here(value) for name, value in raw.items()}
        self.values: dict[str, Any] = named
        self.quantized = frozenset(name for name, value in named.items() if is_quantized(value))
        self.names, self.tensors = self._live(named)
        problems = [_mismatch(m, named[m.name]) for m in self.metadata]
        refuse_all(problem for problem in problems if problem)
        self._lies = self._written_at = extents(self.tensors)
        self._in_file_mapped_twice = False
        self._moves: Moves | None = None  # made when they are first copied, and anew when they have moved
        refuse_all(
            f"{self.names[i]}: its memory cannot be {'written' if self._writes else 'read'} (a file that is mapped for "
            "reading, say); clone the tensor"
            for i in out_of_reach(self._lies, write=self._writes)
        )
        self.arena_places: tuple[Place, ...] = ()  # set by the client that knows the arenas
        self._fingerprints = [fingerprint(tensor) for tensor in self._captured(named)]
        self.offsets, self.packed_bytes = packed_offsets([t.numel() * t.element_size() for t in self.tensors])

    def places(self, arenas: Mapping[int, Arena]) -> tuple[Place, ...]:
        """Return where every tensor lies in arenas; empty unless all of them do. Empty tensors lie anywhere."""
        found: list[Place | None] = []
        for tensor in self.tensors:
            place = _place(tensor, arenas) if tensor.numel() else None
            if place is None and tensor.numel():
                return ()
            found.append(place)
        home = next((place.arena for place in found if place is not None), next(iter(arenas), None))
        if home is None:
            return ()
        return tuple(
            Place(home, 0, _byte_strides(tensor)) if place is None else place
            for tensor, place in zip(self.tensors, found, strict=True)
        )

    def addresses(self) -> tuple[int, ...]:
        """Return where each tensor starts in this process.

        Raises:
            RefusedError: a tensor is not contiguous CPU memory, so that nobody else can read it in place.
        """
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if tensor.device.type != "cpu" or gpu_of(tensor) != HOST or not tensor.is_contiguous():
                raise RefusedError(
                    f"{name}: only contiguous CPU tensors can be pulled (found {tensor.device}, strides "
                    f"{tuple(tensor.stride())}); publish a snapshot instead"
                )
        return tuple(tensor.data_ptr() for tensor in self.tensors)

    def spans(self) -> tuple[Span, ...]:
        """Return the memory of every tensor that `addresses` allows: (address, rows, bytes of a row)."""
        found = []
        for address, tensor in zip(self.addresses(), self.tensors, strict=True):
            row = (tensor.shape[-1] if tensor.dim() > 1 else tensor.numel()) * tensor.element_size()
            if row:
                found.append((address, tensor.numel() * tensor.element_size() // row, row))
        return tuple(found)

    def check_unmoved(self, when: str = "since registration", *, is_described: bool = False) -> None:
        """Raise CommitError when a registered tensor has been replaced, moved or reshaped; `when` is for its text.

        With `is_described` also when attributes or DTensors say of their cut what they did not say.
        """
        try:
            raw = self._read()
            current = self._captured(self._named_again(raw))
            index = self._first_changed(current)
            if index is None and is_described:
                self._check_specs(raw, self._specs)
                if not self._is_cut_as_before(raw):
                    # one that says nothing has replaced another over the same memory, and is written as that was
                    said = {name for name, value in raw.items() if any(each is not None for each in _cut(value))}
                    self._check_described(raw, said)
        except RefusedError as exc:
            raise CommitError(f"{exc}; it has changed {when}") from exc
        if index is not None:
            value: object = current[index]
            is_tensor = isinstance(value, torch.Tensor) and not _problem(value)
            now = fingerprint(current[index]) if is_tensor else _problem(value) or shown(value)
            raise CommitError(
                f"{self.names[index]}: its storage has changed {when} ({self._fingerprints[index]} is now {now}); keep "
                "parameters in place, or register again"
            )

    def follow(self) -> bool:
        """Take up tensors that have replaced others of the same description; return whether there were any.

        What is given is read again: a parameter that was assigned anew, or an entry of a dict that was bound anew, is
        what is published from now on.

        Raises:
            RefusedError: names, shapes, types or layouts are not those registered, memory has been freed, or a tensor
                has left the arena that it is lent from. Names the tensor; nothing has been read, nothing changed.
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
                self._cuts = [_copied(_cut(value)) for value in raw.values()]
            return False
        for m in self.metadata:
            problem = _problem(raw[m.name]) or _difference(m, named[m.name])
            if problem:
                is_gathered = m.name in self._specs and not is_dtensor(raw[m.name])
                todo = (
                    "it was a DTensor, and is none now: where FSDP has gathered it (it keeps the outermost module's "
                    "parameters so after a forward pass), call reshard() on that module before you publish"
                    if is_gathered
                    else "register the source again"
                )
                raise RefusedError(f"{m.name}: {problem}; it has changed since registration; {todo}")
        self._check_specs(raw, {**dict.fromkeys(replaced), **self._specs})
        # not for memory alone that has moved: describing 100,000 tensors takes as long as registering them
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
        self._lies, self._fingerprints, self._moves = lies, prints, None
        self._cuts = [_copied(_cut(value)) for value in raw.values()]
        return True

    def check_still(self, when: str) -> None:
        """Raise RefusedError when a tensor has been replaced, moved or freed since `follow`; `when` is for its text."""
        raw = self._read()
        index = self._first_changed(self._captured(self._named_again(raw)))
        if index is not None:
            raise RefusedError(
                f"{self.names[index]}: it was replaced, moved or freed {when}; publish between two changes of the "
                "tensors, not beside them"
            )

    def _read(self) -> dict[str, Any]:
        """Return what is registered as it is now, DTensors and all."""
        if isinstance(self._given, Mapping):
            try:
                return dict(self._given)
            except Exception as exc:
                kind = type(self._given).__name__
                raise RefusedError(f"module_or_tensors: this {kind} raised {type(exc).__name__} when read") from exc
        return get_refit_tensor_dict(self._given)

    def _named_again(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank holds of `raw`, from which the further names of tied tensors are taken out.

        What has been taken out and put back under its name stands in another place: `raw` is put in the order of the
        registration.

        Raises:
            RefusedError: the names are not those registered.
        """
        if self._tied:
            for other, first in self._tied.items():
                if other in raw and first in raw and not _is_same_memory(raw[other], raw[first]):
                    raise RefusedError(f"{other}: it is no longer the memory of {first}, which it is tied to")
                raw.pop(other, None)
        if list(raw) != list(self._raw):
            if changed := sorted(set(raw) ^ set(self._raw), key=str)[:10]:
                whose = "dict" if isinstance(self._given, Mapping) else "module"
                raise RefusedError(
                    f"the {whose}'s tensors are not those registered (changed: {changed}); register it again"
                )
            for name in self._raw:
                raw[name] = raw.pop(name)
        return {name: _held_here(value) for name, value in raw.items()}

    def _first_changed(self, current: Sequence[torch.Tensor]) -> int | None:
        """Return the first of the live tensors that is not where, or what, it was."""
        if len(current) != len(self._fingerprints):
            return 0
        index = 0
        try:
            # field by field, without a tuple for each: this is most of what looking at 100,000 tensors costs
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
        except Exception:  # it is no tensor, or none with memory: whoever asks finds out
            return index
        return None

    def _check_specs(self, raw: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        """Compare the meshes and placements of DTensors with those at registration."""
        for name in names:
            was, now = self._specs.get(name), getattr(raw[name], "_spec", None)
            if now is not was and now != was:
                raise RefusedError(
                    f"{name}: it is laid out otherwise than at registration ({_laid_out(was)} is now "
                    f"{_laid_out(now)}); keep the layout, or register again"
                )

    def _is_cut_as_before(self, raw: Mapping[str, Any]) -> bool:
        """Whether tensors say of their cut what they said at the last look; it is asked of 100,000, every time."""
        try:
            return [_cut(value) for value in raw.values()] == self._cuts
        except Exception:  # an array among them: descriptions are compared instead
            return False

    def _check_described(self, raw: Mapping[str, Any], names: Container[str] | None = None) -> None:
        """Compare what attributes and DTensors say with what they said; of these tensors, or all."""
        if self._describe is None:
            for (name, value), was in zip(raw.items(), self._cuts, strict=True):
                # what was described by the caller has no other sign of a shard that lies elsewhere now
                if is_dtensor(value) and (now := _chunks(value)) != was[-1]:
                    raise RefusedError(
                        f"{name}: its chunk metadata is {now}, and was {was[-1]} at registration; register again"
                    )
            return
        try:
            described = {m.name: m for m in self._describe(raw)}
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
            # one memory more is no harm, and one less is for _check_one_memory; a target's tied names are in _tied
            if "aliases" in changed and (self._tied or set(m.aliases) - memory_names <= set(now.aliases)):
                changed.remove("aliases")
            if changed:
                raise RefusedError(
                    f"{m.name}: it is described otherwise than at registration ({', '.join(changed)}: "
                    f"{[getattr(m, f) for f in changed]} is now {[getattr(now, f) for f in changed]}); a parameter "
                    "that replaces another needs its attributes; set them, or register again"
                )

    def _check_one_memory(self, raw: Mapping[str, Any]) -> None:
        """Refuse names that have been tied as one memory and no longer are: a target that ties them has one value."""
        for first, *others in self._one_memory:
            for other in others:
                if not _is_same_memory(raw[first], raw[other]):
                    raise RefusedError(
                        f"{other}: it is no longer the memory of {first}, which it was tied to at registration; keep "
                        "them tied, or register the source again"
                    )

    def _without_tied(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Leave out further names of one memory that descriptions tie, and have the first one say them.

            embedding (aliases: output) and output, one memory   ->   embedding, with output as an alias

        Whatever sources hold, one tensor then feeds that memory.
        """
        by_place: dict[Any, list[ParameterMetadata]] = {}
        for m in self.metadata:
            value = raw[m.name]
            if isinstance(value, torch.Tensor) and not is_quantized(value) and value.numel():
                tensor = local_tensor(value)
                place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
                by_place.setdefault(place, []).append(m)
        kept = {m.name: m for m in self.metadata}
        for group in by_place.values():
            first, first_name = group[0], canonical_name(group[0])
            for other in group[1:]:
                name = canonical_name(other)
                if name == first_name or not (name in first.aliases or first_name in other.aliases):
                    continue
                if not same_places(first, other):  # other elements of that weight: check_overlaps refuses them
                    continue
                said = dict.fromkeys((*first.aliases, name, *other.aliases))
                first = kept[first.name] = replace(first, aliases=tuple(a for a in said if a != first_name))
                self._tied[other.name] = first.name
                del kept[other.name]
        self.metadata = list(kept.values())
        return {name: value for name, value in raw.items() if name not in self._tied}

    def check_overlaps(self, more: Mapping[str, torch.Tensor] | None = None) -> None:
        """Refuse tensors to be written that share memory, unless they are the same elements of one tensor.

        `more` are tensors made of these, which may share memory among themselves.

        Raises:
            RefusedError: names two of them.
        """
        by_name = {m.name: m for m in self.metadata}
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if overlaps_itself(tensor):
                raise RefusedError(
                    f"{name}: several of its elements lie in one place (shape {tuple(tensor.shape)}, strides "
                    f"{tuple(tensor.stride())}), so that what is written last would win; register what it was expanded "
                    "from, or a clone"
                )
        names, tensors = [*self.names, *(more or {})], [*self.tensors, *(more or {}).values()]

        def is_one_weight(a: int, b: int) -> bool:
            if a >= len(self.names) and b >= len(self.names):
                return True
            one, other = by_name.get(names[a]), by_name.get(names[b])
            if one is None or other is None or b >= len(self.names):
                return False
            return same_memory(tensors[a], tensors[b]) and same_elements(one, other)

        lies = self._written_at = self._lies if not more else extents(tensors)
        if (found := overlapping(tensors, lies, is_one_weight)) is not None:
            one, other = names[found[0]], names[found[1]]
            raise RefusedError(
                f"{one} and {other} share memory, so that what is written last would win; register it once (tied "
                f"weights: as {one}, with the other's canonical name in its ParameterMetadata.aliases), or clone one"
            )
        files = files_mapped_twice()
        self._in_file_mapped_twice = lie_in(files, lies)
        if (found := mapped_twice(lies, files)) is not None:
            raise RefusedError(
                f"{names[found[0]]} and {names[found[1]]} lie in one place of a file that is mapped twice, so that "
                "what is written last would win; register one of them, or clone one"
            )

    def check_apart(self, other: TensorSet, whose: str) -> None:
        """Refuse tensors of another registration that share memory with these, which `whose` registration has.

        The same weight in the same place is none of that: two models may be served from one memory in turn.
        """
        has_met, is_twice = met(self._written_at, other._written_at), other._in_file_mapped_twice
        if not has_met and not is_twice:
            return
        my_names, my_tensors = self._written()
        their_names, their_tensors = other._written()
        names, tensors, count = [*my_names, *their_names], [*my_tensors, *their_tensors], len(my_names)
        mine, theirs = ({m.name: m for m in tensor_set.metadata} for tensor_set in (self, other))

        def is_apart(a: int, b: int) -> bool:
            if (a < count) == (b < count):
                return True
            one, two = mine.get(names[a]), theirs.get(names[b])
            is_one = names[a] == names[b] if one is None or two is None else same_elements(one, two)
            return is_one and same_memory(tensors[a], tensors[b])

        lies_at = extents(tensors)
        how = "shares memory with"
        found = overlapping(tensors, lies_at, is_apart) if has_met else None
        if found is None and is_twice:
            how = "lies, by another mapping of a file, in one place with"
            found = mapped_twice(lies_at, files_mapped_twice())
        if found is not None:
            raise RefusedError(
                f"{names[found[1]]}: it {how} {names[found[0]]} of {whose}, and both "
                "would be written; register it once, or close the other registration first"
            )

    def _written(self) -> tuple[list[str], list[torch.Tensor]]:
        """Return the names, and the tensors, of all that a commit writes."""
        return self.names, self.tensors

    def _captured(self, named: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors themselves, in the order of `names`; `tensors` are views of their bytes."""
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
        """Return the live tensors of what is registered, and what messages call them."""
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
        """Return once the GPUs that the tensors lie on have done what this process gave them."""
        for gpu in {gpu_of(tensor) for tensor in self.tensors}:
            settle(gpu)

    def write_to(self, arena: Arena) -> None:
        """Copy every tensor into an arena in refitd's layout; `follow` has looked at them."""
        self._known_moves().perform(arena, into_arena=True)

    def read_from(self, arena: Arena) -> None:
        """Copy every tensor out of an arena in refitd's layout, in place; `check_unmoved` has looked at them."""
        self._known_moves().perform(arena, into_arena=False)

    def _known_moves(self) -> Moves:
        if self._moves is None:
            self._moves = Moves(*self._moved())
        return self._moves

    def _moved(self) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
        """Return the tensors that are copied as they are, and their offsets in an arena."""
        return self.tensors, self.offsets

    def differing(self, arena: Arena) -> str | None:
        """Return the name of a tensor whose bytes are not those in an arena of refitd's layout, None if all are."""
        for name, tensor, offset in zip(self.names, self.tensors, self.offsets, strict=True):
            if not _same_bytes(tensor, arena, offset):
                return name
        return None


class Moves:
    """Copies between tensors and an arena. They are made once: tensors that have not moved are not looked at again."""

    def __init__(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        self._all = list(zip(tensors, offsets, strict=True))
        plain = [tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors]
        self._rest = [pair for pair, is_plain in zip(self._all, plain, strict=True) if not is_plain]
        spans = [
            (tensor.data_ptr(), offset, tensor.numel() * tensor.element_size())
            for (tensor, offset), is_plain in zip(self._all, plain, strict=True)
            if is_plain
        ]
        columns = np.array([span for span in spans if span[2]], np.uint64).reshape(-1, 3)
        here, there, size = columns.T
        # what follows one another at both ends is one copy
        joins = (here[1:] == here[:-1] + size[:-1]) & (there[1:] == there[:-1] + size[:-1])
        first = np.flatnonzero(np.append(True, ~joins)[: len(columns)])
        sizes = np.add.reduceat(size, first) if len(first) else size
        self._runs = list(zip(here[first].tolist(), there[first].tolist(), sizes.tolist(), strict=True))

    def perform(self, arena: Arena, *, into_arena: bool) -> None:
        """Copy everything into an arena, or out of it."""
        if arena.device != HOST:
            for tensor, offset in self._all:
                _copy(tensor, arena, offset, into_arena=into_arena)
            return
        # one memmove each, without waking OpenMP
        memmove, base = ctypes.memmove, arena.address
        if into_arena:
            for here, there, nbytes in self._runs:
                memmove(base + there, here, nbytes)
        else:
            for here, there, nbytes in self._runs:
                memmove(here, base + there, nbytes)
        for tensor, offset in self._rest:
            _copy(tensor, arena, offset, into_arena=into_arena)


def _same_bytes(tensor: torch.Tensor, arena: Arena, offset: int) -> bool:
    if not tensor.numel():
        return True
    held = _view(arena, offset, tensor.shape, tensor.dtype)
    if tensor.device.type == "cpu" and arena.device == HOST and tensor.is_contiguous():
        size = tensor.numel() * tensor.element_size()
        differs: int = _libc.memcmp(tensor.data_ptr(), held.data_ptr(), size)
        return not differs
    # as bytes: a NaN is equal to itself
    mine, theirs = (
        (t.view(torch.uint8) if t.dtype == torch.bool else t).detach().contiguous().view(-1).view(torch.uint8)
        for t in (tensor, held)
    )
    return torch.equal(mine, theirs.to(mine.device))


def tensors_in(arena: Arena, wanted: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Return tensors of these shapes and dtypes laid out in a writable arena."""
    offsets, _ = packed_offsets([prod(shape) * dtype.itemsize for shape, dtype in wanted.values()])
    return {
        name: _view(arena, offset, shape, dtype)
        for offset, (name, (shape, dtype)) in zip(offsets, wanted.items(), strict=True)
    }


def checked_wanted(wanted: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes in plain types; raises RefusedError naming the tensor whose are none."""
    if not isinstance(wanted, Mapping):
        raise RefusedError(f"wanted is {shown(wanted)}, expected {{name: (shape, dtype)}}")
    found = {}
    for name, one in wanted.items():
        if not isinstance(name, str) or not isinstance(one, tuple | list) or len(one) != 2:
            raise RefusedError(f"wanted[{name!r}] is {shown(one)}, expected (shape, dtype)")
        shape, dtype = one
        if isinstance(shape, str | bytes) or not isinstance(shape, Iterable) or _is_single(shape):
            raise RefusedError(f"wanted[{name!r}]: shape is {shown(shape)}, expected a tuple of sizes")
        if not isinstance(dtype, torch.dtype) or dtype_name(dtype) not in ELEMENT_SIZES:
            raise RefusedError(
                f"wanted[{name!r}]: dtype is {shown(dtype)}, expected one of {', '.join(ELEMENT_SIZES)} of torch"
            )
        found[name] = tuple(whole(f"a size of wanted[{name!r}]", size) for size in shape), dtype
    return found


def arena_of(name: str, tensor: Any, arenas: Mapping[int, Arena]) -> int | None:
    """Return which arena a tensor lies in, None for one without elements.

    Raises:
        RefusedError: it is no tensor, or lies in none of them.
    """
    if not isinstance(tensor, torch.Tensor):
        raise RefusedError(f"{name} is {shown(tensor)}, expected a tensor of client.allocate()")
    if not tensor.numel():
        return None
    place = _place(tensor, arenas)
    if place is None:
        raise RefusedError(
            f"{name}: it lies in no arena that this client has allocated, or that is free already; give back what "
            "client.allocate() gave"
        )
    return place.arena


def packed_bytes(wanted: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> int:
    """Return the bytes an arena needs for these tensors."""
    return packed_offsets([prod(shape) * dtype.itemsize for shape, dtype in wanted.values()])[1]


def _view(arena: Arena, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if prod(shape) == 0:
        where = arena.tensor.device if isinstance(arena, MappedDeviceArena) else None
        return torch.empty(tuple(shape), dtype=dtype, device=where)
    if isinstance(arena, MappedDeviceArena):
        return arena.tensor[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
    with warnings.catch_warnings():
        # a staging arena is mapped for reading only, and only read
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(arena.bytes, dtype=dtype, count=prod(shape), offset=offset)
    return flat.view(tuple(shape))


def _copy(tensor: torch.Tensor, arena: Arena, offset: int, *, into_arena: bool) -> None:
    staged = _view(arena, offset, tensor.shape, tensor.dtype)
    if into_arena:
        copy_bytes(staged, tensor)
    else:
        copy_bytes(tensor, staged)


def held_of_given(name: str, value: Any) -> Any:
    """Return the memory of what is published under a name; raises RefusedError where it is nothing that can be read."""
    if problem := _problem(value):
        raise RefusedError(f"{name}: {problem}")
    return _held_here(value)


def copy_bytes(to: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor of the same shape and type, byte for byte."""
    if to.device.type == tensor.device.type == "cpu" and to.is_contiguous() and tensor.is_contiguous():
        ctypes.memmove(to.data_ptr(), tensor.data_ptr(), to.numel() * to.element_size())  # without waking OpenMP
        return
    # not no_grad: an engine's tensors may be inference tensors, which nothing else may write
    with torch.inference_mode():
        # torch writes a 1 for every byte of a bool that is not 0, and copies no e8m0
        if tensor.dtype in (torch.bool, torch.float8_e8m0fnu):
            to, tensor = to.view(torch.uint8), tensor.view(torch.uint8)
        to.copy_(tensor)


def _place(tensor: torch.Tensor, arenas: Mapping[int, Arena]) -> Place | None:
    if tensor.device.type not in ("cpu", "cuda") or any(stride < 0 for stride in tensor.stride()):
        return None
    es = tensor.element_size()
    span = (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * es
    for number, arena in arenas.items():
        if arena.device != gpu_of(tensor):
            continue
        offset = arena.offset_of(tensor.data_ptr(), span)
        if offset is not None:
            return Place(number, offset, _byte_strides(tensor))
    return None


def _byte_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride * tensor.element_size() for stride in tensor.stride())


def _checked(tensors: Any) -> Tensors:
    """Return what is to be registered; raises RefusedError where it is nothing that has tensors."""
    if isinstance(tensors, Mapping):
        refuse_all(
            f"module_or_tensors: a key is {shown(name)}, expected the name of a tensor"
            for name in tensors
            if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME
        )
        return tensors
    if isinstance(tensors, torch.nn.Module):
        return tensors
    if isinstance(tensors, Sequence) and not isinstance(tensors, str | bytes):
        for index, chunk in enumerate(tensors):
            if not isinstance(chunk, torch.nn.Module):
                raise RefusedError(f"module_or_tensors[{index}] is {shown(chunk)}, expected a module")
        return tensors
    raise RefusedError(
        f"module_or_tensors is {shown(tensors)}, expected a module, a list of modules, or {{name: tensor}}"
    )


def _is_single(value: Any) -> bool:
    """Whether it is an array or tensor without dimensions, which cannot be iterated over."""
    return getattr(value, "ndim", None) == 0


def _matched(metadata: Any, named: Mapping[str, Any]) -> list[ParameterMetadata]:
    """Return one description for each tensor, in plain values, in the order of the tensors."""
    if (
        isinstance(metadata, str | bytes | Mapping | ParameterMetadata)
        or not isinstance(metadata, Iterable)
        or (_is_single(metadata))
    ):
        raise RefusedError(f"metadata is {shown(metadata)}, expected a list of ParameterMetadata")
    described: dict[str, ParameterMetadata] = {}
    for index, m in enumerate(metadata):
        if not isinstance(m, ParameterMetadata):
            raise RefusedError(f"metadata[{index}] is {shown(m)}, expected a ParameterMetadata")
        found = plain(m)
        if found.name in described:
            raise RefusedError(f"{found.name}: metadata describes it twice; give one ParameterMetadata per tensor")
        described[found.name] = found
    if missing := sorted(named.keys() ^ described.keys()):
        raise RefusedError(
            f"tensors and metadata name different parameters: {missing[:10]}; give one ParameterMetadata per tensor"
        )
    return [described[name] for name in named]


def _problem(value: Any) -> str:
    """Return why what is registered under a name cannot be read, "" where it can."""
    if problem := lazy_problem(value):
        return problem
    problem = tensor_problem(_held_here(value))
    is_buffer = not isinstance(value, torch.Tensor) and hasattr(value, "data") and hasattr(value, "scale")
    if problem and (is_buffer or is_quantized(value)):
        return ""  # held_of says what is wrong with it
    return problem


def _held_here(value: Any) -> Any:
    """Return what this rank holds: the local tensor of a DTensor, anything else as it is."""
    # most are torch's own
    return value._local_tensor if type(value) not in _EXACT and is_dtensor(value) else value


def _is_same_memory(one: Any, other: Any) -> bool:
    return same_memory(_held_here(one), _held_here(other))


def _mismatch(m: ParameterMetadata, value: Any) -> str:
    """Return how a description and its tensor differ, and what to do, "" where they do not."""
    found = _difference(m, value)
    return f"{m.name}: {found}; correct its ParameterMetadata" if found else ""


def _difference(m: ParameterMetadata, value: Any) -> str:
    """Return how a description and its tensor differ, "" where they do not."""
    shape, dtype = _stands_for(m.name, value)
    if m.shape != shape or dtype_name(m.dtype) != dtype_name(dtype):
        return f"described as {tuple(m.shape)} {dtype_name(m.dtype)}, the tensor is {shape} {dtype_name(dtype)}"
    if m.element_size != dtype.itemsize:
        return f"element_size is {m.element_size}, expected {dtype.itemsize} bytes for {dtype_name(dtype)}"
    return ""


def _cut(value: Any) -> tuple[Any, ...]:
    """Return what a tensor says of its own cut, last the chunks of a DTensor; () where it can say nothing."""
    if type(value) in _EXACT:
        said = value.__dict__
        return tuple(map(said.get, _CUT)) if said else ()
    return (*(getattr(value, name, None) for name in _CUT), _chunks(value))


def _chunks(value: Any) -> Any:
    """Return the boxes (offsets, sizes) that a DTensor's local tensor says it holds, None where it says nothing."""
    say = getattr(getattr(value, "_local_tensor", None), "__create_chunk_list__", None)
    if say is None:
        return None
    try:
        return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in say()]
    except Exception as exc:
        return f"unreadable ({type(exc).__name__})"


def _copied(cut: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a cut that does not change with the lists it was read from."""
    return tuple(list(each) if isinstance(each, list) else each for each in cut) if cut else cut


def _laid_out(spec: Any) -> str:
    return "no DTensor" if spec is None else f"{tuple(spec.placements)} on a mesh of {tuple(spec.mesh.shape)}"


def refuse_all(problems: Iterable[str]) -> None:
    """Raise RefusedError with these problems, if there are any."""
    found = list(problems)
    if found:
        more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
        raise RefusedError("; ".join(found[:10]) + more)


def _described(named: Mapping[str, Any], rank: int, num_experts: int | None) -> list[ParameterMetadata]:
    """Describe the tensors of a dict: DTensors say how they are cut, every other tensor is whole."""
    further = without_module(unwrapped_name(name) for name in named)
    found: list[ParameterMetadata] = []
    owners: dict[str, str] = {}
    for name, value in named.items():
        known = unwrapped_name(name)
        if (other := owners.setdefault(known, name)) != name:
            raise RefusedError(f"{other} and {name}: without their wrappers both are called {known}; register one")
        if is_dtensor(value):
            m = replace(extract_param_metadata(value, known, rank, None, num_experts), name=name)
        else:
            shape, dtype = _stands_for(name, value)
            m = ParameterMetadata(
                name=name, shape=shape, dtype=dtype, element_size=dtype.itemsize, owner_rank=rank, resolved_name=known
            )
        if known in further and not is_quantized(value):
            m.aliases = (further[known],)
        found.append(m)
    return found


def _described_again(
    before: Sequence[ParameterMetadata], rank: int, num_experts: int | None, raw: Mapping[str, Any]
) -> list[ParameterMetadata]:
    """Describe the DTensors of a dict: nothing else says more than its shape, which has been compared."""
    found = []
    for m in before:
        value = raw[m.name]
        if is_dtensor(value):
            now = extract_param_metadata(value, unwrapped_name(m.name), rank, None, num_experts)
            found.append(replace(now, name=m.name, aliases=m.aliases))
    return found


def _stands_for(name: str, value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a tensor, or of the bfloat16 one that one in MXFP8 stands for."""
    if isinstance(value, torch.Tensor) and not is_quantized(value):
        return tuple(value.shape), value.dtype
    return tuple(held_of(name, value).data.shape), torch.bfloat16
