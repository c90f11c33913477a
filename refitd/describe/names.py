"""Canonical names: the same weight has the same name on every rank and in every layout.

Wrappers (DistributedDataParallel, torch.compile) add parts to names; these are removed. Pipeline ranks number their
layers from 0 and expert-parallel ranks number their experts from 0. Both numbers are local, so names are rewritten
before anything is matched:

    PP stage 1 of 2, 32 layers        decoder.layers.0.mlp...            -> decoder.layers.16.mlp...
    EP rank 1 of 2, 8 experts         experts.linear_fc1.weight0         -> experts.linear_fc1.weight4
    as above, one module per expert   experts.local_experts.0.linear_fc1.weight -> experts.linear_fc1.weight4

The last two lines give the same name on purpose: grouped and sequential experts hold the same weights. A name is
never guessed: missing information raises PlanError.

Tied weights (one weight under several names) are found from modules and from shared memory:

    one Parameter, or one piece of memory, under two names     each is an alias of the other
    Megatron: share_embeddings_and_output_weights              embedding.word_embeddings.weight is output_layer.weight
    as above, a pipeline stage that has only one of the two    its parameter has shared_embedding

Tied tensors have equal values on every rank. Only aliases are set here; `refitd.plan.layouts` decides which tensor
feeds which.

`tie_problems` compares tensors that are declared tied by their digests. A digest is of elements in canonical
(row-major) order; the memory layout does not matter.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import xxhash

from refitd.describe.layout import canonical_name, elements, same_places
from refitd.describe.metadata import ParameterMetadata, Tile
from refitd.errors import PlanError

if TYPE_CHECKING:
    import torch
    from torch import nn

# TEGroupedMLP: "...linear_fc1.weight3", "...linear_fc1.bias3"
_GROUPED = re.compile(r"^(?P<stem>.*(?:^|\.)(?:weight|bias))(?P<index>\d+)$")
# SequentialMLP: "...experts.local_experts.3.linear_fc1.weight"
_SEQUENTIAL = re.compile(r"^(?P<head>.*?)(?:^|(?<=\.))local_experts\.(?P<index>\d+)\.(?P<tail>.+)$")


def detect_expert_index(name: str) -> int | None:
    """Return the local expert index in a parameter's name, or None if it has none."""
    found = _SEQUENTIAL.match(name) or _GROUPED.match(name)
    return int(found["index"]) if found else None


def with_expert_index(name: str, index: int) -> str:
    """Return the canonical name with its expert index replaced by `index`.

    Raises:
        PlanError: the name has no expert index.
    """
    if found := _SEQUENTIAL.match(name):
        if found["tail"].endswith(("weight", "bias")):
            return f"{found['head']}{found['tail']}{index}"
        # after any other name (w1, scale_2) the index would read as part of the name
        return f"{found['head']}local_experts.{index}.{found['tail']}"
    if found := _GROUPED.match(name):
        return f"{found['stem']}{index}"
    raise PlanError(f"{name}: expected weightK, biasK or local_experts.K. in the name of an expert's tensor")


def expert_range(num_experts: int, ep_size: int, ep_index: int) -> range:
    """Return the global indices of the experts at position `ep_index` of an expert-parallel group.

    Experts are assigned in order; if the group size does not divide them, the first positions hold one more:

        8 experts, EP3 -> [0, 1, 2] [3, 4, 5] [6, 7]
    """
    each, more = divmod(num_experts, ep_size)
    start = ep_index * each + min(ep_index, more)
    return range(start, start + each + (ep_index < more))


def assign_ep_resolved_name_inplace(meta: ParameterMetadata, *, base_name: str | None = None) -> None:
    """Set `meta.resolved_name`, and for an expert's tensor `meta.global_expert_index`.

    Tensors that are not expert parallel, and fused ones whose names have no expert index (tiles name their experts),
    keep `base_name` and get no expert index.

    Args:
        meta: changed in place.
        base_name: the name to start from; `meta.name` by default.

    Raises:
        PlanError: the index cannot be made global: no group, no expert count, or an index out of range.
    """
    base = meta.name if base_name is None else base_name
    index = detect_expert_index(base)
    meta.global_expert_index = None
    if index is None or not meta.is_ep:
        # the experts are not split, so the local index is global; only the form of the name is unified
        meta.resolved_name = with_expert_index(base, index) if index is not None else base
        return
    index = _global_expert_index(meta, index)
    meta.resolved_name = with_expert_index(base, index)
    meta.global_expert_index = index


def assign_resolved_name_inplace(
    meta: ParameterMetadata,
    *,
    layer_module_prefix_map: Mapping[str, str] | None = None,
    base_name: str | None = None,
) -> None:
    """Set `meta.resolved_name`: layer indices made global, then expert indices.

    Args:
        meta: changed in place.
        layer_module_prefix_map: {local layer prefix: global prefix} of `layer_prefix_map`; None: names are global.
        base_name: the name to start from; `meta.name` by default.

    Raises:
        PlanError: see `assign_ep_resolved_name_inplace`.
    """
    base = meta.name if base_name is None else base_name
    if layer_module_prefix_map:
        base = resolve_layer_prefix(base, layer_module_prefix_map)
    assign_ep_resolved_name_inplace(meta, base_name=base)


