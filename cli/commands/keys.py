"""refitctl keygen and reload: make a process's key; have the coordinator read its lists of keys and cables again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from refitd.protocol import keys
from refitd.protocol.reports import ReloadReport
from refitd_cli.output import say
from refitd_cli.printed import KeyMade
from refitd_cli.session import Session, asks, prints


@click.command()
@click.argument("name")
@click.option("--directory", default=".", metavar="DIR", help="Where the files go; may be new.  [default: here]")
@click.option("--replace", is_flag=True, help="Write over a key of this name; the old one is lost.")
@prints
def keygen(session: Session, name: str, directory: str, replace: bool) -> None:
    """Make NAME.key, which stays with its process, and NAME.pub, which others get.

    Daemons and a coordinator that meet over tcp need keys, on one host too. NAME is best the node's.
    """
    pair = keys.generate(name)
    key_file, public_file = keys.write(pair, Path(directory).resolve(), replace=replace)
    made = KeyMade(pair.name, pair.public, str(key_file), str(public_file))
    session.show(made, lambda _: say(*_advice(pair, key_file, public_file)))


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


@click.command()
@asks
def reload(session: Session) -> None:
    """Have the coordinator read its list of admitted keys and the speeds of cables again, without a restart.

    These are the files security.allowed and transport.cables. A node whose key was taken off is removed as if it had
    died: its engines stop serving when their lease ends. Plans go by the new speeds from the next swap on. An unusable
    file is refused, and all settings stay. SIGHUP to the coordinator, or to a standalone daemon, has this effect, too.
    """
    with session.client() as client:
        report = client.reload()
    session.show(report, lambda report: say(*_read_again(report)))


def _read_again(report: ReloadReport) -> Iterator[str]:
    if report.cables:
        yield f"cables: as {report.cables} says"
    if report.absent:
        yield f"not here, though the cluster file has their speeds: {', '.join(report.absent)}"
    if not report.uses_keys:
        yield "the coordinator uses no keys" + ("" if report.cables else ": there is nothing to read again")
        return
    yield f"admitted: {', '.join(report.admitted)}"
    for node in report.removed:
        yield f"removed: node {node}, whose key is not admitted any more"
