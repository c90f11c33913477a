"""Save the live version of a model as a folder, from any layout of its sources."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from refitd.checkpoints.opened import refuse
from refitd.checkpoints.safetensors import in_file_order, nbytes_of
from refitd.checkpoints.writing import FORMATS, Format, Shard, new_folder
from refitd.client.client import Client
from refitd.dtypes import dtype_name
from refitd.errors import CheckpointError, DeadlineExceeded, RefusedError
from refitd.mxfp8.parts import MARK
from refitd.text import shown

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 5_000_000_000
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of saving a model."""

    model: str
    version: int
    path: str
    files: int
    tensors: int
    bytes: int
    seconds: float


class _Moved(Exception):
    """Another version went live between two shards."""


def save_checkpoint(
    client: Client,
    model: str,
    path: str | os.PathLike[str],
    *,
    version: int | None = None,
    format: str = "safetensors",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    partial: bool = False,
    timeout: float = WAIT_S,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Saved:
    """Save the live version of `model` as a folder.

    Shards are fetched one by one, each by a catch-up as for a joining replica: planned, verified byte for byte
    against the sources, all or nothing. This takes the memory of one shard. If another version goes live in between,
    all shards are fetched again together. Engines do not pause, and no other swap waits. Tensors keep the sources'
    dtypes. The folder is written atomically; files other than weights (config, tokenizer) of an older folder at `path`
    are kept.

    Args:
        client: a session with the daemon of the node that gets the folder.
        model: the model whose live version is saved.
        path: the folder to create, or whose weights to replace.
        version: the version that must be live; None: any.
        format: "safetensors" (model.safetensors, or shards with an index), or "dcp", for
            torch.distributed.checkpoint.load.
        max_shard_bytes: the largest file; a larger tensor gets its own file.
        partial: save what the sources offer although they say that it is a part of the model (`partial=True`).
        timeout: seconds for each shard to arrive.
        on_progress: called with the bytes written so far and the total.

    Raises:
        RefusedError: no version or another one is live, or the sources no longer hold the live version.
        CheckpointError: the format is unknown or cannot hold a tensor, the place cannot be used, or the disk is full.
        DeadlineExceeded: a shard did not arrive in time; says why if known.
        ArenaError: there is not enough memory for a shard.
    """
    import torch  # noqa: F401  # before the clock starts, so that `seconds` excludes the import

    if format not in FORMATS:
        raise CheckpointError(f"format is {shown(format)}, known are {', '.join(FORMATS)}")
    writer = FORMATS[format]()
    began = time.monotonic()
    live = _savable(client, model, version, partial)
    wanted = _wanted(client, model, format, writer, timeout)
    shards = split(wanted, max_shard_bytes)
    total = sum(nbytes_of(*one) for one in wanted.values())
    names = writer.file_names(len(shards))
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(done, total)

    def write(folder: Path, groups: Sequence[Sequence[int]]) -> int:
        nonlocal done
        done, first = 0, None
        for group in groups:
            tensors = {name: one for index in group for name, one in shards[index].items()}
            with _brought(client, model, tensors, timeout) as (arrived, held):
                if first not in (None, arrived) or version not in (None, arrived):
                    raise _Moved(arrived)
                first = arrived
                for index in group:
                    writer.write(folder / names[index], shards[index], held, progress)
        writer.finish(folder, dict(zip(names, shards, strict=True)))
        assert first is not None
        return first

    one_by_one = [[index] for index in range(len(shards))]
    with new_folder(Path(path), total) as folder:
        try:
            live = write(folder, one_by_one)
        except _Moved as exc:
            if version is not None:
                raise RefusedError(
                    f"model {model!r}: version {exc} went live while {version} was saved; save again"
                ) from None
            live = write(folder, [list(range(len(shards)))])
    return Saved(model, live, str(path), len(shards), len(wanted), total, time.monotonic() - began)


def split(wanted: Shard, max_bytes: int) -> list[Shard]:
    """Divide tensors, in their order, into files of at most `max_bytes` each; a larger tensor gets its own file."""
    found: list[dict[str, tuple[tuple[int, ...], str]]] = [{}]
    size = 0
    for name, one in wanted.items():
        nbytes = nbytes_of(*one)
        if found[-1] and size + nbytes > max_bytes:
            found.append({})
            size = 0
        found[-1][name] = one
        size += nbytes
    return [in_file_order(shard) for shard in found]


def _savable(client: Client, model: str, version: int | None, partial: bool) -> int:
    """Return the live version; raises RefusedError if it cannot be saved."""
    models = client.status().models
    found = next((m for m in models if m.model == model), None)
    if found is None:
        known = ", ".join(m.model for m in models) or "none"
        raise RefusedError(f"no model {model!r} is registered; registered models: {known}")
    if found.live is None:
        raise RefusedError(f"model {model!r}: no version is live; swap one first (refitctl swap {model})")
    if version not in (None, found.live):
        raise RefusedError(f"model {model!r}: version {found.live} is live, and {version} was to be saved")
    if not partial and any(source.is_partial for source in found.sources):
        raise RefusedError(
            f"model {model!r}: its sources offer a part of the model, which is no whole checkpoint; save that part "
            "with --partial (partial=True)"
        )
    if found.live not in found.complete_versions:
        raise RefusedError(
            f"model {model!r}: version {found.live} is live, and the sources hold it no more (complete versions: "
            f"{list(found.complete_versions) or 'none'}); save before they publish on, or swap a newer one first"
        )
    return found.live


def _wanted(
    client: Client, model: str, format: str, writer: Format, timeout: float
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return {name: (shape, dtype name)} of the sources' tensors.

    Raises:
        CheckpointError: the format cannot hold some tensors; names them.
    """
    offered = {
        name: (shape, dtype_name(dtype)) for name, (shape, dtype) in client.tensors(model, timeout=timeout).items()
    }
    plain = {name: one for name, one in offered.items() if MARK not in name}
    converted = {name.partition(MARK)[0] for name in offered.keys() - plain.keys()}
    refuse(
        [
            *(f"{name}: it is offered in MXFP8 alone" for name in sorted(converted - plain.keys())),
            *(f"{name}: {format} has no {dtype}" for name, (_, dtype) in plain.items() if not writer.can_hold(dtype)),
        ]
    )
    if not plain:
        raise CheckpointError(f"model {model!r}: its sources offer no tensor")
    return plain


@contextlib.contextmanager
def _brought(
    client: Client, model: str, wanted: Shard, timeout: float
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Yield (live version, these tensors with its values), in memory that is freed afterwards."""
    import torch

    tensors = client.allocate(
        {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in wanted.items()}, timeout=timeout
    )
    try:
        yield _take(client, model, tensors, timeout), tensors
    finally:
        client.free(tensors)


def _take(client: Client, model: str, tensors: dict[str, torch.Tensor], timeout: float) -> int:
    """Fetch the live version into these tensors; return the version."""
    from refitd.client.calls import Layout
    from refitd.client.new_target import EngineOptions, register  # imports torch

    deadline = time.monotonic() + timeout
    while True:
        begun: list[int] = []  # versions that workers have begun to write into these tensors
        replica = f"save-{client.node}-{os.getpid()}"
        # `wait` commits; the controller only notes the versions
        controller = client.control_replica(
            model, replica, pause=begun.append, commit=lambda version: None, timeout=timeout
        )
        target = None
        try:
            options = EngineOptions(mode="in-place", observes=True, timeout=timeout)
            target = register(client, model, tensors, replica, Layout(), options)
            arrived = target.wait(0, max(0.0, deadline - time.monotonic()))
        except DeadlineExceeded as exc:
            raise DeadlineExceeded(
                f"model {model!r}: its live version did not arrive within {timeout:.0f} s{_why(client, model)}"
            ) from exc
        finally:
            if target is not None:
                target.close()
            controller.close()
        if begun[-1] == arrived:
            return arrived
        # a newer version went live and may have been written before the target was closed: try again


def _why(client: Client, model: str) -> str:
    swap = next((m.last_swap for m in client.status().models if m.model == model), None)
    return "" if swap is None or not swap.reason else f"; its last swap was {swap.outcome}: {swap.reason}"
