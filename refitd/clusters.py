"""Cluster files: the network and memory speeds of a cluster's nodes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from refitd.errors import ConfigError
from refitd.files import Name, Table, each, read_file, refusal, shown, table, tables
from refitd.plan.cost import Cables

GB = 1e9
Rate = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]  # GB/s: 10**9 bytes per second
Count = Annotated[int, msgspec.Meta(ge=1, le=2**17)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class NodeSpeed(Table, frozen=True):
    """The speeds of one node's network cards, if they differ from the others'. GB/s for each card."""

    name: Name
    send_gb_s: Rate | None = None
    receive_gb_s: Rate | None = None


class ClusterSpeeds(Table, frozen=True):
    """The speeds of a cluster. All rates are GB/s (10**9 bytes per second), in each direction.

    Attributes:
        name: its name in reports.
        note: the origin of the figures, and assumptions.
        nic_gb_s: one network card.
        nics_per_node: a node's cards, shared evenly by its ranks; None: one for each rank.
        rank_gb_s: a rank to and from others of its node (NVLink, or shared memory); None: no limit.
        memory_gb_s: a rank copies this fast within its own memory (reading and writing count once); None: no limit.
        digest_gb_s: a rank packs and digests, or receives and digests, at this rate what crosses between nodes; None:
            no limit.
        flow_gb_s: the most that one pair of ranks moves between nodes (one TCP stream); None: no such limit.
        leaf_nodes: nodes under one leaf switch; None: one switch for all.
        oversubscription: a leaf's downlinks divided by its uplinks.
        chunk_bytes: the bytes that a relay passes on at a time.
        hop_s: latency from node to node.
        control_s: messages and journal of one swap, independent of its size.
        commit_s: the exchange of arenas at a commit.
        nodes: nodes whose cards have other speeds.
    """

    name: Name
    nic_gb_s: Rate
    rank_gb_s: Rate | None = None
    memory_gb_s: Rate | None = None
    note: str = ""
    nics_per_node: Count | None = None
    digest_gb_s: Rate | None = None
    flow_gb_s: Rate | None = None
    leaf_nodes: Count | None = None
    oversubscription: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 1.0
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 8 << 20
    hop_s: Seconds = 0.0
    control_s: Seconds = 0.005
    commit_s: Seconds = 0.001
    nodes: tuple[NodeSpeed, ...] = ()


def load_cluster(path: str | Path) -> ClusterSpeeds:
    """Read a cluster file, TOML or JSON.

    Raises:
        ConfigError: lists everything that is wrong with the file.
    """
    values = read_file(Path(path))
    problems: list[str] = []
    if (kind := values.pop("kind", None)) != "cluster":
        raise ConfigError(f"{path}: kind is {shown(kind)}, expected a cluster")
    entries = each(NodeSpeed, tables(values.pop("nodes", None), "nodes", problems), "nodes", problems)
    nodes = tuple(node for node in entries if node is not None)
    names = [node.name for node in nodes]
    problems += [f"nodes: {name} is there twice" for name in sorted({n for n in names if names.count(n) > 1})]
    problems += [f"nodes: {n.name} sets no speed" for n in nodes if n.send_gb_s is None and n.receive_gb_s is None]
    if "oversubscription" in values and "leaf_nodes" not in values:
        problems.append("oversubscription: there are no leaf switches; set leaf_nodes, or leave it out")
    found = table(ClusterSpeeds, values, "", problems, nodes=nodes)
    if problems or found is None:
        raise refusal(str(path), problems)
    return found


def at_defaults(cluster: ClusterSpeeds) -> dict[str, int | float | str]:
    """Return the constants at their defaults, with the default: a value, or words if it is no number."""
    words = {"nics_per_node": "one for each rank", "leaf_nodes": "one switch for all"}
    return {
        field.name: words.get(field.name, "no limit") if field.default is None else field.default
        for field in msgspec.structs.fields(cluster)
        if field.name not in ("note", "nodes") and getattr(cluster, field.name) == field.default
    }


def cables_of(cluster: ClusterSpeeds, ranks: Iterable[str]) -> Cables:
    """Return the cable speeds of these ranks' nodes, summed over the cards of each node.

    Args:
        cluster: the speeds.
        ranks: the node of each rank.
    """
    count: dict[str, int] = {}
    for there in ranks:
        count[there] = count.get(there, 0) + 1
    own = {node.name: node for node in cluster.nodes}
    send, receive = {}, {}
    for name, number in count.items():
        cards = number if cluster.nics_per_node is None else cluster.nics_per_node
        node = own.get(name, NodeSpeed(name))
        send[name] = cards * GB * (node.send_gb_s or cluster.nic_gb_s)
        receive[name] = cards * GB * (node.receive_gb_s or cluster.nic_gb_s)
    return Cables(cluster.name, (cluster.nics_per_node or 1) * GB * cluster.nic_gb_s, send, receive)


def unknown_nodes(cluster: ClusterSpeeds, nodes: Iterable[str]) -> list[str]:
    """Return the nodes that a cluster file names and that are not in `nodes`."""
    known = set(nodes)
    return [node.name for node in cluster.nodes if node.name not in known]


def check_nodes(cluster: ClusterSpeeds, nodes: Iterable[str]) -> None:
    """Raise ConfigError if a cluster file names a node that is not in the layouts."""
    known = set(nodes)
    unknown = unknown_nodes(cluster, known)
    if unknown:
        there = sorted(known)
        more = f" and {len(there) - 8} more" if len(there) > 8 else ""
        raise ConfigError(
            f"cluster {cluster.name}: no rank of the layouts is on {', '.join(unknown[:8])}; their nodes are "
            f"{', '.join(there[:8])}{more}"
        )
