"""refitctl drain and resume: exclude a node from new swaps, wait for running ones, and include it again."""

from __future__ import annotations

import click

from refitd.protocol.reports import DrainReport
from refitd_cli.output import print_json, say, swap_bar, to_json
from refitd_cli.session import Duration, Session, address_option, json_option, node_names


@click.command()
@click.argument("node", shell_complete=node_names)
@click.option(
    "--timeout",
    type=Duration(min=0),
    metavar="S",
    help="Seconds to wait for swaps in which the node takes part.  [default: until their own deadlines]",
)
@click.option("--no-wait", is_flag=True, help="Do not wait for these swaps.")
@address_option
@json_option
@click.pass_obj
def drain(
    session: Session, node: str, timeout: float | None, no_wait: bool, address: str | None, as_json: bool
) -> None:
    """Leave NODE out of all new swaps, until `refitctl resume`; wait for running ones to end.

    New swaps leave out each replica with a rank, or its controller, there. It serves its version until another one is
    decided, then none; resume catches it up. Trainers cannot be excluded: swaps that would read a source there
    are refused. The node stays drained when daemons or the coordinator restart.
    """
    with session.client(address) as client, swap_bar(f"swaps on {node}") as on_progress:
        report = client.drain(node, timeout=timeout, wait=not no_wait, on_progress=on_progress)
    if as_json:
        print_json(to_json(report))
    else:
        _show(report, waited=not no_wait)


def _show(report: DrainReport, *, waited: bool) -> None:
    say(f"{report.node}: {'drained' if report.changed else 'it was drained already'}")
    for one in report.replicas:
        say(f"{one.model}: swaps leave out replica {one.replica}")
    for model in report.stranded:
        say(f"{model}: no replica is left; its swaps are refused until one is")
    for source in report.sources:
        who = f"source rank {source.rank} (host {source.host}, pid {source.pid})"
        say(f"{source.model}: {who} cannot be left out; swaps that read it are refused until refitctl resume")
    for swap in report.running:
        how = "has ended" if waited else f"still runs (phase {swap.phase}); see refitctl status"
        say(f"{swap.model}: swap {swap.swap} to version {swap.version}, in which it took part, {how}")


@click.command()
@click.argument("node", shell_complete=node_names)
@address_option
@json_option
@click.pass_obj
def resume(session: Session, node: str, address: str | None, as_json: bool) -> None:
    """Let NODE, which was drained, take part in swaps again.

    Its replicas that lag are caught up to the live version, by replicas that serve it or by the trainer.
    """
    with session.client(address) as client:
        report = client.resume(node)
    if as_json:
        print_json(to_json(report))
    elif not report.changed:
        say(f"{node}: it is not drained")
    else:
        say(f"{node}: it takes part in swaps again")
        for one in report.replicas:
            say(f"{one.model}: replica {one.replica} is no longer left out")
