"""refitctl forget: free what dead processes left of a model."""

from __future__ import annotations

import click

from refitd_cli.completion import model_names
from refitd_cli.output import print_json, say, to_json
from refitd_cli.session import Session, address_option, json_option


@click.command()
@click.argument("model", shell_complete=model_names)
@address_option
@json_option
@click.pass_obj
def forget(session: Session, model: str, address: str | None, as_json: bool) -> None:
    """Free what dead processes left of MODEL: versions of ended trainers, memory kept for engines that died.

    Running trainers and engines keep what they have. Without a source, replicas that join get their weights with the
    next published version only. The history stays. A running swap refuses this.
    """
    with session.client(address) as client:
        report = client.forget(model)
    if as_json:
        print_json(to_json(report))
        return
    for source in report.sources:
        say(f"{model}: forgot {source}")
    if not report.sources:
        say(f"{model}: no trainer that has ended has left anything")
    say(f"{model}: what is kept of dead engines is freed on {', '.join(report.nodes)}")
