"""Describe a torch module by the attributes of its parameters.

It reads the attributes that Megatron sets on parameters (`tensor_model_parallel`, `partition_dim`,
`partition_stride`, `partition_sizes`, `allreduce`), the `layer_number` of layer modules, and the mesh and placements
of DTensors. Process groups come in a collection with the attributes or keys tp, ep, expt_tp, dp and pp; each is a
torch process group, a sequence of ranks, or None for a group of one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from refitd.describe.dtensors import describe_dtensor, flattened_problem
from refitd.describe.experts import ExpertFinding, Grouped, findings
from refitd.describe.layout import layout_problems
from refitd.describe.memory import lazy_problem
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.names import (
    assign_resolved_name_inplace,
    clean_name,
    layer_prefix_map,
    resolve_layer_prefix,
    shared_output_names,
    tie_by_memory,
    unwrapped,
    wrapped_paths,
)
from refitd.errors import PlanError

if TYPE_CHECKING:
    import torch
    from torch import nn

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
    """Yield (full name, parent module, name in the parent, tensor) of every buffer that state_dict would save."""
    for prefix, parent in module.named_modules():
        for name, tensor in parent._buffers.items():
            if tensor is not None and name not in parent._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), parent, name, tensor


def named_unsaved_buffers(module: nn.Module | Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of every buffer that a refit does not move, because state_dict would not save it."""
    for prefix, chunk in _chunks(module):
        for path, parent in chunk.named_modules():
            for name, tensor in parent._buffers.items():
                if tensor is not None and name in parent._non_persistent_buffers_set:
                    yield prefix + (f"{path}.{name}" if path else name), tensor


