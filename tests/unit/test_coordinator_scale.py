"""What the coordinator's loop does for one swap grows with the ranks, not with their square."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import refitd.coordinator
from refitd.config import Config, ModelConfig
from refitd.protocol import cluster, local
from tests.support.coordinator_harness import Harness, reports

HERE = str(Path(refitd.coordinator.__file__).parent)


def fleet(count: int) -> Harness:
    """As many source ranks as replicas, each on a node of its own."""
    h = Harness(Config(models={"m": ModelConfig(catch_up=False)}))
    for number in range(count):
        h.join(f"n{number}", pid=10 + number, workers=(1,), keeps_parts=True)
        h.add(f"src{number}", f"n{number}", rank=number, world_size=count)
        h.add(f"a{number}", f"n{number}")
    return h


def swapped(h: Harness, version: int, count: int) -> None:
    """Publish and swap a version, with all answers of all nodes."""
    for number in range(count):
        h.say(f"n{number}", cluster.ShardPublished(member=f"src{number}", version=version))
    h.say("n0", local.StartSwap("m"), request=9)
    swap, pending, staged = "", list(h.sent), 0
    while pending:
        node, _, message = pending.pop(0)
        match message:
            case cluster.DigestRegions(asked, table=table):
                h.say(node, cluster.RegionsDigested(asked, bytes(8 * int(table["rows"]))))
            case cluster.LoadShare(plan, epoch=epoch):
                h.say(node, cluster.PlanLoaded(plan, epoch.id if epoch is not None else ""))
            case cluster.Stage(swap):
                staged += 1
                h.say(node, cluster.StageDone(swap, 1, 32, 0.1))
            case cluster.CommitStaged(swap):
                h.say(node, cluster.MemberCommitted(swap, f"a{node[1:]}", 0.0))
                if done := reports([m for _, _, m in h.sent]):
                    assert done[0].outcome == "committed" and staged == count
                    return
            case _:
                continue
        pending += h.sent
    raise AssertionError(f"swap {swap} has not ended")


def lines(h: Harness, version: int, count: int) -> int:
    """Count the lines of the coordinator that a swap runs; every round of a loop counts, comprehensions' too."""
    found = 0

    def traced(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal found
        if event == "call" and not frame.f_code.co_filename.startswith(HERE):
            return None
        found += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        swapped(h, version, count)
    finally:
        sys.settrace(before)
    return found


def test_four_times_as_many_ranks_are_four_times_the_work() -> None:
    few, many = fleet(12), fleet(48)
    for version in (1, 2):
        one, four = lines(few, version, 12), lines(many, version, 48)
        assert four < 4.2 * one, f"version {version}: {one} lines for 12 nodes, {four} for 48"
