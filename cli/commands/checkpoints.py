"""refitctl publish and save: make a checkpoint on disk a version; write the live version as a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from refitd_cli.commands.swap import perform
from refitd_cli.output import bytes_bar, duration, print_json, rate, say, size, to_json
from refitd_cli.session import Duration, Session, asks, model_names

if TYPE_CHECKING:
    pass


def _part(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, int]:
    """Return one of several parts, "2/4": which one, from 1, and how many."""
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    which, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= which <= count:
        raise click.BadParameter(f"{text!r} is no part; give 1/4, 2/4, ...", ctx, param)
    return which, count


@click.command()
@click.argument("model", shell_complete=model_names)
@click.option(
    "--from",
    "folder",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A folder with model.safetensors, with shards and their index, or of torch.distributed.checkpoint.",
)
@click.option("--version", "number", type=click.IntRange(min=0), help="Its number.  [default: the next one]")
@click.option(
    "--prefix",
    metavar="P",
    help="Publish the tensors whose names begin with P, without it: model. leaves the optimizer aside.",
)
@click.option(
    "--part",
    callback=_part,
    default="1/1",
    show_default=True,
    metavar="I/N",
    help="This node's part, where N nodes that see DIR publish it together: each reads and holds a part.",
)
@click.option("--partial", is_flag=True, help="DIR has only a part of the model; engines keep the rest.")
@click.option("--swap", is_flag=True, help="Bring it into every replica, too.")
@click.option(
    "--timeout",
    type=Duration(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds for memory and admission; with --swap for the swap, too.",
)
@asks
def publish(
    session: Session,
    model: str,
    folder: Path,
    number: int | None,
    prefix: str | None,
    part: tuple[int, int],
    partial: bool,
    swap: bool,
    timeout: float,
) -> int:
    """Make the checkpoint in DIR a version of MODEL; no trainer of MODEL may be attached.

    It is read once, into memory of this node's daemon, and stays there until another source of MODEL registers.
    """
    from refitd.checkpoints.publish import publish_checkpoint

    with session.client() as client, bytes_bar(f"{model}: reading") as on_progress:
        done = publish_checkpoint(
            client,
            model,
            folder,
            version=number,
            prefix=prefix,
            rank=part[0] - 1,
            world_size=part[1],
            partial=partial,
            timeout=timeout,
            on_progress=on_progress,
        )
    if not session.as_json:
        say(
            f"{model}: version {done.version} is published: {done.tensors} tensors in {done.files} files, "
            f"{size(done.bytes)} in {duration(done.seconds)} ({rate(done.bytes, done.seconds)})"
            + (f"; {done.aside} other entries are left aside" if done.aside else "")
        )
    elif not swap:
        print_json(done)
    if swap:
        return perform(
            session,
            model,
            lambda client, on_progress: client.swap(model, done.version, timeout=timeout, on_progress=on_progress),
            {"published": to_json(done)},
        )
    return 0


_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def bytes_of(text: str) -> int:
    """Return a size in bytes: 5GB, 500MB, 1000; 0 if it is no size."""
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
@click.option("--version", "number", type=click.IntRange(min=0), help="The version that must be live.  [default: any]")
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
    type=Duration(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="S",
    help="Seconds for bringing one shard here.",
)
@asks
def save(
    session: Session,
    model: str,
    folder: Path,
    number: int | None,
    partial: bool,
    kind: str,
    shard_bytes: int,
    timeout: float,
) -> None:
    """Write the live version of MODEL as a checkpoint into DIR, completely or not at all.

    Engines do not stand still for it, and no swap waits for it. It takes the memory of one shard.
    """
    from refitd.checkpoints.save import save_checkpoint

    with session.client() as client, bytes_bar(f"{model}: saving") as on_progress:
        done = save_checkpoint(
            client,
            model,
            folder,
            version=number,
            partial=partial,
            format=kind,
            max_shard_bytes=shard_bytes,
            timeout=timeout,
            on_progress=on_progress,
        )
    read = f"{size(done.bytes)} in {duration(done.seconds)} ({rate(done.bytes, done.seconds)})"
    saved = f"version {done.version} is saved in {done.path}: {done.tensors} tensors in {done.files} files, {read}"
    session.show(done, lambda _: say(f"{model}: {saved}"))
