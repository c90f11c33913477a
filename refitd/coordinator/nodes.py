"""Nodes that connect, are drained and resumed, or lose their key, and the speeds of their cables.

No new swap writes or reads members on a drained node, until an operator resumes it. A drain is journalled before it is
answered: it outlives the coordinator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from refitd.clusters import ClusterSpeeds, cables_of, load_cluster, unknown_nodes
from refitd.config import Config
from refitd.coordinator import swap_queue
from refitd.coordinator.actions import DrainWritten, FilesRead, FromNode, Remember, Waiter, WriteDrain
from refitd.coordinator.fleet import Fleet, Running, Turn
from refitd.coordinator.journals import Drain, KnownNode, SwapRecord
from refitd.coordinator.members import Lost, Membership, Node
from refitd.coordinator.preparation import use_speeds
from refitd.coordinator.registrations import forget_node, lose, write_node
from refitd.coordinator.reports import swap_progress
from refitd.errors import ConfigError, ProtocolError, RefusedError
from refitd.plan.cost import EQUAL, Cables
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION, check_version, shown
from refitd.protocol.keys import Allowed
from refitd.protocol.reports import DrainedSource, DrainReport, ForgetReport, ReloadReport, ReplicaName, SwapReport

# Daemons send a heartbeat every second. After this long without one a node's members count as lost.
NODE_SILENCE_S = 10.0

# Why a node is awaited, or lost, that an earlier coordinator knew.
NOT_RETURNED = "it has not returned since the coordinator started"

MAX_NODES = 4096
# Descriptors of the coordinator that are not for daemons.
RESERVED_FILES = 64

# --- connections ------------------------------------------------------------------------------------------


def hello(turn: Turn, event: FromNode, message: cluster.NodeHello) -> None:
    """Welcome a daemon, or refuse it; a daemon that has restarted or reconnected loses its members."""
    fleet, waiter, name = turn.fleet, (event.identity, event.request), message.status.node
    old = fleet.nodes.get(name)
    alive = old is not None and turn.now - old.last_heard < NODE_SILENCE_S / 2
    try:
        check_version(message.protocol, f"node {name}", "this coordinator")
        _check_hello(event.identity, event.key, event.allowed, message, fleet.nodes, alive)
        if old is None and 0 <= fleet.max_files <= len(fleet.nodes) + RESERVED_FILES:  # -1: no limit
            raise RefusedError(
                f"node {name!r}: {len(fleet.nodes)} nodes are connected, and this coordinator may open only "
                f"{fleet.max_files} files (RLIMIT_NOFILE), of which it keeps {RESERVED_FILES}; raise LimitNOFILE of "
                "its service, or `ulimit -Hn`, and start it again"
            )
    except (ProtocolError, RefusedError) as exc:
        turn.log("refused", node=name, message="NodeHello", reason=str(exc))
        turn.send(waiter, local.Failure(code=exc.code, message=str(exc)))
        return
    if old is not None:
        same = old.status.pid == message.status.pid
        # a daemon without an answer repeats its NodeHello
        repeats = same and old.identity == event.identity
        if not repeats or any(member.node == name for member in fleet.members.values()):
            reason = f"its daemon has {'introduced itself' if same else 'started'} again"
            forget_node(turn, name, reason, event="node-again" if same else "node-lost")
    node = Node(event.identity, message.status, turn.now, event.key, event.allowed, message.protocol)
    fleet.node_at[event.identity] = fleet.nodes[name] = node
    was = fleet.awaited.pop(name, None)
    fleet.lost.pop(name, None)
    protocol = shown(message.protocol)
    if old is None or old.identity != event.identity or old.status.pid != message.status.pid:
        turn.log("node", node=name, pid=message.status.pid, host=message.status.host, protocol=protocol)
        here = Lost.of(node, (), "")
        if was is None or (was.described.host, was.described.pid) != (message.status.host, message.status.pid):
            write_node(turn, here)
    lives = fleet.lives
    lives.greeted(turn.now)
    changed = lives.said(turn, name, message.live)
    for model in {claim.model for claim in message.live} | set(lives.models()):
        if (claim := lives.claim(model)) is not None and model not in changed:
            turn.to_node(name, cluster.LiveIs(live=claim))
    lease_s = fleet.config.deadlines.lease_s
    welcome = cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot=fleet.boot, lease_s=lease_s, clock_s=turn.now)
    turn.send(waiter, welcome)
    for model in changed:
        swap_queue.live_learned(turn, model)
        turn.due[model] = None


def remember(fleet: Fleet, known: Iterable[KnownNode], swaps: Iterable[SwapRecord], wall: float) -> None:
    """Take over the nodes of the journal: lost ones, and connected ones, which are awaited.

    `swaps` are its last ones, the newest first, and `wall` is the time, in seconds since the epoch.
    """
    reports: dict[str, SwapReport] = {}  # the newest of each model: it has the ranks of awaited nodes
    for record in swaps:
        if record.model not in reports and (report := record.written_report()) is not None:
            reports[record.model] = report
    for node, described, heard in ((e.node, e.described, e.heard) for e in known if e.described is not None):
        if described.reason:
            fleet.lost[node] = Lost(described, fleet.started - max(0.0, wall - heard))
            continue
        replicas = dict.fromkeys(
            ReplicaName(r.model, m.replica) for r in reports.values() for m in r.members if m.node == node
        )
        sources = [r.model for r in reports.values() if any(s.node == node and not s.replica for s in r.sources)]
        expected = msgspec.structs.replace(
            described, reason=NOT_RETURNED, replicas=tuple(replicas), sources=tuple(sources)
        )
        fleet.awaited[node] = Lost(expected, fleet.started)


def tick(turn: Turn) -> None:
    """Count nodes of an earlier coordinator as lost if they have not returned in NODE_SILENCE_S."""
    fleet = turn.fleet
    if not fleet.awaited or turn.now - fleet.started <= NODE_SILENCE_S:
        return
    for name, found in fleet.awaited.items():
        turn.log("node-lost", node=name, pid=found.described.pid, reason=NOT_RETURNED)
        lose(turn, found)
    fleet.awaited.clear()


def updated(turn: Turn, node: Node, message: cluster.NodeUpdate) -> None:
    """Note a daemon's status and the state of its targets.

    Raises:
        RefusedError: it has another name or pid than in its NodeHello, or names another node's rank.
    """
    name, status = node.status.node, message.status
    moved = [(target, turn.fleet.own(name, target.member)) for target in message.moved]
    if status.node != name or status.pid != node.status.pid:
        raise RefusedError(
            f"node {name!r} (pid {node.status.pid}) calls itself {status.node!r} (pid {status.pid}); a daemon "
            "with another name says NodeHello over a connection of its own"
        )
    node.status = status
    for target, member in moved:
        if member is not None:
            member.told = target.step, target.events
            member.arenas.spare = None if target.spare_lost else member.arenas.spare
            member.arenas.lacks_base = target.lacks_base


def _check_hello(
    identity: bytes, key: str, allowed: Allowed, hello: cluster.NodeHello, nodes: Mapping[str, Node], alive: bool
) -> None:
    """Refuse a daemon whose key does not allow its name, or whose name another daemon uses.

    Args:
        identity: the ZeroMQ identity of the connection.
        key: the connection's public key, "" without keys.
        allowed: the key's line in security.allowed.
        hello: the daemon's first message.
        nodes: the connected nodes.
        alive: whether the present owner of this name, if any, was heard recently.

    Raises:
        RefusedError: names the daemon that has the name, and the setting to change.
    """
    name = hello.status.node
    if allowed.node not in ("", name):
        raise RefusedError(
            f"the key of {allowed.name!r} may be node {allowed.node!r}, not {name!r}; set node.name there, or node= in "
            "its line of security.allowed, and run `refitctl reload`"
        )
    old = nodes.get(name)
    if old is not None and alive and old.key != key:
        raise RefusedError(
            f"node name {name!r} is in use by a daemon with another key (pid {old.status.pid} on {old.status.host}); "
            "set node.name"
        )
    if old is not None and alive and old.status.pid != hello.status.pid:
        raise RefusedError(
            f"node name {name!r} is in use by the daemon with pid {old.status.pid} on {old.status.host}; set node.name"
        )
    if any(node.identity == identity and other != name for other, node in nodes.items()):
        raise RefusedError(f"this connection is another node already, not {name!r}; one daemon is one node")
    if old is None and len(nodes) >= MAX_NODES:
        raise RefusedError(f"node {name!r}: there are {MAX_NODES} nodes already, which is the limit")


def forget_lost(turn: Turn, node: str) -> ForgetReport:
    """Remove a lost node from reports; raises RefusedError if it is not lost."""
    lost = turn.fleet.lost if node in turn.fleet.lost else turn.fleet.awaited
    if node not in lost:
        known = f"lost nodes: {_listed(turn.fleet.lost)}"
        there = "; it is connected: stop its daemon, or drain it" if node in turn.fleet.nodes else ""
        raise RefusedError(f"node {node!r} is not lost{there}; {known}")
    del lost[node]
    turn.effects.append(Remember(KnownNode(node, None)))
    turn.log("forgotten", node=node)
    return ForgetReport(model="", sources=(), nodes=(node,))


def files_read(turn: Turn, event: FilesRead) -> None:
    """Use cable speeds and admitted keys that were read again; answer the operator before a node is removed.

    A node whose key is not admitted, or may not have its name, is removed; the others get the roles of their keys.
    """
    fleet, allowed = turn.fleet, event.allowed
    use_speeds(turn, event.cluster)
    removed = {} if allowed is None else _not_admitted(fleet, allowed)
    report = ReloadReport(uses_keys=False)
    if allowed is not None:
        admitted = tuple(one.name for one in allowed.values())
        turn.log("keys-read", admitted=len(admitted), removed=", ".join(removed) or "none")
        report = ReloadReport(uses_keys=True, admitted=admitted, removed=tuple(removed))
    if event.waiter is not None:
        turn.send(event.waiter, _with_speeds(report, event.cluster, fleet.nodes))  # the asking node may be removed
    for name, why in removed.items():
        text = f"the key of {fleet.nodes[name].allowed.name!r} {why}"
        turn.to_node(name, local.Failure(code="unknown-node", message=text))
        forget_node(turn, name, f"its key {why}")


def _not_admitted(fleet: Fleet, allowed: Mapping[str, Allowed]) -> dict[str, str]:
    """Give nodes the roles of their keys; return the nodes whose key is not admitted, with the reasons."""
    removed: dict[str, str] = {}
    for name, node in sorted(fleet.nodes.items()):
        found = allowed.get(node.key)
        if found is None:
            removed[name] = "was taken off security.allowed"
        elif found.node not in ("", name):
            removed[name] = f"may be node {found.node!r} only"
        else:
            node.allowed = found
    return removed


# --- drains -----------------------------------------------------------------------------------------------


def drain(turn: Turn, node: str, waiter: Waiter) -> None:
    """Have a node drained, then answer the waiter.

    Raises:
        RefusedError: no such node is connected.
    """
    fleet = turn.fleet
    if node in fleet.drained:
        turn.send(waiter, _drained(fleet, node, changed=False))
        return
    if node not in fleet.nodes:
        raise RefusedError(f"no node {node!r} is connected; connected nodes: {_listed(fleet.nodes)}")
    if len(fleet.drained) >= MAX_NODES:
        raise RefusedError(f"node {node!r}: {MAX_NODES} nodes are drained already; resume those that are gone")
    here = {(name, replica) for name, state in fleet.models.items() for replica in _replicas_on(node, state.membership)}
    turn.effects.append(WriteDrain(Drain(node, frozenset(here)), waiter))


def resume(turn: Turn, node: str, waiter: Waiter) -> None:
    """Have a drained node take part again, then answer the waiter.

    Raises:
        RefusedError: the node is not drained, and no node of this name is connected.
    """
    fleet = turn.fleet
    if node in fleet.drained:
        turn.effects.append(WriteDrain(Drain(node, None), waiter))
    elif node in fleet.nodes:
        turn.send(waiter, DrainReport(node=node, changed=False))
    else:
        raise RefusedError(
            f"no node {node!r} is connected or drained; connected nodes: {_listed(fleet.nodes)}; drained "
            f"nodes: {_listed(fleet.drained)}"
        )


def drain_written(turn: Turn, event: DrainWritten) -> None:
    """Apply a change that the journal has recorded, then answer the waiter."""
    fleet, node, replicas, waiter = turn.fleet, event.drain.node, event.drain.replicas, event.waiter
    if replicas is not None:
        fleet.drained[node] = replicas
        if waiter is not None:
            report = _drained(fleet, node, changed=True)
            turn.log("drained", node=node, replicas=len(report.replicas), sources=len(report.sources))
            turn.send(waiter, report)
        return
    before = {name: state.membership.drained() for name, state in fleet.models.items()}
    fleet.drained.pop(node, None)
    again = tuple(
        ReplicaName(name, replica)
        for name, state in sorted(fleet.models.items())
        for replica in sorted({*before[name]} - {*state.membership.drained()})
    )
    turn.log("resumed", node=node, replicas=len(again))
    if waiter is not None:
        turn.send(waiter, DrainReport(node=node, changed=True, replicas=again))
    for name in fleet.models:
        turn.due[name] = None


def _drained(fleet: Fleet, node: str, *, changed: bool) -> DrainReport:
    states = sorted(fleet.models.items())
    replicas, stranded = [], []
    for name, state in states:
        left_out = state.membership.drained()
        replicas += [ReplicaName(name, r) for r in left_out if (name, r) in fleet.drained[node]]
        if left_out and not state.membership.engines().targets:
            stranded.append(name)
    sources = [
        DrainedSource(name, rank, m.place.host, m.added.pid)
        for name, state in states
        for rank, m in sorted(state.membership.sources.items())
        if m.node == node
    ]
    found = [s.running for _, s in states if s.running is not None and _takes_part(node, s.running)]
    running = tuple(one for r in found if (one := swap_progress(r.swap)) is not None)
    return DrainReport(node, changed, tuple(replicas), tuple(stranded), tuple(sources), running)


def _replicas_on(node: str, membership: Membership) -> set[str]:
    """Return the replicas that have a rank or their controller on a node."""
    ranks = {m.added.replica for m in membership.targets.values() if m.node == node}
    return ranks | {replica for replica, c in membership.controllers.items() if c.node == node}


def _takes_part(node: str, running: Running) -> bool:
    members = {m.node for m in running.members.values()} | {c.node for c in running.controllers}
    return node in members or node in running.swap.nodes


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


# --- speeds of cables -------------------------------------------------------------------------------------


def read_cluster(config: Config) -> ClusterSpeeds | None:
    """Read the cluster file; None if none is configured: all cables are equally fast.

    Raises:
        ConfigError: the file cannot be read, or is invalid; lists what is wrong.
    """
    if not config.transport.cables:
        return None
    try:
        return load_cluster(config.transport.cables)
    except ConfigError as exc:
        raise ConfigError(f"transport.cables: {exc}") from exc


def cables_for(cluster: ClusterSpeeds | None, nodes: Iterable[str]) -> Cables:
    """Return the cables of these nodes, one name for each rank."""
    return EQUAL if cluster is None else cables_of(cluster, nodes)


def _with_speeds(report: ReloadReport, cluster: ClusterSpeeds | None, nodes: Collection[str]) -> ReloadReport:
    """Add to a report the speeds that plans assume, and the nodes of the cluster file that are not connected."""
    if cluster is None:
        return report
    absent = tuple(sorted(unknown_nodes(cluster, nodes)))
    return msgspec.structs.replace(report, cables=cluster.name, absent=absent)
