"""Move the parameters and buffers of an existing module into one arena; the tensor objects stay the same.

Bytes move in *parts*: a range of one storage that the module's tensors cover, with all tensors that lie in it. Views of
each other are in one part and stay views; what a storage holds besides does not move.

    storage  [ a.......  b = a.T  |  nobody's  |  c... ]   ->   arena  [ a, b | c ]
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from refitd.buffers.arena import is_left
from refitd.buffers.layout import extent, packed_offsets
from refitd.client.arena_copies import byte_strides, place_of, view_of
from refitd.client.devices import Arena, Home, common_gpu, settle
from refitd.client.given import checked_tensors, is_called, problem_of, refuse_all
from refitd.describe.module import get_refit_tensor_dict, is_dtensor, named_unsaved_buffers
from refitd.describe.usable import lazy_problem
from refitd.errors import RefusedError
from refitd.protocol.shards import Place


@dataclass(frozen=True, slots=True)
class Adopted:
    """What `Client.adopt` has moved.

    Attributes:
        tensors: the number of parameters and persistent buffers that lie in the new arena; tied ones count once.
        nbytes: the bytes that they take there.
        left: {name: reason} of those that are where they were: buffers that no version has, what `only` does not name,
            and what lay in an arena. With `keep_addresses`, also those that each commit copies whole.
        copied_bytes: with `keep_addresses`, the bytes that each commit copies.
    """

    tensors: int
    nbytes: int
    left: dict[str, str]
    copied_bytes: int = 0


@dataclass(slots=True)
class StoragePart:
    """Bytes [start, end) of a storage, and the tensors that lie there; `names` are those of registered ones."""

    storage: torch.UntypedStorage
    start: int
    end: int
    tensors: list[torch.Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.end - self.start

    def bytes(self) -> torch.Tensor:
        """Return its bytes as a tensor."""
        where = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return where.set_(self.storage, self.start, (self.nbytes,), (1,))


class Lying(NamedTuple):
    """A tensor in its storage: from byte `start` to `end`; `name` is "" for the base of a view."""

    start: int
    end: int
    name: str
    tensor: torch.Tensor
    is_registered: bool


Storages = list[tuple[torch.UntypedStorage, list[Lying]]]


class Adoption:
    """The move of a module's tensors into an arena: what moves, and where each part begins.

    Attributes:
        parts, offsets: the parts, and where each begins in the arena.
        nbytes: the arena's size; 0 if nothing is to move.
        contents: for the registered tensors, {name: (offset, bytes of its elements)} in the arena.
        left: as in `Adopted`.
        tensors: as in `Adopted`.
        gpu: the device's number, HOST for main memory.
    """

    _moves = True

    def __init__(
        self,
        module: Any,
        arenas: Mapping[int, Home],
        *,
        only: Sequence[str] | None = None,
        is_draft: bool = False,
        home: Arena | None = None,
    ) -> None:
        """Collect what is to be moved of a module, or a list of modules.

        Args:
            module: what is to be moved.
            arenas: the client's arenas: what lies there is left.
            only: names, with "*" for anything: what none of them matches is left. A tie has its first name.
            is_draft: the module, on the meta device, is only laid out, and not checked.
            home: the arena that it moves to, if some of it may be there already.

        Raises:
            RefusedError: a tensor cannot be moved; names them all, and why.
        """
        if isinstance(module, Mapping):
            raise RefusedError("module is a dict, whose tensors others hold too; pass the module itself")
        registered = get_refit_tensor_dict(checked_tensors(module))  # type: ignore[arg-type]
        registered, unnamed = _divided(registered, only)
        refuse_all(f"{name}: {why}" for name, value in registered.items() if (why := lazy_problem(value)))
        unsaved = dict(named_unsaved_buffers(module))
        self.left = dict.fromkeys(unnamed, "`only` does not name it")
        self.left.update((name, "no version has it: state_dict would not save it") for name in unsaved)
        if not is_draft:
            refuse_all(f"{name}: {why}" for name, value in registered.items() if (why := kind_problem(value)))
            inside = [name for name, value in registered.items() if value.numel() and place_of(value, arenas)]
            self.left.update(dict.fromkeys(inside, "it lies in an arena already"))
        registered = {name: value for name, value in registered.items() if name not in self.left and value.numel()}
        self.gpu = common_gpu([*registered], [*registered.values()])
        others = {n: b for n, b in {**unnamed, **unsaved}.items() if is_draft or not kind_problem(b)}
        storages = _storages(registered, {name: other for name, other in others.items() if other.numel()})
        found = _parts(registered, storages, move=self._moves)
        if not is_draft:
            self._check(storages, found, home)
        first = {name: index for index, name in enumerate(registered)}
        self.parts = sorted(found, key=lambda part: first[part.names[0]])
        offsets, nbytes = packed_offsets([part.nbytes for part in self.parts])
        self.nbytes = nbytes if self.parts else 0
        moved = {id(tensor) for part in self.parts for tensor in part.tensors}
        for name in [name for name, other in others.items() if id(other) in moved]:
            del self.left[name]
        self.tensors = len({id(value) for value in registered.values()})
        self._begins = {name: _span(value)[0] for name, value in registered.items()}
        self._sizes = {name: value.numel() * value.element_size() for name, value in registered.items()}
        self.lay_out(offsets)

    def _check(self, storages: Storages, found: list[StoragePart], home: Arena | None) -> None:
        """Raise RefusedError if anything outside this module holds the memory of registered tensors."""
        mappings, homes = Mappings(), {} if home is None else {0: home}
        refuse_all(
            f"{one.name}: {problem}"
            for storage, lying in storages
            for one in lying
            if one.is_registered and (problem := mappings.problem_of(storage, len(lying), place_of(one.tensor, homes)))
        )

    def lay_out(self, offsets: list[int]) -> None:
        """Set where each part begins in the arena; by default they are packed in order."""
        self.offsets = offsets
        self.contents: dict[str, tuple[int, int]] = {}
        for part, offset in zip(self.parts, offsets, strict=True):
            for name in part.names:
                self.contents[name] = offset + self._begins[name] - part.start, self._sizes[name]

    def perform(self, arena: Arena) -> None:
        """Copy every part into the arena and point its tensors there; undo everything on failure."""
        done: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            with torch.inference_mode(False), torch.no_grad():
                for part, offset in zip(self.parts, self.offsets, strict=True):
                    there = view_of(arena, offset, (part.nbytes,), torch.uint8)
                    here = part.bytes()
                    if here.data_ptr() != there.data_ptr():
                        there.copy_(here)
                        for tensor in part.tensors:
                            done.append((tensor, data_of(tensor)))
                            point(tensor, there, part.start)
                settle(self.gpu)
        except BaseException:
            for tensor, old in reversed(done):
                set_data(tensor, old)
            raise


def point(tensor: torch.Tensor, region: torch.Tensor, start: int = 0) -> None:
    """Point a tensor into a region (of bytes) that holds bytes `start`... of its storage; it stays the same object."""
    at = region.storage_offset() + tensor.storage_offset() * tensor.element_size() - start
    with torch.inference_mode(tensor.is_inference()):  # what is pointed to says whether it is an inference tensor
        new = torch.empty(0, dtype=tensor.dtype, device=region.device)
        new.set_(region.untyped_storage(), at // tensor.element_size(), tensor.shape, tensor.stride())
    set_data(tensor, new)


def holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors use a storage, whoever holds them."""
    spare = torch.empty(1).untyped_storage()  # the count of a storage without tensors: its own references
    use_count = torch._C._storage_Use_Count
    return int(use_count(storage._cdata) - use_count(spare._cdata))


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory as this one."""
    with torch.inference_mode(tensor.is_inference()):
        return torch.Tensor.data.__get__(tensor)  # type: ignore[attr-defined, no-any-return]


def set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Point a tensor at the memory of another one; it stays the same object."""
    # torch's own attribute: engines' subclasses of Parameter may have another, or a __torch_function__
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]


