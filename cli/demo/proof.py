"""The last word of the demo: every weight of every engine against the trainer's, without asking refitd."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from refitd_cli.demo.layout import (
    Array,
    RankPosition,
    TransformerConfig,
    canonical_name,
    canonical_shapes,
    cut_of,
    gather,
    shard,
)
from refitd_cli.demo.mxfp8 import is_converted, parts, shard_of_part

# Logits are compared in fp32, where only the order of summation differs between layouts: sums of up to 2048 products
# through 8 layers, results below 20, 7 digits kept. 1e-6 is what is seen; kernels of other processors may round
# otherwise. Weights that are one version old are off by more than 0.1.
LOGITS_TOLERANCE = 1e-4
MIN_ARGMAX_AGREEMENT = 0.99  # two candidates may be closer to each other than the rounding


@dataclass(frozen=True)
class Party:
    """The trainer, or an engine: its name and its processes' layouts."""

    name: str
    tp: int
    pp: int

    @property
    def members(self) -> dict[str, RankPosition]:
        """The names and places of its processes."""
        layouts = (RankPosition.of_rank(rank, self.tp, self.pp) for rank in range(self.tp * self.pp))
        return {f"{self.name}-{layout.rank}": layout for layout in layouts}

    @property
    def leader(self) -> str:
        """The process that has the logits."""
        return f"{self.name}-{next(iter(self.members.values())).leader}"

    def __str__(self) -> str:
        return str(next(iter(self.members.values())))


@dataclass(frozen=True)
class Verdict:
    """How one engine compares with the trainer."""

    replica: str
    tensors: int
    bytes: int
    differing: tuple[str, ...]  # "engine-a-2 decoder.layers.0...: 17 bytes"
    logits_max_abs_diff: float
    argmax_agreement: float
    bfloat16_bytes: int = 0  # its bytes in bfloat16 if it holds MXFP8; else 0

    @property
    def is_mxfp8(self) -> bool:
        """Whether its weights are the trainer's rounded to fewer bits: logits then differ, and only bytes prove."""
        return self.bfloat16_bytes > 0

    @property
    def holds(self) -> bool:
        """Whether the engine is the trainer."""
        if self.is_mxfp8:
            return not self.differing and math.isfinite(self.logits_max_abs_diff)
        return (
            not self.differing
            and self.logits_max_abs_diff <= LOGITS_TOLERANCE
            and self.argmax_agreement >= MIN_ARGMAX_AGREEMENT
        )


def state_path(directory: Path, member: str) -> Path:
    """Return where a process writes its tensors."""
    return directory / f"{member}.npz"


def logits_path(directory: Path, member: str) -> Path:
    """Return where a process writes its logits."""
    return directory / f"{member}-logits.npy"


def whole_model(directory: Path, trainer: Party, config: TransformerConfig) -> dict[str, Array]:
    """Gather the trainer's shards into full tensors; raises ValueError if they do not make exactly one model."""
    return gather([_read(directory, member) for member in trainer.members], list(trainer.members.values()), config)


def compare(
    directory: Path,
    whole: Mapping[str, Array],
    trainer: Party,
    replica: Party,
    config: TransformerConfig,
    *,
    is_mxfp8: bool = False,
) -> Verdict:
    """Cut the whole model for each rank of an engine and compare every byte, then the logits.

    Of an engine in MXFP8, the whole tensors are converted once, and then cut.
    """
    differing: list[str] = []
    seen: set[str] = set()
    nbytes = tensors = plain = 0
    converted = {name: parts(tensor) for name, tensor in whole.items() if is_mxfp8 and is_converted(name)}
    for member, layout in replica.members.items():
        for local, held in _read(directory, member).items():
            tensor, _, which = local.rpartition(".")
            name = canonical_name(tensor if is_mxfp8 and which in ("data", "scale") else local, layout, config)
            cut = cut_of(name, config)
            if name in converted:
                expected = shard_of_part(which, converted[name][which], cut, layout)
                plain += 2 * held.nbytes if which == "data" else 0
            else:
                expected = shard(whole[name], cut, layout)
                plain += held.nbytes
            if held.dtype != expected.dtype or held.shape != expected.shape:
                differing.append(f"{member} {local}: {held.dtype} {held.shape}, not {expected.dtype} {expected.shape}")
            elif different := _differing_bytes(held, expected):
                differing.append(f"{member} {local}: {different} of {held.nbytes} bytes")
            seen.add(name)
            tensors += 1
            nbytes += held.nbytes
    differing += [f"{replica.name} has no {name}" for name in sorted(canonical_shapes(config).keys() - seen)]
    ours = np.load(logits_path(directory, trainer.leader), allow_pickle=False)
    theirs = np.load(logits_path(directory, replica.leader), allow_pickle=False)
    return Verdict(
        replica.name,
        tensors,
        nbytes,
        tuple(differing),
        float(np.abs(ours - theirs).max()),
        float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
        plain if is_mxfp8 else 0,
    )


def _read(directory: Path, member: str) -> dict[str, Array]:
    with np.load(state_path(directory, member), allow_pickle=False) as arrays:
        return dict(arrays)


def _differing_bytes(one: Array, other: Array) -> int:
    left, right = (np.frombuffer(array.tobytes(), np.uint8) for array in (one, other))
    return int(np.count_nonzero(left != right))
