"""The paths of a plan: from each kind of memory to each, within a node and between nodes; the memory to go live."""

from __future__ import annotations

import pytest

from refitd import ParameterMetadata
from refitd.config import Config, TransportConfig
from refitd.protocol import cluster, local, shards
from refitd.protocol.base import digest_of, pack
from refitd.protocol.plan_reports import PlanReport
from refitd.protocol.reports import LaneStatus
from tests.support.coordinator_harness import Harness, commit, reports

LINKED = (LaneStatus("GPU-a", reaches=(1,)), LaneStatus("GPU-b", reaches=(0,)))
ALONE = (LaneStatus("GPU-a"), LaneStatus("GPU-b"))
APART = "the GPUs cannot address each other's memory"
NO_TRITON = "Triton is not installed"
CONVERTED = "elements are converted"


def asked(h: Harness) -> PlanReport:
    (report,) = h.say("n0", local.GetPlan("m"), request=7)
    assert isinstance(report, PlanReport)
    return report


def paths(report: object) -> list[tuple[str, ...]]:
    assert all((one.rows, one.bytes) == (1, 32) for one in report.paths)
    return [(one.source, one.target, one.path, one.reason) for one in report.paths]


@pytest.mark.parametrize(
    ("on", "lanes", "has_kernels", "expected"),
    [
        (("", ""), (), False, ("main memory", "main memory", "shared memory", "")),
        (("", "GPU-a"), ALONE, True, ("main memory", "GPU", "pinned", "")),
        (("GPU-a", ""), ALONE, True, ("GPU", "main memory", "pinned", "")),
        (("GPU-a", "GPU-a"), ALONE, True, ("GPU", "same GPU", "same GPU, one kernel", "")),
        (("GPU-a", "GPU-a"), ALONE, False, ("GPU", "same GPU", "tensor operations", NO_TRITON)),
        (("GPU-a", "GPU-b"), LINKED, True, ("GPU", "other GPU", "peer GPU, one kernel", "")),
        (("GPU-a", "GPU-b"), ALONE, True, ("GPU", "other GPU", "pinned windows", APART)),
        (("GPU-a", "GPU-b"), LINKED, False, ("GPU", "other GPU", "pinned windows", NO_TRITON)),
    ],
)
def test_the_path_within_a_node_depends_on_both_memories_and_on_the_node(on, lanes, has_kernels, expected) -> None:
    h = Harness().join(lanes=lanes, has_kernels=has_kernels)
    h.add("src", device=on[0])
    h.add("a", device=on[1])
    assert paths(asked(h)) == [expected]
    h.say("n0", local.Publish(member="src", version=1))
    (report,) = reports(commit(h, h.until_staging(), "a"))
    assert paths(report) == [expected], "the swap went the way that the plan shows"


@pytest.mark.parametrize(
    ("on", "path", "reason"),
    [
        (("", ""), "shared memory", ""),
        (("GPU-a", "GPU-a"), "tensor operations", CONVERTED),
        (("GPU-a", "GPU-b"), "tensor operations", CONVERTED),
        (("", "GPU-a"), "tensor operations", CONVERTED),
    ],
)
def test_converted_elements_take_a_path_of_their_own(on: tuple[str, str], path: str, reason: str) -> None:
    h = Harness().join(lanes=LINKED, has_kernels=True)
    wide = shards.shard_of([ParameterMetadata("w", (4, 4), "float32", 4, resolved_name="w", cast_from="bfloat16")])
    h.say("n0", cluster.DescribeShard(digest=digest_of(wide), packed=pack(wide)))
    h.add("src", device=on[0])
    h.add("a", device=on[1], digest=digest_of(wide))
    (way,) = asked(h).paths
    assert (way.path, way.reason, way.bytes) == (path, reason, 64)


@pytest.mark.parametrize(
    ("service", "on", "able", "expected"),
    [
        ("gloo", ("", ""), "gloo", ("main memory", "main memory of another node", "gloo", "")),
        ("nixl", ("", ""), "gloo nixl", ("main memory", "main memory of another node", "nixl", "")),
        ("nccl", ("GPU-a", "GPU-a"), "gloo nccl", ("GPU", "GPU of another node", "nccl", "")),
        ("nixl", ("GPU-a", "GPU-b"), "gloo nixl", ("GPU", "GPU of another node", "nixl", "")),
        ("nvshmem", ("GPU-a", "GPU-b"), "gloo nvshmem", ("GPU", "GPU of another node", "nvshmem", "")),
        *(
            (service, on, able, (*kinds, "gloo through main memory", "gloo moves main memory"))
            for service, on, able, kinds in (
                ("gloo", ("GPU-a", "GPU-a"), "gloo", ("GPU", "GPU of another node")),
                ("nccl", ("GPU-a", ""), "gloo nccl", ("GPU", "main memory of another node")),
                ("nccl", ("", "GPU-a"), "gloo nccl", ("main memory", "GPU of another node")),
                # only one node has NCCL
                ("nccl", ("GPU-a", "GPU-a"), "gloo", ("GPU", "GPU of another node")),
            )
        ),
    ],
)
def test_the_path_between_nodes_is_the_service_of_the_epoch(service, on, able, expected) -> None:
    h = Harness(Config(transport=TransportConfig(service=service)))
    h.join("n0", 10, (1,), services=("gloo", service))
    h.join("n1", 11, (2,), services=tuple(able.split()))
    h.add("src", device=on[0])
    h.add("a", node="n1", device=on[1])
    h.say("n0", local.Publish(member="src", version=1))
    h.say("n0", local.StartSwap("m"), request=2)
    (epoch,) = {m.epoch.id for _, _, m in h.sent if isinstance(m, cluster.LoadPlan) and m.epoch is not None}
    assert epoch and paths(asked(h)) == [expected]


def test_the_memory_of_each_target_and_its_last_pause() -> None:
    h = Harness().join()
    h.add("src")
    h.add("flips", flips=True, held_bytes=100, staging_bytes=100, device="GPU-a")
    h.add("copies", held_bytes=100, staging_bytes=40)
    before = [
        (one.replica, one.mode, one.device, one.held_bytes, one.staging_bytes, one.pause_s) for one in asked(h).memory
    ]
    assert before == [("copies", "copy", "", 100, 40, None), ("flips", "flip", "GPU-a", 100, 100, None)]
    h.say("n0", local.Publish(member="src", version=1))
    swap, began = h.until_staging(), h.now
    h.now += 2.0
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    for member, paused_s in (("flips", 0.25), ("copies", 0.5)):
        h.say("n0", local.CommitDone(swap=swap, member=member, paused_s=paused_s))
    found = asked(h).memory
    assert [one.pause_s for one in found] == [0.5, 0.25]
    assert [one.other_way for one in found] == ["in-place"] * 2 and {one.stage_s for one in found} == {h.now - began}
