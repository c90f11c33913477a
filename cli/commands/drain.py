"""refitctl drain and resume: exclude a node from new swaps, wait for running ones, and include it again."""

from __future__ import annotations

from collections.abc import Iterator

import click

from refitd.protocol.reports import DrainReport
from refitd_cli.output import say, swap_bar
from refitd_cli.session import Duration, Session, asks, node_names


@click.command()
@click.argument("node", shell_complete=node_names)
@click.option(
    "--timeout",
    type=Duration(min=0),
    metavar="S",
    help="Seconds to wait for swaps in which the node takes part.  [default: until their own deadlines]",
)
@click.option("--no-wait", is_flag=True, help="Do not wait for these swaps.")
@asks
def drain(session: Session, node: str, timeout: float | None, no_wait: bool) -> None:
    """Leave NODE out of all new swaps, until `refitctl resume`; wait for running ones to end.

    New swaps leave out each replica with a rank, or its controller, there. It serves its version until another one is
    decided, then none; resume catches it up. Trainers cannot be excluded: swaps that would read a source there
    are refused. The node stays drained when daemons or the coordinator restart.
    """
    with session.client() as client, swap_bar(f"swaps on {node}") as on_progress:
        report = client.drain(node, timeout=timeout, wait=not no_wait, on_progress=on_progress)
    session.show(report, lambda report: say(*_drained(report, waited=not no_wait)))


def _drained(report: DrainReport, *, waited: bool) -> Iterator[str]:
    yield f"{report.node}: {'drained' if report.changed else 'it was drained already'}"
    for one in report.replicas:
        yield f"{one.model}: swaps leave out replica {one.replica}"
    for model in report.stranded:
        yield f"{model}: no replica is left; its swaps are refused until one is"
    for source in report.sources:
        who = f"source rank {source.rank} (host {source.host}, pid {source.pid})"
        yield f"{source.model}: {who} cannot be left out; swaps that read it are refused until refitctl resume"
    for swap in report.running:
        how = "has ended" if waited else f"still runs (phase {swap.phase}); see refitctl status"
        yield f"{swap.model}: swap {swap.swap} to version {swap.version}, in which it took part, {how}"


@click.command()
@click.argument("node", shell_complete=node_names)
@asks
def resume(session: Session, node: str) -> None:
    """Let NODE, which was drained, take part in swaps again.

    Its replicas that lag are caught up to the live version, by replicas that serve it or by the trainer.
    """
    with session.client() as client:
        report = client.resume(node)
    session.show(report, lambda report: say(*_resumed(report)))


def _resumed(report: DrainReport) -> Iterator[str]:
    yield f"{report.node}: {'it takes part in swaps again' if report.changed else 'it is not drained'}"
    for one in report.replicas:
        yield f"{one.model}: replica {one.replica} is no longer left out"
