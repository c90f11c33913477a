"""The resources of a cluster that flows share: cards, links within nodes, memory, uplinks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refitd.offline.clusters import GB, ClusterSpeeds
from refitd.plan.columns import Ints
from refitd.simulate.fluid import Floats, Flows
from refitd.simulate.hops import Hops, Ranks


@dataclass(frozen=True)
class Coding:
    """How much of what crosses between nodes travels, and what that costs; by default all of it, at no cost.

    Attributes:
        per_element: bytes that travel for each element; None: all of it.
        passes: reads or writes of memory for each byte, at each end, beside the transfer; not where a relay sends.
    """

    per_element: float | None = None
    passes: float = 0.0

    def share(self, hops: Hops) -> Floats:
        """Return the share of each hop's bytes that travels, at most 1."""
        if self.per_element is None:
            return np.ones(len(hops.nbytes))
        with np.errstate(divide="ignore", invalid="ignore"):
            wanted = np.where(hops.nbytes > 0, self.per_element * hops.elements / hops.nbytes, 0.0)
        return np.minimum(1.0, wanted)


class Network:
    """Numbers the resources of a cluster: `capacity` [resources] in bytes per second, and their names."""

    def __init__(self, cluster: ClusterSpeeds, ranks: Ranks) -> None:
        self._cluster, self._ranks = cluster, ranks
        nodes, count = len(ranks.nodes), len(ranks)
        cards = ranks.count if cluster.nics_per_node is None else np.full(nodes, cluster.nics_per_node, np.int64)
        first = np.cumsum(cards) - cards
        # a node's ranks share its cards evenly, neighbours the same one
        self._card = first[ranks.node] + ranks.place * cards[ranks.node] // ranks.count[ranks.node]
        total = int(cards.sum())
        self._card_node = np.repeat(np.arange(nodes), cards)
        self._card_number = np.arange(total) - first[self._card_node]
        self._leaf = np.arange(nodes) // (cluster.leaf_nodes or nodes or 1)
        leaves = int(self._leaf.max(initial=-1)) + 1
        sizes = (total, total, count, count, count, leaves, leaves, count, count)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        self._at = dict(zip(_KINDS, starts.tolist(), strict=False))
        self.capacity: Floats = np.full(int(starts[-1]), np.inf)
        self._fill("sends", self._speeds("send_gb_s"))
        self._fill("receives", self._speeds("receive_gb_s"))
        self._fill("gives", np.full(count, (cluster.rank_gb_s or np.inf) * GB))
        self._fill("takes", np.full(count, (cluster.rank_gb_s or np.inf) * GB))
        self._fill("copies", np.full(count, (cluster.memory_gb_s or np.inf) * GB))
        uplink = np.zeros(leaves)
        np.add.at(uplink, self._leaf, cards * cluster.nic_gb_s * GB / cluster.oversubscription)
        self._fill("up", uplink)
        self._fill("down", uplink)
        self._fill("packs", np.full(count, (cluster.digest_gb_s or np.inf) * GB))
        self._fill("unpacks", np.full(count, (cluster.digest_gb_s or np.inf) * GB))

    def slow_last(self) -> Ints:
        """Return the nodes in the order of chains: slow receivers after fast ones, slow senders, which end them, last.

        As in refitd.plan.relays, but that all chains end with the same nodes.
        """
        send, receive = (self._own(which) for which in ("send_gb_s", "receive_gb_s"))
        order: Ints = np.lexsort((np.arange(len(send)), -receive, -np.minimum(send, receive.min())))
        return order

    def _own(self, which: str) -> Floats:
        """Return each node's speed, one card's, in bytes per second."""
        speed = np.full(len(self._ranks.nodes), self._cluster.nic_gb_s * GB)
        for node in self._cluster.nodes:
            own = getattr(node, which)
            if own is not None:
                speed[self._ranks.nodes.index(node.name)] = own * GB
        return speed

    def _speeds(self, which: str) -> Floats:
        each: Floats = self._own(which)[self._card_node]
        return each

    def _fill(self, kind: str, values: Floats) -> None:
        self.capacity[self._at[kind] : self._at[kind] + len(values)] = values

    def flows(self, hops: Hops, coding: Coding) -> tuple[Flows, Floats]:
        """Return the flows of hops, and the capacities of all resources: those of single flows follow the others."""
        src, dst, ranks = hops.src, hops.dst, self._ranks
        own, near = src == dst, ranks.node[src] == ranks.node[dst]
        far = ~near
        leaves = far & (self._leaf[ranks.node[src]] != self._leaf[ranks.node[dst]])
        share = coding.share(hops)
        whole, none = np.ones(len(src)), np.full(len(src), -1, np.int64)
        limited = self._cluster.flow_gb_s is not None
        passes = np.full(len(src), coding.passes)
        columns = [
            (np.where(far, self._at["sends"] + self._card[src], none), share),
            (np.where(far, self._at["receives"] + self._card[dst], none), share),
            (np.where(near & ~own, self._at["gives"] + src, none), whole),
            (np.where(near & ~own, self._at["takes"] + dst, none), whole),
            (np.where(own, self._at["copies"] + dst, none), whole),
            (np.where(leaves, self._at["up"] + self._leaf[ranks.node[src]], none), share),
            (np.where(leaves, self._at["down"] + self._leaf[ranks.node[dst]], none), share),
            (np.where(far, self._at["packs"] + src, none), whole),
            (np.where(far, self._at["unpacks"] + dst, none), whole),
            (np.where(far & ~hops.is_relay & (coding.passes > 0), self._at["copies"] + src, none), passes),
            (np.where(far & (coding.passes > 0), self._at["copies"] + dst, none), passes),
            (np.where(far & limited, len(self.capacity) + np.arange(len(src)), none), share),
        ]
        capacity = self.capacity
        if self._cluster.flow_gb_s is not None:
            capacity = np.concatenate([capacity, np.full(len(src), self._cluster.flow_gb_s * GB)])
        resource, weight = (np.stack(each, axis=1) for each in zip(*columns, strict=True))
        resource = np.where(np.isinf(capacity)[resource] & (resource >= 0), -1, resource)
        return Flows(hops.nbytes.astype(np.float64), resource, weight), capacity

    def name(self, resource: int) -> str:
        """Return a resource's name."""
        kind = max((k for k in _KINDS if self._at[k] <= resource), key=lambda k: self._at[k])
        number = resource - self._at[kind]
        if kind in ("sends", "receives"):
            node = int(self._card_node[number])
            cards = int((self._card_node == node).sum())
            card = f" card {int(self._card_number[number])}" if cards > 1 else ""
            return f"{self._ranks.nodes[node]}{card} {kind}"
        if kind in ("up", "down"):
            return f"leaf switch {number} {kind}"
        roster = self._ranks.rosters[number]
        return f"{roster.label or f'rank {roster.rank}'} {_DOES[kind]}"


_KINDS = ("sends", "receives", "gives", "takes", "copies", "up", "down", "packs", "unpacks")
_DOES = {
    "gives": "sends within its node",
    "takes": "receives within its node",
    "copies": "copies in its memory",
    "packs": "packs and digests",
    "unpacks": "digests and unpacks",
}