def layer_prefix_map(layers: Iterable[tuple[str, object]]) -> dict[str, str]:
    """Map each local layer prefix to its global one.

        [("decoder.layers.0", 17), ("decoder.layers.1", 18)]
        -> {"decoder.layers.0": "decoder.layers.16", "decoder.layers.1": "decoder.layers.17"}

    Args:
        layers: (module name, its `layer_number` or None) for every module, parents before children. A layer is a
            module with a name that ends in an index and with a 1-indexed int `layer_number`; modules inside a layer are
            never layers.

    Raises:
        PlanError: a layer number below 1, or two layers with one global name.
    """
    found: dict[str, str] = {}
    owner: dict[str, str] = {}
    problems = []
    for name, number in layers:
        parent, _, last = name.rpartition(".")
        if isinstance(number, bool) or not isinstance(number, int) or not last.isdigit():
            continue
        if _mapped_prefix(parent, found):
            continue
        if number < 1:
            problems.append(f"{name}: layer_number is {number}, expected 1 or more (it counts from 1)")
            continue
        target = f"{parent}.{number - 1}" if parent else str(number - 1)
        if target in owner:
            problems.append(
                f"{name}: layer_number {number} is also that of {owner[target]}; check the pipeline offsets"
            )
            continue
        found[name] = target
        owner[target] = name
    if problems:
        raise PlanError(problems)
    return found


def resolve_layer_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the longest mapped module prefix of a parameter's name; other names are returned unchanged."""
    prefix = _mapped_prefix(name, prefixes)
    return prefixes[prefix] + name[len(prefix) :] if prefix else name


def _mapped_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return the longest dotted prefix of `name` that is a key of `prefixes`, or ""."""
    while name and name not in prefixes:
        name = name.rpartition(".")[0]
    return name


def _global_expert_index(meta: ParameterMetadata, index: int) -> int:
    """Return the global index of this rank's local expert `index`."""
    subject, group = f"{meta.name} on rank {meta.owner_rank}", meta.expert_parallel_group_ranks
    if not group:
        raise PlanError(f"{subject}: an expert's tensor without an expert-parallel group; check pg_collection.ep")
    if meta.owner_rank not in group:
        raise PlanError(f"{subject}: its rank is not in its expert-parallel group {_short(group)}")
    if meta.num_experts is None:
        if len(group) == 1:
            return index
        raise PlanError(f"{subject}: the number of experts is not known; pass num_experts")
    held = expert_range(meta.num_experts, len(group), group.index(meta.owner_rank))
    if index >= len(held):
        raise PlanError(
            f"{subject}: local expert {index}, expected at most {len(held)} experts here "
            f"({meta.num_experts} over EP{len(group)}); check num_experts"
        )
    return held[index]


def _short(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] ({len(ranks)} ranks)"


# child names that only wrappers use
WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_DATA_PARALLEL = frozenset({"DistributedDataParallel", "DataParallel"})


def wrapped_paths(module: nn.Module) -> frozenset[str]:
    """Return the paths of children that are inside a wrapper; `clean_name` removes them from names.

    A child called `module` counts as wrapped if its parent is a data-parallel module of torch or Megatron, or has no
    other child and no tensor.
    """
    wrapped: set[str] = set()
    for path, child in module.named_modules(remove_duplicate=False):
        for name, _ in child._modules.items():  # a scripted module's _modules cannot be iterated over directly
            if name in WRAPPED or (name == "module" and _wraps(child)):
                wrapped.add(f"{path}.{name}" if path else name)

    return frozenset(wrapped)


def clean_name(name: str, wrapped: frozenset[str]) -> str:
    """Return a parameter's or module's name without the wrappers in it; `wrapped` is from `wrapped_paths`."""
    if not wrapped:
        return name
    kept, path = [], ""
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        if path not in wrapped:
            kept.append(part)
    return ".".join(kept)


def unwrapped(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, then the module that it wraps, and so on inwards."""
    inner: nn.Module | None = module
    while inner is not None:
        outer, inner = inner, None
        yield outer
        for name, child in outer._modules.items():
            if child is not None and (name in WRAPPED or (name == "module" and _wraps(outer))):
                inner = child


def unwrapped_name(name: str) -> str:
    """Return a dict key without names that only wrappers use; "module" stays, because any module may use it."""
    parts = name.split(".")
    kept = [part for part in parts if part not in WRAPPED]
    return ".".join(kept) if kept and len(kept) < len(parts) else name


def without_module(names: Iterable[str]) -> dict[str, str]:
    """Return {name: name without "module."} if all names begin with it, else {}.

    In a dict one cannot tell whether "module." is a wrapper, so the results are used as additional names.
    """
    listed = list(names)
    if not all(name.startswith("module.") and name != "module." for name in listed):
        return {}
    return {name: name.removeprefix("module.") for name in listed}


def holds_only_module(parent: nn.Module) -> bool:
    """Return whether a module has one child, called `module`, and neither parameters nor buffers."""
    children = [name for name, _ in parent._modules.items()]
    return children == ["module"] and not len(parent._parameters) and not len(parent._buffers)


def _wraps(parent: nn.Module) -> bool:
    if any(kind.__name__ in _DATA_PARALLEL for kind in type(parent).__mro__):
        return True
    return holds_only_module(parent)


# --- ties -------------------------------------------------------------------------------------------------

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
