"""Cable measurements: the pairs of each round, and each node's speed from the rounds' results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from refitd.offline.clusters import GB, ClusterSpeeds, NodeSpeed

# The number of peers that each node is measured with, in each direction: one slow peer must not hide a fast cable.
PARTNERS = 4
# A node whose speed differs from the usual one by less than this share counts as equal to it.
ALIKE = 0.1

Pairs = list[tuple[str, str]]


def rounds_of(nodes: Sequence[str]) -> list[Pairs]:
    """Return rounds of (sending node, receiving node) in which each node is at most once, and sends or receives.

    Over all rounds each node sends to up to PARTNERS others, and receives from them.
    """
    ring: list[str | None] = [*sorted(set(nodes))]
    ring += [None] * (len(ring) % 2)  # with an odd number of nodes, one sits out each round
    found: list[Pairs] = []
    for _ in range(min(PARTNERS, len(ring) - 1)):
        half = len(ring) // 2
        there = [(a, b) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if a and b]
        found += [there, [(b, a) for a, b in there]]
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def speeds_of(rates: Iterable[tuple[str, str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes that each node sends and receives per second: its best result with any peer.

    Args:
        rates: (sending node, receiving node, bytes per second).
    """
    send: dict[str, float] = {}
    receive: dict[str, float] = {}
    for source, target, rate in rates:
        if rate > 0:
            send[source] = max(rate, send.get(source, 0.0))
            receive[target] = max(rate, receive.get(target, 0.0))
    return send, receive


def cluster_of(name: str, note: str, send: Mapping[str, float], receive: Mapping[str, float]) -> ClusterSpeeds:
    """Return the cluster of measured speeds (bytes per second): the usual speed, and the nodes that differ.

    Raises:
        ValueError: nothing was measured.
    """
    speeds = [*send.values(), *receive.values()]
    if not speeds:
        raise ValueError("no cable was measured")
    usual = _rounded(statistics.median_high(speeds))
    nodes = []
    for node in sorted(send.keys() | receive.keys()):
        own = [_rounded(way[node]) if node in way else None for way in (send, receive)]
        differ = [speed if speed is not None and abs(speed - usual) > ALIKE * usual else None for speed in own]
        if any(differ):
            nodes.append(NodeSpeed(node, *differ))
    return ClusterSpeeds(name=name, note=note, nic_gb_s=usual, nics_per_node=1, nodes=tuple(nodes))


def _rounded(speed: float) -> float:
    """Return GB/s with three significant digits, the precision of a measurement."""
    return max(1e-6, float(f"{speed / GB:.3g}"))


def to_toml(cluster: ClusterSpeeds) -> str:
    """Return the file of measured speeds."""
    lines = [
        'kind = "cluster"',
        f"name = {_quoted(cluster.name)}",
        f"note = {_quoted(cluster.note)}",
        f"nics_per_node = {cluster.nics_per_node}",
        f"nic_gb_s = {cluster.nic_gb_s!r}",
    ]
    for node in cluster.nodes:
        lines += ["", "[[nodes]]", f"name = {_quoted(node.name)}"]
        for key, speed in (("send_gb_s", node.send_gb_s), ("receive_gb_s", node.receive_gb_s)):
            lines += [f"{key} = {speed!r}"] if speed is not None else []
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    import json

    return json.dumps(text, ensure_ascii=False)  # a basic string of TOML