def kind_problem(value: Any) -> str:
    """Return why a tensor of this kind cannot be moved; "" if it can."""
    if is_dtensor(value):
        return "it is a DTensor, and FSDP keeps views of its memory; leave adopt out, and versions are copied"
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"it is a {type(value).__name__}, which has no memory of its own; leave adopt out"
    if problem := problem_of(value):
        return problem
    if not (value.is_cpu or value.is_cuda):
        return f"it lies on {value.device}; arenas lie in main memory or on a CUDA GPU"
    return ""


def _storages(registered: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> Storages:
    """Return every storage of these tensors, with its known tensors: these, and the bases of which they are views."""
    found: dict[int, tuple[torch.UntypedStorage, dict[int, Lying]]] = {}
    for named in (registered, others):
        for name, tensor in named.items():
            storage = tensor.untyped_storage()
            _, lying = found.setdefault(storage._cdata, (storage, {}))
            lying.setdefault(id(tensor), Lying(*_span(tensor), name, tensor, named is registered))
    for storage, lying in found.values():
        for base in [one.tensor._base for one in lying.values()]:
            if base is not None and base.untyped_storage()._cdata == storage._cdata:
                lying.setdefault(id(base), Lying(*_span(base), "", base, False))
    return [(storage, [*lying.values()]) for storage, lying in found.values()]


def _divided(
    registered: Mapping[str, torch.Tensor], only: Sequence[str] | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors that `only` names, and the others.

    Raises:
        RefusedError: a name matches none.
    """
    if only is None:
        return dict(registered), {}
    refuse_all(
        f"only: no parameter or persistent buffer of the module is registered as {name!r} (a tie has its first name)"
        for name in only
        if not any(is_called(known, (name,)) for known in registered)
    )
    named = {name: value for name, value in registered.items() if is_called(name, only)}
    return named, {name: value for name, value in registered.items() if name not in named}


def _parts(registered: Mapping[str, torch.Tensor], storages: Storages, *, move: bool) -> list[StoragePart]:
    """Return the parts in which registered tensors lie. If they `move`, a part begins where each type may begin.

    Raises:
        RefusedError: one shares bytes with a tensor of the module that no version has.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in registered.items():
        names.setdefault(id(tensor), []).append(name)
    found: list[StoragePart] = []
    problems: list[str] = []
    for storage, lying in storages:
        for group in _overlapping(sorted(lying, key=lambda one: one.start)):
            moved = [one for one in group if one.is_registered]
            if not moved:
                continue
            problems += [
                f"{one.name}: it shares memory with {moved[0].name}, and no version has it (or `only` does not name "
                "it); clone it"
                for one in group
                if one.name and not one.is_registered and not any(_is_within(one, other) for other in moved)
            ]
            largest = max(one.tensor.element_size() for one in group) if move else 1
            part = StoragePart(storage, group[0].start // largest * largest, max(one.end for one in group))
            part.tensors = [one.tensor for one in group]
            part.names = [name for one in moved for name in names[id(one.tensor)]]
            found.append(part)
    refuse_all(problems)
    return found


def _overlapping(sorted_: list[Lying]) -> Iterator[list[Lying]]:
    """Yield groups of tensors, sorted by start, that share bytes."""
    group: list[Lying] = []
    end = 0
    for one in sorted_:
        if group and one.start >= end:
            yield group
            group, end = [], 0
        group.append(one)
        end = max(end, one.end)
    if group:
        yield group


def _is_within(one: Lying, other: Lying) -> bool:
    """Return whether all bytes of `one` belong to `other`, which has no gaps."""
    is_dense = other.tensor.numel() * other.tensor.element_size() == other.end - other.start
    return is_dense and other.start <= one.start and one.end <= other.end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes that a tensor spans in its storage."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + extent(tensor.shape, byte_strides(tensor), tensor.element_size())


class Mappings:
    """This process's memory map, to tell which memory is shared, and which is a private view of a file."""

    def __init__(self) -> None:
        rows = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, access, _, _, inode = line.split(None, 5)[:5]
            start, _, end = span.partition("-")
            rows.append((int(start, 16), int(end, 16), access[3] == "s", inode != "0"))
        self._rows = rows
        self._starts = [row[0] for row in rows]

    def is_shared(self, start: int, end: int) -> bool:
        """Return whether other processes may share memory of these addresses."""
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        rows = self._rows[first : bisect.bisect_left(self._starts, end)]
        return any(is_shared for _, until, is_shared, _ in rows if until > start)

    def problem_of(self, storage: torch.UntypedStorage, known: int, home: Place | None) -> str:
        """Return why a storage in which the module has `known` tensors cannot be left, "" if it can.

        `home` is its place in the arena to which it would move.
        """
        is_shared, is_file = False, home is not None
        if storage.device.type == "cpu" and home is None:
            row = self._rows[max(0, bisect.bisect_right(self._starts, storage.data_ptr()) - 1)]
            is_shared, is_file = (row[2], row[3]) if storage.data_ptr() < row[1] else (False, False)
        if is_left(storage.data_ptr()):
            is_shared, is_file = False, True
        if is_shared:
            return (
                "its memory is shared with other processes (share_memory_, or an arena of another client "
                "that is open), which would keep it; clone it"
            )
        if not is_file and not storage.resizable():
            return "its memory belongs to another object (of numpy, say), which would keep it; clone it"
        if (others := holders(storage) - known) > 0:
            return (
                f"tensors outside this module ({others}: a view, a state dict, a registration here, an autograd graph) "
                "share its memory and would keep the old one; drop them first, or clone it"
            )
        return ""
