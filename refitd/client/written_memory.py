"""Check that no two tensors written by commits share memory, within a registration or across several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from refitd.describe.layout import canonical_name, same_elements, same_places
from refitd.describe.memory import (
    extents,
    files_mapped_twice,
    lie_in,
    mapped_twice,
    met,
    overlapping,
    overlaps_itself,
    same_memory,
)
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.module import local_tensor
from refitd.errors import RefusedError
from refitd.transforms.mxfp8_buffers import is_quantized


def one_of_each(
    metadata: Sequence[ParameterMetadata], values: Mapping[str, Any]
) -> tuple[list[ParameterMetadata], dict[str, str]]:
    """Merge tied names that share memory: keep the first name, and make the others its aliases.

        embedding (aliases: output) and output, one memory   ->   embedding, with output as an alias

    One source tensor then feeds that memory, whichever names the sources hold.

    Returns:
        The remaining descriptions, and {dropped name: kept name}.
    """
    by_place: dict[Any, list[ParameterMetadata]] = {}
    for m in metadata:
        value = values[m.name]
        if isinstance(value, torch.Tensor) and not is_quantized(value) and value.numel():
            tensor = local_tensor(value)
            place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
            by_place.setdefault(place, []).append(m)
    kept = {m.name: m for m in metadata}
    tied: dict[str, str] = {}
    for group in by_place.values():
        first, first_name = group[0], canonical_name(group[0])
        for other in group[1:]:
            name = canonical_name(other)
            if name == first_name or not (name in first.aliases or first_name in other.aliases):
                continue
            if not same_places(first, other):  # different elements of that weight: WrittenMemory refuses them
                continue
            said = dict.fromkeys((*first.aliases, name, *other.aliases))
            first = kept[first.name] = replace(first, aliases=tuple(a for a in said if a != first_name))
            tied[other.name] = first.name
            del kept[other.name]
    return list(kept.values()), tied


class WrittenMemory:
    """The memory of one registration's live tensors and derived tensors."""

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        metadata: Sequence[ParameterMetadata],
        made: Mapping[str, torch.Tensor],
    ) -> None:
        """Refuse tensors that share memory, unless they are the same elements of one tensor.

        Args:
            names: the names of `tensors`.
            tensors: the tensors that swaps write.
            metadata: their descriptions; the data and scales of MXFP8 tensors have none.
            made: tensors that are derived from them. They may share memory among themselves.

        Raises:
            RefusedError: tensors share memory; names two of them.
        """
        for name, tensor in zip(names, tensors, strict=True):
            if overlaps_itself(tensor):
                raise RefusedError(
                    f"{name}: several of its elements lie in one place (shape {tuple(tensor.shape)}, strides "
                    f"{tuple(tensor.stride())}), so that what is written last would win; register what it was expanded "
                    "from, or a clone"
                )
        count = len(names)
        self._names, self._tensors = [*names, *made], [*tensors, *made.values()]
        described = {m.name: m for m in metadata}

        def is_one_weight(a: int, b: int) -> bool:
            if a >= count and b >= count:
                return True
            one, other = (described.get(self._names[each]) for each in (a, b))
            if one is None or other is None or b >= count:
                return False
            return same_memory(self._tensors[a], self._tensors[b]) and same_elements(one, other)

        self._lies = extents(self._tensors)
        if (found := overlapping(self._tensors, self._lies, is_one_weight)) is not None:
            one, other = (self._names[each] for each in found)
            raise RefusedError(
                f"{one} and {other} share memory, so that what is written last would win; register it once (tied "
                f"weights: as {one}, with the other's canonical name in its ParameterMetadata.aliases), or clone one"
            )
        files = files_mapped_twice()
        self._in_file_mapped_twice = lie_in(files, self._lies)
        if (found := mapped_twice(self._lies, files)) is not None:
            raise RefusedError(
                f"{self._names[found[0]]} and {self._names[found[1]]} lie in one place of a file that is mapped twice, "
                "so that what is written last would win; register one of them, or clone one"
            )

    def check_kept(self, names: Sequence[str], tensors: Sequence[torch.Tensor], whose: str = "") -> None:
        """Refuse tensors that are to keep their values and share memory with what is written.

        `whose` is " of " and the registration that writes, if it is another one.

        Raises:
            RefusedError: names a tensor of each.
        """
        every, count = [*self._tensors, *tensors], len(self._tensors)
        found = overlapping(every, extents(every), lambda a, b: (a < count) == (b < count)) if tensors else None
        if found is not None:
            todo = "keep it in one registration and write it in none" if whose else "keep both, or clone one"
            raise RefusedError(
                f"{names[found[1] - count]}: it is to keep its values and shares memory with "
                f"{self._names[found[0]]}{whose}, which is written; {todo}"
            )

    def check_apart(self, other: WrittenMemory, whose: str) -> None:
        """Refuse `other` if it shares memory with this registration, which errors call `whose`.

        Raises:
            RefusedError: they share memory; names a tensor of each.
        """
        has_met, is_twice = met(self._lies, other._lies), other._in_file_mapped_twice
        if not has_met and not is_twice:
            return
        names, tensors, count = [*self._names, *other._names], [*self._tensors, *other._tensors], len(self._names)
        lies = extents(tensors)  # again: memory that was freed since is not in the way
        how = "shares memory with"
        found = overlapping(tensors, lies, lambda a, b: (a < count) == (b < count)) if has_met else None
        if found is None and is_twice:
            how = "lies, by another mapping of a file, in one place with"
            found = mapped_twice(lies, files_mapped_twice())
        if found is not None:
            raise RefusedError(
                f"{names[found[1]]}: it {how} {names[found[0]]} of {whose}, and both would write it, so that a swap of "
                "one changes what the other serves; close the other registration first, or register a clone"
            )
