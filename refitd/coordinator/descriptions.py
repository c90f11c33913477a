"""Descriptions of shards that daemons sent: all that ranks use, and some unused ones."""

from __future__ import annotations

from collections.abc import Container

from refitd.coordinator.admission import MAX_UNUSED_PARTS, check_shard, parts_of
from refitd.coordinator.rosters import ShardRead, ShardReader, read_shard
from refitd.errors import RefusedError
from refitd.protocol.cluster import AddShard
from refitd.protocol.codec import unpack
from refitd.protocol.shards import Shard

# Limit on unused descriptions, kept so that restarted engines need not send theirs again.
MAX_UNUSED_SHARDS = 256


class UnknownShard(RefusedError):
    """A member's description was not sent, or was discarded."""

    code = "unknown-shard"


def unpack_shard(packed: bytes, digest: str) -> ShardRead:
    """Unpack, check and read a description. Large ones take seconds.

    Raises:
        ProtocolError: it is damaged, does not match `digest`, or exceeds a limit.
    """
    shard = unpack(packed, Shard, digest)
    check_shard(shard)
    return read_shard(shard)


class Descriptions:
    """Shards by digest. `reader` gets each new one and keeps what planning needs."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self._shards: dict[str, Shard] = {}

    def take(self, digest: str, read: ShardRead, used: Container[str]) -> None:
        """Store a description, and forget the oldest unused ones beyond the limits.

        A daemon that refers to a forgotten one is asked to send it again. `used` are the digests in use.
        """
        unused = [d for d in self._shards if d not in used]
        parts = sum(parts_of(self._shards[d]) for d in unused)
        for count, old in zip(range(len(unused), 0, -1), unused, strict=True):
            if count <= MAX_UNUSED_SHARDS and parts <= MAX_UNUSED_PARTS:
                break
            parts -= parts_of(self._shards.pop(old))
        self._reader.keep(self._shards.keys())
        self._shards[digest] = read.shard
        self._reader.learn(digest, read)

    def of(self, added: AddShard) -> Shard:
        """Return a rank's description.

        Raises:
            UnknownShard: it is not known here.
        """
        shard = self._shards.get(added.digest)
        if shard is None:
            raise UnknownShard(f"{added.member}: no shard {added.digest} has been described to this coordinator")
        return shard
