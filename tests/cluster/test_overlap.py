"""A version is staged while it is published, and becomes visible only as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import refitd
from refitd.client import slot_source
from refitd.client.streamed import StreamedSource
from refitd.protocol.reports import SwapProgress, SwapReport
from refitd.testing import Daemon, Engine
from tests.support.names import policy

SHAPES = {f"w{i}": ((1 << 16,), torch.float32) for i in range(6)}
FAILS = 4  # the version whose iterator raises, if it is staged by then
Tensors = dict[str, torch.Tensor]


def values(version: int) -> Tensors:
    return {name: torch.arange(shape[0], dtype=dtype) + version for name, (shape, dtype) in SHAPES.items()}


def zeros() -> Tensors:
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}


@pytest.fixture(autouse=True)
def tells_of_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_source, "TOLD_BYTES", 1)
    monkeypatch.setattr(slot_source, "TOLD_PART", 1 << 40)


class Early:
    """A publication of `source` whose second half waits until `go`, and a swap that is asked for before it."""

    def __init__(self, source: StreamedSource, version: int, operator: refitd.Client, timeout: float = 60.0) -> None:
        self.staging, self.go = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor()
        self.publishing = self._pool.submit(source.publish_from, version, self._weights(version))
        self.swapping = self._pool.submit(self._swap, operator, version, timeout)

    def _weights(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        items = [*values(version).items()]
        yield from items[3 * (version % 2) :][:3]  # odd versions begin with the last tensors
        assert self.go.wait(30)
        if self.staging.is_set() and version == FAILS:
            raise RuntimeError("the gather failed")
        yield from items[3 - 3 * (version % 2) :][:3]

    def _swap(self, operator: refitd.Client, version: int, timeout: float) -> SwapReport:
        def said(progress: SwapProgress) -> None:
            if progress.phase == "stage":
                self.staging.set()

        try:
            return operator.swap(policy(), version, timeout=timeout, wait=30, on_progress=said)
        except refitd.SwapFailed as exc:
            return exc.report

    def ended(self) -> SwapReport:
        """Return the swap's report."""
        self.go.set()
        self._pool.shutdown()
        return self.swapping.result()


@pytest.mark.parametrize("count", [1, 2])
def test_a_version_is_staged_while_it_is_published(nodes: Callable[..., tuple[Daemon, ...]], count: int) -> None:
    first, *others = nodes(count)
    last = others[0] if others else first
    with first.connect("trainer") as trainer, last.connect("engine") as engine, last.connect("operator") as operator:
        source, mine = trainer.declare_source(policy(), SHAPES), zeros()
        with Engine(engine.register_target(policy(), mine, replica="a")):
            for version in (1, 2, 3):  # between nodes, the others are sent as deltas
                early = Early(source, version, operator)
                assert early.staging.wait(30)
                assert all(
                    torch.equal(mine[name], was)
                    for name, was in (values(version - 1) if version > 1 else zeros()).items()
                )
                report = early.ended()
                assert report.outcome == "committed"
                assert all(torch.equal(mine[name], tensor) for name, tensor in values(version).items())
                trace = trainer.trace(policy(), report.swap)
        (span,) = [span for node in trace.nodes for span in node.spans if span.name == "publish"]
        steps = {s.name: s for node in trace.nodes for s in node.spans}
        assert any(s.began < span.ended < s.ended for n in trace.nodes for s in n.spans if s.name == "stage")
        if others:
            assert {"send", "receive", "place", "digest", "await publication"} <= steps.keys()
            assert steps["send"].began < steps["await publication"].ended, "pieces cross before the last is published"
        source.close()


@pytest.mark.parametrize("end", ["raises", "leaves", "is late"])
def test_a_publication_that_does_not_end_aborts_the_swap(daemon: Daemon, end: str) -> None:
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine, daemon.connect("again") as again:
        source, mine = trainer.declare_source(policy(), SHAPES), zeros()
        with Engine(engine.register_target(policy(), mine, replica="a")):
            source.publish_from(1, values(1).items())
            engine.swap(policy(), 1, timeout=60)
            early = Early(source, FAILS, engine, timeout=2.0 if end == "is late" else 60.0)
            assert early.staging.wait(30)
            if end == "leaves":
                trainer.close()
            elif end == "is late":
                early.swapping.result()
                early.staging.clear()
            report = early.ended()
            assert report.outcome == "aborted" and "source rank 0" in report.reason, report.reason
            assert all(torch.equal(mine[name], tensor) for name, tensor in values(1).items())
            if end == "is late":
                early.publishing.result()
                after = FAILS
            else:
                with pytest.raises((RuntimeError, refitd.RefitdError)):
                    early.publishing.result()
                source = again.declare_source(policy(), SHAPES) if end == "leaves" else source
                after = FAILS + 1
                source.publish_from(after, values(after).items())
            assert engine.swap(policy(), after, timeout=60).outcome == "committed"
            assert all(torch.equal(mine[name], tensor) for name, tensor in values(after).items())
