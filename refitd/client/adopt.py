"""Move the parameters and buffers of an existing module into one arena, without replacing the tensor objects.

Bytes move in *parts*. A part is a range of one storage, with all tensors of the module in that range. Tensors that
overlap are in one part, and views stay views. Bytes outside the parts do not move.

    storage  [ a.......  b = a.T  |  unused  |  c... ]   ->   arena  [ a, b | c ]
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from refitd.buffers.arena import MappedArena, is_left
from refitd.buffers.cuda import is_capturing
from refitd.buffers.layout import extent, packed_offsets
from refitd.buffers.windows import LEAST, WindowedArena, most_windows, placed
from refitd.client.arenas import Arena, Home, byte_strides, common_gpu, place_of, settle, view_of
from refitd.client.given import checked_tensors, problem_of, refuse_all
from refitd.describe.memory import HOST, lazy_problem
from refitd.describe.module import get_refit_tensor_dict, is_dtensor, named_unsaved_buffers
from refitd.errors import RefusedError
from refitd.protocol.shards import Place


@dataclass(frozen=True, slots=True)
class Adopted:
    """The result of `Client.adopt`.

    Attributes:
        tensors: the number of parameters and persistent buffers in the new arena; tied ones count once.
        nbytes: their size in the arena.
        left: {name: reason} of the tensors that did not move: buffers that versions do not contain, and tensors that
            were in an arena already. With `keep_addresses`, also the tensors that each commit copies whole.
        copied_bytes: with `keep_addresses`, the bytes that each commit copies.
    """

    tensors: int
    nbytes: int
    left: dict[str, str]
    copied_bytes: int = 0


@dataclass(slots=True)
class StoragePart:
    """Bytes [start, end) of a storage and the tensors in that range; `names` lists the registered ones."""

    storage: torch.UntypedStorage
    start: int
    end: int
    tensors: list[torch.Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The part's size in bytes."""
        return self.end - self.start

    def bytes(self) -> torch.Tensor:
        """Return the part's memory as a tensor of bytes."""
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
    """The plan of moving a module's tensors into an arena.

    Attributes:
        parts: the parts to move.
        offsets: the offset of each part in the arena, in bytes.
        nbytes: the arena's size; 0 if no tensor moves.
        contents: {name: (offset, bytes of its elements)} of the registered tensors in the arena.
        left: as in `Adopted`.
        tensors: as in `Adopted`.
        gpu: the device's number, HOST for main memory.
    """

    _moves = True

    def __init__(self, module: Any, arenas: Mapping[int, Home], *, home: Arena | None = None) -> None:
        """Collect the tensors to move.

        Args:
            module: a module, or a list of modules.
            arenas: the client's arenas; tensors in them do not move.
            home: the arena that the tensors move to, if some may be in it already.

        Raises:
            RefusedError: some tensors cannot be moved; the error names each with its reason.
        """
        if isinstance(module, Mapping):
            raise RefusedError("module is a dict, whose tensors others hold too; pass the module itself")
        registered = get_refit_tensor_dict(checked_tensors(module))  # type: ignore[arg-type]
        refuse_all(f"{name}: {why}" for name, value in registered.items() if (why := lazy_problem(value)))
        unsaved = dict(named_unsaved_buffers(module))
        self.left = dict.fromkeys(unsaved, "no version has it: state_dict would not save it")
        refuse_all(f"{name}: {why}" for name, value in registered.items() if (why := kind_problem(value)))
        inside = [name for name, value in registered.items() if value.numel() and place_of(value, arenas)]
        self.left.update(dict.fromkeys(inside, "it lies in an arena already"))
        registered = {name: value for name, value in registered.items() if name not in self.left and value.numel()}
        self.gpu = common_gpu([*registered], [*registered.values()])
        others = {n: b for n, b in unsaved.items() if not kind_problem(b)}
        storages = _storages(registered, {name: other for name, other in others.items() if other.numel()})
        found = _parts(registered, storages, move=self._moves)
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
        """Raise RefusedError if an object outside this module uses the memory of registered tensors."""
        mappings, homes = Mappings(), {} if home is None else {0: home}
        refuse_all(
            f"{one.name}: {problem}"
            for storage, lying in storages
            for one in lying
            if one.is_registered and (problem := mappings.problem_of(storage, len(lying), place_of(one.tensor, homes)))
        )

    def lay_out(self, offsets: list[int]) -> None:
        """Set each part's offset in the arena. `__init__` packs the parts in order; subclasses may choose others."""
        self.offsets = offsets
        self.contents: dict[str, tuple[int, int]] = {}
        for part, offset in zip(self.parts, offsets, strict=True):
            for name in part.names:
                self.contents[name] = offset + self._begins[name] - part.start, self._sizes[name]

    def perform(self, arena: Arena) -> None:
        """Copy every part into the arena and point its tensors there; undo everything on failure."""
        if self.gpu != HOST and is_capturing(self.gpu):  # the copies would be in the graph, and the wait would break it
            raise RefusedError(
                f"a CUDA graph is being captured on GPU {self.gpu}, and no tensor was moved; adopt after the capture"
            )
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
    """Point a tensor, which stays the same object, into `region`: the bytes of its storage from `start` on."""
    at = region.storage_offset() + tensor.storage_offset() * tensor.element_size() - start
    with torch.inference_mode(tensor.is_inference()):  # the new memory decides whether it is an inference tensor
        new = torch.empty(0, dtype=tensor.dtype, device=region.device)
        new.set_(region.untyped_storage(), at // tensor.element_size(), tensor.shape, tensor.stride())
    set_data(tensor, new)


def holders(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors that use a storage, in this module or elsewhere."""
    spare = torch.empty(1).untyped_storage()  # without tensors: this count is the overhead to subtract
    use_count = torch._C._storage_Use_Count
    return int(use_count(storage._cdata) - use_count(spare._cdata))


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor over the same memory."""
    with torch.inference_mode(tensor.is_inference()):
        return torch.Tensor.data.__get__(tensor)  # type: ignore[attr-defined, no-any-return]


def set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Point a tensor, which stays the same object, at the memory of another tensor."""
    # torch's own attribute: an engine's subclass of Parameter may override `data`, or have a __torch_function__
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
    """Return every storage of these tensors, with the tensors in it and the bases of views among them."""
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


def _parts(registered: Mapping[str, torch.Tensor], storages: Storages, *, move: bool) -> list[StoragePart]:
    """Return the parts that contain registered tensors.

    If they `move`, each part starts at a multiple of its largest element size, so all its tensors stay aligned.

    Raises:
        RefusedError: a registered tensor shares bytes with a tensor of the module that versions do not contain.
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
                f"{one.name}: it shares memory with {moved[0].name}, and no version has it; clone it"
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
    """Yield groups of tensors that share bytes; the tensors must be sorted by start."""
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
    """This process's memory map: it shows which memory is shared, and which is a private view of a file."""

    def __init__(self) -> None:
        rows = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, access, _, _, inode = line.split(None, 5)[:5]
            start, _, end = span.partition("-")
            rows.append((int(start, 16), int(end, 16), access[3] == "s", inode != "0"))
        self._rows = rows
        self._starts = [row[0] for row in rows]

    def is_shared(self, start: int, end: int) -> bool:
        """Return whether other processes may share memory in this range of addresses."""
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        rows = self._rows[first : bisect.bisect_left(self._starts, end)]
        return any(is_shared for _, until, is_shared, _ in rows if until > start)

    def problem_of(self, storage: torch.UntypedStorage, known: int, home: Place | None) -> str:
        """Return why tensors cannot move out of this storage; "" if they can.

        The module has `known` tensors in the storage. `home` is the storage's place in the arena that they move to, if
        it is there already.
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


class WindowedAdoption(Adoption):
    """An adoption that keeps addresses: it maps an arena's pages over each part, or has each commit copy the part.

    Views of a part outside the module stay valid and show each version. Only gaps between the module's tensors must be
    unused, because commits overwrite them.
    """

    _moves = False

    def __init__(self, module: Any, arenas: Mapping[int, Home]) -> None:
        """Collect the tensors to adopt.

        Raises:
            RefusedError: as for `Adoption`, or tensors are on a GPU.
        """
        super().__init__(module, arenas)
        if self.gpu != HOST:
            raise RefusedError(
                f"{self.parts[0].names[0]}: it lies on GPU {self.gpu}, and keep_addresses is possible in main memory "
                "alone; adopt before graphs are captured, without keep_addresses"
            )
        mappings, memory = Mappings(), [(_address(part), part.nbytes) for part in self.parts]
        found, nbytes = placed(memory)
        self._memory = found
        self._copied = {
            index: reason for index, part in enumerate(found) if (reason := self._obstacle(index, mappings))
        }
        self._leave_room()
        self.nbytes = nbytes if self.parts else 0
        self.lay_out([part.offset for part in found])

    def show(self, arena: MappedArena) -> WindowedArena:
        """Copy the tensors' bytes into the arena and map its pages at their addresses; undo everything on failure.

        Raises:
            CommitError: the kernel has unmapped memory and cannot map it again.
        """
        held: dict[int, torch.Tensor] = {}  # by storage
        done: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            with torch.inference_mode(False), torch.no_grad():
                owners = {part.storage._cdata for part in self.parts if part.storage.resizable()}
                for part in self.parts:
                    storage = part.storage._cdata
                    if storage not in held:
                        held[storage] = _never_resized(part.storage)
                    for tensor in part.tensors if storage in owners else ():
                        done.append((tensor, data_of(tensor)))
                        point(tensor, held[storage])
            may = [index not in self._copied for index in range(len(self.parts))]
            shown = WindowedArena(arena, self._memory, may, [*held.values()])
        except BaseException:
            for tensor, old in reversed(done):
                set_data(tensor, old)
            raise
        self._copied.update(shown.refused)
        for index, reason in self._copied.items():
            self.left.update(dict.fromkeys(self.parts[index].names, f"each commit copies it: {reason}"))
        return shown

    def _check(self, storages: Storages, found: list[StoragePart], home: Arena | None) -> None:
        """Raise RefusedError if tensors outside this module may use the gaps of a part."""
        lying = {storage._cdata: found for storage, found in storages}
        refuse_all(
            f"{part.names[0]}: tensors outside this module ({others}) share its memory, and may lie in its gaps, which "
            "a version would overwrite; drop them first, or clone it"
            for part in found
            if not _is_covered(part, lying[part.storage._cdata])
            and (others := holders(part.storage) - len(lying[part.storage._cdata])) > 0
        )

    def _obstacle(self, index: int, mappings: Mappings) -> str:
        """Return why an arena cannot be mapped at a part's addresses; "" if it can."""
        part = self._memory[index]
        if part.window() is None:
            return f"it has less than {LEAST >> 10} KiB"
        if mappings.is_shared(part.address, part.address + part.nbytes):
            return "its memory is shared with other processes, or an arena of another client that is open"
        if any(tensor.is_pinned() for tensor in self.parts[index].tensors):
            return "its memory is pinned for a GPU, which would go on to use the pages that it has now"
        return ""

    def _leave_room(self) -> None:
        """Mark the smallest parts to be copied at commits, if windows for all would exceed the kernel's limit."""
        shown = [index for index in range(len(self._memory)) if index not in self._copied]
        room = most_windows()
        for index in sorted(shown, key=lambda index: -self._memory[index].nbytes)[room:]:
            self._copied[index] = f"vm.max_map_count leaves room for {room} ranges of pages, and others are larger"


def _address(part: StoragePart) -> int:
    return part.storage.data_ptr() + part.start


def _never_resized(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor over the same memory, in a new storage that keeps the old one alive.

    Afterwards neither storage can be resized, which would free memory where arena pages are mapped: torch refuses to
    resize a storage that numpy has seen, or that numpy owns.
    """
    return torch.from_numpy(StoragePart(storage, 0, storage.nbytes()).bytes().numpy())


def _is_covered(part: StoragePart, lying: Sequence[Lying]) -> bool:
    """Return whether the module's dense tensors cover a part completely."""
    end = part.start
    for one in sorted(lying, key=lambda one: one.start):
        if one.tensor.numel() * one.tensor.element_size() == one.end - one.start and one.start <= end:
            end = max(end, one.end) if one.end > part.start else end
    return end >= part.end
