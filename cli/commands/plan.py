"""refitctl plan: the transfers of a swap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from refitd.errors import ConfigError
from refitd.protocol.plan_reports import CableTraffic, LiveMemory, PairTraffic, ParameterTraffic, PlanReport, Relaying
from refitd.states import CommitMode
from refitd_cli.layouts import ManifestPlan, RankNumbers, balance_of, in_a_swap, manifest_options, memory_of, planned
from refitd_cli.output import duration, print_table, say, size
from refitd_cli.printed import ManifestPlanned, ParameterSent, RankMemory, RankPair, Senders
from refitd_cli.session import Session, asks, model_names
from refitd_cli.view import PATH_COLUMNS, path_rows

if TYPE_CHECKING:
    from refitd.plan.cost import Traffic


@click.command()
@click.argument("model", required=False, shell_complete=model_names)
@manifest_options
@click.option("--top", type=click.IntRange(min=0), default=20, show_default=True, help="Rows per table; 0 shows all.")
@click.option(
    "--explain", is_flag=True, help="Also show the path of the bytes, and the memory and the pause of each target."
)
@click.option("--html", "html_file", metavar="FILE", help="Write who sends how much to whom as a heat map.")
@asks
def plan(
    session: Session,
    model: str | None,
    source: str | None,
    targets: tuple[str, ...],
    model_file: str | None,
    collocated: bool,
    top: int,
    explain: bool,
    html_file: str | None,
) -> None:
    """Show what a swap of MODEL would move, per pair of ranks and per parameter. Moves nothing.

    With --source and --target instead of MODEL: plan between two manifests, without a daemon. Exit 1 if the plan
    is refused.
    """
    if model is None:
        if source is None or not targets:
            raise click.UsageError("give a MODEL that is registered, or manifests with --source and --target")
        if explain:
            raise click.UsageError("--explain needs a MODEL: manifests do not say where tensors are")
        found = planned(source, targets, model_file, collocated)
        _offline(session, found, top, html_file)
        return
    if source is not None or targets or model_file is not None or collocated or html_file is not None:
        raise click.UsageError(
            "MODEL asks the daemon; --source, --target, --model, --collocated and --html are for manifests: give one"
        )
    with session.client() as client:
        report = client.plan(model)
    session.show(report, lambda report: _show(report, top, explain))


def _explain(report: PlanReport, top: int) -> None:
    print_table("paths", PATH_COLUMNS, path_rows(report.paths))
    shown = report.memory[: top or None]
    print_table(
        _title("memory to go live", len(shown), len(report.memory)),
        ("replica", ">rank", "mode", "on", ">live", ">beside it", ">in all", ">pause", "the other way"),
        (
            (
                one.replica,
                str(one.rank),
                one.mode,
                one.device or "main memory",
                size(one.held_bytes),
                size(one.staging_bytes),
                f"{(one.held_bytes + one.staging_bytes) / one.held_bytes:.1f}x" if one.held_bytes else "-",
                "not measured" if one.pause_s is None else duration(one.pause_s),
                _other_way(one),
            )
            for one in shown
        ),
    )


def _other_way(one: LiveMemory) -> str:
    """Return the memory and the pause that a target would need if it went live another way."""
    if one.other_way == CommitMode.FLIP:
        return f"flip: {size(2 * one.held_bytes)}, and a pause without the copy"
    pause = "as long as a swap stages" if one.stage_s is None else f"of about {duration(one.stage_s)}"
    return f"in place: {size(one.held_bytes)}, and a pause {pause}"


def _show(report: PlanReport, top: int, explain: bool) -> None:
    pairs: Sequence[PairTraffic] = sorted(report.pairs, key=lambda pair: -pair.bytes)
    shown = pairs[: top or None]
    print_table(
        _title("rank pairs", len(shown), len(pairs)),
        ("source", "target", ">bytes", ">copies"),
        ((pair.source, pair.target, size(pair.bytes), str(pair.copies)) for pair in shown),
    )
    if report.links:
        print_table(
            "between nodes",
            ("from", "to", ">crosses", ">needed there"),
            ((link.source, link.target, size(link.bytes), size(link.needed_bytes)) for link in report.links),
        )
    _show_cables(report.cables, top)
    _show_relays(report.relays, top)
    parameters: Sequence[ParameterTraffic] = sorted(report.parameters, key=lambda parameter: -parameter.bytes)
    _show_parameters([(p.name, p.bytes, p.copies) for p in parameters], top)
    _show_unused(report.unused_sources, top)
    say(
        f"{report.model}: {size(report.bytes)} in {report.copies} copies over {len(pairs)} rank pairs, "
        f"{len(parameters)} parameters; planned in {duration(report.plan_s)}; digest {report.digest}"
    )
    if report.speeds:
        say(f"cables as {report.speeds} says (transport.cables)")
    if report.kept:
        names = [kept.name for kept in report.kept[: top or None]]
        more = f" and {len(report.kept) - len(names)} more" if len(report.kept) > len(names) else ""
        say(f"targets keep {size(sum(kept.bytes for kept in report.kept))} of their own: {', '.join(names)}{more}")
    if report.converted_bytes:
        say(
            f"{size(report.converted_bytes)} of it are converted where they arrive; targets hold "
            f"{size(report.held_bytes)}, and {size(report.staging_bytes)} while staging"
        )
    if explain:
        _explain(report, top)


def _show_relays(relays: Relaying, top: int) -> None:
    for path in relays.paths[: top or None]:
        say(f"passed on: {size(path.bytes)} over {' -> '.join((path.source, *path.nodes))}")
    if len(relays.paths) > top > 0:
        say(f"and over {len(relays.paths) - top} more paths; --top 0 shows all")
    if relays.paths:
        say(f"the busiest cable carries {size(relays.bytes)} one way; without relays {size(relays.direct_bytes)}")
    elif relays.direct_bytes and not relays.direct_seconds:
        say(f"no relays: the busiest cable carries {size(relays.direct_bytes)}, with relays hardly less")
    if relays.paths and relays.direct_seconds:
        say(f"predicted, with relays: {duration(relays.seconds)}; without: {duration(relays.direct_seconds)}")
    elif relays.direct_seconds:
        say(f"no relays: predicted without them {duration(relays.direct_seconds)}, with them hardly less")


def _show_cables(cables: Sequence[CableTraffic], top: int) -> None:
    if cables:
        print_table(
            _title("cables", min(top or len(cables), len(cables)), len(cables)),
            ("node", "", ">carries", ">per second", ">takes"),
            (
                (c.node, "sends" if c.is_send else "receives", size(c.bytes), size(c.speed), duration(c.seconds))
                for c in cables[: top or None]
            ),
        )


def _show_parameters(parameters: Sequence[tuple[str, int, int]], top: int) -> None:
    largest = parameters[: top or None]
    print_table(
        _title("parameters, over all targets", len(largest), len(parameters)),
        ("parameter", ">bytes", ">copies"),
        ((name, size(nbytes), str(copies)) for name, nbytes, copies in largest),
    )


def _show_unused(unused: Sequence[str], top: int) -> None:
    if unused:
        names = unused[: top or None]
        more = len(unused) - len(names)
        say(f"no target takes: {', '.join(names)}{f' and {more} more' if more else ''}")


def _title(what: str, shown: int, total: int) -> str:
    return what if shown == total else f"{what} (the largest {shown} of {total}; --top 0 shows all)"


def _offline(session: Session, found: ManifestPlan, top: int, html_file: str | None) -> None:
    """Show a plan between manifests."""
    from refitd.plan.cost import traffic_of

    traffic = traffic_of(found.plan)
    balance = balance_of(traffic, found.rosters)
    memory = memory_of(found.rosters)
    moved = in_a_swap(found.plan, found.rosters, traffic)
    facts = _facts(found, traffic, moved, balance)
    if html_file is not None:
        _write_heat_map(html_file, found, traffic, facts)
    result = _object(found, traffic, moved, balance, memory)
    session.show(result, lambda _: _show_offline(found, traffic, memory, facts, top))
    if html_file is not None and not session.as_json:
        say(f"heat map: {html_file}")


def _show_offline(
    found: ManifestPlan, traffic: Traffic, memory: Sequence[RankMemory], facts: Sequence[str], top: int
) -> None:
    from refitd_cli.heatmap import matrix_of, text_matrix

    title, columns, rows = text_matrix(matrix_of(traffic, found.rosters, found.sides), found.sides)
    print_table(title, columns, rows)
    _show_parameters(traffic.largest_tensors(), top)
    _show_memory(memory, found.sides, top)
    _show_unused(found.plan.unused_sources, top)
    say(*facts)


def _facts(
    found: ManifestPlan,
    traffic: Traffic,
    moved: Traffic,
    balance: Senders,
) -> list[str]:
    far, crossing = _far(found, traffic), _far(found, moved)
    near = traffic.total_bytes - traffic.local_bytes - far
    alike = f" for {size(far)} that ranks there need" if crossing < far else ""
    return [
        f"{found.source.name} ({len(found.sides[0].ranks)} ranks) to "
        + ", ".join(f"{side.name} ({len(side.ranks)} ranks)" for side in found.sides[1:]),
        f"{size(traffic.total_bytes)} in {traffic.total_copies} copies over {len(traffic.src)} rank pairs: "
        f"{size(traffic.local_bytes)} stay on their rank, {size(near)} on their node, "
        f"{size(crossing)} cross nodes{alike}",
        f"senders: the busiest, rank {_own(found.sides, [balance.max_rank])}, sends {size(balance.max_bytes)}, "
        f"{balance.max_over_mean:.2f} times the mean of {balance.senders}",
        f"planned in {duration(found.plan_s)}; digest {found.plan.digest}",
    ]


def _far(found: ManifestPlan, traffic: Traffic) -> int:
    """Return the bytes that cross between nodes."""
    nodes = {r.rank: r.node or f"rank {r.rank}" for r in found.rosters}
    pairs = zip(traffic.src.tolist(), traffic.dst.tolist(), traffic.bytes.tolist(), strict=True)
    return sum(nbytes for src, dst, nbytes in pairs if nodes[src] != nodes[dst])


def _show_memory(memory: Sequence[RankMemory], sides: Sequence[RankNumbers], top: int) -> None:
    kinds: dict[tuple[int, int], list[int]] = {}
    for each in memory:
        kinds.setdefault((each.staging_bytes, each.source_bytes), []).append(each.rank)
    largest = sorted(kinds.items(), reverse=True)
    shown = largest[: top or None]
    print_table(
        _title("memory per rank", len(shown), len(largest)),
        ("ranks", ">number", ">source", ">staging"),
        ((_own(sides, ranks), str(len(ranks)), size(held), size(staged)) for (staged, held), ranks in shown),
    )


def _own(sides: Sequence[RankNumbers], ranks: Sequence[int]) -> str:
    """Return ranks by their own numbers, on every side that they are on."""
    return " + ".join(own for side in sides if (own := side.own(ranks)))


def _object(
    found: ManifestPlan,
    traffic: Traffic,
    moved: Traffic,
    balance: Senders,
    memory: Sequence[RankMemory],
) -> ManifestPlanned:
    pairs = zip(
        traffic.src.tolist(), traffic.dst.tolist(), traffic.bytes.tolist(), traffic.copies.tolist(), strict=True
    )
    return ManifestPlanned(
        source=found.source.name,
        targets=tuple(target.name for target in found.targets),
        ranks=len(found.rosters),
        bytes=traffic.total_bytes,
        local_bytes=traffic.local_bytes,
        crossing_bytes=_far(found, moved),
        copies=traffic.total_copies,
        plan_s=found.plan_s,
        digest=found.plan.digest,
        senders=balance,
        memory=tuple(memory),
        pairs=tuple(RankPair(*pair) for pair in pairs),
        parameters=tuple(ParameterSent(*row) for row in traffic.largest_tensors()),
        unused_sources=tuple(found.plan.unused_sources),
    )


def _write_heat_map(path: str, found: ManifestPlan, traffic: Traffic, facts: Sequence[str]) -> None:
    from refitd_cli.heatmap import HTML_GROUPS, html_page, matrix_of

    title = f"{found.source.name} to {', '.join(target.name for target in found.targets)}"
    page = html_page(title, facts, matrix_of(traffic, found.rosters, found.sides, HTML_GROUPS), found.sides)
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; choose another --html FILE") from error
