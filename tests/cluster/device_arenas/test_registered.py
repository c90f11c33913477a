"""NIXL reads from arena to arena: they are registered once, and again after a flip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from refitd.testing import Daemon, Engine, eventually
from tests.support import fake_cuda
from tests.support.gpu_tensors import DEADLINES, allocated, copy_into


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_whole_tensors_are_read_from_arena_to_arena_by_flipping_replicas(
    device: str,
    gpus: fake_cuda.FakeGpus,
    start_daemon: Callable[..., Daemon],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    log = tmp_path / "reads"
    monkeypatch.setenv("FAKE_NIXL_LOG", str(log))
    config = DEADLINES + '[transport]\nservice = "nixl"\n'
    n0 = start_daemon(config)
    n1 = start_daemon(config, name="n1", joins=n0.endpoint)
    eventually(lambda: n0.node_of("n1").pid > 0, "the other node has joined")
    count = 24 << 20
    with n0.connect() as trainer, n1.connect() as engine:
        like = {"w": torch.zeros(count, dtype=torch.uint8)}
        given, live = (allocated(client, like, device) for client in (trainer, engine))
        source = trainer.register_source("policy", given)
        target = engine.register_target("policy", live, replica="far", mode="flip")
        for version in (1, 2, 3):
            copy_into(given, {"w": torch.full((count,), version, dtype=torch.uint8)})
            before = log.read_text() if log.exists() else ""
            with Engine(target), source.lend(version):
                trainer.swap("policy", version, timeout=60)
            assert int(live["w"].min()) == int(live["w"].max()) == version
            reads = [line.split() for line in log.read_text()[len(before) :].splitlines()]
            kind = "DRAM" if device == "cpu" else "VRAM"
            assert sum(int(nbytes) for _, nbytes, *_ in reads) == count
            assert {(what, *sizes) for what, _, *sizes in reads} == {(kind, str(count), str(count))}, "not by slabs"
        assert trainer.verify("policy", timeout=60).outcome == "proven"
        del given, live
