"""The positions of a layout's ranks, and the checks of a layout."""

from __future__ import annotations

import math
from collections.abc import Iterator

from refitd.describe.names import expert_range
from refitd.offline.models import span_of
from refitd.offline.tables import shown
from refitd.offline.values import MAX_DESCRIPTIONS, MAX_RANKS, Layout, Position, Split, TensorSpec

Kind = tuple[int, int, int, int, int, int]  # positions: pp, tp, ep, etp, fsdp, fsdp of the experts


def world_size(layout: Layout) -> int:
    """Return the number of ranks of a layout."""
    return layout.tp * layout.dp * layout.pp


def stage_layers(layout: Layout, stage: int) -> range:
    """Return the layers of a pipeline stage."""
    counts = layout.pp_layers
    if counts is None:
        assert layout.model is not None
        return expert_range(layout.model.layers, layout.pp, stage)
    return range(sum(counts[:stage]), sum(counts[: stage + 1]))


def position(layout: Layout, index: int) -> Position:
    """Return the position of rank `index` of a layout, counted from its first rank.

    Tensor-parallel ranks are adjacent, as Megatron numbers them (order tp-dp-pp):

        TP2 DP2 PP2    rank 0 1 2 3 | 4 5 6 7      the same ranks, EP4 ETP1:   0 1 2 3 | 4 5 6 7
                       tp   0 1 0 1 | 0 1 0 1                             ep   0 1 2 3 | 0 1 2 3
                       dp   0 0 1 1 | 0 0 1 1
                       pp   0       | 1                                   pp   0       | 1
    """
    stage, inner = divmod(index, layout.tp * layout.dp)
    outer, etp = divmod(inner, layout.etp)
    expert_dp, ep = divmod(outer, layout.ep)
    return Position(pp=stage, tp=inner % layout.tp, dp=inner // layout.tp, ep=ep, etp=etp, expert_dp=expert_dp)


def layout_problems(layout: Layout) -> list[str]:
    """Return every problem of a layout; bounds are checked before anything large is computed."""
    model = layout.model
    assert model is not None
    ranks = world_size(layout)
    if ranks > MAX_RANKS:
        return [f"tp * dp * pp is {ranks} ranks, expected at most {MAX_RANKS}"]
    problems = []
    if layout.first_rank is not None and layout.first_rank + ranks > 2**20:
        problems.append(f"first_rank {layout.first_rank} and {ranks} ranks end above 2**20")
    per_stage, expert_ranks = layout.tp * layout.dp, layout.ep * layout.etp
    if per_stage % expert_ranks:
        problems.append(
            f"ep {layout.ep} * etp {layout.etp} = {expert_ranks} does not divide the {per_stage} ranks of a stage "
            f"(tp {layout.tp} * dp {layout.dp}); change dp"
        )
    if layout.dp % layout.fsdp:
        problems.append(f"fsdp {layout.fsdp} does not divide dp {layout.dp}")
    if layout.ep > max(model.experts, 1):
        problems.append(f"ep is {layout.ep}, and the model {model.name!r} has {model.experts} experts; lower ep")
    counts = layout.pp_layers
    if counts is not None and (len(counts) != layout.pp or sum(counts) != model.layers):
        problems.append(
            f"pp_layers {shown(list(counts))} gives {sum(counts)} layers to {len(counts)} stages, expected "
            f"{model.layers} and {layout.pp}"
        )
    if problems:
        return problems
    classes = len(set(classes_of(layout)))
    per_stage_kinds = classes // layout.pp
    total = per_stage_kinds * sum(_copies(spec, layout) for spec in model.tensors)
    if total > MAX_DESCRIPTIONS:
        problems.append(
            f"{classes} different kinds of ranks with {total // classes} tensors each; expected at most "
            f"{MAX_DESCRIPTIONS} descriptions in all"
        )
    for spec in model.tensors:
        if spec.split is not None:
            problems += _cut_problems(spec, spec.split, layout)
    return problems


def _copies(spec: TensorSpec, layout: Layout) -> int:
    """Return the most descriptions that a pattern needs, summed over one rank of every stage."""
    assert layout.model is not None
    layers = len(span_of(spec.layers, layout.model.layers)) if "{layer}" in spec.name else layout.pp
    experts = len(span_of(spec.experts, layout.model.experts)) if "{expert}" in spec.name else 1
    return layers * -(-experts // layout.ep)


def _cut_problems(spec: TensorSpec, split: Split, layout: Layout) -> list[str]:
    """Return why a tensor cannot be split over the layout's group."""
    which, ways = group_of(spec, layout)
    size, over = spec.shape[split.dim], f"over {which} {ways}"
    advice = f"; change {which}, or the padding of the tensor, or say uneven = true"
    if spec.interleave is not None:
        if spec.interleave % ways:
            return [f"{spec.name}: {spec.interleave} interleaved groups cannot be split {over}; lower {which}"]
        return []
    pieces = [(f"part {part.tensor!r}", part.size, part.units) for part in spec.parts or ()]
    pieces += [(f"block of {block}", block, None) for block in split.sizes or ()]
    if not pieces and not split.uneven:
        each = size // split.stride
        pieces = [(f"dim {split.dim}" if split.stride == 1 else f"part of dim {split.dim}", each, split.units)]
    found = []
    for what, whole, units in pieces:
        if units is not None and units % ways and ways % units:
            found.append(f"{spec.name}: {what} has {units} units, which cannot be dealt {over}; change {which}")
        elif units is None and whole % ways:
            found.append(f"{spec.name}: {what} has {whole} elements, which cannot be split {over}{advice}")
    return found


def group_of(spec: TensorSpec, layout: Layout) -> tuple[str, int]:
    """Return the name and the size of the group that a tensor is split over."""
    which = (spec.split.group if spec.split else "") or ("etp" if "{expert}" in spec.name else "tp")
    return which, layout.etp if which == "etp" else layout.tp


def classes_of(layout: Layout) -> Iterator[Kind]:
    """Yield each rank's kind; ranks of equal kind hold the same."""
    expert_fsdp = expert_fsdp_of(layout)
    has_experts = layout.model is not None and layout.model.experts > 0
    for index in range(world_size(layout)):
        p = position(layout, index)
        experts = (p.ep, p.etp, p.expert_dp % expert_fsdp) if has_experts else (0, 0, 0)
        yield p.pp, p.tp, experts[0], experts[1], p.dp % layout.fsdp, experts[2]


def expert_fsdp_of(layout: Layout) -> int:
    """Return how many ranks share a copy of the experts, of which there may be fewer than of other tensors."""
    return math.gcd(layout.fsdp, layout.tp * layout.dp // (layout.ep * layout.etp))
