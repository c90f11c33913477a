"""Before a swap: have nodes digest what its sources hold in different cuts, and compare."""

from __future__ import annotations

from collections.abc import Callable

from refitd.coordinator.models import Running
from refitd.coordinator.plans import LoadedPlan
from refitd.coordinator.replica_digests import HeldRegions, region_comparison
from refitd.protocol import cluster
from refitd.protocol.base import Message

# Nodes answer in this share of the time that there is: their own errors name who is late.
NODE_SHARE = 0.9


class Comparisons:
    """Begins and ends the comparisons of running swaps, each of which holds its own (`Running.comparison`)."""

    def __init__(self, to_node: Callable[[str, Message], None], log: Callable[..., None]) -> None:
        self._to_node = to_node
        self._log = log

    def are_equal(self, running: Running, plan: LoadedPlan, now: float) -> bool:
        """Whether what sources hold in different cuts is known to be equal; else ask their nodes for digests."""
        fleet, swap = running.fleet, running.swap
        if not len(plan.regions) or not fleet.check_replicas:
            return True
        held = {rank: HeldRegions(m.id, m.node, m.describe()) for rank, m in fleet.sources.items()}
        timeout_s = NODE_SHARE * (swap.deadline - now)
        comparison = region_comparison(plan.regions, held, now + timeout_s)
        if fleet.compared.equal.get(comparison.key):
            return True
        self._log("comparing", swap=swap.swap, regions=len(plan.regions), left_out=", ".join(plan.not_compared))
        running.plan, running.comparison = plan, comparison
        for node, request in comparison.requests(swap.swap, swap.version, running.run, NODE_SHARE * timeout_s):
            self._to_node(node, request)
        return False

    def digested(self, running: Running, node: str, message: cluster.RegionsDigested) -> LoadedPlan | str | None:
        """Take a node's digests.

        Returns:
            The plan to go on with once all nodes have answered, None before; or why the swap must be aborted.
        """
        comparison, model = running.comparison, running.swap.model
        if comparison is None:
            return None
        if message.reason:
            return f"comparing the sources of {model!r}: {message.reason}"
        if not comparison.answered(node, message.digests):
            return None
        if problems := comparison.problems():
            return (
                f"{'; '.join(problems)} ([models.{model}] check_replicas = false at the coordinator swaps all the same)"
            )
        running.comparison = None
        running.fleet.compared.equal.put(comparison.key, True)
        return running.plan

    def late(self, running: Running, now: float) -> str:
        """Return which nodes have not answered in time, and what to do; "" while there is time."""
        comparison, swap = running.comparison, running.swap
        if comparison is None or now < comparison.deadline:
            return ""
        return (
            f"nodes {', '.join(comparison.waiting)}: what sources hold in different cuts is not compared after "
            f"{now - swap.entered[swap.phase]:.1f} s (allow more time, or set [models.{swap.model}] check_replicas = "
            "false at the coordinator)"
        )

    def ended(self, running: Running) -> None:
        """The swap is over: nodes that still digest for it stop."""
        if running.comparison is not None:
            for node in running.comparison.waiting:
                self._to_node(node, cluster.Abort(swap=running.swap.swap, reason=running.swap.reason))
