"""What descriptions of one tensor leave out, or contradict each other in: completed, or refused, before planning.

    partition_sizes on some ranks      the others' blocks are the same ones, cut for as many ranks as they are
    not said to be split at all        an expert's tensor, smaller than the whole by exactly its group
    stride not known                   an fc1, gated or not: as whoever knows says

What cannot be completed, and would matter, is refused by name; so is what cannot be true together:

    packed blocks that differ          a tensor has the same parts everywhere, however many ranks split them
    ranks of one group, cut otherwise  they are the shares of one cut

Sides may differ in dimension and stride: contiguous on one, gate | up on the other. Where all say the same nothing is
done here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from refitd.describe.layout import canonical_name, is_sharded
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.roster import Roster

_EXPERTS = re.compile(r"(?:^|\.)(?:local_)?experts\.")


# The parts of a dimension: how many where they are equal, else their sizes in the whole tensor.
Parts = int | tuple[int, ...]

# How one description is split: (ranks, dimension, stride, packed blocks; 1 where it declares none, or one alone)
Cut = tuple[int, int, int, Parts]


class Description(Protocol):
    """A description, as it is or as it travels."""

    @property
    def is_tp(self) -> bool:
        """As in ParameterMetadata, like all of these."""

    @property
    def partition_dim(self) -> int:
        """The dimension."""

    @property
    def partition_stride(self) -> int:
        """The stride."""

    @property
    def partition_sizes(self) -> Sequence[int] | None:
        """The packed blocks."""

    @property
    def stride_is_known(self) -> bool:
        """Whether the stride is more than a guess."""


@dataclass(slots=True)
class Said:
    """Who says what, by canonical name."""

    cuts: dict[str, frozenset[Cut]] = field(default_factory=dict)
    unsaid: set[str] = field(default_factory=set)  # has a group, and does not say that it is split over it
    blocks: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)  # split, in one part as far as it says
    unknown: set[str] = field(default_factory=set)  # split, with a stride that is not known
    _same: dict[frozenset[Cut], frozenset[Cut]] = field(default_factory=dict)  # few, of many tensors

    def see(self, name: str, meta: Description, group_size: int) -> None:
        """Note one description without tiles; one that is not split may still know the blocks."""
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
        """Add what another has seen."""
        for name, cuts in other.cuts.items():
            self._cut(name, cuts)
        self.unsaid |= other.unsaid
        self.blocks |= other.blocks
        self.silent |= other.silent
        self.unknown |= other.unknown

    def incomplete(self) -> set[str]:
        """Return the tensors whose descriptions have to be looked at together."""
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
        return group_size, 0, 1, 1  # told where descriptions are read
    return group_size, dim, stride, _blocks_of(meta, group_size)


def _blocks_of(meta: Description, group_size: int) -> Parts:
    """Return the packed blocks that a description declares; 1 where it is one run a rank, or does not say."""
    sizes = [size for size in meta.partition_sizes or (1,) if size]
    if not all(isinstance(size, int) for size in sizes):
        return 1
    return len(sizes) if len(set(sizes)) < 2 else tuple(size * group_size for size in sizes)


def _may_contradict(cuts: Iterable[Cut]) -> bool:
    """Whether these cuts of one tensor are to be looked at: equal groups cut otherwise, or parts that differ."""
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
    """One description, and where it stands."""

    roster: int
    side: str
    at: int
    meta: ParameterMetadata
    label: str

    @property
    def size(self) -> int:
        """Ranks it is split over."""
        return len(self.meta.tensor_parallel_group_ranks or ()) if is_sharded(self.meta) else 1

    @property
    def where(self) -> str:
        """Rank and side, for people."""
        return f"{self.label} ({self.side})"


def completed(rosters: Sequence[Roster]) -> tuple[list[Roster], dict[str, list[str]]]:
    """Return the rosters with what others say filled in, and problems by canonical name."""
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
    read: dict[int, object] = {}  # lists that rosters share are read once; kept, so that an id stays its own
    for roster in rosters:
        for metas in (roster.source, roster.destination):
            if id(metas) in read:
                continue
            read[id(metas)] = metas
            for m in metas:
                group = m.tensor_parallel_group_ranks
                if m.tiles is None and (m.is_tp or group is not None or m.partition_sizes is not None):
                    said.see(canonical_name(m), m, len(group or ()))
    return said


def _is_sound(meta: ParameterMetadata) -> bool:
    """Whether it can be reasoned about; what is wrong with the others is reported where they are read."""
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
    """Whether a description says along which dimension the tensor is, or would be, split."""
    return meta.is_tp or meta.partition_sizes is not None


def _find_splits(holders: Sequence[_Holder]) -> None:
    """Have tensors that are one share of what others say is split be split likewise."""
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
    """Give those that are split in one part the blocks that others declare; return what stands in the way, or ""."""
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
    """Give those whose stride is not known that of others; return why it must be known and is not, or ""."""
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
    # of a dense fc1 what is stamped is taken: only experts' are known to be stamped wrongly
    if other is None or not (first.meta.is_ep or _EXPERTS.search(name)):
        return ""
    over = "in tiles" if other.meta.tiles is not None else f"over {other.size} ranks"
    return (
        f"{name}: an expert's fc1, cut over {first.size} ranks on {first.where} and {over} on "
        f"{other.where}, with partition_stride 1, and nothing says whether it is gated (each rank then "
        "holds gate and up); set gated_linear_unit on the module or its config, or partition_stride on the parameter"
    )


def _different_parts(name: str, holders: Sequence[_Holder]) -> str:
    """Return what packed blocks say that other blocks, or strides, of the same dimension contradict, or ""."""
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
    """Return which ranks of one tensor-parallel group say differently how it is cut, or ""."""
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
