"""Between nodes, only changes since the engines' version are sent, and the complete result is verified."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

import refitd
from refitd import MXFP8Buffer
from refitd.testing import Daemon, Engine, RunningSwap, eventually
from tests.support import shards
from tests.support.controls import controlled
from tests.support.fleet import CutReplica, CutSource
from tests.support.names import policy

Nodes = tuple[Daemon, ...]
Tensors = dict[str, torch.Tensor]
COUNTED = {"wide": (700, 901), "tall": (901, 700), "norm": (901,)}


def made(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in COUNTED.items()}


def changed(tensors: Tensors, share: float, seed: int) -> int:
    """Change the given share of the elements, in place, at random; return how many."""
    random, count = np.random.default_rng(seed), 0
    for tensor in tensors.values():
        words = tensor.view(torch.uint8).numpy().reshape(-1).view(f"u{tensor.element_size()}")
        which = random.random(len(words)) < share
        words[which] ^= np.array(
            1 << (8 * tensor.element_size() - 9), words.dtype
        )  # change bits of a float32 that bfloat16 has too
        count += int(which.sum())
    return count


class Pair:
    """A trainer on one node, engines of several kinds on another."""

    def __init__(
        self,
        nodes: Callable[..., Nodes],
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.n0, self.n1 = nodes(2)
        self.trainer, self.engine = self.n0.connect(), self.n1.connect()
        self.held = made(0, dtype)
        self.cast = {} if dtype is torch.bfloat16 else {"cast": str(dtype).removeprefix("torch.")}
        self.source = self.trainer.register_source(policy(), self.held)
        self.targets: list[refitd.Target] = []
        self.live: list[Tensors] = []

    def add(self, live: Tensors, replica: str, **options: object) -> refitd.Target:
        self.live.append(live)
        self.targets.append(self.engine.register_target(policy(), live, replica=replica, **self.cast, **options))  # type: ignore[arg-type]
        return self.targets[-1]

    def empty(self, *, flips: bool = False) -> Tensors:
        shapes = {name: (shape, torch.bfloat16) for name, shape in COUNTED.items()}
        if flips:
            return self.engine.allocate(shapes)
        return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}

    def swap(self, version: int, *, publish: bool = True) -> refitd.SwapReport:
        if publish:
            self.source.publish(version)
        with Engine(*self.targets):
            return self.trainer.swap(policy(), version, timeout=60)

    def digested(self, version: int) -> None:
        """Wait until the engine's node has the digest of a version."""
        line = re.compile(rf"event=digests .*version={version} ")
        eventually(lambda: line.search(self.n1.log()), f"version {version} has been digested")

    def check(self) -> None:
        want = {name: tensor.to(torch.bfloat16) for name, tensor in self.held.items()}
        assert all(shards.equal(live, want) for live in self.live)

    def close(self) -> None:
        self.trainer.close()
        self.engine.close()


def test_what_changed_crosses_and_a_base_that_is_wrong_goes_live_nowhere(nodes: Callable[..., Nodes]) -> None:
    """A flipping engine's base is the version that it serves, and the engine could have written to it."""
    pair = Pair(nodes)
    live = pair.empty(flips=True)
    pair.add(live, "a", mode="flip")
    pair.swap(1)
    for version in (2, 3):
        changed(pair.held, 0.01, version)
        crossing = pair.swap(version).crossing
        pair.check()
        assert crossing.delta_bytes == crossing.bytes
    served = live["norm"].clone()
    pair.digested(3)
    live["norm"].view(torch.int16)[900] ^= 1
    changed(pair.held, 0.01, 4)
    with pytest.raises(refitd.SwapFailed, match=r"differ from the bytes .* an engine there serves.* swap again"):
        pair.swap(4)
    assert pair.targets[0].version == 3
    assert torch.equal(live["norm"][:900], served[:900])
    eventually(lambda: "event=base-wrong" in pair.n1.log(), "the base has been compared")
    assert pair.swap(4, publish=False).crossing.delta_bytes == 0, "its base is wrong"
    pair.check()
    assert pair.swap(5).crossing.delta_bytes, "version 4 was proven, and is a base again"
    pair.digested(5)
    live["norm"].view(torch.int16)[900] ^= 1
    with pytest.raises(refitd.SwapFailed, match="differ from the bytes"):
        pair.swap(6)
    got = []
    for version, publish in ((6, False), (7, True), (8, True)):
        got.append(bool(pair.swap(version, publish=publish).crossing.delta_bytes))
        pair.check()
    assert got == [False, False, True], "with each wrong base the full versions double"
    pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("flips", [True, False])
