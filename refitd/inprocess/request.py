"""One rank's request for a refit: check it, describe its modules and collect their tensors."""

from __future__ import annotations

import operator
import platform
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from refitd.describe.layout import canonical_name, global_shape_of, same_elements
from refitd.describe.memory import extents, out_of_reach, overlapping, overlaps_itself, same_memory, tensor_problem
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.module import describe_module, get_refit_tensor_dict, is_dtensor, module_tensors
from refitd.describe.names import Aliases, declare_aliases, holds_only_module
from refitd.describe.renames import Names, rename
from refitd.dtypes import dtype_name
from refitd.errors import PlanError, RefusedError
from refitd.inprocess.rank_plan import RankDescribed
from refitd.protocol.shards import shard_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from refitd.transforms import ReshardTransform


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of a rank's call; a module that the rank does not have is None.

    Attributes:
        source: the module to read, or the chunks of a virtual pipeline stage.
        destination: the module to write, or its chunks.
        num_experts: the number of experts in the whole model; by default from the modules' configs.
        src_rank_offset: added to the ranks in the source's parallel groups, if they number their own world.
        dst_rank_offset: the same for the destination's.
        casts: {canonical name or pattern with "*": dtype} for source tensors to convert.
        transform: converts some of the tensors.
        aliases: declared ties, {canonical name: other canonical names of its weight}.
        names: canonical names for the source's own, see `refitd.describe.renames`.
        check_replicas: compare the elements that several source ranks hold before a plan's first exchange.
        is_plan_only: no tensor is read or written, so tensors may be on the meta device.
    """

    source: nn.Module | Sequence[nn.Module] | None
    destination: nn.Module | Sequence[nn.Module] | None
    num_experts: int | None = None
    src_rank_offset: int = 0
    dst_rank_offset: int = 0
    casts: Mapping[str, torch.dtype] | None = None
    transform: ReshardTransform | None = None
    aliases: Aliases | None = None
    names: Names | None = None
    check_replicas: bool = True
    is_plan_only: bool = False


@dataclass(frozen=True, slots=True)
class RankTensors:
    """This rank's tensors for a request, and their descriptions.

    Attributes:
        described: the rank's roster, as it is sent to the others.
        sources: local tensors to read, by local name.
        destinations: local tensors to write, by local name.
        casts: the dtype of source elements after conversion, by local name.
    """

    described: RankDescribed
    sources: Mapping[str, torch.Tensor] = field(default_factory=dict)
    destinations: Mapping[str, torch.Tensor] = field(default_factory=dict)
    casts: Mapping[str, torch.dtype] = field(default_factory=dict)


def collect_tensors(request: Request, rank: int) -> RankTensors:
    """Describe both modules and collect their tensors.

    Raises:
        PlanError: lists every tensor that cannot be described, read or written, and why.
    """
    source, destination = _model("source", request.source), _model("target", request.destination)
    request = _checked(request, rank)
    if not request.is_plan_only:
        _refuse(
            [
                *_unusable(source, rank, request.transform, write=False),
                *_unusable(destination, rank, request.transform, write=True),
            ]
        )
    ties = request.aliases or {}
    held = _side(source, rank, request.num_experts, request.src_rank_offset)
    if request.names is not None:
        held = rename(held, request.names, is_target=False)
    held = declare_aliases(held, ties)
    wanted = declare_aliases(_side(destination, rank, request.num_experts, request.dst_rank_offset), ties)
    sources = {} if source is None else module_tensors(source)
    destinations = {} if destination is None else module_tensors(destination)
    if not request.is_plan_only:
        _refuse(_overlaps(wanted, destinations, rank, request.transform))
    casts: dict[str, torch.dtype] = {}
    for meta in held:
        if (dtype := _cast_of(meta, request.casts)) is not None:
            casts[meta.name] = meta.dtype = dtype
            meta.element_size = dtype.itemsize
    if (transform := request.transform) is not None:
        _describe_transformed(transform, rank, held, wanted, sources, destinations)
    return RankTensors(
        described=RankDescribed(rank, platform.node()[:512], shard_of(held), shard_of(wanted), request.check_replicas),
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
    """Return the dtype of a source tensor and of all tensors fused in it after conversion; None without conversion."""
    names = {tile.tensor for tile in meta.tiles} if meta.tiles else {canonical_name(meta)}
    for pattern, dtype in (casts or {}).items():
        if dtype_name(dtype) != dtype_name(meta.dtype) and any(fnmatchcase(name, pattern) for name in names):
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
    """Set the dtypes of descriptions that a transform handles to the dtype that travels.

    Raises:
        PlanError: lists everything that the transform refuses.
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
    _refuse(problems)


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise PlanError(problems)


