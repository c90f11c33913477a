"""refitctl status: nodes, links, models, versions and running swaps."""

from __future__ import annotations

import click

from refitd_cli.output import print_json, to_json
from refitd_cli.session import Session, address_option, json_option
from refitd_cli.view import print_parts, status_parts


@click.command()
@click.option("--events", "with_events", is_flag=True, help="Also the last events of each swap and each target rank.")
@address_option
@json_option
@click.pass_obj
def status(session: Session, address: str | None, as_json: bool, with_events: bool) -> None:
    """Show the cluster as the coordinator sees it."""
    with session.client(address) as client:
        report = client.status()
    if as_json:
        print_json(to_json(report))
    else:
        print_parts(status_parts(report, with_events=with_events))