def test_a_delta_altered_on_the_cable_costs_no_rank_its_deltas(
    nodes: Callable[..., Nodes], meddle: Callable[[str], None], flips: bool
) -> None:
    pair = Pair(nodes)
    live = pair.empty(flips=flips)
    pair.add(live, "a", mode="flip" if flips else "copy")
    pair.swap(1)
    changed(pair.held, 0.01, 2)
    assert pair.swap(2).crossing.delta_bytes
    before = {name: tensor.clone() for name, tensor in live.items()}
    changed(pair.held, 0.01, 3)
    meddle("delta n1")
    with pytest.raises(refitd.SwapFailed, match=r"differ from the bytes .* as a delta"):
        pair.swap(3)
    meddle("")
    assert shards.equal(live, before)
    eventually(lambda: "event=delta-wrong" in pair.n1.log(), "the base has been compared")
    again = pair.swap(3, publish=False).crossing
    pair.check()
    assert bool(again.delta_bytes) == flips, "one that copies had rebuilt its base in place"
    changed(pair.held, 0.01, 4)
    crossing = pair.swap(4).crossing
    pair.check()
    assert crossing.delta_bytes == crossing.bytes and crossing.crossed_bytes < 0.03 * crossing.bytes
    assert "event=base-wrong" not in pair.n1.log()
    pair.close()


@pytest.mark.slow
def test_a_wrong_base_is_known_however_late_its_daemon_hears_of_it(nodes: Callable[..., Nodes]) -> None:
    """The sender's node reports the difference first; then the abort and the receiver's report are queued together."""
    pair = Pair(nodes)
    live = pair.empty(flips=True)
    pair.add(live, "a", mode="flip")
    pair.swap(1)
    pair.digested(1)
    live["norm"].view(torch.int16)[900] ^= 1
    changed(pair.held, 0.01, 2)
    pair.source.publish(2)
    (worker,) = pair.n1.workers()
    os.kill(worker, signal.SIGSTOP)
    with Engine(*pair.targets):
        swapping = RunningSwap(pair.n0.connect(), policy(), 2)
        eventually(lambda: "version=2 phase=stage" in pair.n1.log(), "the worker has been told")
        os.kill(pair.n1.pid, signal.SIGSTOP)
        os.kill(worker, signal.SIGCONT)
        eventually(lambda: "phase=aborted" in pair.n0.log(), "the sender has reported it")
        os.kill(pair.n1.pid, signal.SIGCONT)
        with pytest.raises(refitd.SwapFailed, match="differ from the bytes"):
            swapping.result()
    assert pair.swap(2, publish=False).crossing.delta_bytes == 0
    pair.check()
    pair.close()


@pytest.mark.slow
def test_a_version_is_proven_whole_whatever_share_of_it_crossed(nodes: Callable[..., Nodes]) -> None:
    """A trainer in float32, an engine in bfloat16 that copies."""
    pair = Pair(nodes, torch.float32)
    pair.add(pair.empty(), "a", mode="copy")
    first = pair.swap(1).crossing
    whole = sum(2 * tensor.numel() for tensor in pair.held.values())
    assert (first.bytes, first.delta_bytes, first.changed) == (whole, 0, None)
    assert first.crossed_bytes >= whole
    for version in (2, 3, 4):
        count = changed(pair.held, 0.01, version)
        crossing = pair.swap(version).crossing
        pair.check()
        assert crossing.bytes == crossing.delta_bytes == whole
        assert crossing.changed_bytes == 2 * count
        assert crossing.crossed_bytes <= 0.02 * whole
    same = pair.swap(5).crossing
    assert (same.changed, same.crossed_bytes < 500) == (0.0, True), "nothing has changed"
    changed(pair.held, 0.6, 6)
    most = pair.swap(6).crossing
    assert most.delta_bytes < 0.1 * whole and most.crossed_bytes > 0.9 * whole, "nearly everything has changed"
    pair.check()
    assert pair.trainer.verify(policy()).outcome == "proven"
    (entry, *_) = pair.trainer.history(policy()).swaps
    assert entry.report is not None and entry.report.crossing == most
    pair.close()


