"""refitctl plan: what a swap would move."""

from __future__ import annotations

from collections.abc import Sequence

import click

from refitd.protocol.reports import PairTraffic, ParameterTraffic, PlanReport
from refitd_cli.output import duration, print_json, print_table, size, to_json
from refitd_cli.session import Session, address_option, json_option


@click.command()
@click.argument("model")
@click.option("--top", type=click.IntRange(min=0), default=20, show_default=True, help="Rows per table; 0 shows all.")
@address_option
@json_option
@click.pass_obj
def plan(session: Session, model: str, top: int, address: str | None, as_json: bool) -> None:
    """Show what a swap of MODEL would move, per pair of ranks and per parameter. Moves nothing."""
    with session.client(address) as client:
        report = client.plan(model)
    if as_json:
        print_json(to_json(report))
    else:
        _show(report, top)


def _show(report: PlanReport, top: int) -> None:
    pairs: Sequence[PairTraffic] = sorted(report.pairs, key=lambda pair: -pair.bytes)
    shown = pairs[: top or None]
    print_table(
        _title("rank pairs", len(shown), len(pairs)),
        ("source", "target", ">bytes", ">copies"),
        ((pair.source, pair.target, size(pair.bytes), str(pair.copies)) for pair in shown),
    )
    parameters: Sequence[ParameterTraffic] = sorted(report.parameters, key=lambda parameter: -parameter.bytes)
    largest = parameters[: top or None]
    print_table(
        _title("parameters, over all targets", len(largest), len(parameters)),
        ("parameter", ">bytes", ">copies"),
        ((parameter.name, size(parameter.bytes), str(parameter.copies)) for parameter in largest),
    )
    if report.unused_sources:
        names = report.unused_sources[: top or None]
        more = len(report.unused_sources) - len(names)
        click.echo(f"no target takes: {', '.join(names)}{f' and {more} more' if more else ''}")
    click.echo(
        f"{report.model}: {size(report.bytes)} in {report.copies} copies over {len(pairs)} rank pairs, "
        f"{len(parameters)} parameters; planned in {duration(report.plan_s)}; digest {report.digest}"
    )


def _title(what: str, shown: int, total: int) -> str:
    return what if shown == total else f"{what} (the largest {shown} of {total}; --top 0 shows all)"
