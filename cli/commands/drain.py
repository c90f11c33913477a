"""refitctl drain, resume, evict, forget: exclude a node from swaps, remove an engine, free what dead processes left."""

from __future__ import annotations

from collections.abc import Iterator

import click

from refitd.protocol.reports import DrainReport, ForgetReport
from refitd_cli.output import say, swap_bar
from refitd_cli.session import Duration, Session, asks, model_names, node_names, replica_names


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


@click.command()
@click.argument("model", shell_complete=model_names)
@click.option(
    "--replica",
    required=True,
    shell_complete=replica_names,
    help="The engine's name, as `refitctl status` shows it.",
)
@click.option("--rank", type=click.IntRange(min=0), help="One of its ranks.  [default: all]")
@click.option(
    "--reason",
    default="evicted by the operator",
    show_default=True,
    help="Shown to the engine and in logs.",
)
@asks
def evict(session: Session, model: str, replica: str, rank: int | None, reason: str) -> None:
    """Remove a hanging replica of MODEL; the others can then swap again.

    A swap that waits for it ends as if its process had died. When it wakes it must register again before it serves;
    its process keeps running.
    """
    with session.client() as client:
        report = client.evict(model, replica, rank, reason)
    session.show(report, lambda report: say(*(f"{model}: evicted {member}" for member in report.members)))


@click.command()
@click.argument("model", required=False, shell_complete=model_names)
@click.option("--node", metavar="NAME", help="Instead of MODEL: remove this lost node from the status.")
@asks
def forget(session: Session, model: str | None, node: str | None) -> None:
    """Free what dead processes left of MODEL: versions of ended trainers, memory kept for engines that died.

    Running trainers and engines keep what they have. Without a source, replicas that join get their weights with the
    next published version only. The history stays. A running swap refuses this.
    """
    if (model is None) == (node is None):
        raise click.UsageError("give a MODEL, or --node NAME")
    with session.client() as client:
        report = client.forget(model) if model is not None else client.forget_node(node or "")
    session.show(report, lambda report: say(*_forgotten(report, model, node)))


def _forgotten(report: ForgetReport, model: str | None, node: str | None) -> Iterator[str]:
    if model is None:
        yield f"node {node}: removed from the status; it is shown again when it returns"
        return
    for source in report.sources:
        yield f"{model}: forgot {source}"
    if not report.sources:
        yield f"{model}: no trainer that has ended has left anything"
    yield f"{model}: what is kept of dead engines is freed on {', '.join(report.nodes)}"
