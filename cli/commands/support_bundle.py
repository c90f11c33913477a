"""refitctl support-bundle: one archive of what somebody needs who is asked for help."""

from __future__ import annotations

import click

from refitd_cli import settings
from refitd_cli.bundle import collected, write
from refitd_cli.output import print_json, print_table, say, size, to_json
from refitd_cli.printed import BundleItem, BundleWritten
from refitd_cli.session import Session, address_option, json_option


@click.command("support-bundle")
@click.option("-o", "--output", metavar="FILE", help="The archive.  [default: refitd-support-TIME.tar.gz]")
@click.option("--config", "config_file", metavar="FILE", help="The daemon's configuration; its keys are left out.")
@click.option("--log", "logs", multiple=True, metavar="FILE", help="A log; its end is taken. May be given again.")
@click.option("--unit", default="refitd", show_default=True, help="The systemd unit whose journal is asked.")
@address_option
@json_option
@click.pass_obj
def support_bundle(
    session: Session,
    output: str | None,
    config_file: str | None,
    logs: tuple[str, ...],
    unit: str,
    address: str | None,
    as_json: bool,
) -> None:
    """Collect versions, checks, configuration, status, histories and log ends in one archive, and say what is in it.

    It holds names of hosts, users, models and tensors, and paths; no keys and no weights. What cannot be had (a daemon
    that is down) is noted in it. At most 4 MB are taken of each item.
    """
    items = collected(lambda: session.factory(address), lambda: settings.read(config_file), address, logs, unit)
    path = write(items, output)
    rows = tuple(BundleItem(item.name, len(item.content), item.note) for item in items)
    if as_json:
        print_json(to_json(BundleWritten(str(path), rows)))
        return
    print_table("", ("item", ">bytes", "what it is"), ((row.name, size(row.bytes), row.note) for row in rows))
    say(f"{path}: look through it before you pass it on; it names hosts, users, models and paths")
