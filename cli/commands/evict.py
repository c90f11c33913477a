"""refitctl evict and forget: remove an engine that hangs; free what dead processes left of a model."""

from __future__ import annotations

import click

from refitd_cli.output import print_json, say, to_json
from refitd_cli.session import Session, address_option, json_option, model_names, replica_names


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
@address_option
@json_option
@click.pass_obj
def evict(
    session: Session, model: str, replica: str, rank: int | None, reason: str, address: str | None, as_json: bool
) -> None:
    """Remove a hanging replica of MODEL; the others can then swap again.

    A swap that waits for it ends as if its process had died. When it wakes it must register again before it serves;
    its process keeps running.
    """
    with session.client(address) as client:
        report = client.evict(model, replica, rank, reason)
    if as_json:
        print_json(to_json(report))
    else:
        for member in report.members:
            say(f"{model}: evicted {member}")


@click.command()
@click.argument("model", required=False, shell_complete=model_names)
@click.option("--node", metavar="NAME", help="Instead of MODEL: remove this lost node from the status.")
@address_option
@json_option
@click.pass_obj
def forget(session: Session, model: str | None, node: str | None, address: str | None, as_json: bool) -> None:
    """Free what dead processes left of MODEL: versions of ended trainers, memory kept for engines that died.

    Running trainers and engines keep what they have. Without a source, replicas that join get their weights with the
    next published version only. The history stays. A running swap refuses this.
    """
    if (model is None) == (node is None):
        raise click.UsageError("give a MODEL, or --node NAME")
    with session.client(address) as client:
        report = client.forget(model) if model is not None else client.forget_node(node or "")
    if as_json:
        print_json(to_json(report))
        return
    if model is None:
        say(f"node {node}: removed from the status; it is shown again when it returns")
        return
    for source in report.sources:
        say(f"{model}: forgot {source}")
    if not report.sources:
        say(f"{model}: no trainer that has ended has left anything")
    say(f"{model}: what is kept of dead engines is freed on {', '.join(report.nodes)}")
