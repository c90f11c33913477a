"""The first exchange of a plan compares what several source ranks hold of the same elements."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from refitd.copy_services.peers import Deadline, Peers
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.replica_pieces import digest_of, piece_count
from refitd.errors import PlanError
from refitd.inprocess.agree import said_of
from refitd.inprocess.rank_plan import RankPlan
from refitd.inprocess.request import RankTensors
from refitd.inprocess.wire import (
    COMPARED,
    TWINS,
    NotDescribed,
    TwinDigests,
    TwinsCompared,
    texts,
    twins_from,
    wire_twins,
)
from refitd.plan.replica_digests import Twin, differences
from refitd.protocol.codec import encode
from refitd.protocol.shards import metadata_of
from refitd.transforms.mxfp8_buffers import is_quantized

_LENGTH = struct.Struct("<q")


def compare_twins(plan: RankPlan, tensors: RankTensors, peers: Peers, deadline: Deadline) -> None:
    """Have rank 0 compare the digests of all twins. Collective; nothing has moved.

    Raises:
        PlanError: on every rank: the tensors of which ranks hold different values, and which ranks.
    """
    try:
        frame = encode(0, TwinDigests(wire_twins(plan.twins), _digests(plan, tensors)))
    except Exception as exc:  # whatever it is, the others must not wait for it
        frame = encode(0, NotDescribed(texts(said_of(exc, peers.rank))))
    lengths = [_LENGTH.unpack(r)[0] for r in peers.all_gather(_LENGTH.pack(len(frame)), deadline, "comparing replicas")]
    frames = peers.gather(frame, lengths, deadline, "comparing replicas")
    answers = None
    if frames is not None:
        try:
            problems = _compared(frames, peers)
        except Exception as exc:
            problems = said_of(exc, peers.rank)
        answers = [encode(0, TwinsCompared(texts(tuple(problems))))] * len(peers)
    _, answer = COMPARED.decode(peers.scatter(answers, deadline, "comparing replicas"))
    if answer.problems:
        raise PlanError(answer.problems)
    plan.check.is_due = False


def _digests(plan: RankPlan, tensors: RankTensors) -> bytes:
    metas = metadata_of(tensors.described.source, plan.rank)
    first: dict[str, tuple[int, ParameterMetadata]] = {}
    number = 0
    for meta in metas:
        first[meta.name] = (number, meta)
        number += piece_count(meta)
    found = []
    for twin in plan.twins:
        number, meta = first[twin.local]
        tensor = tensors.sources[twin.local]
        tile = twin.tile
        if tile is None:
            tile = meta.tiles[twin.number - number] if meta.tiles is not None and piece_count(meta) else None
        found.append(digest_of(tensor, tile) if tensor.numel() and not is_quantized(tensor) else 0)
    return np.array(found, "<u8").tobytes()


def _compared(frames: list[bytes], peers: Peers) -> tuple[str, ...]:
    held: list[tuple[str, tuple[Twin, ...], npt.NDArray[np.uint64]]] = []
    failed: list[str] = []
    for frame, rank in zip(frames, peers.ranks, strict=True):
        _, said = TWINS.decode(frame)
        if isinstance(said, NotDescribed):
            failed += said.problems
        else:
            held.append((f"rank {rank}", twins_from(said.twins), np.frombuffer(said.digests, "<u8")))
    return tuple(failed or differences(held))
