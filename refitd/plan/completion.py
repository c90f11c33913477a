"""Complete descriptions of one tensor from each other before planning, and refuse contradictory ones.

    partition_sizes on some ranks      the other ranks have the same blocks, split over their own number of ranks
    not described as split             an expert's tensor that is smaller than the whole by exactly its group's size
    stride not known                   an fc1, gated or not: taken from a description that knows

If information is missing and matters, the tensor is refused by name. So are contradictions:

    packed blocks that differ          a tensor has the same parts everywhere, however many ranks split them
    one group split in several ways    the ranks of a group hold the shares of one split

The two sides may differ in dimension and stride: contiguous on one, gate | up on the other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from refitd.describe.layout import canonical_name, is_sharded
from refitd.describe.metadata import ParameterMetadata, Roster, kinds_of

_EXPERTS = re.compile(r"(?:^|\.)(?:local_)?experts\.")
# The parts of a dimension: their number if they are equal, else their sizes in the whole tensor.
Parts = int | tuple[int, ...]
# How one description is split: (ranks, dimension, stride, packed blocks or 1 if it has at most one block)
Cut = tuple[int, int, int, Parts]


class Description(Protocol):
    """A ParameterMetadata or its wire form; ParameterMetadata describes the fields."""

    @property
    def is_tp(self) -> bool:
        """Whether the tensor is split."""

    @property
    def partition_dim(self) -> int:
        """The dimension that is split."""

    @property
    def partition_stride(self) -> int:
        """The number of interleaved pieces per rank."""

    @property
    def partition_sizes(self) -> Sequence[int] | None:
        """The packed blocks."""

    @property
    def stride_is_known(self) -> bool:
        """Whether `partition_stride` is certain."""


@dataclass(slots=True)
class Said:
    """Declared splits, by canonical name."""

    cuts: dict[str, frozenset[Cut]] = field(default_factory=dict)
    unsaid: set[str] = field(default_factory=set)  # has a group, but is not described as split
    blocks: set[str] = field(default_factory=set)  # declares partition_sizes
    silent: set[str] = field(default_factory=set)  # split, without blocks or stride
    unknown: set[str] = field(default_factory=set)  # split, with an unknown stride
    _same: dict[frozenset[Cut], frozenset[Cut]] = field(default_factory=dict)  # interned: many tensors share few sets

    def see(self, name: str, meta: Description, group_size: int) -> None:
        """Note one description without tiles; an unsplit one may still declare blocks."""
        if meta.partition_sizes is not None:
            self.blocks.add(name)
        if group_size < 2 or not meta.is_tp:
            if meta.partition_sizes is not None:
                self._cut(name, frozenset({_cut_of(meta, 1)}))
            if group_size > 1:
                self.unsaid.add(name)
            return
        self._cut(name, frozenset({_cut_of(meta, group_size)}))
        if meta.partition_sizes is None and meta.partition_stride == 1:
            self.silent.add(name)
        if not meta.stride_is_known:
            self.unknown.add(name)

    def join(self, other: Said) -> None:
        """Merge another instance into this one."""
        for name, cuts in other.cuts.items():
            self._cut(name, cuts)
        self.unsaid |= other.unsaid
        self.blocks |= other.blocks
        self.silent |= other.silent
        self.unknown |= other.unknown

    def incomplete(self) -> set[str]:
        """Return the tensors whose descriptions must be completed or compared."""
        found = (self.blocks & (self.silent | self.unsaid)) | self.unknown | (self.unsaid & self.cuts.keys())
        if doubtful := {cuts for cuts in self._same if len(cuts) > 1 and _may_contradict(cuts)}:
            found |= {name for name, cuts in self.cuts.items() if cuts in doubtful}
        return found

    def _cut(self, name: str, cuts: frozenset[Cut]) -> None:
        known = self.cuts.get(name)
        if known is None or not cuts <= known:
            both = cuts if known is None else known | cuts
            self.cuts[name] = self._same.setdefault(both, both)


def _cut_of(meta: Description, group_size: int) -> Cut:
    dim, stride = meta.partition_dim, meta.partition_stride
    if not isinstance(dim, int) or not isinstance(stride, int):
        return group_size, 0, 1, 1  # invalid; reported when the description is read
    return group_size, dim, stride, _blocks_of(meta, group_size)


def _blocks_of(meta: Description, group_size: int) -> Parts:
    """Return the packed blocks that a description declares; 1 if it declares none or only one."""
    sizes = [size for size in meta.partition_sizes or (1,) if size]
    if not all(isinstance(size, int) for size in sizes):
        return 1
    return len(sizes) if len(set(sizes)) < 2 else tuple(size * group_size for size in sizes)


def _may_contradict(cuts: Iterable[Cut]) -> bool:
    """Return whether cuts of one tensor may conflict: equally large groups split differently, or parts differ."""
    ways: dict[int, tuple[int, int]] = {}
    parts: dict[int, set[Parts]] = defaultdict(set)
    has_blocks: set[int] = set()
    for size, dim, stride, blocks in cuts:
        if ways.setdefault(size, (dim, stride)) != (dim, stride):
            return True
        if blocks != 1:
            has_blocks.add(dim)
        parts[dim].add(stride if blocks == 1 else blocks)
    return any(len(parts[dim] - {1}) > 1 for dim in has_blocks)


@dataclass(slots=True)
class _Holder:
    """One description and its place in the rosters: rosters[roster].<side>[at]."""

    roster: int
    side: str
    at: int
    meta: ParameterMetadata
    label: str

    @property
    def size(self) -> int:
        """The number of ranks that the tensor is split over."""
        return len(self.meta.tensor_parallel_group_ranks or ()) if is_sharded(self.meta) else 1

    @property
    def where(self) -> str:
        """Rank and side, for messages."""
        return f"{self.label} ({self.side})"


def completed(rosters: Sequence[Roster]) -> tuple[list[Roster], dict[str, list[str]]]:
    """Return the rosters with completed descriptions, and problems by canonical name."""
    names = _said(rosters).incomplete()
    if not names:
        return list(rosters), {}
    holders: dict[str, list[_Holder]] = defaultdict(list)
    for i, roster in enumerate(rosters):
        for side in ("source", "destination"):
            for at, meta in enumerate(getattr(roster, side)):
                if (name := canonical_name(meta)) in names and _is_sound(meta):
                    holders[name].append(_Holder(i, side, at, meta, roster.label or f"rank {roster.rank}"))
    problems: dict[str, list[str]] = {}
    changed: dict[tuple[int, str], dict[int, ParameterMetadata]] = defaultdict(dict)
    for name in sorted(holders):
        before = [holder.meta for holder in holders[name]]
        _find_splits(holders[name])
        wrong = (
            _fill_blocks(name, holders[name])
            or _fill_strides(name, holders[name])
            or _different_parts(name, holders[name])
            or _divided_groups(name, holders[name])
        )
        if wrong:
            problems[name] = [wrong]
        for holder, meta in zip(holders[name], before, strict=True):
            if holder.meta is not meta:
                changed[holder.roster, holder.side][holder.at] = holder.meta
    found = list(rosters)
    for (i, side), metas in changed.items():
        said = list(getattr(found[i], side))
        for at, meta in metas.items():
            said[at] = meta
        found[i] = replace(found[i], source=said) if side == "source" else replace(found[i], destination=said)
    return found, problems


def _said(rosters: Iterable[Roster]) -> Said:
    said = Said()
    read: dict[int, object] = {}  # read shared lists once; keeping them prevents the reuse of their ids
    for roster in rosters:
        for metas in (roster.source, roster.destination):
            if id(metas) in read:
                continue
            read[id(metas)] = metas
            for m in kinds_of(metas):  # of equal ones, no difference is reported
                group = m.tensor_parallel_group_ranks
                if m.tiles is None and (m.is_tp or group is not None or m.partition_sizes is not None):
                    said.see(canonical_name(m), m, len(group or ()))
    return said


def _is_sound(meta: ParameterMetadata) -> bool:
    """Return whether a description is valid enough to be completed; others are reported when they are read."""
    return meta.tiles is not None or (
        isinstance(meta.shape, list | tuple)
        and all(isinstance(n, int) for n in meta.shape)
        and (not _says_cut(meta) or (isinstance(meta.partition_dim, int) and 0 <= meta.partition_dim < len(meta.shape)))
        and isinstance(meta.partition_stride, int)
        and (
            meta.partition_sizes is None
            or (
                all(isinstance(n, int) for n in meta.partition_sizes)
                and sum(meta.partition_sizes) == meta.shape[meta.partition_dim]
            )
        )
    )


def _says_cut(meta: ParameterMetadata) -> bool:
    """Return whether a description's `partition_dim` is meaningful."""
    return meta.is_tp or meta.partition_sizes is not None


