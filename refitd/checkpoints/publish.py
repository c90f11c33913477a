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
POLL_S = 0.1  # how often it is asked whether others have published


@dataclass(frozen=True, slots=True)
class Published:
    """What was published."""

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
    timeout: float = WAIT_S,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Published:
    """Publish a Hugging Face folder of safetensors as a version of `model`; nobody else may be its source.

    The files are mapped and read once, into a slot that this node's daemon owns. The version stays there when this
    client has left, as a trainer's does that has ended, until another source of the model registers. Nothing is
    published unless all of the folder is sound and has been read.

    Args:
        client: a session of its own (`refitd.connect`); close it afterwards.
        model: the name that engines use.
        path: the folder, with model.safetensors, or with shards and model.safetensors.index.json.
        version: the version's number; None: the next one.
        rank: this node's, where `world_size` nodes that see the folder share the reading and the memory. All of them
            publish at the same time: each returns when all have, and reads its part alone.
        world_size: how many there are.
        timeout: seconds for memory and admission, and for the other nodes.
        on_progress: is told of the bytes that have been read, and of all.

    Raises:
        CheckpointError: shards are missing, truncated, damaged, doubled or of another checkpoint; names them.
        RefusedError: the model has a trainer that is attached, or the version is not above those that were live.
        ArenaError: the daemon has not enough memory for a slot.
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
        source = client.declare_source(model, shapes, rank=rank, world_size=world_size, slots=1, timeout=timeout)
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
    """Return once every part is published: who leaves earlier is no part of the others' version."""
    deadline = time.monotonic() + timeout
    while True:
        # a coordinator that has just been started knows of nobody yet
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
