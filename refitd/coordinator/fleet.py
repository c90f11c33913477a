"""Who is registered: nodes, models, source ranks and target ranks, and what may be swapped."""

from __future__ import annotations

from dataclasses import dataclass, field

from refitd.coordinator.rosters import Registered
from refitd.errors import RefusedError
from refitd.protocol.cluster import AddShard
from refitd.protocol.reports import (
    DescribedMember,
    ModelDescription,
    NodeStatus,
    SourceReport,
    SourceStatus,
    TargetStatus,
)
from refitd.protocol.shards import Shard


@dataclass(slots=True)
class Node:
    """One daemon and when it was last heard."""

    identity: bytes
    status: NodeStatus
    last_heard: float


@dataclass(slots=True)
class Member:
    """One registered rank, on either side."""

    added: AddShard
    shard: Shard
    node: str
    host: str
    bytes: int
    attached: bool = True
    versions: set[int] = field(default_factory=set)  # source: published and held
    ways: dict[int, str] = field(default_factory=dict)  # source: how each of these is given
    way: str = ""  # source: how the latest version was given, held or not
    why: str = ""  # source: the measurement that chose it
    version: int | None = None  # target: served
    staged: str | None = None  # target: a decided swap that it has not taken over yet

    @property
    def id(self) -> str:
        """The daemon's name for it."""
        return self.added.member

    def describe(self) -> str:
        """Return how people are told about it."""
        kind = self.added.replica if self.added.role == "target" else "source"
        return f"{kind} rank {self.added.rank} (host {self.host}, pid {self.added.pid})"


