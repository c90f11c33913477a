"""Text that every machine has: the sources of Python's own standard library."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
PROMPT = b"    def read(self, "  # the engines complete this prompt
NEW_TOKENS = 32
HELD_OUT_EVERY = 16  # one file in so many is never trained on


@dataclass(frozen=True)
class Corpus:
    """The text as bytes; the same on every process of a machine."""

    train: Bytes
    held_out: Bytes

    def batch(self, step: int, size: int, length: int) -> npt.NDArray[np.int64]:
        """Return [size, length + 1] bytes of training text, chosen by the step alone."""
        rng = np.random.default_rng(step)
        starts = rng.integers(0, len(self.train) - length - 1, size)
        return np.stack([self.train[at : at + length + 1] for at in starts]).astype(np.int64)

    def held_out_batch(self, size: int, length: int) -> npt.NDArray[np.int64]:
        """Return [size, length + 1] bytes of text that is never trained on, evenly spaced."""
        starts = np.linspace(0, len(self.held_out) - length - 1, size).astype(np.int64)
        return np.stack([self.held_out[at : at + length + 1] for at in starts]).astype(np.int64)


def load(folder: Path | None = None) -> Corpus:
    """Read the modules directly in the standard library's folder, split by their order of name.

    Raises:
        RuntimeError: this Python has no sources (a zipped or stripped installation).
    """
    folder = Path(os.__file__).parent if folder is None else folder
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for index, path in enumerate(sorted(folder.glob("*.py"))):
        parts[index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(path.read_bytes())
    train, held_out = (np.frombuffer(b"\n".join(part), np.uint8) for part in parts)
    if min(len(train), len(held_out)) < 4096:
        raise RuntimeError(f"{folder}: no Python sources to train on; the demo needs a Python with its .py files")
    return Corpus(train, held_out)
