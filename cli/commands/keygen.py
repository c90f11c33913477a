"""refitctl keygen: make the key by which a process is known on other hosts."""

from __future__ import annotations

from pathlib import Path

import click

from refitd.protocol import keys
from refitd_cli.output import print_json
from refitd_cli.session import json_option


@click.command()
@click.argument("name")
@click.option("--directory", default=".", metavar="DIR", help="Where the files go.  [default: here]")
@click.option("--replace", is_flag=True, help="Write over a key of this name; the old one is lost.")
@json_option
def keygen(name: str, directory: str, replace: bool, as_json: bool) -> None:
    """Make NAME.key, which stays with its process, and NAME.pub, which others get.

    Only daemons and a coordinator on different hosts need keys. NAME is best the node's.
    """
    pair = keys.generate(name)
    key_file, public_file = keys.write(pair, Path(directory).resolve(), replace=replace)
    if as_json:
        print_json(
            {"name": pair.name, "public": pair.public, "key_file": str(key_file), "public_file": str(public_file)}
        )
        return
    click.echo(f"""\
{key_file}: the secret; only its process may read it (mode 0600)
{public_file}: {pair.public_line}

If it is a daemon's key, in that daemon's configuration:
    [security]
    key = "{key_file}"
    server_key = "..."  # the coordinator's public key, or its .pub file
and the line of {public_file.name} goes into the coordinator's list of allowed keys.

If it is the coordinator's, in the coordinator's configuration:
    [security]
    key = "{key_file}"
    allowed = "..."  # the list: the .pub lines of all daemons in one file
and every daemon has server_key = "{pair.public}".""")
