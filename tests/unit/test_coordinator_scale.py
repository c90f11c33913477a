"""The cost of a fleet for its coordinator grows with the number of nodes, not faster."""

from __future__ import annotations

from benchmarks.coordinator import LANES, Figures, Fleet


def swapped(nodes: int) -> Figures:
    """Return the messages of the first swap of a fleet: the plan is loaded and the epoch is formed."""
    fleet = Fleet(nodes)
    for node in range(nodes):
        fleet.come(node)
    fleet.figures = Figures()
    fleet.swap(1)
    return fleet.figures


def test_a_swap_costs_each_node_the_same_messages_and_bytes_in_a_fleet_of_any_size() -> None:
    small, large = swapped(8), swapped(32)
    for kind in ("LoadPlan", "PlanLoaded", "Stage", "StageDone", "CommitStaged", "EndSwap"):
        assert large.messages[kind] <= 32 and small.messages[kind] <= 8, "one for each node and phase"
        assert large.bytes[kind] / 32 < 1.1 * small.bytes[kind] / 8, kind
    for kind in large.messages.keys() - {"SwapProgress"}:
        assert large.messages[kind] <= LANES * 32, kind
