"""Common start of trainer and engine processes: arguments, threads, process groups, pipes to the launcher."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from refitd_cli.demo.layout import RankPosition, TransformerConfig
from refitd_cli.demo.model import tensors_of
from refitd_cli.demo.parallel import Comm, Gloo, Solo

Message = dict[str, Any]
LAUNCHER_GONE = 3  # exit status


class Channel:
    """Newline-separated JSON in both directions. Other output of this process goes to stderr, its log.

    When stdin ends, the launcher has ended: this process then ends too, and no process is left running.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def emit(self, event: str, **fields: Any) -> None:
        """Send an event to the launcher."""
        self._out.write(json.dumps({"event": event, **fields}) + "\n")
        self._out.flush()

    def next(self, timeout_s: float) -> Message:
        """Return the next command.

        Raises:
            TimeoutError: the launcher was silent for `timeout_s`.
        """
        try:
            return self._commands.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no command from the launcher for {timeout_s:.0f} s") from None

    def poll(self) -> Message | None:
        """Return the next command if there is one."""
        try:
            return self._commands.get_nowait()
        except queue.Empty:
            return None

    def _read(self) -> None:
        for line in sys.stdin:
            self._commands.put(json.loads(line))
        os._exit(LAUNCHER_GONE)


@contextlib.contextmanager
def reporting(channel: Channel) -> Iterator[None]:
    """Report an error that ends this process to the launcher."""
    try:
        yield
    except Exception as exc:
        channel.emit("failed", reason=f"{type(exc).__name__}: {exc}")
        raise


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
