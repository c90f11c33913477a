"""The rules of a swap: what holds in every world, and in a world where only faults may happen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from refitd.commit.rank_state import RankStep
from refitd.commit.target_state import Live, Step
from refitd.protocol import local
from tests.exploration.fleet import Fleet
from tests.exploration.nodes import Node, in_contact
from tests.exploration.worlds import Broken, Journal, Store, World


class Rules:
    """Checks worlds; the facts of each node are found once."""

    def __init__(self, fleets: Store, nodes: Store, journals: Store) -> None:
        self.fleets, self.nodes, self.journals = fleets, nodes, journals
        self._facts: dict[int, tuple[Any, ...]] = {}

    def check(self, world: World) -> None:
        """Check the rules that hold in every world.

        Raises:
            Broken: one does not.
        """
        journal: Journal = self.journals.values[world.journal]
        for index in range(2):
            node = world.nodes[index]
            facts = self._facts.get(node)
            if facts is None:
                facts = self._facts[node] = tuple(serving(self.nodes.values[node]))
            for rank, version, swap, is_cut in facts:
                if version == journal.live:
                    continue
                # it may serve the previous version until the decision reaches it, or until its permit ends
                is_deciding = journal.is_written or swap in {s for s, v in journal.decided if v == journal.live}
                is_told = (index, rank) in journal.ranks if is_cut else is_deciding
                if version != journal.before or not is_told:
                    reason = f"rank {'ab'[rank]}{index} serves version {version}, and version {journal.live} is live"
                    raise Broken(reason, world=world)

    def check_end(self, world: World) -> None:
        """Check that no part of the cluster waits in a world where only faults may happen.

        Raises:
            Broken: something is.
        """
        fleet: Fleet = self.fleets.values[world.fleet]
        journal: Journal = self.journals.values[world.journal]
        if fleet.swap is not None:
            waits = sorted(fleet.swap.waiting)
            raise Broken(f"the swap waits in {fleet.swap.phase.value} for {waits}, and no answer can come", world=world)
        if fleet.live != journal.live:
            raise Broken("the coordinator does not know the live version", world=world)
        for number, node in enumerate(self.nodes.values[n] for n in world.nodes):
            if node.paused:
                raise Broken(f"the controller keeps its engine paused for {node.paused}", world=world)
            for who, rank in zip("ab", node.ranks, strict=True):
                target, process, name = rank.target, rank.process, f"rank {who}{number}"
                if target is None or process is None:
                    raise Broken(f"{name} is not registered", world=world)
                if target.step is not Step.IDLE or process.step is not RankStep.IDLE or process.pending is not None:
                    raise Broken(f"{name} waits: daemon {target}; process {process}", world=world)
                if target.version != process.version:
                    raise Broken(f"{name}: the daemon knows {target}, the process {process}", world=world)
                if rank.serves != journal.live and target.live is not Live.SUSPENDED:
                    raise Broken(f"{name} does not serve the live version: {target}; {process}", world=world)


def serving(node: Node) -> Iterator[tuple[int, int, str | None, bool]]:
    """Yield (replica, version, swap, is_cut) of each rank that serves, unless the order to stop is on its way to it.

    `swap` is its staged swap. `is_cut`: the coordinator does not renew its permit.
    """
    for index, rank in enumerate(node.ranks):
        version = rank.serves
        is_stopped = any(m[0] in ("fence", "evict") and m[1] == index for m in node.down)
        is_stopped |= any(isinstance(m, local.Fence | local.Evicted) for m in rank.down)
        if version is not None and not is_stopped:
            swap = rank.target.swap if rank.target is not None else None
            yield index, version, swap, not in_contact(node, rank)
