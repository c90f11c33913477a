"""Find tied weights (one weight under several names) from modules and from shared memory.

    one Parameter, or one piece of memory, under two names     each is an alias of the other
    Megatron: share_embeddings_and_output_weights              embedding.word_embeddings.weight is output_layer.weight
    as above, a pipeline stage that has only one of the two    its parameter has shared_embedding

Tied tensors have equal values on every rank. This module only sets aliases; `refitd.plan.layouts` decides which tensor
feeds which.

`tie_problems` compares tensors that are declared tied by their digests. A digest is of elements in canonical
(row-major) order; the memory layout does not matter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import xxhash

from refitd.describe.layout import canonical_name, elements, same_places
from refitd.describe.metadata import ParameterMetadata, Tile
from refitd.errors import PlanError

if TYPE_CHECKING:
    import torch
    from torch import nn

Aliases = Mapping[str, str | Sequence[str]]
# Megatron's names of the two tensors of a language model that may be tied
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def shared_output_names(module: nn.Module) -> dict[str, str]:
    """Return {name: tied name} for each embedding and output layer that Megatron shares.

    `share_embeddings_and_output_weights` of the language model or its config decides. Without it, the parameters are
    tied if each of the two that is present is marked `shared_embedding`. If both are present, both must be marked: an
    untied model with MTP marks its embedding, too.
    """
    found: dict[str, str] = {}
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for prefix, child in module.named_modules():
        here = f"{prefix}." if prefix else ""
        present = [name for name in (EMBEDDING, OUTPUT) if f"{here}{name}" in names]
        says = _says_shared(child)
        if says is None:
            marked = [_is_marked(module.get_parameter(f"{here}{name}")) for name in present]
            says = marked in ([True], [True, True])
        if says:
            found.update((f"{here}{name}", f"{here}{OUTPUT if name == EMBEDDING else EMBEDDING}") for name in present)
    return found


def _is_marked(param: nn.Parameter) -> bool:
    return bool(getattr(param, "shared_embedding", False) or getattr(param, "shared", False))


def _says_shared(module: nn.Module) -> bool | None:
    for holder in (module, getattr(module, "config", None)):
        said = getattr(holder, "share_embeddings_and_output_weights", None)
        if isinstance(said, bool):
            return said
    return None


def tie_by_memory(metas: Sequence[ParameterMetadata], tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Make tensors that share the same memory, element for element, aliases of each other. Changes `metas`.

    Returns:
        The names of each group of tied tensors.
    """
    found: list[list[str]] = []
    groups: dict[Any, list[ParameterMetadata]] = {}
    for meta in metas:
        tensor = tensors.get(meta.name)
        if tensor is None or not tensor.numel() or tensor.device.type == "meta":
            continue
        try:
            address = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):  # a tensor subclass without memory
            continue
        if address:
            place = (tensor.device, address, tuple(tensor.shape), tensor.stride(), tensor.dtype)
            groups.setdefault(place, []).append(meta)
    for group in (same for metas_there in groups.values() for same in _by_places(metas_there)):
        if len(group) > 1 and not any(len({tile.tensor for tile in meta.tiles or ()}) > 1 for meta in group):
            names = {name for meta in group for name in (canonical_name(meta), *meta.aliases)}
            for meta in group:
                meta.aliases = tuple(sorted(names - {canonical_name(meta)}))
            found.append([meta.name for meta in group])
    return found


def _by_places(metas: list[ParameterMetadata]) -> list[list[ParameterMetadata]]:
    """Group tensors that share memory by the part of their weight: rows 0:4 and rows 4:8 are not tied."""
    found: list[list[ParameterMetadata]] = []
    for meta in metas:
        group = next((group for group in found if same_places(group[0], meta)), None)
        if group is None:
            found.append([meta])
        else:
            group.append(meta)
    return found


