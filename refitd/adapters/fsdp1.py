"""Describe FSDP1 (FullyShardedDataParallel) and DeepSpeed ZeRO-3 modules as sources: each rank offers its flat slices.

Both frameworks split flattened parameters into contiguous ranges of elements. A rank offers its ranges without
gathering or copying: the tensors are views of the framework's own shards, so they follow every optimizer step.

`fsdp1_tensors` reads private attributes of torch 2.13 (`FlatParameter`). It ran on CPUs, without hybrid sharding.
`zero3_tensors` reads the attributes that DeepSpeed sets on parameters (`ds_tensor`, `ds_shape`, `ds_process_group`). It
ran with DeepSpeed 0.19.8 on CPUs, without offloading (scripts/try-zero3).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import nn

from refitd import ParameterMetadata, PlanError, flat_tiles, unwrapped_name

FlatShards = tuple[dict[str, torch.Tensor], list[ParameterMetadata]]


def fsdp1_tensors(module: nn.Module, rank: int) -> FlatShards:
    """Return this rank's tensors of a module wrapped in FullyShardedDataParallel, and their descriptions.

        tensors, metadata = fsdp1_tensors(model, rank)
        source = client.register_source("policy", tensors, metadata=metadata, rank=rank, world_size=world_size)

    Call it while the module is sharded: not inside `summon_full_params`, nor between forward and backward. Hybrid
    sharding strategies are untested. Shared parameters become ties.

    Args:
        module: the root module.
        rank: this process's rank among all source ranks.

    Raises:
        PlanError: a parameter's memory is not contiguous, or the module is not sharded now; the error names it.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    held: FlatShards = {}, []
    managed: set[int] = set()
    for prefix, unit in module.named_modules():
        handle = getattr(unit, "_handle", None) if isinstance(unit, FullyShardedDataParallel) else None
        if handle is None:
            continue
        flat: Any = handle.flat_param
        managed |= {id(flat), *(id(param) for param in getattr(flat, "_params", None) or ())}
        shard = getattr(flat, "_local_shard", flat.data)  # FSDP sets it before the first forward pass; same memory
        is_sharded = handle.uses_sharded_strategy
        if is_sharded and (flat.data_ptr() != shard.data_ptr() or flat.shape != flat._sharded_size):
            raise PlanError(
                f"{prefix or 'the module'}: FSDP has gathered its parameters; call this while it is sharded"
            )
        aliases: dict[str, list[str]] = {}
        for info in flat._shared_param_infos:
            aliases.setdefault(_joined(info.prim_module_name, info.prim_param_name), []).append(
                unwrapped_name(_joined(prefix, info.module_name, info.param_name))
            )
        shards = flat._shard_param_infos if is_sharded else _whole(flat)
        for fqn, shape, contiguous, info in zip(flat._fqns, flat._shapes, flat._contiguities, shards, strict=True):
            name = unwrapped_name(_joined(prefix, fqn))
            if not contiguous:
                raise PlanError(f"{name}: FSDP has flattened it in another order than row-major; make it contiguous")
            if info.in_shard:
                part = shard[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
                _add(held, name, part, shape, info.intra_param_start_idx, rank, tuple(aliases.get(fqn, ())))
    _add_rest(held, module, managed, rank)
    return held


def zero3_tensors(module: nn.Module, rank: int) -> FlatShards:
    """Return this rank's tensors of a module partitioned by DeepSpeed ZeRO stage 3, as `fsdp1_tensors` does.

    Each parameter is split into equal ranges, one for each data-parallel rank, with padding at the end. This includes
    parameters below `stage3_param_persistence_threshold`; DeepSpeed also stores gathered copies of these. If bf16 or
    fp16 is enabled, parameters are offered in that type, because DeepSpeed computes with it. Shared parameters become
    ties. Offloaded parameters are untested.

    Raises:
        PlanError: a parameter has no partition on this rank; the error names it.
    """
    held: FlatShards = {}, []
    named: dict[int, list[str]] = {}
    for full, param in module.named_parameters(remove_duplicate=False):
        named.setdefault(id(param), []).append(unwrapped_name(full))
    managed: set[int] = set()
    for param in module.parameters():
        if not hasattr(param, "ds_shape"):
            continue
        (name, *aliases), part = named[id(param)], getattr(param, "ds_tensor", None)
        managed.add(id(param))
        if part is None:
            raise PlanError(f"{name}: DeepSpeed has not partitioned it; call this after deepspeed.initialize")
        group_rank = torch.distributed.get_rank(getattr(param, "ds_process_group", None))
        start = group_rank * part.numel()
        count = max(0, min(part.numel(), prod(param.ds_shape) - start))
        if count:
            _add(held, name, part.view(-1)[:count], tuple(param.ds_shape), start, rank, (*aliases,))
    _add_rest(held, module, managed, rank)
    return held


def _add(
    held: FlatShards,
    name: str,
    part: torch.Tensor,
    shape: tuple[int, ...],
    start: int,
    rank: int,
    aliases: tuple[str, ...],
) -> None:
    tensors, metadata = held
    tensors[name] = part.detach()
    metadata.append(
        ParameterMetadata(
            name=name,
            shape=tuple(part.shape),
            dtype=part.dtype,
            element_size=part.element_size(),
            owner_rank=rank,
            resolved_name=name,
            tiles=flat_tiles(name, shape, start, start + part.numel()),
            global_shape=tuple(shape),
            aliases=aliases,
        )
    )


def _add_rest(held: FlatShards, module: nn.Module, managed: set[int], rank: int) -> None:
    """Add tensors that the framework does not split: ignored parameters and persistent buffers."""
    tensors, metadata = held
    rest = [(name, param) for name, param in module.named_parameters() if id(param) not in managed]
    for prefix, owner in module.named_modules():
        lost = owner._non_persistent_buffers_set
        rest += [(_joined(prefix, name), b) for name, b in owner.named_buffers(recurse=False) if name not in lost]
    for full, tensor in rest:
        name = unwrapped_name(full)
        if name in tensors:
            continue
        tensors[name] = tensor.detach()
        metadata.append(
            ParameterMetadata(
                name, tuple(tensor.shape), tensor.dtype, tensor.element_size(), owner_rank=rank, resolved_name=name
            )
        )


def _whole(flat: Any) -> list[Any]:
    """Return shard infos of a flat parameter that is not sharded: all its parameters, consecutively."""
    from torch.distributed.fsdp._flat_param import _ShardParamInfo

    found, offset = [], 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            found.append(_ShardParamInfo(True, offset, numel, 0, numel - 1))
        offset += numel
    return found


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)
