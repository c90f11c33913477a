"""Publish a folder of safetensors as a version, without a trainer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from refitd.checkpoints.folder import part_of, read_folder
from refitd.client.client import Client
from refitd.errors import DeadlineExceeded

WAIT_S = 60.0
POLL_S = 0.1  # interval between looks at whether others have published


@dataclass(frozen=True, slots=True)
class Published:
    """The result of publishing a folder."""

    model: str
    version: int
    path: str
    files: int
    tensors: int
    bytes: int
    seconds: float


def publish_checkpoint(
    client: Client,
    model: str,
    path: str | os.PathLike[str],
    *,
    version: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    partial: bool = False,
    timeout: float = WAIT_S,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Published:
    """Publish a Hugging Face folder of safetensors as a version of `model`, which must have no other source.

    The files are mapped and read once, into a slot that this node's daemon owns. Like the version of an ended trainer,
    it outlives this client, until another source of the model registers. Nothing is published unless the whole folder
    is valid and has been read.

    Args:
        client: a separate session (`refitd.connect`); close it afterwards.
        model: the name that engines use.
        path: the folder, with model.safetensors, or with shards and model.safetensors.index.json.
        version: the version's number; None: the next one.
        rank: this node's number among `world_size` nodes that all see the folder, read one part each and share the
            memory. All must publish at the same time; each call returns when all parts are published.
        world_size: the number of nodes.
        partial: the folder has only a part of what targets hold; see `Client.register_source`.
        timeout: seconds for memory and admission, and for the other nodes.
        on_progress: called with the bytes read so far and the total.

    Raises:
        CheckpointError: shards are missing, truncated, damaged, duplicated or of another checkpoint; names them.
        RefusedError: the model has an attached trainer, or the version is not above those that were live.
        ArenaError: the daemon does not have enough memory for a slot.
        DeadlineExceeded: another node has not published its part in time.
    """
    from refitd.checkpoints.reading import Mapped

    began = time.monotonic()
    checkpoint = part_of(read_folder(Path(path)), rank, world_size)
    total = checkpoint.nbytes
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(done, total)

    with Mapped(checkpoint) as mapped:
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in mapped.tensors.items()}
        source = client.declare_source(
            model, shapes, rank=rank, world_size=world_size, slots=1, partial=partial, timeout=timeout
        )
        number = source.next_version if version is None else version
        try:
            source.publish_from(number, mapped.read(progress), timeout=timeout)
            if world_size > 1:
                _wait_for_others(client, model, number, world_size, timeout)
        except BaseException:
            source.close()
            raise
        count = len(mapped.tensors)
    return Published(model, number, str(path), len(checkpoint.files), count, total, time.monotonic() - began)


def _wait_for_others(client: Client, model: str, version: int, world_size: int, timeout: float) -> None:
    """Return once every part is published: the part of a source that leaves earlier would be lost."""
    deadline = time.monotonic() + timeout
    while True:
        # a coordinator that has just started may not know the model yet
        found = next((m for m in client.status().models if m.model == model), None)
        if found is not None and version in found.complete_versions:
            return
        if time.monotonic() >= deadline:
            there = {source.rank for source in found.sources if version in source.versions} if found else set()
            missing = sorted(set(range(world_size)) - there)
            raise DeadlineExceeded(
                f"model {model!r}: parts {[rank + 1 for rank in missing]} of {world_size} were not "
                f"published within {timeout:.0f} s; publish on all nodes at the same time, with one version"
            )
        time.sleep(POLL_S)
