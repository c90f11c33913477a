"""`refitctl trace` of a swap between two nodes contains every process, in chronological order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine
from tests.support.controls import controlled
from tests.support.fleet import go_live
from tests.support.names import policy
from tests.support.otlp import collecting
from tests.support.otlp import spans as spans_of
from tests.support.programs import refitctl


def test_a_trace_of_one_node(shared_daemon: Daemon) -> None:
    with shared_daemon.connect("trainer") as trainer, shared_daemon.connect("engine") as engine:
        source = trainer.register_source("traced", {"w": torch.ones(1000)})
        target = engine.register_target("traced", {"w": torch.zeros(1000)}, replica="a")
        swap = go_live(trainer, source, 1, target, model="traced").swap
        report = trainer.trace("traced")
        with pytest.raises(refitd.RefusedError, match=rf"no trace of swap 'nosuch'.*{swap}"):
            trainer.trace("traced", "nosuch")
        target.close()
        source.close()
    assert (report.swap, report.outcome, report.missing) == (swap, "committed", ())
    (node,) = report.nodes
    assert node.error_s is not None
    assert {span.name for span in node.spans} >= {"load plan", "stage", "copy, compared", "commit", "stands still"}


@pytest.mark.slow
def test_a_trace_has_every_process_and_its_clocks_agree(
    nodes: Callable[..., tuple[Daemon, ...]], tmp_path: Path
) -> None:
    first, second = nodes(2)
    file = tmp_path / "swap.json"
    with first.connect("trainer") as trainer, first.connect("near") as near, second.connect("far") as far:
        source = trainer.register_source(policy(), {"w": torch.ones(1_000_000)})
        controlled(near, policy(), {"w": torch.zeros(1_000_000)}, replica="a")
        b = far.register_target(policy(), {"w": torch.zeros(1_000_000)}, replica="b")
        ids = []
        with Engine(b):
            for version in (1, 2):
                source.publish(version)
                ids.append(trainer.swap(policy(), timeout=30).swap)
        with collecting() as collector:
            said = refitctl(second, "trace", policy(), "--swap", ids[0], "-o", str(file), "--otlp", collector.url)
        assert said.returncode == 0 and "clocks agree within" in said.stdout, said.stderr
    made = json.loads(file.read_text())
    assert made["otherData"]["swap"] == ids[0] and made["otherData"]["missing"] == []
    ((_, request),) = collector.got
    root, *sent = spans_of(request)
    assert root[6]["refitd.swap"] == ids[0] and root[6]["refitd.outcome"] == "committed"
    assert Counter(span[1] for span in sent) == Counter(e["name"] for e in made["traceEvents"] if e["ph"] == "X")
    assert {span[0] for span in sent} == {"coordinator", "node n0", "node n1"}
    error_us = 1e6 * max(made["otherData"]["clock_error_s"].values())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in made["traceEvents"] if e["ph"] == "M" and e["tid"]}
    spans = {
        (e["pid"], names[e["pid"], e["tid"]].partition(" (pid")[0].partition(" rank")[0], e["name"]): e
        for e in made["traceEvents"]
        if e["ph"] == "X"
    }
    head, n0, n1 = 1, 2, 3
    stage, commit = spans[head, "coordinator", "stage"], spans[head, "coordinator", "commit"]
    for node in (n0, n1):
        for name in ("stage", "exchange with other nodes, compared"):
            inner = spans[node, "daemon" if name == "stage" else "worker 0", name]
            assert stage["ts"] - error_us <= inner["ts"]
            assert inner["ts"] + inner["dur"] <= stage["ts"] + stage["dur"] + error_us
    assert (n0, "worker 0", "copy, compared") in spans and any(
        where[0] == n0 and where[2] == "pause" for where in spans
    )
    for node, engine in ((n0, "a"), (n1, "b")):
        inner = spans[node, engine, "commit"]
        assert commit["ts"] - error_us <= inner["ts"] <= commit["ts"] + commit["dur"] + error_us
    assert spans[n1, "worker 0", "exchange with other nodes, compared"]["args"]["bytes"] == 4_000_000