@dataclass(slots=True)
class Model:
    """One model name with its sources and targets."""

    name: str
    auto_swap: bool
    sources: dict[int, Member] = field(default_factory=dict)
    targets: dict[tuple[str, int], Member] = field(default_factory=dict)

    def members(self) -> list[Member]:
        """Return sources and targets, each in rank order."""
        return [m for _, m in sorted(self.sources.items())] + [m for _, m in sorted(self.targets.items())]

    def source_world(self) -> int:
        """Return how many source ranks there are to be; 0 while none is registered."""
        return next((m.added.world_size for m in self.sources.values()), 0)

    def missing_sources(self) -> list[int]:
        """Return the source ranks that have not registered."""
        return [rank for rank in range(self.source_world()) if rank not in self.sources]

    def complete_versions(self) -> list[int]:
        """Return the versions that every source rank holds, ascending."""
        if not self.sources or self.missing_sources():
            return []
        held = [member.versions for member in self.sources.values()]
        return sorted(set.intersection(*held))

    def add(self, member: Member) -> Member | None:
        """Take a rank in; return the detached one that it replaces.

        Raises:
            RefusedError: the rank is taken, or its pool has another size.
        """
        a = member.added
        pool: dict[int, Member]
        if a.role == "source":
            pool, what = self.sources, f"model {self.name!r} source"
        else:
            pool = {rank: m for (replica, rank), m in self.targets.items() if replica == a.replica}
            what = f"model {self.name!r} replica {a.replica!r}"
        for other in pool.values():
            if other.added.world_size != a.world_size:
                raise RefusedError(
                    f"{what} rank {a.rank} says there are {a.world_size} ranks, rank {other.added.rank} "
                    f"(host {other.host}, pid {other.added.pid}) said {other.added.world_size}; start all with one size"
                )
        old = pool.get(a.rank)
        if old is not None and old.attached:
            raise RefusedError(
                f"{what} rank {a.rank} is already registered by pid {old.added.pid} on {old.host}; "
                "close that registration first, or use another rank"
            )
        if a.role == "source":
            self.sources[a.rank] = member
        else:
            self.targets[(a.replica, a.rank)] = member
        return old

    def remove(self, member: Member) -> None:
        """Forget a rank."""
        a = member.added
        if a.role == "source" and self.sources.get(a.rank) is member:
            del self.sources[a.rank]
        elif a.role == "target" and self.targets.get((a.replica, a.rank)) is member:
            del self.targets[(a.replica, a.rank)]

    def version_to_swap(self, wanted: int | None) -> int:
        """Return the version a swap would make live.

        Raises:
            RefusedError: it cannot be swapped now; the text says what is missing and where.
        """
        if not self.sources:
            raise RefusedError(f"model {self.name!r} has no source; start the trainer and let it register_source")
        if missing := self.missing_sources():
            raise RefusedError(
                f"model {self.name!r}: source ranks {missing} of {self.source_world()} have not registered"
            )
        complete = self.complete_versions()
        held = ", ".join(f"rank {r}: {sorted(m.versions) or 'none'}" for r, m in sorted(self.sources.items()))
        if wanted is None and not complete:
            raise RefusedError(
                f"model {self.name!r} has no version that every source rank has published ({held}); publish one"
            )
        version = complete[-1] if wanted is None else wanted
        if version not in complete:
            raise RefusedError(
                f"model {self.name!r}: version {version} is not held by every source rank ({held}); "
                f"complete versions: {complete or 'none'}"
            )
        self._check_targets(version)
        return version

    def _check_targets(self, version: int) -> None:
        if not self.targets:
            raise RefusedError(f"model {self.name!r} has no target; start an engine and let it register_target")
        for replica in sorted({replica for replica, _ in self.targets}):
            ranks = {rank: m for (r, rank), m in self.targets.items() if r == replica}
            world = next(iter(ranks.values())).added.world_size
            if missing := [rank for rank in range(world) if rank not in ranks]:
                raise RefusedError(
                    f"model {self.name!r}: replica {replica!r} lacks ranks {missing} of {world}; "
                    "wait until they have registered, or stop the others"
                )
            for member in ranks.values():
                if member.staged is not None:
                    raise RefusedError(
                        f"model {self.name!r}: {member.describe()} has not yet taken over the version of swap "
                        f"{member.staged}; it must reach a commit point (poll or wait), or be restarted"
                    )
                if member.version is not None and member.version > version:
                    raise RefusedError(
                        f"model {self.name!r}: {member.describe()} serves version {member.version}, which is newer "
                        f"than {version}; publish a higher version"
                    )

    def ranks(self) -> dict[str, int]:
        """Return the plan-wide rank of every member: sources first, then replica after replica by name.

        sources 0, 1; engine-a 0, 1 -> 2, 3; engine-b 0 -> 4
        """
        found = {m.id: rank for rank, m in self.sources.items()}
        for replica, offset in self._offsets().items():
            found |= {m.id: offset + rank for (r, rank), m in self.targets.items() if r == replica}
        return found

    def pools(self) -> list[list[Registered]]:
        """Return what the planner needs: the sources, then each replica, ranks numbered as `ranks` says."""
        offsets = self._offsets()
        pools = [[_registered(m, rank, f"source rank {rank}") for rank, m in sorted(self.sources.items())]]
        for replica, offset in offsets.items():
            members = [(rank, m) for (r, rank), m in sorted(self.targets.items()) if r == replica]
            pools.append([_registered(m, offset + rank, f"{replica} rank {rank}") for rank, m in members])
        return pools

    def description(self) -> ModelDescription:
        """Return what every member holds, equal descriptions once."""
        digests = {m.added.digest: m.shard for m in self.members()}
        index = {digest: i for i, digest in enumerate(digests)}
        return ModelDescription(
            model=self.name,
            shards=tuple(digests.values()),
            members=tuple(
                DescribedMember(
                    role=m.added.role,
                    replica=m.added.replica,
                    rank=m.added.rank,
                    world_size=m.added.world_size,
                    node=m.node,
                    host=m.host,
                    shard=index[m.added.digest],
                )
                for m in self.members()
            ),
        )

    def _offsets(self) -> dict[str, int]:
        offset, found = self.source_world(), {}
        worlds = {replica: m.added.world_size for (replica, _), m in self.targets.items()}
        for replica in sorted(worlds):
            found[replica] = offset
            offset += worlds[replica]
        return found

    def source_status(self) -> tuple[SourceStatus, ...]:
        """Return the report rows of the sources."""
        return tuple(
            SourceStatus(
                rank=rank,
                node=m.node,
                host=m.host,
                pid=m.added.pid,
                attached=m.attached,
                tensors=len(m.shard.tensors),
                bytes=m.bytes,
                versions=tuple(sorted(m.versions)),
                way=m.way,
                why=m.why,
            )
            for rank, m in sorted(self.sources.items())
        )

    def source_reports(self, version: int) -> tuple[SourceReport, ...]:
        """Return how each source rank gives this version."""
        return tuple(
            SourceReport(rank, m.node, m.host, way=m.ways.get(version, ""), why=m.why)
            for rank, m in sorted(self.sources.items())
        )

    def target_status(self) -> tuple[TargetStatus, ...]:
        """Return the report rows of the targets."""
        return tuple(
            TargetStatus(
                replica=replica,
                rank=rank,
                world_size=m.added.world_size,
                node=m.node,
                host=m.host,
                pid=m.added.pid,
                tensors=len(m.shard.tensors),
                bytes=m.bytes,
                state="behind" if m.staged else "empty" if m.version is None else "serving",
                version=m.version,
            )
            for (replica, rank), m in sorted(self.targets.items())
        )


def _registered(member: Member, rank: int, label: str) -> Registered:
    is_source = member.added.role == "source"
    return Registered(rank, label, member.node, is_source, member.added.digest, member.shard)
