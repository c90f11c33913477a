"""Faults during the comparison of differently cut sources: the swap ends in time, and the next one is exact."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

import refitd
from refitd.testing import Cluster, Engine, RunningSwap, eventually, stopped
from refitd.testing.daemon import joined
from tests.support.cuts import in_cuts, offered_in_cuts

FAULTS = (
    "a worker is killed",
    "a worker stands still",
    "a daemon is killed",
    "the coordinator is killed",
    "a source withdraws",
    "a source closes",
    "somebody aborts it",
)
PLAN_S = 12.0  # a worker that was killed is started again in it


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(("n0", "n1"), f"[deadlines]\nplan_s = {PLAN_S}") as cluster:
        yield cluster


@pytest.mark.parametrize("fault", FAULTS)
def test_a_comparison_that_is_interrupted_ends_the_swap_in_its_time_and_the_next_is_exact(
    cluster: Cluster, fault: str
) -> None:
    whole, model, near = torch.arange(512.0 * 600).view(512, 600), fault.replace(" ", "-"), cluster.daemons["n0"]
    held = in_cuts(whole, (None, 0))
    here, there = near.connect("here"), cluster.daemons["n1"].connect("there")
    with here:
        target = here.register_target(model, live := {"w": torch.zeros_like(whole)}, replica="r")
        with Engine(target):
            offered = [offered_in_cuts((here, there)[rank > 0], model, held, "copied", [rank])[0] for rank in range(3)]
            leases = [source.lend(1) for source, _ in offered]
            compared = cluster.coordinator.log().count("comparing")
            (worker,) = cluster.daemons["n1"].workers()
            with stopped([worker]):
                swap = RunningSwap(near.connect("swap"), model, 1)
                eventually(lambda: cluster.coordinator.log().count("comparing") > compared, "the nodes are asked")
                match fault:
                    case "a worker is killed":
                        os.kill(worker, signal.SIGKILL)
                    case "a worker stands still":
                        with pytest.raises(refitd.SwapFailed, match=r"n1.* (has not read|is not compared)"):
                            swap.result()
                    case "a daemon is killed":
                        cluster.daemons["n1"].kill()
                    case "the coordinator is killed":
                        cluster.coordinator.kill()
                        cluster.coordinator.start()
                    case "a source withdraws":
                        leases[1].withdraw()
                    case "a source closes":
                        offered[1][0].close()
                    case _:
                        with near.connect("operator") as operator:
                            operator.abort(model, "no time")
            if fault == "a worker is killed":
                assert swap.result().outcome == "committed"
            else:
                with pytest.raises(refitd.RefitdError):
                    swap.result()
                assert not live["w"].any()
            if fault == "a daemon is killed":
                there.close()
                cluster.daemons["n1"].start()
                there = cluster.daemons["n1"].connect("there")
            else:
                for source, _ in offered[1:]:
                    source.close()
            leases[0].withdraw()
            with cluster.daemons["n1"].connect("status") as client:
                eventually(lambda: joined(client) == 2, "both nodes are there")
            again = [offered_in_cuts(there, model, held, "copied", [rank])[0] for rank in (1, 2)]
            for source, tensor in [offered[0], *again]:
                tensor.add_(1)
                source.publish(2)
            assert here.swap(model, 2, timeout=30).outcome == "committed"
            assert torch.equal(live["w"], whole + 1)
            for source, _ in [offered[0], *again]:
                source.close()
        target.close()
    there.close()
