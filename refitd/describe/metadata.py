"""ParameterMetadata: one rank's description of one of its tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from refitd.describe.tiles import Repeat, Tile
from refitd.errors import PlanError
from refitd.text import shown

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class ParameterMetadata:
    """One local tensor of one rank: its local shape and its part of the canonical tensor.

    The fields up to `global_expert_index` are the reference's (Megatron). It is mutable because name resolution sets
    `resolved_name` and `global_expert_index` afterwards (see `refitd.describe.names`).

    Attributes:
        name: the tensor's name in its own module.
        shape: the local shape, in elements.
        dtype: a torch.dtype, or its name without "torch." in processes that do not load torch.
        element_size: bytes per element.
        is_tp: whether the tensor is split over the tensor-parallel group.
        partition_dim: the dimension that is split.
        partition_stride: the number of interleaved pieces that each rank holds along it (gated fc1: 2).
        partition_sizes: local sizes of packed blocks along `partition_dim`, each split over the group separately.
        is_ep: whether the tensor belongs to experts split over the expert-parallel group.
        num_experts: the number of experts in the whole model.
        owner_rank: the rank that holds this tensor.
        tensor_parallel_group_ranks: the ranks it is split over, in shard order (None: not split).
        expert_parallel_group_ranks: the ranks the experts are split over, in order.
        data_parallel_group_ranks: the ranks that hold the same tensor.
        pipeline_parallel_group_ranks: the ranks of the pipeline, in stage order.
        resolved_name: the canonical name, equal on every rank and in every layout.
        global_expert_index: the expert's index in the whole model, for per-expert tensors.
        tiles: the exact layout, for layouts that the fields above cannot express; it replaces them.
        global_shape: the canonical tensor's shape, if tiles alone do not determine it.
        fill: the value of local elements that belong to no tile. A destination with such elements must declare it, and
            they are written. A source may declare it; then both must declare the same.
        aliases: other canonical names of the same weight (tied embeddings). A destination tensor that no source has is
            fed from a tensor tied to it, whichever end declares the tie; see `refitd.plan.aliases`.
        cast_from: for a destination, the sources' dtype, if it is to be converted. For a source, the dtype from which
            it rounds this tensor when it publishes. The supported casts are in `refitd.describe.casts`.
        stride_is_known: False if `partition_stride` could also be 2, because it is unknown whether an fc1 is gated.
            Other descriptions of the tensor then decide; a plan that depends on an expert's unknown stride is refused.
        cast_to: for a source, a dtype that this tensor may be converted to: destinations that hold that dtype receive
            it so. Ignored for a destination.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    element_size: int
    is_tp: bool = False
    partition_dim: int = 0
    partition_stride: int = 1
    partition_sizes: list[int] | None = None
    is_ep: bool = False
    num_experts: int | None = None
    owner_rank: int | None = None
    tensor_parallel_group_ranks: list[int] | None = None
    expert_parallel_group_ranks: list[int] | None = None
    data_parallel_group_ranks: list[int] | None = None
    pipeline_parallel_group_ranks: list[int] | None = None
    resolved_name: str | None = None
    global_expert_index: int | None = None
    tiles: tuple[Tile, ...] | None = None
    global_shape: tuple[int, ...] | None = None
    fill: float | None = None
    aliases: tuple[str, ...] = ()
    cast_from: str | None = None
    stride_is_known: bool = True
    cast_to: str | None = None


def plain(meta: ParameterMetadata) -> ParameterMetadata:
    """Return the description with numbers, booleans and texts of numpy, torch or enums converted to Python's types.

    A description that is already plain is returned itself.

    Raises:
        PlanError: a field's value cannot be converted; names tensor and field.
    """
    if _is_whole(meta):
        return meta
    changed: dict[str, Any] = {}
    for field, convert in _PLAIN.items():
        value = getattr(meta, field)
        try:
            found = convert(value)
        except Exception:
            raise PlanError(
                f"{meta.name}: {field} is {shown(value)}, expected {_EXPECTED[convert]}; correct its ParameterMetadata"
            ) from None
        if found is not value:
            changed[field] = found
    return replace(meta, **changed) if changed else meta


# The fields of most tensors, recognised as plain within a microsecond: registrations have up to 100,000 tensors.
_COMMON = operator.attrgetter(
    "name", "resolved_name", "shape", "element_size", "is_tp", "is_ep", "partition_dim", "partition_stride"
)
_COMMON_TYPES = (str, str, tuple, int, bool, bool, int, int)
_RARE = operator.attrgetter(
    "partition_sizes",
    "num_experts",
    "tensor_parallel_group_ranks",
    "expert_parallel_group_ranks",
    "data_parallel_group_ranks",
    "pipeline_parallel_group_ranks",
    "global_expert_index",
    "tiles",
    "global_shape",
    "fill",
    "aliases",
    "cast_from",
    "cast_to",
)
_UNSET: tuple[Any, ...] = (None,) * 10 + ((), None, None)


