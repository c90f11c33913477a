"""Common start of trainer and engine processes: arguments, threads, process groups."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from refitd_cli.demo.channel import Channel
from refitd_cli.demo.layout import RankPosition, TransformerConfig
from refitd_cli.demo.model import tensors_of
from refitd_cli.demo.parallel import Comm, Gloo, Solo

COLLECTIVE_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 120.0
MODEL_NAME = "policy"


@dataclass(frozen=True)
class DemoProcess:
    """This process: its arguments, its rank, its groups."""

    name: str
    runtime_dir: Path
    seed: int
    memory: str  # "private": its own tensors; "arena": tensors the daemon owns; "mxfp8": projections in MXFP8
    layout: RankPosition
    config: TransformerConfig
    comm: Comm  # over the ranks that share this one's tensors
    everyone: Gloo  # over the whole trainer or replica
    channel: Channel


def join(argv: list[str], channel: Channel) -> DemoProcess:
    """Parse the command line and join the process groups of the trainer or replica."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True, help="file where the processes meet")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--pp", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--memory", choices=("private", "arena", "mxfp8"), default="private")
    args = parser.parse_args(argv)

    torch.set_num_threads(1)  # more processes than cores: a second thread only takes turns with the first
    layout = RankPosition.of_rank(args.rank, args.tp, args.pp)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{args.store}",
        rank=args.rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed made no process group")
    everyone = Gloo(world)
    comm: Comm = everyone
    if args.tp == 1:
        comm = Solo()
    elif args.pp > 1:
        stages = [[stage * args.tp + rank for rank in range(args.tp)] for stage in range(args.pp)]
        comm = Gloo([dist.new_group(ranks) for ranks in stages][layout.pp_stage])
    return DemoProcess(
        name=args.name,
        runtime_dir=args.runtime_dir,
        seed=args.seed,
        memory=args.memory,
        layout=layout,
        config=TransformerConfig(),
        comm=comm,
        everyone=everyone,
        channel=channel,
    )


def write_state(path: str, model: torch.nn.Module) -> None:
    """Write every parameter and persistent buffer unchanged; bf16 as integers of its bits."""
    write_tensors(path, tensors_of(model))


def write_tensors(path: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors as `write_state` does."""
    arrays: dict[str, Any] = {}
    for name, tensor in tensors.items():
        bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        arrays[name] = bits.detach().contiguous().numpy()
    np.savez(path, **arrays)
