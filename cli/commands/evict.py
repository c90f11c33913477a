"""refitctl evict and forget: remove an engine that hangs; free what dead processes left of a model."""

from __future__ import annotations

from collections.abc import Iterator

import click

from refitd.protocol.reports import ForgetReport
from refitd_cli.output import say
from refitd_cli.session import Session, asks, model_names, replica_names


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
