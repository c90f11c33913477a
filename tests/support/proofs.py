"""One rank whose live tensors are checked: the daemon's Proofs, a worker's digests and a client's checks, by hand."""

from __future__ import annotations

import os
from math import prod
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from refitd.buffers import arena as memory
from refitd.buffers.arena import MappedArena
from refitd.buffers.layout import packed_offsets, row_major_strides
from refitd.client.checks import LiveChecks
from refitd.client.tensors import TensorSet
from refitd.daemon import actions as act
from refitd.daemon.digest_work import DigestQueue
from refitd.daemon.members import Arena, LocalMember, new_member
from refitd.daemon.target_state import Live
from refitd.daemon.verification import Proofs
from refitd.describe.metadata import ParameterMetadata
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Message
from refitd.protocol.cluster import MemberChecked
from refitd.protocol.shards import Place, shard_of
from refitd.worker import digests

STAGING, LIVE = 1, 2
DTYPES = {torch.uint8: 1, torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


class Node:
    """A member with its staging arena and live tensors, and everybody who reads them."""

    def __init__(self, shapes: Shapes, way: str, seed: int) -> None:
        self.names = [f"t{i}" for i in range(len(shapes))]
        sizes = [prod(shape) * DTYPES[dtype] for shape, dtype in shapes]
        self.offsets, nbytes = packed_offsets(sizes)
        self.staging = _arena(nbytes)
        self.staging.bytes[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
        self.arenas = {STAGING: self.staging}
        self.live: list[torch.Tensor] = []
        places: list[Place] = []
        known: dict[int, Arena] = {}
        # live tensors lie one element further apart in their last dimension: their rows do not touch
        wide = [(*shape[:-1], shape[-1] + (way != "packed")) for shape, _ in shapes]
        live_offsets, live_bytes = packed_offsets([prod(w) * DTYPES[d] for w, (_, d) in zip(wide, shapes, strict=True)])
        room = _arena(live_bytes)
        for (shape, dtype), lies, offset in zip(shapes, wide, live_offsets, strict=True):
            element = DTYPES[dtype]
            flat = torch.frombuffer(room.bytes, dtype=torch.uint8, count=prod(lies) * element, offset=offset)
            self.live.append(flat.view(dtype).view(lies)[..., : shape[-1]])
            places.append(Place(LIVE, offset, row_major_strides(lies, element)))
        if way in ("arena", "in-place"):
            self.arenas[LIVE] = room
            known[LIVE] = Arena(LIVE, room.nbytes, "live", 1, write=True)
        metadata = [
            ParameterMetadata(name, shape, dtype, DTYPES[dtype], owner_rank=0, resolved_name=name)
            for name, (shape, dtype) in zip(self.names, shapes, strict=True)
        ]
        registration = local.RegisterTarget(
            model="m",
            replica="a",
            rank=0,
            world_size=1,
            shard=shard_of(metadata),
            live=tuple(places) if way in ("arena", "in-place") else (),
            pauses=way == "in-place",
            in_place=way == "in-place",
        )
        self.member: LocalMember = new_member("m/a:0", 1, os.getpid(), registration, known)[0]
        self.becomes(live=Live.SERVING, version=7, holds=7)
        self.member.staging = -1 if way == "in-place" else STAGING
        tensors = TensorSet(dict(zip(self.names, self.live, strict=True)), 0, metadata, None, None)
        self.client = LiveChecks(self, self.member.id, tensors, lambda: self.staging)  # type: ignore[arg-type]
        self.out: list[act.Instruction] = []
        self.answers: list[cluster.MembersChecked] = []
        self.said: list[Message] = []
        self.is_swapping = False
        self.gpus: dict[int, int] = {}  # arena -> worker
        self.digests = DigestQueue(
            "n0",
            2,
            self.out.append,
            lambda *_: None,
            lambda arenas: {a: w for a, w in self.gpus.items() if a in arenas},
            lambda: self.is_swapping,
        )
        self.proofs = Proofs({self.member.id: self.member}, self.digests, self.out.append)
        for i in range(len(shapes)):
            self.write(i, self.staged(i))
        if way == "in-place":  # its digest can be taken at that time only
            self.proofs.committed(self.member)
            self.run()

    def becomes(self, **changes: Any) -> None:
        """Bring the member into the state after a swap."""
        self.member.state = replace(self.member.state, **changes)

    def tell(self, message: Message) -> None:
        """The client's connection."""
        self.said.append(message)

    def staged(self, i: int) -> np.ndarray:
        """The elements of a tensor as they were staged, each as its bytes."""
        element, count = self.live[i].element_size(), self.live[i].numel()
        at = self.offsets[i]
        return self.staging.bytes[at : at + count * element].reshape(count, element).copy()

    def write(self, i: int, elements: np.ndarray) -> None:
        dtype, shape = self.live[i].dtype, tuple(self.live[i].shape)
        self.live[i].copy_(torch.from_numpy(np.ascontiguousarray(elements).reshape(-1)).view(dtype).view(shape))

    def run(self) -> None:
        """Perform the daemon's instructions until there are none left."""
        self.digests.dispatch()
        while self.out:
            done = self.out.pop(0)
            match done:
                case act.ToWorker(_, sidecar.TakeDigests() as message):
                    self.digests.worker_said(digests.taken(message, self.arenas))
                case act.ToWorker(_, sidecar.CompareSpans() as message):
                    self.digests.worker_said(digests.compared(message, self.arenas))
                case act.ToClient(_, _, (local.DigestLive() | local.CompareLive()) as message):
                    self.client._answer(message)
                    for reply in self.said:
                        assert isinstance(reply, local.LiveDigests | local.LiveCompared)
                        self.proofs.client_said(self.member, reply)
                    self.said.clear()
                case act.ToCoordinator(_, cluster.MembersChecked() as message):
                    self.answers.append(message)
                case _:
                    pass
            self.digests.dispatch()

    def tick(self) -> None:
        """Run the daemon's work of one second."""
        self.proofs.tick()
        self.digests.tick()

    def ask(self, check: str = "c", now: float = 0.0) -> None:
        self.proofs.check(cluster.CheckMembers(check=check, members=(self.member.id,), timeout_s=10.0), now)

    def check(self) -> MemberChecked:
        self.ask()
        self.run()
        (answer,) = self.answers
        self.answers.clear()
        return answer.members[0]


def _arena(nbytes: int) -> MappedArena:
    fd = memory.create(nbytes, "test")
    try:
        return MappedArena(fd, nbytes, write=True)
    finally:
        os.close(fd)
