"""DeepSpeed's ZeRO stage 3 on CPUs: its ranks publish the values that it gathers (scripts/try-zero3).

It runs where DeepSpeed is installed, and is skipped elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from refitd.testing import Daemon, Engine

pytestmark = [
    pytest.mark.own_daemon,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

ROOT = Path(__file__).parents[2]


class Ranks:
    """The trainer's processes; all get the same commands."""

    def __init__(self, world_size: int, folder: Path, directory: Path, settings: dict[str, Any]) -> None:
        module = [sys.executable, "-m", "tests.support.zero3_rank"]
        given = [str(world_size), str(folder), str(directory), json.dumps(settings)]
        pipe = subprocess.PIPE
        self._all = [
            subprocess.Popen([*module, str(rank), *given], stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
            for rank in range(world_size)
        ]
        self._hear("ready")

    def publish(self, version: int) -> None:
        for rank in self._all:
            assert rank.stdin is not None
            rank.stdin.write(f"{version}\n")
            rank.stdin.flush()
        self._hear("published")

    def _hear(self, word: str) -> None:
        for rank in self._all:
            assert rank.stdout is not None
            for line in rank.stdout:  # DeepSpeed logs there, too
                if line.strip() == word:
                    break
            else:
                raise AssertionError("a rank has ended")

    def close(self) -> None:
        for rank in self._all:
            if rank.stdin is not None:
                rank.stdin.close()
        for rank in self._all:
            rank.wait(30)


@pytest.mark.parametrize(
    "settings",
    [
        {"zero": {"stage3_param_persistence_threshold": 0}},
        {"zero": {"stage3_param_persistence_threshold": 1000000}},
        {"bf16": {"enabled": True}},
    ],
    ids=["all are split", "all are kept gathered", "bfloat16"],
)
@pytest.mark.timeout(300)
def test_engines_get_what_deepspeed_gathers(daemon: Daemon, tmp_path: Path, settings: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if "bf16" in settings else torch.float32
    shapes = {"up.weight": (29, 13), "up.bias": (29,), "down.weight": (13, 29), "scale": (1,), "frozen": (5, 3)}
    live = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    live |= {name: torch.zeros(37, 13, dtype=dtype) for name in ("embed.weight", "head.weight")}  # tied by the trainer
    ranks = Ranks(2, tmp_path, daemon.directory, settings)
    try:
        with daemon.connect("engine") as client:
            live["table"] = torch.zeros(5, dtype=client.tensors("policy")["table"][1])
            held = []
            with Engine(client.register_target("policy", live, replica="a")):
                for version in (1, 2, 3):
                    ranks.publish(version)
                    assert client.swap("policy", version, timeout=60).outcome == "committed"
                    whole = torch.load(tmp_path / f"{version}.pt")
                    assert whole.keys() == live.keys()
                    for name, tensor in live.items():
                        assert torch.equal(tensor, whole[name]), name
                    held.append(live["up.weight"].clone())
            assert not torch.equal(held[0], held[1]) and not torch.equal(held[1], held[2])
    finally:
        ranks.close()