def _find_splits(holders: Sequence[_Holder]) -> None:
    """Mark tensors as split if their shape is one share of a tensor that other descriptions declare split."""
    said = {
        (dim, (*h.meta.shape[:dim], h.meta.shape[dim] * h.size, *h.meta.shape[dim + 1 :]))
        for h in holders
        if is_sharded(h.meta)
        for dim in (h.meta.partition_dim,)
    }
    if len(said) != 1:
        return
    ((dim, whole),) = said
    strides = {h.meta.partition_stride for h in holders if is_sharded(h.meta)}
    for holder in holders:
        meta, size = holder.meta, len(holder.meta.tensor_parallel_group_ranks or ())
        if meta.tiles is not None or meta.is_tp or size < 2 or len(meta.shape) != len(whole):
            continue
        share = (*whole[:dim], whole[dim] // size, *whole[dim + 1 :])
        if whole[dim] % size == 0 and tuple(meta.shape) == share and share != whole and len(strides) == 1:
            holder.meta = replace(meta, is_tp=True, partition_dim=dim, partition_stride=min(strides))


def _fill_blocks(name: str, holders: Sequence[_Holder]) -> str:
    """Give split tensors without blocks the blocks that others declare; return the problem, or ""."""
    declared: dict[tuple[int, tuple[int, ...]], _Holder] = {}
    for h in holders:
        if h.meta.tiles is None and h.meta.partition_sizes is not None:
            whole = tuple(size * h.size for size in h.meta.partition_sizes)
            declared.setdefault((h.meta.partition_dim, whole), h)
    for holder in holders:
        meta = holder.meta
        if not is_sharded(meta) or meta.partition_sizes is not None or meta.partition_stride != 1:
            continue
        found = [(blocks, by) for (dim, blocks), by in declared.items() if dim == meta.partition_dim]
        if not found:
            continue
        here = holder.where
        if len(found) > 1:
            said = ", ".join(f"{list(blocks)} on {by.where}" for blocks, by in found)
            return (
                f"{name}: its packed blocks are {said}, and {here} declares no partition_sizes; declare them there, "
                "or describe it with explicit tiles"
            )
        ((blocks, by),) = found
        if any(block % holder.size for block in blocks):
            return (
                f"{name}: {by.where} declares partition_sizes, whole blocks of {list(blocks)}, which do "
                f"not divide over the {holder.size} ranks of {here}, where none are declared; describe it with "
                "explicit tiles there"
            )
        sizes = [block // holder.size for block in blocks]
        if sum(sizes) == meta.shape[meta.partition_dim]:
            holder.meta = replace(meta, partition_sizes=sizes)
    return ""


def _fill_strides(name: str, holders: Sequence[_Holder]) -> str:
    """Take unknown strides from other descriptions; return why a stride must be known but is not, or ""."""
    unknown = [h for h in holders if is_sharded(h.meta) and not h.meta.stride_is_known and not h.meta.partition_sizes]
    if not unknown:
        return ""
    known = {
        h.meta.partition_stride
        for h in holders
        if h.meta.tiles is None and h.meta.is_tp and h.meta.stride_is_known and h.meta.partition_sizes is None
        if is_sharded(h.meta) or h.meta.partition_stride > 1
    }
    if len(known) == 1:
        for h in unknown:
            h.meta = replace(h.meta, partition_stride=min(known), stride_is_known=True)
        return ""
    first = unknown[0]
    other = next(
        (
            h
            for h in holders
            if h.meta.tiles is not None or h.size != first.size or h.meta.partition_dim != first.meta.partition_dim
        ),
        None,
    )
    # a dense fc1's partition_stride is trusted; only experts' strides are known to be wrong
    if other is None or not (first.meta.is_ep or _EXPERTS.search(name)):
        return ""
    over = "in tiles" if other.meta.tiles is not None else f"over {other.size} ranks"
    return (
        f"{name}: an expert's fc1, cut over {first.size} ranks on {first.where} and {over} on "
        f"{other.where}, with partition_stride 1, and nothing says whether it is gated (each rank then "
        "holds gate and up); set gated_linear_unit on the module or its config, or partition_stride on the parameter"
    )


def _different_parts(name: str, holders: Sequence[_Holder]) -> str:
    """Return how packed blocks contradict other blocks or strides of one dimension, or ""."""
    declared: dict[int, dict[Parts, str]] = defaultdict(dict)
    has_blocks: set[int] = set()
    for h in holders:
        meta, dim = h.meta, h.meta.partition_dim
        if meta.tiles is not None or not _says_cut(meta):
            continue
        if (blocks := _blocks_of(meta, h.size)) != 1:
            has_blocks.add(dim)
            ranks = "1 rank" if h.size == 1 else f"{h.size} ranks"
            sizes = list(meta.partition_sizes or ())
            declared[dim].setdefault(blocks, f"partition_sizes {sizes} over {ranks} on {h.where}")
        elif is_sharded(meta) and meta.partition_stride > 1:
            declared[dim].setdefault(meta.partition_stride, f"partition_stride {meta.partition_stride} on {h.where}")
    for dim in sorted(has_blocks):
        if len(said := list(declared[dim].values())) > 1:
            return (
                f"{name}: the parts that dim {dim} consists of are {', '.join(said[:4])}; a tensor has the same parts "
                "everywhere, however many ranks split each: correct one of them; where each rank holds one run of the "
                "dimension, declare partition_sizes of one block, and describe any other cut with explicit tiles"
            )
    return ""


def _divided_groups(name: str, holders: Sequence[_Holder]) -> str:
    """Return which ranks of one tensor-parallel group disagree on how the tensor is split, or ""."""
    first: dict[tuple[str, tuple[int, ...]], _Holder] = {}
    for h in holders:
        meta = h.meta
        if not is_sharded(meta):
            continue
        other = first.setdefault((h.side, tuple(meta.tensor_parallel_group_ranks or ())), h)
        ways = [f"partition_dim {m.partition_dim}, partition_stride {m.partition_stride}" for m in (other.meta, meta)]
        if ways[0] != ways[1] and meta.stride_is_known and other.meta.stride_is_known:
            return (
                f"{name}: {other.where} and {h.where} hold it in one tensor-parallel group "
                f"{meta.tensor_parallel_group_ranks} and say differently how it is cut: {ways[0]}, and {ways[1]}; "
                "correct one of them, or describe it with explicit tiles"
            )
    return ""


SIDES = ("source", "destination")
# (side, tensor, group) -> sizes along the split dimension on the ranks of a group that is split unevenly
Uneven = dict[tuple[str, str, tuple[int, ...]], tuple[int, ...]]


def uneven_sizes(ordered: Sequence[Roster], names: Iterable[str]) -> Uneven:
    """Return the local sizes of every complete group that splits one of these tensors unevenly."""
    wanted = set(names)
    held: dict[tuple[str, str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
    for side in SIDES:
        for roster in ordered:
            for m in getattr(roster, side):
                if is_sharded(m) and canonical_name(m) in wanted and m.partition_dim < len(m.shape):
                    group = tuple(m.tensor_parallel_group_ranks or ())
                    held[side, canonical_name(m), group][roster.rank] = m.shape[m.partition_dim]
    return {
        key: tuple(sizes[rank] for rank in key[2])
        for key, sizes in held.items()
        if len(set(sizes.values())) > 1 and all(rank in sizes for rank in key[2])
    }