def _unusable(
    module: nn.Module | Sequence[nn.Module] | None, rank: int, transform: ReshardTransform | None, *, write: bool
) -> list[str]:
    """Return an error text for each tensor of a module that cannot be read (or written).

    Tensors that a transform handles are skipped.
    """
    if module is None:
        return []
    problems: list[str] = []
    usable: dict[str, torch.Tensor] = {}
    for name, value in get_refit_tensor_dict(module).items():
        if transform is not None and transform.should_transform(name):
            continue
        tensor: torch.Tensor = getattr(value, "_local_tensor") if is_dtensor(value) else value  # noqa: B009
        if problem := tensor_problem(tensor):
            problems.append(f"{name} on rank {rank}: {problem}")
        elif write and overlaps_itself(tensor):
            problems.append(
                f"{name} on rank {rank}: several of its elements lie in one place (shape {tuple(tensor.shape)}, "
                f"strides {tuple(tensor.stride())}), so that what is written last would win; give the target model "
                "what it was expanded from, or a clone"
            )
        else:
            usable[name] = tensor
    names = list(usable)
    return problems + [
        f"{names[index]} on rank {rank}: its memory cannot be {'written' if write else 'read'} (a file that is mapped "
        "for reading, say); clone the tensor"
        for index in out_of_reach(extents(list(usable.values())), write=write)
    ]


def _overlaps(
    wanted: Sequence[ParameterMetadata],
    destinations: Mapping[str, torch.Tensor],
    rank: int,
    transform: ReshardTransform | None,
) -> list[str]:
    """Return an error text if two destinations share memory and are not the same elements of one weight; else []."""
    metas = [m for m in wanted if transform is None or not transform.should_transform(m.name)]
    tensors = [destinations[m.name] for m in metas]
    sharing = overlapping(tensors, extents(tensors))
    found = next(
        (
            (a, b)
            for a, b in sharing
            if not (same_memory(tensors[a], tensors[b]) and _is_one_weight(metas[a], metas[b]))
        ),
        None,
    )
    if found is None:
        return []
    one, other = (metas[index].name for index in found)
    return [
        f"{one} and {other} on rank {rank}: they share memory, so that what is written last would win; tied weights "
        "must be the same elements in the same places, anything else needs memory of its own (clone one)"
    ]


def _is_one_weight(one: ParameterMetadata, other: ParameterMetadata) -> bool:
    """Return whether two tensors hold the same elements of one canonical tensor, or of two tied ones."""
    name, other_name = canonical_name(one), canonical_name(other)
    if name != other_name:
        if other_name not in one.aliases and name not in other.aliases:
            return False
        tiles = other.tiles and tuple(
            replace(tile, tensor=name) if tile.tensor == other_name else tile for tile in other.tiles
        )
        other = replace(other, resolved_name=name, tiles=tiles)
    return same_elements(one, other) and global_shape_of(one) == global_shape_of(other)


def _checked(request: Request, rank: int) -> Request:
    """Return the request with Python numbers.

    Raises:
        PlanError: lists every argument of the wrong type.
    """
    problems: list[str] = []

    def refuse(what: str, value: object, expected: str) -> None:
        problems.append(f"rank {rank}: {what} is {reprlib.repr(value)} ({type(value).__name__}), expected {expected}")

    def whole(what: str, value: Any) -> int:
        try:
            if isinstance(value, bool):
                raise TypeError
            return operator.index(value)
        except (TypeError, RuntimeError, ValueError):
            refuse(what, value, "a whole number")
            return 0

    experts = None if request.num_experts is None else whole("num_experts", request.num_experts)
    offsets = (
        whole("src_rank_offset", request.src_rank_offset),
        whole("dst_rank_offset", request.dst_rank_offset),
    )
    if not isinstance(request.casts, Mapping | None):
        refuse("casts", request.casts, "{canonical name or pattern: dtype}")
    else:
        for name, dtype in (request.casts or {}).items():
            if not isinstance(name, str) or type(dtype).__name__ != "dtype":
                refuse(f"casts[{name!r}]", dtype, "a torch dtype, under a canonical name or a pattern")
    if not isinstance(request.aliases, Mapping | None):
        refuse("aliases", request.aliases, "{canonical name: the other canonical names of its weight}")
    if request.transform is not None and not callable(getattr(request.transform, "should_transform", None)):
        refuse("transform", request.transform, "a ReshardTransform, or None")
    _refuse(problems)
    return replace(request, num_experts=experts, src_rank_offset=offsets[0], dst_rank_offset=offsets[1])


def _model(which: str, given: Any) -> nn.Module | Sequence[nn.Module] | None:
    """Return the given model without wrappers.

    Raises:
        TypeError: it is neither a module nor a list of modules.
    """
    from torch import nn

    if given is None or isinstance(given, nn.Module):
        return _unwrapped(given)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        shown = f"{reprlib.repr(given)} ({type(given).__name__})"
        raise TypeError(f"the {which} model is {shown}, expected a module or a list of them")
    chunks = list(given)
    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, nn.Module):
            raise TypeError(
                f"chunk {index} of the {which} model is {chunk!r} ({type(chunk).__name__}), expected a module"
            )
    return _unwrapped(chunks)


def _unwrapped(model: nn.Module | Sequence[nn.Module] | None) -> nn.Module | Sequence[nn.Module] | None:
    """Return the model inside wrappers (DistributedDataParallel, Float16Module) that hold only `module`.

    With them, its names would differ from the names of an unwrapped model.
    """
    from torch import nn

    if model is None:
        return None
    if not isinstance(model, nn.Module):
        chunks = [_unwrapped(chunk) for chunk in model]
        return [chunk for chunk in chunks if isinstance(chunk, nn.Module)]
    while holds_only_module(model):
        inner = model._modules["module"]
        if inner is None:
            break
        model = inner
    return model
