"""The pipelines of the GPU services between processes on the CPU: gloo replaces NCCL, mapped files replace NVSHMEM."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import refitd
from refitd.copy_services.digests import DeviceDigests, Digest
from refitd.copy_services.nccl import MAX_OPERATIONS, RoundsExchange
from refitd.copy_services.nvshmem import SlottedExchange
from refitd.copy_services.packed import STAGING_BYTES, PackedExchange
from refitd.copy_services.peers import Peers
from refitd.copy_services.streams import InFlight
from refitd.copy_services.waits import Deadline
from tests.spmd.cases import TIMEOUT_S, World, numbers, refused, wrong_bytes


class GlooRounds(RoundsExchange):
    """Group calls made of single messages, tagged with their number; a message out of order would hang."""

    def __init__(self, message_bytes: int | None) -> None:
        super().__init__(Peers(), message_bytes=message_bytes)
        self._digests = DeviceDigests(self.device)

    def _issue(self, flights: Sequence[InFlight], deadline: Deadline, subject: str) -> Any:
        assert len(flights) <= MAX_OPERATIONS
        posts = []
        for flight in flights:
            post = self.peers.send if flight.stream.is_send else self.peers.receive
            posts.append((flight.stream.position, post(flight.buffer, flight.stream.position, 7000 + flight.number)))
        return posts

    def _is_over(self, issued: Any) -> bool:
        return True  # gloo's messages do not report completion before they are waited for

    def _finish(self, issued: Any, deadline: Deadline, subject: str) -> None:
        for position, post in issued:
            self.peers.wait(post, position, deadline, f"{subject}:")

    def _new_digest(self, about: bytes) -> Digest:
        return self._digests.new(about)


class FileSlots(SlottedExchange):
    """Every rank's slots and words are a file that all ranks have mapped."""

    def __init__(self, message_bytes: int | None, folder: str) -> None:
        super().__init__(Peers(), message_bytes=message_bytes, staging_bytes=STAGING_BYTES)
        self._digests = DeviceDigests(self.device)
        ranks = range(len(self.peers))
        slots, words = self.slots.nbytes, self.slots.words

        def mapped(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.from_file(f"{folder}/{name}", shared=True, size=size, dtype=dtype)

        self._heaps = [mapped(f"slots{i}", slots, torch.uint8) for i in ranks]
        self._words = [mapped(f"words{i}", words, torch.int64) for i in ranks]

    def _room(self, offset: int, nbytes: int) -> torch.Tensor:
        assert offset + nbytes <= self.slots.nbytes
        return self._heaps[self.peers.index][offset : offset + nbytes]

    def _put(self, position: int, leaving: int, landing: int, nbytes: int, word: int, value: int) -> None:
        self._heaps[position][landing : landing + nbytes] = self._room(leaving, nbytes)
        self._signal(position, word, value)

    def _signal(self, position: int, word: int, value: int) -> None:
        assert int(self._words[position][word]) < value
        self._words[position][word] = value

    def _look(self) -> Sequence[int]:
        found: list[int] = self._words[self.peers.index].tolist()
        return found

    def _new_digest(self, about: bytes) -> Digest:
        return self._digests.new(about)


def make(kind: str, message_bytes: int | None) -> PackedExchange:
    if kind == "rounds":
        return GlooRounds(message_bytes)
    folder: list[Any] = [tempfile.mkdtemp(prefix="rfslots") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    service = FileSlots(message_bytes, folder[0])
    dist.barrier()  # all ranks have mapped the files
    if dist.get_rank() == 0:
        for path in Path(folder[0]).iterdir():
            path.unlink()
        Path(folder[0]).rmdir()
    return service


def random_exchanges(world: World, kind: str, seeds: Sequence[int]) -> int:
    """Many tensors of awkward sizes, contiguous or not, in messages of any size, between all pairs, in several runs."""
    total = 0
    for seed in seeds:
        rng = random.Random(seed)
        service = make(kind, rng.choice([16, 48, 256, 1 << 16]))
        for again in range(3):
            landed = []
            for task in range(rng.choice([1, 3, 40])):
                source, target, part = rng.randrange(8), rng.randrange(8), rng.randrange(3)
                shape = [rng.choice([0, 1, 2, 3, 5, 7, 40]) for _ in range(rng.randrange(4))]
                dtype = rng.choice([torch.int64, torch.bfloat16, torch.uint8])
                value = numbers(*shape, dtype=dtype, start=task + again)
                is_strided = rng.random() < 0.5
                if world.rank == source:
                    service.send(task, value, target, part=part)
                if world.rank == target:
                    room = torch.zeros([*shape, 2], dtype=dtype)[..., 0] if is_strided else value.new_zeros(shape)
                    service.receive(task, room, source, part=part)
                    landed.append((room, value))
            total += service.run(TIMEOUT_S, verify=bool((seed + again) % 2)).messages
            assert all(torch.equal(room, value) for room, value in landed), (seed, again)
        service.close()
    return total


def wrong_bytes_are_noticed(world: World, kind: str) -> str:
    return wrong_bytes(world, make(kind, None))


def nobody_waits_for_ever(world: World, kind: str, timeout: float) -> tuple[str, bool]:
    """Rank 1 agrees and then does not send."""
    service = make(kind, None)
    if world.rank == 1:
        service.send(1, torch.ones(9), 0)
        service._move = lambda *_: ""  # type: ignore[assignment, method-assign]
    if world.rank == 0:
        service.receive(1, torch.zeros(9), 1)
    return refused(lambda: service.run(timeout), refitd.TransportError), service.is_usable
