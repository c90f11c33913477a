"""refitctl manifest: write the manifest of a registered model, or of a layout, rank by rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import click
import msgspec

from refitd.describe.metadata import Roster
from refitd.errors import ConfigError, RefusedError
from refitd.offline.files import load, load_model, shards_of, to_json
from refitd.offline.layouts import Shards
from refitd.offline.rosters import rosters_of
from refitd.protocol.plan_reports import ModelDescription
from refitd.protocol.shards import metadata_of
from refitd_cli.output import json_on_terminal, say
from refitd_cli.printed import ManifestWritten
from refitd_cli.session import Session, asks, model_names, replica_names


@click.command()
@click.argument("model", required=False, shell_complete=model_names)
@click.option(
    "--replica",
    metavar="NAME",
    shell_complete=replica_names,
    help="Write this replica's ranks instead of the source's.",
)
@click.option("--layout", "layout_file", metavar="FILE", help="Instead of MODEL: a layout to write rank by rank.")
@click.option("--model", "model_file", metavar="FILE", help="The layout's model, over the one it names.")
@click.option("-o", "--output", metavar="FILE", help="Write there instead of on stdout.")
@asks
def manifest(
    session: Session,
    model: str | None,
    replica: str | None,
    layout_file: str | None,
    model_file: str | None,
    output: str | None,
) -> None:
    """Write the manifest of a registered MODEL as JSON, for `refitctl plan` and `explain` to read.

    It tells, rank by rank, which tensors each holds and how they are cut. With --json, a manifest on stdout is one
    line, and with --output a summary is printed.
    """
    if (model is None) == (layout_file is None):
        raise click.UsageError("give a MODEL that is registered, or --layout FILE")
    if layout_file is not None:
        if replica is not None:
            raise click.UsageError("--replica is one of a registered MODEL; a layout has one side")
        found = _expanded(layout_file, model_file)
    else:
        found = _registered(session, model or "", replica)
    if output is not None:
        try:
            Path(output).write_text(to_json(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{output}: cannot be written: {error.strerror}; choose another --output FILE") from error
        written = ManifestWritten(output, len(found.ranks), len(found.shards))
        session.show(written, lambda w: say(f"{w.file}: {w.ranks} ranks, {w.shards} different shards"))
    else:
        session.show(found, lambda found: click.echo(json_on_terminal(to_json(found)), nl=False))


def _expanded(layout_file: str, model_file: str | None) -> Shards:
    source = load(layout_file, load_model(model_file) if model_file is not None else None)
    return shards_of(source.name, rosters_of(source, ()), "source")


def _registered(session: Session, model: str, replica: str | None) -> Shards:
    with session.client() as client:
        found = client.describe(model)
    rosters = list(_rosters(found, replica))
    if not rosters:
        known = sorted({m.replica for m in found.members if m.role == "target"})
        what = "source" if replica is None else f"replica {replica!r}"
        raise RefusedError(f"model {model!r} has no {what}; replicas: {', '.join(known) or 'none'}")
    side: Literal["source", "destination"] = "source" if replica is None else "destination"
    name = model if replica is None else f"{model} {replica}"
    # ranks of a replica are numbered from 0: the reader of the manifest places them among others
    return msgspec.structs.replace(shards_of(name, rosters, side), first_rank=None)


def _rosters(found: ModelDescription, replica: str | None) -> Iterator[Roster]:
    for member in found.members:
        shard = found.shards[member.shard]
        if replica is None and member.role == "source":
            held = metadata_of(shard, member.rank)
            yield Roster(member.rank, source=held, node=member.node, label=f"source rank {member.rank}")
        elif replica is not None and member.role == "target" and member.replica == replica:
            held = metadata_of(shard, member.rank)
            yield Roster(member.rank, destination=held, node=member.node, label=f"{replica} rank {member.rank}")
