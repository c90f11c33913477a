"""refitctl keygen: make the key that authenticates a process to other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from refitd.protocol import keys
from refitd_cli.output import print_json, say, to_json
from refitd_cli.printed import KeyMade
from refitd_cli.session import json_option


@click.command()
@click.argument("name")
@click.option("--directory", default=".", metavar="DIR", help="Where the files go; may be new.  [default: here]")
@click.option("--replace", is_flag=True, help="Write over a key of this name; the old one is lost.")
@json_option
def keygen(name: str, directory: str, replace: bool, as_json: bool) -> None:
    """Make NAME.key, which stays with its process, and NAME.pub, which others get.

    Daemons and a coordinator that meet over tcp need keys, on one host too. NAME is best the node's.
    """
    pair = keys.generate(name)
    key_file, public_file = keys.write(pair, Path(directory).resolve(), replace=replace)
    if as_json:
        print_json(to_json(KeyMade(pair.name, pair.public, str(key_file), str(public_file))))
        return
    for line in _advice(pair, key_file, public_file):
        say(line)


def _advice(pair: keys.KeyPair, key_file: Path, public_file: Path) -> Iterator[str]:
    yield f"{key_file}: the secret; only its process may read it (mode 0600)"
    yield f"{public_file}: {pair.public_line}"
    yield ""
    yield "If it is a daemon's key, in that daemon's configuration:"
    yield "    [security]"
    yield f'    key = "{key_file}"'
    yield '    server_key = "..."  # the coordinator\'s public key, or its .pub file'
    yield f"and the line of {public_file.name} goes into the coordinator's list of allowed keys."
    yield ""
    yield "If it is the coordinator's, in the coordinator's configuration:"
    yield "    [security]"
    yield f'    key = "{key_file}"'
    yield '    allowed = "..."  # the list: the .pub lines of all daemons in one file'
    yield f'and every daemon has server_key = "{pair.public}".'
