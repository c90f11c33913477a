"""Publish a folder of safetensors as a version, without a trainer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from refitd.checkpoints.folder import read_folder
from refitd.client.client import Client

WAIT_S = 60.0


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
        timeout: seconds for memory and admission.
        on_progress: is told of the bytes that have been read, and of all.

    Raises:
        CheckpointError: shards are missing, truncated, damaged, doubled or of another checkpoint; names them.
        RefusedError: the model has a trainer that is attached, or the version is not above those that were live.
        ArenaError: the daemon has not enough memory for a slot.
    """
    from refitd.checkpoints.reading import Mapped

    began = time.monotonic()
    checkpoint = read_folder(Path(path))
    total = checkpoint.nbytes
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(done, total)

    with Mapped(checkpoint) as mapped:
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in mapped.tensors.items()}
        source = client.declare_source(model, shapes, slots=1, timeout=timeout)
        number = source.next_version if version is None else version
        try:
            source.publish_from(number, mapped.read(progress), timeout=timeout)
        except BaseException:
            source.close()
            raise
        count = len(mapped.tensors)
    return Published(model, number, str(path), len(checkpoint.files), count, total, time.monotonic() - began)
