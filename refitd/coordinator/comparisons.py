"""Before a swap: compare the regions that several source ranks hold, by digests that their nodes take.

Regions found equal are not compared again until a source rank registers anew or provides other tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from refitd.coordinator.models import Running
from refitd.coordinator.plans import LoadedPlan
from refitd.coordinator.region_comparison import RegionComparison
from refitd.protocol import cluster
from refitd.protocol.base import Message

# Share of the timeout given to nodes, so that their own errors, which name who is late, arrive first.
NODE_SHARE = 0.9


class Comparisons:
    """Starts and ends the comparisons of running swaps; each swap holds its own (`Running.comparison`)."""

    def __init__(self, to_node: Callable[[str, Message], None], log: Callable[..., None]) -> None:
        self._to_node = to_node
        self._log = log

    def are_equal(self, running: Running, plan: LoadedPlan, now: float) -> bool:
        """Return whether the regions that several sources hold are known to be equal; if not, request digests."""
        membership, swap, regions = running.membership, running.swap, plan.regions
        is_compared = running.comparison is not None  # for this swap
        # seeds are compared with what they held when it went live
        if is_compared or not len(regions) or not membership.check_replicas or membership.seeds:
            return True
        # a rank that is not read may have dropped the version; a later swap compares it
        held = [
            member
            for rank, member in sorted(membership.sources.items())
            if rank in regions.holder_of and swap.version in member.versions
        ]
        said = [regions.digest, *(f"{member.id} {member.contents}" for member in held)]
        key = xxhash.xxh3_128_hexdigest("\0".join(said).encode())
        if not held or membership.compared.get(key):
            return True
        timeout_s = NODE_SHARE * (swap.deadline - now)
        comparison = RegionComparison(key, regions, held, now + timeout_s)
        self._log("comparing", swap=swap.swap, regions=len(regions), nodes=", ".join(comparison.nodes))
        running.plan, running.comparison = plan, comparison
        for node, request in comparison.requests(swap.swap, swap.version, running.run, NODE_SHARE * timeout_s):
            self._to_node(node, request)
        return False

    def digested(self, running: Running, node: str, message: cluster.RegionsDigested) -> LoadedPlan | str | None:
        """Handle a node's digests.

        Returns:
            The plan to continue with, once all nodes have answered; None before; or why the swap must be aborted.
        """
        comparison, model = running.comparison, running.swap.model
        if comparison is None or not comparison.waiting:
            return None
        if message.reason:
            return f"comparing the sources of {model!r}: {message.reason}"
        if not comparison.answered(node, message.digests):
            return None
        if problems := comparison.problems():
            advice = f"[models.{model}] check_replicas = false at the coordinator swaps all the same"
            return f"{'; '.join(problems)} ({advice})"
        running.membership.compared.put(comparison.key, True)
        return running.plan

    def late(self, running: Running, now: float) -> str:
        """Return which nodes have not answered in time, and what to do; "" while there is time."""
        comparison, swap = running.comparison, running.swap
        if comparison is None or not comparison.waiting or now < comparison.deadline:
            return ""
        return (
            f"nodes {', '.join(sorted(comparison.waiting))}: what several sources hold is not compared after "
            f"{now - swap.entered[swap.phase]:.1f} s (look at their workers, allow more time, or set "
            f"[models.{swap.model}] check_replicas = false at the coordinator)"
        )

    def ended(self, running: Running) -> None:
        """End the comparison of a swap that is over: nodes stop digesting and release the versions."""
        if running.comparison is not None:
            for node in running.comparison.nodes:
                self._to_node(node, cluster.Abort(swap=running.swap.swap, reason=running.swap.reason))
