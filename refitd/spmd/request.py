"""What one rank brings to a refit: its modules, described, and their tensors."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from refitd.describe.layout import canonical_name
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.module import describe_module, module_tensors
from refitd.dtypes import dtype_name
from refitd.errors import PlanError, RefusedError
from refitd.protocol.shards import shard_of
from refitd.spmd.wire import Described

if TYPE_CHECKING:
    import torch
    from torch import nn

    from refitd.transforms.base import ReshardTransform


@dataclass(frozen=True, slots=True)
class Request:
    """What a rank was called with. None for a module that it does not have.

    Attributes:
        source: the module, or virtual pipeline chunks, that is read.
        destination: the one that is written.
        num_experts: experts in the whole model; by default what the modules' configs say.
        src_rank_offset: added to the ranks in the source's parallel groups, where they number their own world.
        dst_rank_offset: the same for the destination's.
        casts: canonical names, or patterns with "*", of tensors whose source values are converted, and to what.
        transform: what takes over some of the tensors.
    """

    source: nn.Module | Sequence[nn.Module] | None
    destination: nn.Module | Sequence[nn.Module] | None
    num_experts: int | None = None
    src_rank_offset: int = 0
    dst_rank_offset: int = 0
    casts: Mapping[str, torch.dtype] | None = None
    transform: ReshardTransform | None = None


@dataclass(frozen=True, slots=True)
class Brought:
    """What that comes to.

    Attributes:
        described: the rank's roster, as others are told.
        sources: local tensors that can be read, by local name.
        destinations: local tensors that are written.
        casts: what sources' elements are converted to, by local name.
    """

    described: Described
    sources: Mapping[str, torch.Tensor] = field(default_factory=dict)
    destinations: Mapping[str, torch.Tensor] = field(default_factory=dict)
    casts: Mapping[str, torch.dtype] = field(default_factory=dict)


def bring(request: Request, rank: int) -> Brought:
    """Describe both modules and collect their tensors.

    Raises:
        PlanError: with every tensor that cannot be described, and why.
    """
    source, destination = _unwrapped(request.source), _unwrapped(request.destination)
    held = _side(source, rank, request.num_experts, request.src_rank_offset)
    wanted = _side(destination, rank, request.num_experts, request.dst_rank_offset)
    sources = {} if source is None else module_tensors(source)
    destinations = {} if destination is None else module_tensors(destination)
    casts: dict[str, torch.dtype] = {}
    for meta in held:
        if (dtype := _cast_of(meta, request.casts)) is not None:
            casts[meta.name] = meta.dtype = dtype
            meta.element_size = dtype.itemsize
    if (transform := request.transform) is not None:
        _describe_transformed(transform, rank, held, wanted, sources, destinations)
    return Brought(
        described=Described(rank, platform.node()[:512], shard_of(held), shard_of(wanted)),
        sources=sources,
        destinations=destinations,
        casts=casts,
    )


def _side(
    module: nn.Module | Sequence[nn.Module] | None, rank: int, num_experts: int | None, offset: int
) -> list[ParameterMetadata]:
    if module is None:
        return []
    return describe_module(module, rank, num_experts=num_experts, rank_offset=offset)


def _cast_of(meta: ParameterMetadata, casts: Mapping[str, torch.dtype] | None) -> torch.dtype | None:
    """Return the dtype that a source tensor's values are declared to be converted to; None where they are not."""
    name = canonical_name(meta)
    for pattern, dtype in (casts or {}).items():
        if fnmatchcase(name, pattern) and dtype_name(dtype) != dtype_name(meta.dtype):
            return dtype
    return None


def _describe_transformed(
    transform: ReshardTransform,
    rank: int,
    held: Sequence[ParameterMetadata],
    wanted: Sequence[ParameterMetadata],
    sources: Mapping[str, torch.Tensor],
    destinations: Mapping[str, torch.Tensor],
) -> None:
    """Describe what a transform takes over by the dtype that travels.

    Raises:
        PlanError: with everything that the transform refuses.
    """
    questions: list[tuple[ParameterMetadata, Callable[[ParameterMetadata], torch.dtype | None]]] = []
    questions += [(meta, lambda m: transform.send_dtype(m.name, sources[m.name], m.dtype)) for meta in held]
    questions += [(meta, lambda m: transform.recv_dtype(m.name, destinations[m.name])) for meta in wanted]
    problems = []
    for meta, ask in questions:
        if not transform.should_transform(meta.name):
            continue
        try:
            dtype = ask(meta)
        except RefusedError as exc:
            problems.append(f"rank {rank}: {exc}")
            continue
        if dtype is not None:
            meta.dtype, meta.element_size = dtype, dtype.itemsize
    if problems:
        raise PlanError(problems)


def _unwrapped(model: nn.Module | Sequence[nn.Module] | None) -> nn.Module | Sequence[nn.Module] | None:
    """Return the model inside wrappers (DistributedDataParallel, Float16Module) that hold nothing but `module`.

    Their names would differ from those of a model that is not wrapped.
    """
    from torch import nn

    if model is None:
        return None
    if not isinstance(model, nn.Module):
        chunks = [_unwrapped(chunk) for chunk in model]
        return [chunk for chunk in chunks if isinstance(chunk, nn.Module)]
    while list(model._modules) == ["module"] and not model._parameters and not model._buffers:
        inner = model._modules["module"]
        if inner is None:
            break
        model = inner
    return model
