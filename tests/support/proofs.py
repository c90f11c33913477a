"""Verify one rank's live tensors with the daemon's Proofs, a worker's digests and a client's checks, driven by hand."""

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
from refitd.client.target_tensors import LiveChecks, TargetTensors
from refitd.commit.target_state import Live
from refitd.daemon import actions as act
from refitd.daemon.digest_work import DigestQueue
from refitd.daemon.effects import Effects
from refitd.daemon.jobs import WorkerArenas
from refitd.daemon.members import Arena, LocalMember, TargetMemory
from refitd.daemon.new_members import checked, new_member
from refitd.daemon.verification import Proofs
from refitd.describe.metadata import ParameterMetadata
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Message
from refitd.protocol.cluster import MemberChecked
from refitd.protocol.shards import Place, shard_of
from refitd.worker import host_jobs

STAGING, LIVE = 1, 2
DTYPES = {torch.uint8: 1, torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


class _Maps(WorkerArenas):
    """Every worker maps every arena; `gpus` gives the worker that has the GPU of an arena."""

    def __init__(self, gpus: dict[int, int]) -> None:
        super().__init__(2)
        self._gpus = gpus

    def need(self, effects: Effects, worker: int, arenas: set[int]) -> None:
        pass

    def homes(self, arenas: set[int]) -> dict[int, int]:
        return {a: w for a, w in self._gpus.items() if a in arenas}


class Node:
    """A member with its staging arena, live tensors, and all processes that read them."""

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
        # live tensors have one unused element after each row, so rows do not touch
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
            in_place=way == "in-place",
            controlled=way == "in-place",
        )
        self.member: LocalMember = new_member("m/a:0", 1, checked(1, os.getpid(), registration, known))
        self.becomes(live=Live.SERVING, version=7, holds=7)
        self.member.memory = TargetMemory(-1 if way == "in-place" else STAGING)
        tensors = TargetTensors(dict(zip(self.names, self.live, strict=True)), 0, metadata, None, None)
        self.client = LiveChecks(self, self.member.id, tensors, lambda: self.staging)  # type: ignore[arg-type]
        self.out = Effects(0.0)
        self.answers: list[cluster.MembersChecked] = []
        self.said: list[Message] = []
        self.is_swapping = False
        self.gpus: dict[int, int] = {}  # arena -> worker
        self.digests = DigestQueue(
            "n0",
            2,
            _Maps(self.gpus),
        )
        self.proofs = Proofs({self.member.id: self.member}, self.digests)
        for i in range(len(shapes)):
            self.write(i, self.staged(i))
        if way == "in-place":  # its digest can only be taken at that time
            self.proofs.committed(self.out, self.member)
            self.run()

    def becomes(self, **changes: Any) -> None:
        """Bring the member into the state after a swap."""
        self.member.state = replace(self.member.state, **changes)

    def tell(self, message: Message) -> None:
        """The client's connection."""
        self.said.append(message)

    def staged(self, i: int) -> np.ndarray:
        """The staged elements of a tensor, each as its bytes."""
        element, count = self.live[i].element_size(), self.live[i].numel()
        at = self.offsets[i]
        return self.staging.bytes[at : at + count * element].reshape(count, element).copy()

    def write(self, i: int, elements: np.ndarray) -> None:
        dtype, shape = self.live[i].dtype, tuple(self.live[i].shape)
        self.live[i].copy_(torch.from_numpy(np.ascontiguousarray(elements).reshape(-1)).view(dtype).view(shape))

    def run(self) -> None:
        """Perform the daemon's instructions until none are left."""
        self.dispatch()
        while self.out:
            done = self.out.pop(0)
            match done:
                case act.ToWorker(_, sidecar.ReadSpans() as message):
                    self.digests.worker_said(self.out, host_jobs.read(message, self.arenas))
                case act.ToClient(_, _, local.CheckLive() as message):
                    self.client._answer(message)
                    for reply in self.said:
                        assert isinstance(reply, local.LiveChecked)
                        self.proofs.client_said(self.out, self.member, reply)
                    self.said.clear()
                case act.ToCoordinator(_, cluster.MembersChecked() as message):
                    self.answers.append(message)
                case _:
                    pass
            self.dispatch()

    def dispatch(self) -> None:
        """Give idle workers work."""
        self.digests.dispatch(self.out, is_swapping=self.is_swapping)

    def tick(self) -> None:
        """Run the daemon's work of one second."""
        self.proofs.tick(self.out)
        self.digests.tick()

    def ask(self, check: str = "c", now: float = 0.0) -> None:
        self.out.now = now
        self.proofs.check(self.out, cluster.CheckMembers(check=check, members=(self.member.id,), timeout_s=10.0))

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
