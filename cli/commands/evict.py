"""refitctl evict: remove an engine that hangs."""

from __future__ import annotations

import click

from refitd_cli.completion import model_names, replica_names
from refitd_cli.output import print_json, say, to_json
from refitd_cli.session import Session, address_option, json_option


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
    """Remove a replica of MODEL that hangs, so that the others can swap again.

    A swap that waits for it ends as if its process had died. When it wakes it serves nothing until it has registered
    again; its process is left alone.
    """
    with session.client(address) as client:
        report = client.evict(model, replica, rank, reason)
    if as_json:
        print_json(to_json(report))
    else:
        for member in report.members:
            say(f"{model}: evicted {member}")
