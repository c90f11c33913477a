"""The baselines of the swap benchmark: the same bytes between the same processes, moved by torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.swap_model import Layout, Shard, Tensor, held


class Peers:
    """One rank of all baselines: the sources are the first ranks of the world, the targets follow."""

    def __init__(
        self, tensors: Sequence[Tensor], source: Layout, target: Layout, rank: int, local: dict[str, torch.Tensor]
    ) -> None:
        self._tensors = tensors
        self._source, self._target = source, target
        self._rank = rank
        self._local = local
        self._is_source = rank < source.world
        ranks = [range(source.world), range(source.world, source.world + target.world)]
        self._groups = [dist.new_group(list(side)) for side in ranks]

    def direct(self, flat: torch.Tensor, pairs: Sequence[tuple[int, int, int]]) -> float:
        """Raw gloo: one message and one buffer for each pair of ranks, neither packed nor unpacked.

        `flat` is this rank's full shard; the buffers are sections of it, already touched. `pairs` are (source rank,
        target rank, elements).
        """
        me = self._rank if self._is_source else self._rank - self._source.world
        mine = [(src, dst, n) for src, dst, n in pairs if (src if self._is_source else dst) == me]
        buffers, at = [], 0
        for src, dst, n in mine:
            at = at if at + n <= len(flat) else 0  # replicated tensors are sent more than once
            buffers.append((flat[at : at + n], self._source.world + dst if self._is_source else src))
            at += n
        started = _start()
        move = dist.isend if self._is_source else dist.irecv
        works = [move(buffer, peer) for buffer, peer in buffers]
        for work in works:
            if work is not None:
                work.wait()
        return _end(started)

    def gather(self) -> float:
        """Gather each full tensor on rank 0, broadcast it to all ranks, slice it there."""
        sources = [{s.tensor.name: s for s in held(self._tensors, self._source, r)} for r in range(self._source.world)]
        mine = {s.tensor.name: s for s in held(self._tensors, self._target, self._rank - self._source.world)}
        started = _start()
        for tensor in self._tensors:
            whole = torch.empty(tensor.shape, dtype=torch.bfloat16)
            holders = [(rank, shards[tensor.name]) for rank, shards in enumerate(sources) if tensor.name in shards]
            if holders[0][1].shape == tensor.shape:
                holders = holders[:1]
            for rank, shard in holders:
                self._hand_over(rank, shard, whole)
            dist.broadcast(whole, 0)
            if not self._is_source and tensor.name in mine:
                shard, place = mine[tensor.name], self._local[tensor.name]
                for part, (start, stop) in zip(_parts(shard, place), shard.spans, strict=True):
                    part.copy_(whole.narrow(shard.dim, start, stop - start))
        return _end(started)

    def _hand_over(self, rank: int, shard: Shard, whole: torch.Tensor) -> None:
        if self._rank == rank and rank:
            dist.send(self._local[shard.tensor.name], 0)
        elif self._rank == 0:
            part = self._local[shard.tensor.name] if rank == 0 else torch.empty(shard.shape, dtype=torch.bfloat16)
            if rank:
                dist.recv(part, rank)
            for piece, (start, stop) in zip(_parts(shard, part), shard.spans, strict=True):
                whole.narrow(shard.dim, start, stop - start).copy_(piece)

    def checkpoint(self, directory: str) -> float:
        """Save with torch.distributed.checkpoint, load in the targets' layout."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
        from torch.distributed.checkpoint.state_dict_loader import load
        from torch.distributed.checkpoint.state_dict_saver import save

        state = self._state()
        group = self._groups[not self._is_source]
        started = _start()
        if self._is_source:
            save(state, storage_writer=FileSystemWriter(directory, sync_files=False), process_group=group)
        dist.barrier()
        if not self._is_source:
            load(state, storage_reader=FileSystemReader(directory), process_group=group)
        return _end(started)

    def _state(self) -> dict[str, torch.Tensor]:
        """Return the shard as DTensors; they cut gated tensors as one piece, which moves as many bytes."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Replicate
        from torch.distributed.tensor import Shard as Sharded

        layout = self._source if self._is_source else self._target
        if layout.kind != "tp":
            return dict(self._local)
        mesh = DeviceMesh.from_group(self._groups[not self._is_source], "cpu")
        state: dict[str, torch.Tensor] = {}
        for tensor in self._tensors:
            place = Replicate() if tensor.dim is None else Sharded(tensor.dim)
            state[tensor.name] = DTensor.from_local(self._local[tensor.name], mesh, [place], run_check=False)
        return state


def _parts(shard: Shard, local: torch.Tensor) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = local.split([stop - start for start, stop in shard.spans], shard.dim)
    return parts


def _start() -> float:
    dist.barrier()
    return time.perf_counter()


def _end(started: float) -> float:
    dist.barrier()
    return time.perf_counter() - started