@pytest.mark.slow
def test_a_rank_that_lacks_the_version_before_gets_all_of_it(nodes: Callable[..., Nodes]) -> None:
    """An aborted staging has overwritten the base; a new replica has none; a rollback goes from newer to older."""
    pair = Pair(nodes)
    pair.add(pair.empty(), "a")
    pair.swap(1)
    before = {name: tensor.clone() for name, tensor in pair.held.items()}
    changed(pair.held, 0.01, 2)
    newer = {name: tensor.clone() for name, tensor in pair.held.items()}
    assert pair.swap(2).crossing.changed
    with Engine(*pair.targets):
        back = pair.trainer.rollback(policy(), timeout=60)
    assert back.crossing.delta_bytes == back.crossing.bytes, "the older version is a change to the newer one, too"
    assert shards.equal(pair.live[0], before)
    pair.add(pair.empty(flips=True), "b", mode="flip")
    with Engine(*pair.targets):
        pair.targets[1].wait(1, timeout=60)
        report = pair.trainer.swap(policy(), 2, timeout=60)
        assert report.crossing.delta_bytes == report.crossing.bytes
    assert all(shards.equal(live, newer) for live in pair.live)

    refuses = threading.Event()

    def stand_still(version: int) -> None:
        if refuses.is_set():
            raise RuntimeError("not now")

    late = pair.empty()
    target = controlled(pair.engine, policy(), late, replica="c", pause=stand_still)
    eventually(lambda: target.version == 2, "it has caught up")
    refuses.set()
    changed(pair.held, 0.01, 3)
    with pytest.raises(refitd.SwapFailed, match="not now"):
        pair.swap(3)
    assert {one.version for one in (*pair.targets, target)} == {2}
    refuses.clear()
    report = pair.swap(3, publish=False)
    assert 0 <= report.crossing.delta_bytes < report.crossing.bytes, "an aborted swap has overwritten what one held"
    pair.check()
    assert shards.equal(late, pair.held)
    changed(pair.held, 0.01, 4)
    report = pair.swap(4)
    assert report.crossing.delta_bytes == report.crossing.bytes
    pair.close()


@pytest.mark.slow
def test_ranks_of_both_sides_on_both_nodes_and_mxfp8(nodes: Callable[..., Nodes]) -> None:
    n0, n1 = nodes(2, workers=(2, 2))
    with n0.connect() as c0, n1.connect() as c1:
        sources = CutSource([c0, c1], 2, shards.whole(1))
        replica = CutReplica([c0, c1], "fine", 4)
        quantized = {
            name: MXFP8Buffer.empty(tuple(t.shape)) if t.dim() == 2 and t.shape[1] % 32 == 0 else torch.zeros_like(t)
            for name, t in shards.whole(0).items()
        }
        converts = c1.register_target(policy(), quantized, replica="mxfp8")
        full = shards.whole(1)
        with Engine(*replica.targets, converts):
            for version in range(1, 6):
                changed(full, 0.02, version)
                sources.publish(full, version)
                report = c0.swap(policy(), version, timeout=90)
                assert (report.crossing.delta_bytes == report.crossing.bytes) == (version > 1)
                assert replica.holds(full)
                for name, tensor in full.items():
                    held = quantized[name]
                    if isinstance(held, torch.Tensor):
                        assert torch.equal(held, tensor)
                        continue
                    once = MXFP8Buffer.empty(tuple(tensor.shape))
                    once.quantize(tensor)
                    assert torch.equal(once.data, held.data) and torch.equal(once.scale, held.scale)
