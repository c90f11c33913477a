"""refitctl reload: have the coordinator read its list of admitted keys, and its cluster file, again."""

from __future__ import annotations

import click

from refitd_cli.output import print_json, say, to_json
from refitd_cli.session import Session, address_option, json_option


@click.command()
@address_option
@json_option
@click.pass_obj
def reload(session: Session, address: str | None, as_json: bool) -> None:
    """Have the coordinator read its list of admitted keys and the speeds of cables again, without a restart.

    These are the files security.allowed and transport.cables. A node whose key was taken off is removed as if it had
    died: its engines stop serving when their lease ends. Plans go by the new speeds from the next swap on. A file that
    cannot be used changes nothing. SIGHUP to the coordinator, or to a standalone daemon, does the same.
    """
    with session.client(address) as client:
        report = client.reload()
    if as_json:
        print_json(to_json(report))
        return
    if report.cables:
        say(f"cables: as {report.cables} says")
    if report.absent:
        say(f"not here, though the cluster file has their speeds: {', '.join(report.absent)}")
    if not report.uses_keys:
        say("the coordinator uses no keys" + ("" if report.cables else ": there is nothing to read again"))
        return
    say(f"admitted: {', '.join(report.admitted)}")
    for node in report.removed:
        say(f"removed: node {node}, whose key is not admitted any more")
