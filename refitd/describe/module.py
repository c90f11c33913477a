"""Describe a torch module: the only file of describe/ and plan/ that knows torch.

What is read from a parameter are the attributes that Megatron sets (`tensor_model_parallel`, `partition_dim`,
`partition_stride`, `partition_sizes`, `allreduce`), from a layer module its `layer_number`, and from a DTensor
its mesh and placements. Process groups come in a collection with the attributes or keys tp, ep, expt_tp, dp and
pp; each is a torch process group, a sequence of ranks, or None for a group of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from refitd.describe.layout import layout_problems
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.names import assign_resolved_name_inplace, layer_prefix_map, resolve_layer_prefix
from refitd.describe.placements import Split, split_tiles
from refitd.describe.tiles import Tile
from refitd.errors import PlanError

if TYPE_CHECKING:
    import torch
    from torch import nn

_CACHE = "_refitd_tensors"

Group = Any  # a torch ProcessGroup, a sequence of ranks, or None for a group of one


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Process groups as plain rank lists: a `pg_collection` for callers that have no process groups."""

    tp: Group = None
    ep: Group = None
    expt_tp: Group = None
    dp: Group = None
    pp: Group = None


def named_persistent_buffers(
    module: nn.Module,
) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield (full name, parent module, name in it, tensor) of every buffer that state_dict would save."""
    for prefix, parent in module.named_modules():
        for name, tensor in parent._buffers.items():
            if tensor is not None and name not in parent._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), parent, name, tensor


def named_refit_tensors(module: nn.Module | Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of all that a refit moves: every parameter, then every persistent buffer.

    A parameter that several modules share is yielded once. The chunks of a virtual pipeline are a sequence of
    modules; where there are several, their names are told apart by a prefix "chunkN.".
    """
    for prefix, chunk in _chunks(module):
        for name, param in chunk.named_parameters():
            yield prefix + name, param
        for name, _, _, tensor in named_persistent_buffers(chunk):
            yield prefix + name, tensor


