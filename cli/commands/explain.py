"""refitctl explain: draw one parameter's tiles and transfers as text."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from refitd.errors import ConfigError, PlanError
from refitd_cli.group import EXIT_FAILED, error_object
from refitd_cli.layouts import manifest_options, read_manifests
from refitd_cli.output import print_json, rank_ranges, say, size, to_json
from refitd_cli.printed import BoxSent, Explained, HeldBoxes, TensorExplained
from refitd_cli.session import json_option

if TYPE_CHECKING:
    from refitd.describe.roster import Roster
    from refitd.plan.shared import GlobalPlan
    from refitd_cli.picture import Picture, SentBox

SIDE_LINES = 40
PLANNERS = {
    "lcm": "each side holds it whole or splits it evenly, along the same dimension",
    "intersect": "the sides split it unevenly or in several ways: their tiles are intersected",
}


@click.command()
@click.argument("param")
@manifest_options
@click.option("--rank", type=click.IntRange(min=0), help="Show the transfers into this rank only.")
@click.option("--top", type=click.IntRange(min=0), default=8, show_default=True, help="Receiving ranks; 0 shows all.")
@json_option
@click.pass_context
def explain(
    ctx: click.Context,
    param: str,
    source: str | None,
    targets: tuple[str, ...],
    model_file: str | None,
    collocated: bool,
    rank: int | None,
    top: int,
    as_json: bool,
) -> None:
    """Show where PARAM lies on each side, and what of it travels between which ranks.

    PARAM is a canonical name, or a local one that holds several (a fused qkv). Works on manifests, without a
    daemon. The tiles are shown even where the plan is refused; the exit status is then 1.
    """
    if source is None or not targets:
        raise click.UsageError("give the manifests of both sides: --source FILE --target FILE")
    from refitd.offline import rosters_of
    from refitd.plan.build import plan_copies
    from refitd_cli.picture import pictures

    sender, receivers = read_manifests(source, targets, model_file)
    rosters = rosters_of(sender, receivers, collocated=collocated)
    found = pictures(rosters, param)
    if not found:
        raise ConfigError(_unknown(param, rosters))
    plan: GlobalPlan | None = None
    refusal: PlanError | None = None
    try:
        plan = plan_copies(rosters)
    except PlanError as error:
        refusal = error
    if as_json:
        shown = to_json(Explained(tuple(_object(picture, plan) for picture in found)))
        print_json(shown | (error_object(refusal) if refusal else {}))
    else:
        for picture in found:
            _show(picture, plan, rank, top)
        if refusal is not None:
            _show_refusal(refusal, [picture.tensor for picture in found])
    ctx.exit(EXIT_FAILED if refusal is not None else 0)


def _pieces(picture: Picture, plan: GlobalPlan | None) -> list[SentBox]:
    from refitd.plan.cost import copies_of
    from refitd_cli.picture import pieces

    return pieces(picture, copies_of(plan, picture.tensor)) if plan is not None else []


def _planner(picture: Picture, plan: GlobalPlan | None) -> str | None:
    planner = plan.planner_of(picture.tensor) if plan is not None else None
    return planner and planner.value


def _show(picture: Picture, plan: GlobalPlan | None, rank: int | None, top: int) -> None:
    from refitd.describe.layout import elements
    from refitd_cli.picture import bars, boxes_text, cut_dims, side_lines

    shape = ", ".join(map(str, picture.shape))
    say(f"{picture.tensor}  [{shape}] {picture.dtype}, {size(elements(picture.shape) * picture.element_size)}")
    dims = cut_dims(picture)
    what = ", ".join(f"dimension {d} of {picture.shape[d]}" for d in dims)
    say(f"  bars: {what}; # held, + held in part, . not held" if dims else "  a single element")
    for title, holdings in (("source", picture.source), ("destination", picture.destination)):
        say(f"{title}:" if holdings else f"{title}: nobody")
        lines = side_lines(picture, holdings)
        for line in lines[:SIDE_LINES] if top else lines:
            say(line)
        if top and len(lines) > SIDE_LINES:
            say(f"  and {len(lines) - SIDE_LINES} other parts (--top 0 shows all)")
    if planner := _planner(picture, plan):
        say(f"planned by: {planner} ({PLANNERS[planner]})")
    by_pair: dict[int, dict[int, list[SentBox]]] = {}
    for piece in _pieces(picture, plan):
        by_pair.setdefault(piece.dst, {}).setdefault(piece.src, []).append(piece)
    receivers = [dst for dst in by_pair if rank is None or dst == rank]
    shown = receivers if rank is not None else receivers[: top or None]
    for dst in shown:
        say(f"into rank {dst}:")
        width = max(len(str(src)) for src in by_pair[dst])
        for src, some in by_pair[dst].items():
            boxes = [piece.box for piece in some]
            moved = size(sum(piece.bytes for piece in some))
            kept = " (local copy)" if src == dst else ""
            say(f"  from rank {src:>{width}}  {bars(picture.shape, dims, boxes)}  {boxes_text(boxes)}  {moved}{kept}")
    if len(shown) < len(receivers):
        rest = receivers[len(shown) :]
        say(f"and into {len(rest)} more ranks: {rank_ranges(rest)} (--top 0 shows all, --rank N shows one)")


def _show_refusal(refusal: PlanError, tensors: Sequence[str]) -> None:
    mine = [text for text in refusal.violations if any(tensor in text for tensor in tensors)]
    others = len(refusal.violations) - len(mine)
    say("the plan is refused:", err=True)
    for text in mine:
        say(f"  {text}", err=True)
    if others:
        say(f"  {others} reasons that are not about this parameter; refitctl plan shows them", err=True)


def _object(picture: Picture, plan: GlobalPlan | None) -> TensorExplained:
    return TensorExplained(
        name=picture.tensor,
        shape=tuple(picture.shape),
        dtype=picture.dtype,
        source=tuple(HeldBoxes(h.rank, h.local, h.boxes) for h in picture.source),
        destination=tuple(HeldBoxes(h.rank, h.local, h.boxes) for h in picture.destination),
        planned_by=_planner(picture, plan),
        transfers=tuple(BoxSent(p.src, p.dst, p.box, p.bytes) for p in _pieces(picture, plan)),
    )


def _unknown(param: str, rosters: Sequence[Roster]) -> str:
    from refitd_cli.picture import tensors_of

    names: set[str] = set()
    seen: set[int] = set()
    for roster in rosters:
        for held in (roster.source, roster.destination):
            if id(held) not in seen:
                seen.add(id(held))
                for meta in held:
                    names |= {meta.name, *tensors_of(meta)}
    close = [name for name in sorted(names) if param in name][:5] or difflib.get_close_matches(param, names, 5, 0.5)
    return f"{param}: no rank has a tensor of this name" + (f"; did you mean {', '.join(close)}?" if close else "")
