"""Admission checks for daemons' messages: names and roles of keys, ownership of members, and limits."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod

import msgspec

from refitd.config import ModelConfig
from refitd.coordinator.members import Member, Node
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import ProtocolError, RefusedError
from refitd.protocol import cluster
from refitd.protocol.roles import Allowed, check_role
from refitd.protocol.shards import Shard
from refitd.protocol.texts import check_names, check_tensor_names

MAX_NODES = 4096
MAX_MEMBERS = 1 << 16
MAX_VERSIONS = 1024  # held by one source rank
MAX_BYTES = 1 << 48  # of one shard, or one node's part of a swap; the sum of thousands still fits a message's integers

# Limit on descriptions that no rank uses: this many tensors, tiles and group entries take some hundred megabytes.
MAX_UNUSED_PARTS = 1 << 20


def check_hello(
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
        RefusedError: says which daemon has the name and what to change.
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
    if any(node.identity == identity and other != name for other, node in nodes.items()):
        raise RefusedError(f"this connection is another node already, not {name!r}; one daemon is one node")
    if old is None and len(nodes) >= MAX_NODES:
        raise RefusedError(f"node {name!r}: there are {MAX_NODES} nodes already, which is the limit")


def check_message(node: Node, message: cluster.NodeMessage, members: Mapping[str, Member]) -> None:
    """Refuse a message that this node may not send.

    Raises:
        RefusedError: its key lacks the role, the member is another node's, or a limit is exceeded; nothing has changed.
    """
    name = node.status.node
    check_names(message)
    check_role(message, node.allowed.roles, f"the key of node {name!r}", "its line of security.allowed")
    match message:
        case cluster.NodeUpdate(status, moved):
            for target in moved:
                _own(name, target.member, members)
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
            | cluster.MemberSuspended(member)
            | cluster.DetachShard(member)
            | cluster.ShardWithdrawn(member)
            | cluster.WantsRoom(member)
            | cluster.MemberQuiet(_, member)
            | cluster.MemberStep(_, member)
            | cluster.MemberCommitted(_, member)
            | cluster.MemberCommitFailed(_, member)
        ):
            _own(name, member, members)
        case cluster.MembersChecked(_, checked):
            for one in checked:
                _own(name, one.member, members)
        case cluster.StageDone(_, _, nbytes) | cluster.StageProgress(_, nbytes):
            if isinstance(message, cluster.StageDone):
                nbytes = max(nbytes, *msgspec.structs.astuple(message.crossing))
            if nbytes > MAX_BYTES:
                raise RefusedError(f"node {name!r} says it has staged {nbytes} bytes, at most {MAX_BYTES} are believed")
        case _:
            pass


def _own(node: str, member: str, members: Mapping[str, Member]) -> Member | None:
    """Return a member of this node, None if it is unknown (the message may be late).

    Raises:
        RefusedError: the member is another node's.
    """
    found = members.get(member)
    if found is not None and found.node != node:
        raise RefusedError(f"member {member!r} is one of node {found.node!r}; node {node!r} cannot speak for it")
    return found


def check_replica(added: cluster.AddShard, model: ModelConfig) -> None:
    """Refuse a replica that is not listed: it would receive the weights and could delay every swap.

    Raises:
        RefusedError: names the replica, the expected ones and where they are listed.
    """
    if added.role != "target" or not model.replicas:
        return  # no list: any process with the engine role may register any replica
    if not any(fnmatchcase(added.replica, pattern) for pattern in model.replicas):
        expected = ", ".join(map(repr, model.replicas))
        raise RefusedError(
            f"model {added.model!r}: nobody expects replica {added.replica!r} (rank {added.rank}, pid {added.pid}); "
            f"models.{added.model}.replicas of the coordinator has {expected}: add it there and start the coordinator "
            "again, or register under one of these names"
        )


def check_shard(shard: Shard) -> None:
    """Refuse a description whose byte count exceeds what messages can carry.

    Raises:
        ProtocolError, RefusedError: names the tensor, or says why its name is invalid.
    """
    check_tensor_names(shard)
    total = 0
    for tensor in shard.tensors:
        total += prod(tensor.shape) * ELEMENT_SIZES.get(tensor.dtype, 0)
        if total > MAX_BYTES:
            raise ProtocolError(f"{tensor.name}: a shard of more than {MAX_BYTES} bytes, shape {tensor.shape}")
    if (kept := sum(tensor.nbytes for tensor in shard.kept)) > MAX_BYTES:
        raise ProtocolError(f"{shard.kept[0].name}: {kept} bytes are kept, at most {MAX_BYTES} are believed")


def parts_of(shard: Shard) -> int:
    """Return roughly how many values a description holds, as a measure of its memory."""
    tiles = sum(len(tensor.tiles or ()) + len(tensor.aliases) for tensor in shard.tensors)
    kept = sum(1 + len(tensor.tensors) for tensor in shard.kept)
    return len(shard.tensors) + tiles + sum(len(group) for group in shard.groups) + kept