def get_refit_tensor_dict(module: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of `named_refit_tensors`, remembered on the module between calls.

    Each call compares what the module and its children hold now with what they held then, by identity, so a
    parameter, buffer or child module that was replaced, added or removed is always seen.
    """
    found: dict[str, torch.Tensor] = {}
    for prefix, chunk in _chunks(module):
        seen = _seen(chunk)
        cache = chunk.__dict__.get(_CACHE)
        if not isinstance(cache, _TensorCache) or not cache.shows(seen):
            cache = _TensorCache(seen, dict(named_refit_tensors(chunk)))
            chunk.__dict__[_CACHE] = cache
        found.update((prefix + name, tensor) for name, tensor in cache.tensors.items())
    return found


def invalidate_refit_tensor_cache(module: nn.Module | Sequence[nn.Module]) -> None:
    """Forget what `get_refit_tensor_dict` remembered. Never needed for correctness; frees the references."""
    for _, chunk in _chunks(module):
        chunk.__dict__.pop(_CACHE, None)


def module_tensors(module: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return {name: tensor that holds this rank's elements} of `get_refit_tensor_dict`."""
    return {name: local_tensor(tensor) for name, tensor in get_refit_tensor_dict(module).items()}


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds this rank's elements: a DTensor's local one, any other without autograd."""
    local = getattr(tensor, "_local_tensor", None)
    return (tensor if local is None else local).detach()


def module_layer_prefix_map(module: nn.Module) -> dict[str, str]:
    """Map the module's local layer prefixes to global ones, from its layers' `layer_number`.

    Raises:
        PlanError: see `refitd.describe.names.layer_prefix_map`.
    """
    return layer_prefix_map(
        (name, getattr(child, "layer_number", None)) for name, child in module.named_modules() if name
    )


def extract_param_metadata(
    param: torch.Tensor,
    param_name: str,
    owner_rank: int,
    pg_collection: Any,
    num_experts: int | None = None,
    layer_module_prefix_map: Mapping[str, str] | None = None,
    rank_offset: int = 0,
    _rank_list_cache: dict[Any, list[int]] | None = None,
) -> ParameterMetadata:
    """Describe one parameter or buffer of this rank.

    Args:
        param: the tensor, with Megatron's attributes where it is split, or a DTensor.
        param_name: its name in the module.
        owner_rank: this rank, as the planner numbers ranks.
        pg_collection: the process groups; None where nothing is split.
        num_experts: experts in the whole model.
        layer_module_prefix_map: from `module_layer_prefix_map`; None where layer names are global already.
        rank_offset: added to every rank found in a group. Groups number the ranks of their own world from 0;
            `owner_rank` is not moved.
        _rank_list_cache: shared between calls, it makes equal groups one list.

    Raises:
        PlanError: what is needed is missing (a split tensor without its group, an expert without a count).
    """
    lists = {} if _rank_list_cache is None else _rank_list_cache

    def ranks(*names: str) -> list[int] | None:
        group = _group_ranks(pg_collection, *names)
        if group is None:
            return None
        moved = [rank + rank_offset for rank in group]
        return lists.setdefault(tuple(moved), moved)

    is_ep = getattr(param, "allreduce", True) is False
    is_tp = bool(getattr(param, "tensor_model_parallel", False))
    meta = ParameterMetadata(
        name=param_name,
        shape=tuple(param.shape),
        dtype=param.dtype,
        element_size=param.element_size(),
        is_ep=is_ep,
        num_experts=num_experts if is_ep else None,
        owner_rank=owner_rank,
        expert_parallel_group_ranks=ranks("ep") if is_ep else None,
        data_parallel_group_ranks=ranks("expt_dp", "dp") if is_ep else ranks("dp", "dp_cp"),
        pipeline_parallel_group_ranks=ranks("pp"),
    )
    if hasattr(param, "placements"):
        assign_resolved_name_inplace(meta, layer_module_prefix_map=layer_module_prefix_map)
        _describe_dtensor(meta, param)
        return meta
    if is_tp:
        names = ("expt_tp", "tp") if is_ep else ("tp",)
        if not any(_has(pg_collection, name) for name in names):
            raise PlanError(
                f"{param_name} on rank {owner_rank}: it is tensor parallel and no group says over which ranks; "
                f"pass a pg_collection with {' or '.join(names)}"
            )
        sizes = getattr(param, "partition_sizes", None)
        meta.tensor_parallel_group_ranks = ranks(*names)
        meta.is_tp = True
        meta.partition_dim = int(getattr(param, "partition_dim", 0))
        meta.partition_stride = int(getattr(param, "partition_stride", 1))
        meta.partition_sizes = None if sizes is None else [int(size) for size in sizes]
    assign_resolved_name_inplace(meta, layer_module_prefix_map=layer_module_prefix_map)
    return meta


def describe_module(
    module_or_chunks: nn.Module | Sequence[nn.Module],
    rank: int,
    pg_collection: Any = None,
    num_experts: int | None = None,
    rank_offset: int = 0,
) -> list[ParameterMetadata]:
    """Describe every tensor that a refit of this module moves, under the names of `named_refit_tensors`.

    A parameter that is there under several names (tied embeddings) is described once, with the others as aliases.

    Args:
        module_or_chunks: a module, or the chunks of a virtual pipeline stage.
        rank: this rank, as the planner numbers ranks.
        pg_collection: the process groups; by default the module's own `pg_collection`.
        num_experts: experts in the whole model; by default the module's `config.num_moe_experts`.
        rank_offset: added to every rank found in a group.

    Raises:
        PlanError: with every tensor that cannot be described, and why.
    """
    found: list[ParameterMetadata] = []
    problems: list[str] = []
    owners: dict[str, str] = {}
    lists: dict[Any, list[int]] = {}
    for prefix, chunk in _chunks(module_or_chunks):
        groups = getattr(chunk, "pg_collection", None) if pg_collection is None else pg_collection
        experts = num_experts
        if experts is None:
            experts = getattr(getattr(chunk, "config", None), "num_moe_experts", None)
        layers = module_layer_prefix_map(chunk)
        others = _other_names(chunk, layers)
        for name, tensor in named_refit_tensors(chunk):
            try:
                meta = extract_param_metadata(
                    tensor, name, rank, groups, experts, layers, rank_offset, _rank_list_cache=lists
                )
                meta.aliases = tuple(_canonical(meta, other, layers) for other in others.get(name, ()))
            except PlanError as error:
                problems += error.violations
                continue
            meta.name = prefix + name
            resolved = meta.resolved_name or name
            if resolved in owners:
                problems.append(
                    f"{meta.name} on rank {rank}: its canonical name {resolved} is also that of "
                    f"{owners[resolved]}; check layer_number and the expert-parallel group"
                )
            owners[resolved] = meta.name
            problems += [f"{problem} (rank {rank})" for problem in layout_problems(meta)]
            found.append(meta)
    if problems:
        raise PlanError(problems)
    return found


@dataclass(slots=True)
class _TensorCache:
    """The tensors of a module, and what the module looked like when they were collected."""

    seen: list[object] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def shows(self, seen: list[object]) -> bool:
        # names are compared by value, everything else by identity; the list keeps the objects alive, so an
        # identity cannot be used again by another object
        return len(seen) == len(self.seen) and all(
            new is old or (isinstance(new, str) and new == old) for new, old in zip(seen, self.seen, strict=True)
        )

    def __reduce__(self) -> tuple[type[_TensorCache], tuple[()]]:
        # a copied or saved module starts without a cache
        return _TensorCache, ()


def _seen(module: nn.Module) -> list[object]:
    """Return every name and object that decides what `named_refit_tensors` yields."""
    seen: list[object] = []
    todo, done = [module], {id(module)}
    for parent in todo:
        for entries in (parent._parameters, parent._buffers, parent._modules):
            seen.extend(entries.keys())
            seen.extend(entries.values())
        seen.extend(sorted(parent._non_persistent_buffers_set))
        for child in parent._modules.values():
            if child is not None and id(child) not in done:
                done.add(id(child))
                todo.append(child)
    return seen


def _chunks(module: nn.Module | Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return (name prefix, module) for a module or for each chunk of a virtual pipeline."""
    from torch import nn

    chunks = [module] if isinstance(module, nn.Module) else list(module)
    return [(f"chunk{i}." if len(chunks) > 1 else "", chunk) for i, chunk in enumerate(chunks)]


def _has(groups: Any, name: str) -> bool:
    return name in groups if isinstance(groups, Mapping) else hasattr(groups, name)


def _group_ranks(groups: Any, *names: str) -> list[int] | None:
    """Return the ranks of the first of these groups that is there, in the numbering of their own world."""
    for name in names:
        group = groups.get(name) if isinstance(groups, Mapping) else getattr(groups, name, None)
        if group is None:
            continue
        if isinstance(group, Sequence) and not isinstance(group, str):
            return [int(rank) for rank in group]
        import torch.distributed as dist

        return list(dist.get_process_group_ranks(group))
    return None


def _other_names(module: nn.Module, layers: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the further names of each parameter that has several, by the name that `named_refit_tensors` gives it.

    A whole layer that is used twice has one `layer_number`, which says nothing of its second place: names there
    are left out.
    """
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    unnumbered: list[str] | None = None
    for name, param in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(param), name)
        if known == name:
            continue
        if unnumbered is None:
            unnumbered = [
                f"{path}."
                for path, child in module.named_modules(remove_duplicate=False)
                if path.rpartition(".")[2].isdigit()
                and isinstance(getattr(child, "layer_number", None), int)
                and resolve_layer_prefix(path, layers) == path
                and path not in layers
            ]
        if not name.startswith(tuple(unnumbered)):
            found.setdefault(known, []).append(name)
    return found


def _canonical(meta: ParameterMetadata, name: str, layers: Mapping[str, str]) -> str:
    """Return the canonical name of a tensor's other name."""
    twin = replace(meta, name=name)
    assign_resolved_name_inplace(twin, layer_module_prefix_map=layers)
    return twin.resolved_name or name


def _describe_dtensor(meta: ParameterMetadata, param: Any) -> None:
    """Fill in the shape and the tiles of a DTensor."""
    local = param._local_tensor
    meta.global_shape, meta.shape = tuple(param.shape), tuple(local.shape)
    name = meta.resolved_name or meta.name
    if hasattr(local, "__create_chunk_list__"):  # uneven shards say where they lie
        meta.tiles = _chunk_tiles(name, meta.shape, local.__create_chunk_list__())
        return
    coordinate = param.device_mesh.get_coordinate()
    if coordinate is None:
        raise PlanError(f"{meta.name} on rank {meta.owner_rank}: this rank is not in the DTensor's mesh")
    splits = []
    for mesh_dim, placement in enumerate(param.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise PlanError(
                f"{meta.name} on rank {meta.owner_rank}: placement {placement} is a pending sum, not a weight; "
                "redistribute it first"
            )
        factor = getattr(placement, "split_factor", 1)
        splits.append(Split(placement.dim, param.device_mesh.size(mesh_dim), int(coordinate[mesh_dim]), int(factor)))
    shape, meta.tiles = split_tiles(name, meta.global_shape, splits)
    if shape != meta.shape:
        raise PlanError(
            f"{meta.name} on rank {meta.owner_rank}: the local tensor is {meta.shape}, expected {shape} from "
            f"placements {tuple(param.placements)}; an uneven DTensor must carry its chunk metadata"
        )


def _chunk_tiles(name: str, shape: tuple[int, ...], chunks: Sequence[Any]) -> tuple[Tile, ...]:
    from refitd.describe.layout import elements, row_major

    if elements(shape) == 0:
        return ()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != shape:
        found = [(tuple(c.offsets), tuple(c.sizes)) for c in chunks]
        raise PlanError(f"{name}: chunk metadata {found} does not describe the local tensor {shape} as one box")
    return (Tile(name, tuple(chunks[0].offsets), shape, 0, row_major(shape)),)