def declare_aliases(metas: Sequence[ParameterMetadata], aliases: Aliases) -> list[ParameterMetadata]:
    """Return the descriptions with declared ties, {canonical name: other canonical names of its weight}.

    Each name gets all the others as aliases, because ranks may hold any of them.

    Raises:
        PlanError: a declaration is not a name or a sequence of names.
    """
    groups = _groups(aliases)
    found = []
    for meta in metas:
        tied = groups.get(canonical_name(meta))
        if tied is None:
            found.append(meta)
        else:
            names = {*meta.aliases, *tied} - {canonical_name(meta)}
            found.append(replace(meta, aliases=tuple(sorted(names))))
    return found


def _groups(aliases: Aliases) -> dict[str, set[str]]:
    groups: dict[str, set[str]] = {}
    for name, declared in aliases.items():
        others: Iterable[Any] = (declared,) if isinstance(declared, str) else declared
        group = {name, *(others if isinstance(others, Iterable) else (None,))}
        if not all(isinstance(each, str) and each for each in group) or len(group) == 1:
            raise PlanError(f"aliases of {name!r} are {declared!r}, expected the other canonical names of its weight")
        for each in tuple(group):
            group |= groups.get(each, set())
        for each in group:
            groups[each] = group
    return groups


# Up to this many bytes, a copy costs less than the views that avoid it.
SMALL = 1 << 14


def digest_of(tensor: torch.Tensor, tile: Tile | None = None) -> int:
    """Return the xxh3-64 digest of a tensor, or of one tile, in row-major order; 0 only for a tile without elements."""
    if tile is None and (nbytes := tensor.numel() * tensor.element_size()) <= SMALL and _is_plain(tensor):
        return xxhash.xxh3_64_intdigest(ctypes.string_at(tensor.data_ptr(), nbytes)) or 1
    import torch

    tensor = tensor.detach()
    if tensor.dtype is torch.bool:  # a strided copy of bools would normalise every byte to 0 or 1
        tensor = tensor.view(torch.uint8)
    if tile is not None:
        if not elements(tile.size):
            return 0
        flat = tensor.contiguous().reshape(-1)
        start = flat.storage_offset() + tile.local_offset
        size, stride = tuple(tile.size), tuple(tile.local_stride)
        if (repeat := tile.repeat) is not None:
            size, stride = (repeat.count, *size), (repeat.local_step, *stride)
        box = [pair for pair in zip(size, stride, strict=True) if pair[0] > 1] or [(1, 1)]
        tensor = flat.as_strided([n for n, _ in box], [step for _, step in box], start)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)  # copies only non-contiguous tensors
    return xxhash.xxh3_64_intdigest((raw if raw.device.type == "cpu" else raw.cpu()).numpy().data) or 1


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def tie_problems(metas: Sequence[ParameterMetadata], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return an error text for each pair of one rank's tensors that are declared tied but hold different values.

    Only tensors that hold the same elements of the weight are compared.
    """
    by_name = {canonical_name(meta): meta for meta in metas}
    found = []
    for meta in metas:
        for alias in meta.aliases:
            other = by_name.get(alias)
            if other is None or other is meta or (meta.name > other.name and canonical_name(meta) in other.aliases):
                continue
            one, two = tensors.get(meta.name), tensors.get(other.name)
            if one is None or two is None or one.dtype != two.dtype or not same_places(meta, other):
                continue
            is_one = one.data_ptr() == two.data_ptr() and one.shape == two.shape and one.stride() == two.stride()
            if is_one or not one.numel():
                continue
            # compare tile by tile, because elements outside the tiles may hold anything
            tiles: Sequence[tuple[Tile | None, Tile | None]] = [(None, None)]
            if meta.tiles is not None and other.tiles is not None:
                tiles = list(zip(meta.tiles, other.tiles, strict=False))
            if any(digest_of(one, a) != digest_of(two, b) for a, b in tiles):
                found.append(
                    f"{meta.name} and {other.name}: they are declared to be one weight (aliases) and hold different "
                    "values; make them equal, or leave the alias out"
                )
    return found
