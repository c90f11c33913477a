"""refitctl save: write the live version of a model as a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from refitd_cli.completion import model_names
from refitd_cli.numbers import Number
from refitd_cli.output import duration, print_json, rate, say, size, to_json
from refitd_cli.progress import bytes_bar
from refitd_cli.session import Session, address_option, json_option

if TYPE_CHECKING:
    from refitd.client import Client

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def bytes_of(text: str) -> int:
    """Return a size in bytes: 5GB, 500MB, 1000; 0 for what is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?)B?", text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _size(ctx: click.Context, param: click.Parameter, text: str) -> int:
    if not (nbytes := bytes_of(text)):
        raise click.BadParameter(f"{text!r} is no size; give bytes, or 500MB, 5GB", ctx, param)
    return nbytes


@click.command()
@click.argument("model", shell_complete=model_names)
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder to make, or whose weights to replace: its config and tokenizer stay.",
)
@click.option("--version", "number", type=click.IntRange(min=0), help="What must be live.  [default: whatever is]")
@click.option("--partial", is_flag=True, help="Save what the sources offer, where they offer a part of the model.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "dcp"]),
    default="safetensors",
    show_default=True,
    help="dcp: for torch.distributed.checkpoint.",
)
@click.option("--max-shard-size", "shard_bytes", callback=_size, default="5GB", show_default=True, metavar="SIZE")
@click.option(
    "--timeout",
    type=Number(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="S",
    help="Seconds for bringing one shard here.",
)
@address_option
@json_option
@click.pass_context
def save(
    ctx: click.Context,
    model: str,
    folder: Path,
    number: int | None,
    partial: bool,
    kind: str,
    shard_bytes: int,
    timeout: float,
    address: str | None,
    as_json: bool,
) -> None:
    """Write the live version of MODEL as a checkpoint into DIR: all of it, or nothing.

    Engines do not stand still for it, and no swap waits for it. It takes the memory of one shard.
    """
    from refitd.checkpoints.save import save_checkpoint

    session: Session = ctx.obj
    with session.client(address) as client, bytes_bar(f"{model}: saving") as on_progress:
        done = save_checkpoint(
            cast("Client", client),
            model,
            folder,
            version=number,
            partial=partial,
            format=kind,
            max_shard_bytes=shard_bytes,
            timeout=timeout,
            on_progress=on_progress,
        )
    if as_json:
        print_json(to_json(done))
        return
    say(
        f"{model}: version {done.version} is saved in {done.path}: {done.tensors} tensors in {done.files} files, "
        f"{size(done.bytes)} in {duration(done.seconds)} ({rate(done.bytes, done.seconds)})"
    )