def named_refit_tensors(module: nn.Module | Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of everything that a refit moves: every parameter, then every persistent buffer.

    A parameter that several modules share is yielded once. For several chunks of a virtual pipeline, names get the
    prefix "chunkN.".
    """
    for prefix, chunk in _chunks(module):
        seen: set[int] = set()  # by id; hashing a tensor takes ten times as long
        buffers: list[tuple[str, torch.Tensor]] = []
        for path, parent in chunk.named_modules():  # one walk, because each publish does this
            here = f"{prefix}{path}." if path else prefix
            for name, param in parent._parameters.items():
                if param is not None and id(param) not in seen:
                    seen.add(id(param))
                    yield here + name, param
            for name, tensor in parent._buffers.items():
                if tensor is not None and name not in parent._non_persistent_buffers_set:
                    buffers.append((here + name, tensor))
        yield from buffers


def get_refit_tensor_dict(module: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of `named_refit_tensors`."""
    return dict(named_refit_tensors(module))


def invalidate_refit_tensor_cache(module: nn.Module | Sequence[nn.Module]) -> None:
    """Return immediately: `get_refit_tensor_dict` has no cache. The reference has this name."""


def module_tensors(module: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return {name: local tensor} of `get_refit_tensor_dict`."""
    return {name: local_tensor(tensor) for name, tensor in get_refit_tensor_dict(module).items()}


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor."""
    return getattr(value, "_local_tensor", None) is not None and hasattr(value, "placements")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the detached tensor with this rank's elements: a DTensor's local tensor, or the tensor itself."""
    local = getattr(tensor, "_local_tensor", None)
    return (tensor if local is None else local).detach()


def module_layer_prefix_map(module: nn.Module, wrapped: frozenset[str] = frozenset()) -> dict[str, str]:
    """Map the module's local layer prefixes to global ones, from its layers' `layer_number`.

    `wrapped` is from `wrapped_paths`: a layer and its wrapper count as one.

    Raises:
        PlanError: see `refitd.describe.names.layer_prefix_map`.
    """
    numbers: dict[str, object] = {}
    for path, child in module.named_modules():
        name = clean_name(path, wrapped)
        if name and numbers.get(name) is None:
            numbers[name] = getattr(child, "layer_number", None)
    return layer_prefix_map(numbers.items())


def extract_param_metadata(
    param: torch.Tensor,
    param_name: str,
    owner_rank: int,
    pg_collection: Any,
    num_experts: int | None = None,
    layer_module_prefix_map: Mapping[str, str] | None = None,
    rank_offset: int = 0,
    _rank_list_cache: dict[Any, list[int]] | None = None,
    _finding: ExpertFinding | None = None,
) -> ParameterMetadata:
    """Describe one parameter or buffer of this rank.

    Args:
        param: the tensor, with Megatron's attributes if it is split, or a DTensor.
        param_name: its name in the module.
        owner_rank: this rank in the planner's numbering.
        pg_collection: the process groups; None if no tensor is split.
        num_experts: the number of experts in the whole model.
        layer_module_prefix_map: from `module_layer_prefix_map`; None if layer names are already global.
        rank_offset: added to every rank of a group, because groups number their own world from 0. It is not added to
            `owner_rank`.
        _rank_list_cache: shared between calls; equal groups become one list.
        _finding: the parameter's finding from `refitd.describe.experts.findings`.

    Raises:
        PlanError: information is missing (a split tensor without its group, an expert without a count) or invalid.
    """
    lists = {} if _rank_list_cache is None else _rank_list_cache

    def ranks(*names: str) -> list[int] | None:
        group = _group_ranks(pg_collection, *names)
        if group is None:
            return None
        moved = [rank + rank_offset for rank in group]
        return lists.setdefault(tuple(moved), moved)

    known = _finding or ExpertFinding()
    is_ep = known.is_ep or getattr(param, "allreduce", True) is False
    is_tp = known.dim is not None or _is_true(
        f"{param_name}: tensor_model_parallel", getattr(param, "tensor_model_parallel", False)
    )
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
        describe_dtensor(meta, param)
        return meta
    names = ("expt_tp", "tp") if is_ep or known.is_expert else ("tp",)
    if known.grouped is not None:
        _describe_grouped(meta, known.grouped, ranks(*names) or [owner_rank], layer_module_prefix_map)
        return meta
    if is_ep and not is_tp and "expt_tp" in names and _has(pg_collection, "expt_tp"):
        # its attributes do not declare a split; with the group, the planner can compare it with ranks that do
        meta.tensor_parallel_group_ranks = ranks("expt_tp")
    dim, stride = getattr(param, "partition_dim", 0), getattr(param, "partition_stride", 1)
    sizes = getattr(param, "partition_sizes", None)
    if sizes is not None:  # for whole tensors too: other ranks may not declare the blocks
        meta.partition_sizes = _whole_numbers(f"{param_name}: partition_sizes", sizes)
    if is_tp or sizes is not None:
        meta.partition_dim = _whole_number(f"{param_name}: partition_dim", dim) if known.dim is None else known.dim
    if is_tp:
        if not any(_has(pg_collection, name) for name in names):
            raise PlanError(
                f"{param_name} on rank {owner_rank}: it is tensor parallel and no group says over which ranks; "
                f"pass a pg_collection with {' or '.join(names)}"
            )
        meta.tensor_parallel_group_ranks = ranks(*names)
        meta.is_tp = True
        meta.partition_stride = (
            _whole_number(f"{param_name}: partition_stride", stride) if known.stride is None else known.stride
        )
        meta.stride_is_known = known.stride_is_known
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

    A parameter with several names (tied embeddings) is described once, with the other names as aliases. Weights that
    Megatron shares between the ends of a pipeline, and tensors that share memory, also become aliases.

    Args:
        module_or_chunks: a module, or the chunks of a virtual pipeline stage.
        rank: this rank in the planner's numbering.
        pg_collection: the process groups; by default the `pg_collection` of the module or of the module it wraps.
        num_experts: the number of experts in the whole model; by default `config.num_moe_experts` of these modules.
        rank_offset: added to every rank of a group.

    Raises:
        PlanError: lists every tensor that cannot be described, and why.
    """
    found: list[ParameterMetadata] = []
    problems: list[str] = []
    owners: dict[str, str] = {}
    lists: dict[Any, list[int]] = {}
    memory: dict[str, torch.Tensor] = {}
    for prefix, chunk in _chunks(module_or_chunks):
        if problem := flattened_problem(chunk):
            raise PlanError(prefix + problem)
        inside = list(unwrapped(chunk))
        groups = _first(inside, "pg_collection") if pg_collection is None else pg_collection
        experts = num_experts
        if experts is None:
            experts = _first([getattr(module, "config", None) for module in inside], "num_moe_experts")
        wrapped = wrapped_paths(chunk)
        layers = module_layer_prefix_map(chunk, wrapped)
        others = _other_names(chunk, layers, wrapped)
        for name, other in shared_output_names(chunk).items():
            others.setdefault(name, []).append(other)
        sizes = (len(_group_ranks(groups, "ep") or ()), len(_group_ranks(groups, "expt_tp", "tp") or ()))
        found_out = findings(chunk, *sizes, experts)
        for name, tensor in named_refit_tensors(chunk):
            if problem := lazy_problem(tensor):
                problems.append(f"{prefix + name} on rank {rank}: {problem}")
                continue
            try:
                meta = extract_param_metadata(
                    tensor,
                    clean_name(name, wrapped),
                    rank,
                    groups,
                    experts,
                    layers,
                    rank_offset,
                    lists,
                    found_out.get(name),
                )
                names = [_canonical(meta, clean_name(other, wrapped), layers) for other in others.get(name, ())]
                meta.aliases = tuple(dict.fromkeys(other for other in names if other != meta.resolved_name))
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
            memory[meta.name] = local_tensor(tensor)
    if problems:
        raise PlanError(problems)
    tie_by_memory(found, memory)
    return found


def _chunks(module: nn.Module | Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return (name prefix, module) for a module or for each chunk of a virtual pipeline."""
    from torch import nn

    chunks = [module] if isinstance(module, nn.Module) else list(module)
    return [(f"chunk{i}." if len(chunks) > 1 else "", chunk) for i, chunk in enumerate(chunks)]


def _first(holders: Sequence[object], name: str) -> Any:
    """Return the first attribute `name` of the holders that is not None; else None."""
    return next((said for holder in holders if (said := getattr(holder, name, None)) is not None), None)


def _has(groups: Any, name: str) -> bool:
    return name in groups if isinstance(groups, Mapping) else hasattr(groups, name)


def _group_ranks(groups: Any, *names: str) -> list[int] | None:
    """Return the ranks of the first group that exists, in its own world's numbering; None if none does."""
    for name in names:
        group = groups.get(name) if isinstance(groups, Mapping) else getattr(groups, name, None)
        if group is None:
            continue
        if isinstance(group, Sequence | range) or hasattr(group, "__array__"):
            return _whole_numbers(f"pg_collection: group {name}", group)
        import torch.distributed as dist

        try:
            if isinstance(group, str | bytes | Mapping | int | float):  # torch reads a falsy value as the default group
                raise TypeError
            return list(dist.get_process_group_ranks(group))
        except Exception:
            raise PlanError(
                f"pg_collection: group {name} is a {type(group).__name__}, expected a process group, a sequence of "
                "ranks, or None for a group of one"
            ) from None
    return None


def _whole_numbers(what: str, values: Any) -> list[int]:
    """Return a sequence of whole numbers (of Python, numpy or torch) as ints; raises PlanError if it is not one."""
    try:
        if isinstance(values, str | bytes):
            raise TypeError
        return [operator.index(value) for value in values]
    except Exception:
        raise PlanError(f"{what} is a {type(values).__name__}, expected a sequence of whole numbers") from None


def _whole_number(what: str, value: Any) -> int:
    try:
        return operator.index(value)
    except Exception:
        raise PlanError(f"{what} is a {type(value).__name__}, expected a whole number") from None


def _is_true(what: str, value: Any) -> bool:
    try:
        return bool(value)
    except Exception:
        raise PlanError(f"{what} is a {type(value).__name__}, expected True or False") from None


def _other_names(module: nn.Module, layers: Mapping[str, str], wrapped: frozenset[str]) -> dict[str, list[str]]:
    """Return the other names of each parameter that has several, by its name in `named_refit_tensors`.

    Names inside a layer's second place are skipped: a layer that is used twice has one `layer_number`, which does not
    apply there.
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
                and (name_here := clean_name(path, wrapped)) not in layers
                and resolve_layer_prefix(name_here, layers) == name_here
            ]
        if not name.startswith(tuple(unnumbered)):
            found.setdefault(known, []).append(name)
    return found


def _canonical(meta: ParameterMetadata, name: str, layers: Mapping[str, str]) -> str:
    """Return the canonical form of another name of a tensor."""
    twin = replace(meta, name=name)
    assign_resolved_name_inplace(twin, layer_module_prefix_map=layers)
    return twin.resolved_name or name


def _describe_grouped(
    meta: ParameterMetadata, grouped: Grouped, group: Sequence[int], layers: Mapping[str, str] | None
) -> None:
    """Set the tiles of a tensor that holds several experts, under the canonical names of single experts."""
    if meta.owner_rank not in group:
        raise PlanError(f"{meta.name} on rank {meta.owner_rank}: its rank is not in its expert group {list(group)}")
    # the digit in "weight1" is not an expert's index
    meta.resolved_name = resolve_layer_prefix(meta.name, layers or {})
    stem = meta.name.rpartition(".")[0]
    names = []
    for expert in range(grouped.experts):
        twin = replace(meta, name=f"{stem}.{grouped.stem}{expert}" if stem else f"{grouped.stem}{expert}")
        assign_resolved_name_inplace(twin, layer_module_prefix_map=layers)
        names.append(twin.resolved_name or twin.name)
    meta.tiles = grouped.tiles(names, list(group).index(meta.owner_rank or 0), len(group))
    if len(names) == 1:
        wide = grouped.width * (len(group) if grouped.is_split else 1)
        first = (grouped.parts * wide, grouped.hidden)
        meta.global_shape = first if grouped.is_first else (grouped.hidden, wide)
