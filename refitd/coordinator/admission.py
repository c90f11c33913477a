"""Who may say what to the coordinator: names and roles of keys, whose members are whose, and how much of everything."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from refitd.coordinator.fleet import Member, Node
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import ProtocolError, RefusedError
from refitd.protocol import cluster
from refitd.protocol.roles import Allowed, check_role
from refitd.protocol.shards import Shard

MAX_NODES = 4096
MAX_MEMBERS = 1 << 16
MAX_VERSIONS = 1024  # that one source rank holds
MAX_BYTES = 1 << 48  # of one shard, and of one node's part of a swap: thousands of them still are a number that travels

# Descriptions that no member uses: as many tensors, tiles and group entries as these are some hundred megabytes.
MAX_UNUSED_PARTS = 1 << 20


def check_hello(
    identity: bytes, key: str, allowed: Allowed, hello: cluster.NodeHello, nodes: Mapping[str, Node], alive: bool
) -> None:
    """Refuse a daemon that claims a name which its key does not allow, or another's.

    Args:
        identity: the connection.
        key: the public key that it was let in with, "" without keys.
        allowed: what the list says of the key.
        hello: what it says.
        nodes: those that are here.
        alive: whether the one that has this name, if any, was heard lately.

    Raises:
        RefusedError: says whose name it is and what to change.
    """
    name = hello.status.node
    if allowed.node not in ("", name):
        raise RefusedError(
            f"the key of {allowed.name!r} may be node {allowed.node!r}, not {name!r}; set node.name there, or node= in "
            "its line of security.allowed and start the coordinator again"
        )
    old = nodes.get(name)
    if old is not None and alive and old.key != key:
        raise RefusedError(
            f"node name {name!r} is in use by a daemon with another key (pid {old.status.pid} on {old.status.host}); "
            "set node.name"
        )
    if any(node.identity == identity and other != name for other, node in nodes.items()):
        raise RefusedError(f"this connection is another node already, not {name!r}; one daemon is one node")
    if old is None and len(nodes) >= MAX_NODES:
        raise RefusedError(f"node {name!r}: there are {MAX_NODES} nodes already, which is the limit")


def check_message(node: Node, message: cluster.NodeMessage, members: Mapping[str, Member]) -> None:
    """Refuse what this node may not say.

    Raises:
        RefusedError: its key lacks the role, the member is another node's, or it is too much; nothing has changed.
    """
    name = node.status.node
    check_role(message, node.allowed.roles, f"the key of node {name!r}", "its line of security.allowed")
    match message:
        case cluster.NodeUpdate(status):
            if status.node != name or status.pid != node.status.pid:
                raise RefusedError(
                    f"node {name!r} (pid {node.status.pid}) calls itself {status.node!r} (pid {status.pid}); a daemon "
                    "with another name says NodeHello over a connection of its own"
                )
        case cluster.AddShard(member):
            if member in members:
                raise RefusedError(f"member {member!r} is registered already, on node {members[member].node!r}")
            if len(members) >= MAX_MEMBERS:
                raise RefusedError(f"member {member!r}: {MAX_MEMBERS} ranks are registered, which is the limit")
            if len(message.versions) > MAX_VERSIONS:
                raise RefusedError(f"member {member!r}: holds {len(message.versions)} versions, at most {MAX_VERSIONS}")
        case cluster.ShardPublished(member, version):
            found = _own(name, member, members)
            if found is not None and version not in found.versions and len(found.versions) >= MAX_VERSIONS:
                raise RefusedError(f"member {member!r}: holds {MAX_VERSIONS} versions already; withdraw some")
        case (
            cluster.RemoveShard(member)
            | cluster.DetachShard(member)
            | cluster.ShardWithdrawn(member)
            | cluster.MemberQuiet(_, member)
            | cluster.MemberCommitted(_, member)
            | cluster.MemberCommitFailed(_, member)
        ):
            _own(name, member, members)
        case cluster.MembersChecked(_, checked):
            for one in checked:
                _own(name, one.member, members)
        case cluster.StageDone(_, _, nbytes) | cluster.StageProgress(_, nbytes):
            if nbytes > MAX_BYTES:
                raise RefusedError(f"node {name!r} says it has staged {nbytes} bytes, at most {MAX_BYTES} are believed")
        case _:
            pass


def _own(node: str, member: str, members: Mapping[str, Member]) -> Member | None:
    """Return a member of this node; None where nobody knows it, which is how late words look."""
    found = members.get(member)
    if found is not None and found.node != node:
        raise RefusedError(f"member {member!r} is one of node {found.node!r}; node {node!r} cannot speak for it")
    return found


def check_shard(shard: Shard) -> None:
    """Refuse a description of more bytes than anything here counts.

    Raises:
        ProtocolError: names the tensor.
    """
    total = 0
    for tensor in shard.tensors:
        total += prod(tensor.shape) * ELEMENT_SIZES.get(tensor.dtype, 0)
        if total > MAX_BYTES:
            raise ProtocolError(f"{tensor.name}: a shard of more than {MAX_BYTES} bytes, shape {tensor.shape}")


def parts_of(shard: Shard) -> int:
    """Return how many values a description is made of, roughly: its memory by another measure."""
    tiles = sum(len(tensor.tiles or ()) + len(tensor.aliases) for tensor in shard.tensors)
    return len(shard.tensors) + tiles + sum(len(group) for group in shard.groups)
