"""refitctl status: nodes, links, models, who has what, and what is going on."""

from __future__ import annotations

import click

from refitd_cli.output import print_json, to_json
from refitd_cli.session import Session, address_option, json_option
from refitd_cli.view import print_parts, status_parts


@click.command()
@address_option
@json_option
@click.pass_obj
def status(session: Session, address: str | None, as_json: bool) -> None:
    """Show the cluster as the coordinator sees it."""
    with session.client(address) as client:
        report = client.status()
    if as_json:
        print_json(to_json(report))
    else:
        print_parts(status_parts(report))
