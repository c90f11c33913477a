"""Before a plan's first exchange, compare the elements that several source ranks hold."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from refitd.copy_services.peers import Deadline, Peers
from refitd.describe.digests import digest_of
from refitd.describe.tiles import Tile
from refitd.errors import PlanError
from refitd.inprocess.agree import said_of
from refitd.inprocess.rank_plan import HeldRegion, RankPlan
from refitd.inprocess.request import RankTensors
from refitd.inprocess.wire import COMPARED, DIGESTED, NotDescribed, RankRegionDigests, RegionsCompared, texts
from refitd.plan.regions import Digested, differences
from refitd.protocol.codec import encode
from refitd.transforms.mxfp8_buffers import is_quantized

_LENGTH = struct.Struct("<q")


def compare_regions(plan: RankPlan, tensors: RankTensors, peers: Peers, deadline: Deadline) -> None:
    """Let rank 0 compare the digests of all regions. Collective; moves no weights.

    Raises:
        PlanError: on every rank; names the tensors whose values differ, and the ranks that hold them.
    """
    try:
        # tensors in MXFP8 are not compared
        regions = [region for region in plan.regions if not is_quantized(tensors.sources[region.local])]
        frame = encode(0, RankRegionDigests(tuple(regions), _digests(regions, tensors)))
    except Exception as exc:  # any failure must be sent to the other ranks, which would wait otherwise
        frame = encode(0, NotDescribed(texts(said_of(exc, peers.rank))))
    lengths = [_LENGTH.unpack(r)[0] for r in peers.all_gather(_LENGTH.pack(len(frame)), deadline, "comparing replicas")]
    frames = peers.gather(frame, lengths, deadline, "comparing replicas")
    answers = None
    if frames is not None:
        try:
            problems = _compared(frames, peers)
        except Exception as exc:
            problems = said_of(exc, peers.rank)
        answers = [encode(0, RegionsCompared(texts(tuple(problems))))] * len(peers)
    _, answer = COMPARED.decode(peers.scatter(answers, deadline, "comparing replicas"))
    if answer.problems:
        raise PlanError(answer.problems)
    plan.check.is_due = False


def _digests(regions: Sequence[HeldRegion], tensors: RankTensors) -> bytes:
    found = []
    for region in regions:
        tile = Tile(region.tensor, (0,) * len(region.size), region.size, region.offset, region.stride)
        found.append(digest_of(tensors.sources[region.local], tile))
    return np.array(found, "<u8").tobytes()


def _compared(frames: list[bytes], peers: Peers) -> tuple[str, ...]:
    held: list[Digested] = []
    failed: list[str] = []
    for frame, rank in zip(frames, peers.ranks, strict=True):
        _, said = DIGESTED.decode(frame)
        if isinstance(said, NotDescribed):
            failed += said.problems
        else:
            groups = np.array([group for group, *_ in said.regions], np.int64)
            names = [tensor for _, tensor, *_ in said.regions]
            held.append(Digested(f"rank {rank}", groups, names.__getitem__, np.frombuffer(said.digests, "<u8")))
    return tuple(failed or differences(held))
