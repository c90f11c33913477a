"""ParameterMetadata: one rank's description of one of its tensors."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec
from msgspec.structs import astuple

from refitd.errors import PlanError
from refitd.text import mismatch, shown

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Repeat:
    """Repeat a tile `count` times, each `step` further along canonical `dim` and `local_step` further locally."""

    dim: int
    count: int
    step: int
    local_step: int


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of a canonical tensor at a place of a local tensor. All numbers count elements.

        TP2 rank 1 of a [8, 4] tensor, split on dim 0, local shape [4, 4]:
        Tile("w", offset=(4, 0), size=(4, 4), local_offset=0, local_stride=(4, 1))

    `local_offset` and `local_stride` address the local tensor as if it were row-major; its strides in memory do not
    matter. `local_stride` has one entry per canonical dimension.
    """

    tensor: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    local_offset: int
    local_stride: tuple[int, ...]
    repeat: Repeat | None = None


def spaced(spots: Sequence[tuple[int, int]], size: int, dim: int) -> list[tuple[int, int, Repeat | None]]:
    """Join runs of one size along `dim` into one with a repeat if they are equally far apart at both ends.

    Args:
        spots: (first element of the canonical tensor along `dim`, local offset) of each run.
        size: the number of elements of each run along `dim`.
        dim: the dimension.
    """
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(spots)}
    if len(steps) == 1:
        ((far, local_far),) = steps
        if far >= size and local_far >= 0:
            return [(*spots[0], Repeat(dim, len(spots), far, local_far))]
    return [(*spot, None) for spot in spots]


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
            they are written. A source may declare it; then both values must be equal.
        aliases: other canonical names of this weight (tied embeddings). A destination tensor that no source has is fed
            from a tensor tied to it, whichever end declares the tie; see `refitd.plan.layouts`.
        cast_from: for a destination, the sources' dtype, if it is to be converted. For a source that rounds this tensor
            when it publishes, the dtype before rounding. The supported casts are in `refitd.dtypes`.
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


# The types of all fields in plain values, except that a dtype may be a torch.dtype.
_Name = Annotated[str, msgspec.Meta(min_length=1)]
_Repeat = msgspec.defstruct("_Repeat", list(get_type_hints(Repeat).items()))
_Tile = msgspec.defstruct("_Tile", list(get_type_hints(Tile, localns={"Repeat": _Repeat}).items()))
_KNOWN = {"str": _Name, "torch": SimpleNamespace(dtype=Any), "Tile": _Tile}
_HINTS = get_type_hints(ParameterMetadata, localns=_KNOWN, include_extras=True)
del _HINTS["dtype"]
_FIELDS = tuple(_HINTS)
_VALUES = operator.attrgetter(*_FIELDS)
_Plain = msgspec.defstruct("_Plain", list(_HINTS.items()), array_like=True)
_PLACE = re.compile(r"(.*?)(?: - at `\$\[(\d+)\].*)?")


def plain(meta: ParameterMetadata) -> ParameterMetadata:
    """Return the description with numbers, booleans and texts of numpy, torch or enums converted to Python's types.

    A description that is already plain is returned itself.

    Raises:
        PlanError: a field's value cannot be converted; names tensor and field.
    """
    values = _VALUES(meta)
    try:
        if not isinstance(meta.dtype, str) and type(meta.dtype).__name__ != "dtype":  # this module imports no torch
            raise PlanError(f"{meta.name}: dtype is {shown(meta.dtype)}, expected a dtype or its name")
        found = _checked(values)
    except msgspec.ValidationError:
        return replace(meta, **dict(zip(_FIELDS, _converted(meta, values), strict=True)))
    # a list, say, is no tuple
    return meta if found == values else replace(meta, **dict(zip(_FIELDS, found, strict=True)))


