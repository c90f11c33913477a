"""Adopt a module's tensors in place: map an arena's pages at their addresses, which captured graphs may contain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from refitd.buffers.arena import MappedArena
from refitd.buffers.windows import LEAST, WindowedArena, most_windows, placed
from refitd.client.adopt import Adoption, Lying, Mappings, StoragePart, Storages, data_of, holders, point, set_data
from refitd.client.devices import Arena, Home
from refitd.client.given import refuse_all
from refitd.describe.memory import HOST
from refitd.errors import RefusedError


class WindowedAdoption(Adoption):
    """An adoption that keeps addresses. Parts are shown an arena's pages, or copied at each commit.

    Views that others hold of a part go on to show it, so only its gaps must be nobody's.
    """

    _moves = False

    def __init__(self, module: Any, arenas: Mapping[int, Home], *, only: Sequence[str] | None = None) -> None:
        """Look at a module; raises RefusedError as `Adoption`, and for tensors on GPUs."""
        super().__init__(module, arenas, only=only)
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
        """Map the arena's pages, with the tensors' bytes, at the tensors' addresses; undo everything on failure.

        Raises:
            CommitError: the kernel has unmapped memory that it cannot map again.
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
        """Raise RefusedError if anything outside this module may use memory in the gaps of a part."""
        lying = {storage._cdata: found for storage, found in storages}
        refuse_all(
            f"{part.names[0]}: tensors outside this module ({others}) share its memory, and may lie in its gaps, which "
            "a version would overwrite; drop them first, or clone it"
            for part in found
            if not _is_covered(part, lying[part.storage._cdata])
            and (others := holders(part.storage) - len(lying[part.storage._cdata])) > 0
        )

    def _obstacle(self, index: int, mappings: Mappings) -> str:
        """Return why an arena cannot be mapped at a part's addresses, "" if it can."""
        part = self._memory[index]
        if part.window() is None:
            return f"it has less than {LEAST >> 10} KiB"
        if mappings.is_shared(part.address, part.address + part.nbytes):
            return "its memory is shared with other processes, or an arena of another client that is open"
        if any(tensor.is_pinned() for tensor in self.parts[index].tensors):
            return "its memory is pinned for a GPU, which would go on to use the pages that it has now"
        return ""

    def _leave_room(self) -> None:
        """Mark the smallest parts to be copied at commits, if the process would otherwise have too many mappings."""
        shown = [index for index in range(len(self._memory)) if index not in self._copied]
        room = most_windows()
        for index in sorted(shown, key=lambda index: -self._memory[index].nbytes)[room:]:
            self._copied[index] = f"vm.max_map_count leaves room for {room} ranges of pages, and others are larger"


def _address(part: StoragePart) -> int:
    return part.storage.data_ptr() + part.start


def _never_resized(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage's bytes as one of its own at the same address, which holds the old one.

    No call of the owner of either frees memory that shows an arena's pages: torch resizes no storage that numpy has
    seen, and none that numpy owns.
    """
    return torch.from_numpy(StoragePart(storage, 0, storage.nbytes()).bytes().numpy())


def _is_covered(part: StoragePart, lying: Sequence[Lying]) -> bool:
    """Return whether gapless tensors of the module cover a part completely."""
    end = part.start
    for one in sorted(lying, key=lambda one: one.start):
        if one.tensor.numel() * one.tensor.element_size() == one.end - one.start and one.start <= end:
            end = max(end, one.end) if one.end > part.start else end
    return end >= part.end
