"""refitctl resume: let a drained node take part in swaps again."""

from __future__ import annotations

import click

from refitd_cli.completion import node_names
from refitd_cli.output import print_json, say, to_json
from refitd_cli.session import Session, address_option, json_option


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
