"""refitctl simulate: how long a refit between manifests takes on a cluster that is described in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from refitd.errors import ConfigError
from refitd_cli.layouts import manifest_options, planned
from refitd_cli.output import duration, print_table, rank_ranges, say, size
from refitd_cli.printed import Simulated, SimulatedCable, SimulatedPhase, SimulatedRoute
from refitd_cli.session import Number, Session, prints

if TYPE_CHECKING:
    from refitd.clusters import ClusterSpeeds
    from refitd.simulate import Prediction
    from refitd_cli.layouts import ManifestPlan

ROUTES = ("direct", "relayed", "delta", "relayed delta")
EXPLAINED = {
    "direct": "what one node needs crosses to it once",
    "relayed": "nodes that need the same pass it on, one to the next",
    "delta": "only changed elements cross",
    "relayed delta": "both",
}


@click.command()
@manifest_options
@click.option(
    "--cluster", "cluster_file", metavar="FILE", required=True, help="Speeds of nodes and cables: a TOML file."
)
@click.option("--route", "routes", type=click.Choice(ROUTES), multiple=True, help="How bytes get there; default: all.")
@click.option(
    "--changed",
    type=Number(min=0, max=1),
    default=0.01,
    show_default=True,
    help="Share of the elements that changed, for deltas.",
)
@click.option("--top", type=click.IntRange(min=1, max=1000), default=8, show_default=True, help="Busiest cables shown.")
@click.option("-o", "--trace", "trace_file", metavar="FILE", help="Write a trace for Perfetto (ui.perfetto.dev).")
@prints
def simulate(
    session: Session,
    source: str | None,
    targets: tuple[str, ...],
    model_file: str | None,
    collocated: bool,
    cluster_file: str,
    routes: tuple[str, ...],
    changed: float,
    top: int,
    trace_file: str | None,
) -> None:
    """Predict how long a refit takes on a cluster, and which cables limit it.

    Plans between two manifests, without a daemon, and lets the bytes flow: all at once, each cable shared fairly
    by all that goes over it. Memory, digests and messages cost what the cluster's file says.
    """
    if source is None or not targets:
        raise click.UsageError("give the manifests of both sides: --source FILE --target FILE")
    from refitd.clusters import at_defaults, load_cluster
    from refitd.simulate import FanOut, Simulation

    cluster = load_cluster(cluster_file)
    found = planned(source, targets, model_file, collocated, cluster)
    simulation = Simulation(found.plan, found.rosters, cluster)
    predictions = [simulation.run(FanOut(r), changed=changed, top=top) for r in ROUTES if r in (routes or ROUTES)]
    if trace_file is not None:
        _write_trace(trace_file, predictions)
    result = _object(found, cluster, at_defaults(cluster), changed, predictions)
    session.show(result, lambda _: _show(found, cluster, result.defaults, changed, predictions, trace_file))


def _write_trace(file: str, predictions: list[Prediction]) -> None:
    try:
        Path(file).write_text(json.dumps(trace(predictions)))
    except OSError as exc:
        raise ConfigError(f"--trace {file}: cannot be written: {exc.strerror}") from exc


def trace(predictions: Iterable[Prediction]) -> dict[str, Any]:
    """Return the JSON object: one process for each prediction, with its phases and its busiest cables as threads."""
    events: list[dict[str, Any]] = []

    def name(what: str, process: int, thread: int, name: str) -> None:
        events.append({"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}})

    def span(process: int, thread: int, name: str, at_s: float, seconds: float, **args: float) -> None:
        span = {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": at_s * 1e6, "dur": seconds * 1e6}
        events.append(span | {"args": args})

    for number, prediction in enumerate(predictions, 1):
        name("process_name", number, 0, prediction.route.value)
        name("thread_name", number, 0, "phases")
        at, arriving = 0.0, 0.0
        for phase in prediction.phases:
            if phase.name == "arriving":
                arriving = at
            span(number, 0, phase.name, at, phase.seconds)
            at += phase.seconds
        for thread, (cable, rates) in enumerate(zip(prediction.cables, prediction.rates, strict=True), 1):
            name("thread_name", number, thread, cable.name)
            for rate in rates:
                said = {"GB/s": rate.gb_s, "of": cable.gb_s}
                begin, length = arriving + rate.begin_s, rate.end_s - rate.begin_s
                span(number, thread, f"{rate.gb_s:.4g} GB/s", begin, length, **said)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _show(
    found: ManifestPlan,
    cluster: ClusterSpeeds,
    defaults: dict[str, int | float | str],
    changed: float,
    predictions: list[Prediction],
    trace_file: str | None,
) -> None:
    print_table(
        f"a swap on {cluster.name}",
        ("route", ">time", ">between nodes", ">from sources", "limited by", ">busy"),
        (
            (
                p.route.value,
                duration(p.seconds),
                size(p.crossing_bytes),
                size(p.sent_bytes),
                p.cables[0].name if p.cables else "nothing moves",
                f"{p.cables[0].busy:.0%}" if p.cables else "",
            )
            for p in predictions
        ),
    )
    for p in predictions:
        phases = ", ".join(f"{phase.name} {duration(phase.seconds)}" for phase in p.phases)
        chain = f"; the longest chain is {p.chain} nodes" if p.chain > 1 else ""
        say(f"{p.route.value}: {EXPLAINED[p.route.value]}. {phases}{chain}")
    first = predictions[0]
    print_table(
        f"busiest, {first.route.value} ({len(first.cables)})",
        ("cable", ">carries", ">GB/s", ">busy"),
        ((c.name, size(c.nbytes), f"{c.gb_s:g}", f"{c.busy:.0%}") for c in first.cables),
    )
    senders = [r.rank for r in found.rosters if r.source]
    receivers = [r.rank for r in found.rosters if r.destination]
    say(
        f"{found.source.name} ({len(senders)} ranks: {rank_ranges(senders)}) to "
        f"{', '.join(target.name for target in found.targets)} ({len(receivers)} ranks: {rank_ranges(receivers)}); "
        f"planned in {duration(found.plan_s)}"
    )
    if any(p.route.is_delta for p in predictions):
        say(f"deltas: {changed:.3%} of the elements changed")
    if cluster.note:
        say(f"assumed: {cluster.note}")
    if defaults:
        say(f"at their defaults: {', '.join(f'{name} = {value}' for name, value in defaults.items())}")
    if trace_file is not None:
        say(f"trace: {trace_file}")


def _object(
    found: ManifestPlan,
    cluster: ClusterSpeeds,
    defaults: dict[str, int | float | str],
    changed: float,
    predictions: list[Prediction],
) -> Simulated:
    routes = tuple(
        SimulatedRoute(
            route=p.route.value,
            seconds=p.seconds,
            phases=tuple(SimulatedPhase(phase.name, phase.seconds) for phase in p.phases),
            crossing_bytes=p.crossing_bytes,
            sent_bytes=p.sent_bytes,
            chain=p.chain,
            cables=tuple(SimulatedCable(c.name, c.nbytes, c.gb_s, c.busy) for c in p.cables),
        )
        for p in predictions
    )
    return Simulated(cluster.name, cluster.note, defaults, found.plan.digest, len(found.rosters), changed, routes)