def _converted(meta: ParameterMetadata, values: tuple[Any, ...]) -> tuple[Any, ...]:
    given = [_builtin(value) for value in values]
    for number, (hint, value) in enumerate(zip(_HINTS.values(), given, strict=True)):
        if hint is bool and type(value) is int and value in (0, 1):  # of a configuration
            given[number] = bool(value)
    try:
        return _checked(given)
    except msgspec.ValidationError as exc:
        number = int(_PLACE.fullmatch(str(exc))[2])  # type: ignore[index]
        said = mismatch(str(exc))[1]
        raise PlanError(
            f"{meta.name}: {_FIELDS[number]} is {shown(values[number])}, {said}; correct its ParameterMetadata"
        ) from None


def _checked(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return plain values of the fields; raises ValidationError if one is not plain."""
    found: Any = msgspec.convert(values, _Plain, from_attributes=True)
    if found.tiles is not None:
        found.tiles = tuple(
            Tile(t.tensor, t.offset, t.size, t.local_offset, t.local_stride, t.repeat and Repeat(*astuple(t.repeat)))
            for t in found.tiles
        )
    for field in ("cast_from", "cast_to"):
        if (dtype := getattr(found, field)) is not None:
            setattr(found, field, dtype.removeprefix("torch."))
    checked: tuple[Any, ...] = _VALUES(found)
    return checked


def _builtin(value: Any) -> Any:
    """Return a value of numpy, torch or an enum, or a sequence of them, in Python's types; others unchanged."""
    if hasattr(type(value), "__members__"):
        return _builtin(value.value)
    if isinstance(value, Tile | Repeat):
        return type(value)(*(_builtin(getattr(value, name)) for name in value.__slots__))
    if isinstance(value, tuple | list | range):
        return [_builtin(one) for one in value]
    if isinstance(value, str):
        return str.__str__(value)
    if type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    return value.tolist() if hasattr(value, "tolist") else value


@dataclass(frozen=True, slots=True)
class Roster:
    """The tensors that rank `rank` can send, and the tensors that it must receive; either may be empty.

    Ranks are unique across all pools (trainer and engines together). Ranks with the same `node` share a machine.
    `label` names the rank in error messages ("engine-a rank 1"); the default is "rank N".
    """

    rank: int
    source: Sequence[ParameterMetadata] = ()
    destination: Sequence[ParameterMetadata] = ()
    node: str = ""
    label: str = ""


@dataclass(frozen=True, eq=False)
class Names:
    """The names in a list of descriptions. Lists of several ranks share them; tensors of one kind differ only in names.

    Attributes:
        local: [tensors] the names in the rank's module.
        canonical: [tensors] the resolved names.
        experts: [tensors] their `global_expert_index`.
        kind: [tensors] the number of each tensor's kind.
        first: [kinds] the first tensor of each kind.
    """

    local: tuple[str, ...]
    canonical: tuple[str, ...]
    experts: tuple[int | None, ...]
    kind: tuple[int, ...]
    first: tuple[int, ...]


class Alike(Sequence[ParameterMetadata]):
    """One rank's descriptions, which name no rank, as one per kind. The others are made when they are asked for.

    A kind of several tensors has no aliases, casts, fill or own tiles (those of its split name one tensor).
    """

    def __init__(self, names: Names, kinds: tuple[ParameterMetadata, ...]) -> None:
        """`kinds[k]` describes tensor `names.first[k]`."""
        self.names = names
        self.kinds = kinds

    def __len__(self) -> int:
        return len(self.names.kind)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        names, number = self.names, range(len(self))[at]
        kind = names.kind[number]
        meta, canonical = self.kinds[kind], names.canonical[number]
        if names.first[kind] == number:
            return meta
        return replace(
            meta,
            name=names.local[number],
            resolved_name=canonical,
            global_expert_index=names.experts[number],
            tiles=None if meta.tiles is None else tuple(replace(tile, tensor=canonical) for tile in meta.tiles),
        )


def kinds_of(described: Sequence[ParameterMetadata]) -> Sequence[ParameterMetadata]:
    """Return descriptions that include every one with aliases, casts, fills, own tiles or a name of a part."""
    return described.kinds if isinstance(described, Alike) else described