def _is_whole(meta: ParameterMetadata) -> bool:
    """Return whether this describes a whole tensor in plain values."""
    return (
        all(map(operator.is_, _RARE(meta), _UNSET))
        and tuple(map(type, _COMMON(meta))) == _COMMON_TYPES
        and all(type(n) is int for n in meta.shape)
        and type(meta.owner_rank) in (int, type(None))
        and (type(meta.dtype) is str or type(meta.dtype).__name__ == "dtype")
        and bool(meta.name and meta.resolved_name)
    )


def _count(value: Any) -> int:
    return value if type(value) is int else operator.index(_of_enum(value))


def _counts(value: Any) -> tuple[int, ...]:
    if type(value) is tuple and all(type(n) is int for n in value):
        return value
    return tuple(_count(n) for n in _sequence(value))


def _count_list(value: Any) -> list[int]:
    if type(value) is list and all(type(n) is int for n in value):
        return value
    return [_count(n) for n in _sequence(value)]


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    # numpy's and torch's booleans, and the 0 and 1 of configurations
    if not hasattr(value, "dtype") and value not in (0, 1):
        raise TypeError
    return bool(value)


def _number(value: Any) -> float:
    if type(value) in (int, float):
        found: float = value
        return found
    if isinstance(value, str | bytes | bool):
        raise TypeError
    if hasattr(value, "item"):
        value = value.item()
    found = value if type(value) is int else float(value)
    return found


def _name(value: Any) -> str:
    value = _of_enum(value)
    if not isinstance(value, str) or not value:
        raise TypeError
    return value if type(value) is str else str.__str__(value)


def _names(value: Any) -> tuple[str, ...]:
    if type(value) is tuple and all(type(name) is str and name for name in value):
        return value
    return tuple(_name(name) for name in _sequence(value))


def _dtype(value: Any) -> str:
    # a torch.dtype prints as its name; this module does not import torch
    found = str(value).removeprefix("torch.")
    if not isinstance(value, str) and type(value).__name__ != "dtype":
        raise TypeError
    return value if type(value) is str and found == value else found


def _element_type(value: Any) -> Any:
    _dtype(value)
    return value


def _tiles(value: Any) -> tuple[Tile, ...]:
    if type(value) is tuple and all(type(tile) is Tile and _is_plain(tile) for tile in value):
        return value
    return tuple(
        Tile(
            _name(tile.tensor),
            _counts(tile.offset),
            _counts(tile.size),
            _count(tile.local_offset),
            _counts(tile.local_stride),
            None if (r := tile.repeat) is None else Repeat(*map(_count, (r.dim, r.count, r.step, r.local_step))),
        )
        for tile in _sequence(value)
    )


def _is_plain(tile: Tile) -> bool:
    numbers: tuple[object, ...] = (tile.offset, tile.size, tile.local_stride)
    if not all(type(value) is tuple and all(type(n) is int for n in value) for value in numbers):
        return False
    r = tile.repeat
    rest = (tile.local_offset,) if r is None else (tile.local_offset, r.dim, r.count, r.step, r.local_step)
    return type(tile.tensor) is str and all(type(n) is int for n in rest)


def _sequence(value: Any) -> list[Any]:
    if isinstance(value, str | bytes | dict | set):
        raise TypeError
    return list(value)


def _of_enum(value: Any) -> Any:
    return getattr(value, "value", value) if hasattr(type(value), "__members__") else value


def _or_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def found(value: Any) -> Any:
        return None if value is None else convert(value)

    _EXPECTED[found] = f"{_EXPECTED[convert]}, or None"
    return found


_EXPECTED: dict[Callable[[Any], Any], str] = {
    _name: "a text",
    _names: "a tuple of texts",
    _count: "a whole number",
    _counts: "a tuple of whole numbers",
    _count_list: "a list of whole numbers",
    _truth: "True or False",
    _number: "a number",
    _dtype: "a dtype or its name",
    _element_type: "a dtype or its name",
    _tiles: "a tuple of Tile",
}

_PLAIN: dict[str, Callable[[Any], Any]] = {
    "name": _name,
    "shape": _counts,
    "dtype": _element_type,
    "element_size": _count,
    "is_tp": _truth,
    "partition_dim": _count,
    "partition_stride": _count,
    "partition_sizes": _or_none(_count_list),
    "is_ep": _truth,
    "num_experts": _or_none(_count),
    "owner_rank": _or_none(_count),
    "tensor_parallel_group_ranks": _or_none(_count_list),
    "expert_parallel_group_ranks": _or_none(_count_list),
    "data_parallel_group_ranks": _or_none(_count_list),
    "pipeline_parallel_group_ranks": _or_none(_count_list),
    "resolved_name": _or_none(_name),
    "global_expert_index": _or_none(_count),
    "tiles": _or_none(_tiles),
    "global_shape": _or_none(_counts),
    "fill": _or_none(_number),
    "aliases": _names,
    "cast_from": _or_none(_dtype),
    "cast_to": _or_none(_dtype),
}
