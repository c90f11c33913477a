"""One model's sources, targets and controllers: who is registered, what they hold, their ranks in a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from refitd.caches import BoundedCache
from refitd.coordinator.members import Controller, Member
from refitd.coordinator.records import Drained, LiveVersion
from refitd.coordinator.rosters import Registered
from refitd.errors import RefusedError
from refitd.protocol.cluster import AddShard
from refitd.protocol.shards import Shard

# Limit on cached comparisons of a model: one for each choice of source replicas, until ranks register anew.
MAX_COMPARED = 16

# Limit on cached forms of a model: one for each description.
MAX_FORMS = 1024

# A hash of (canonical tensor, dtype, dtype from which it was cast) for each that is held.
Forms = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Membership:
    """One model with its sources and targets."""

    name: str
    auto_swap: bool
    sources: dict[int, Member] = field(default_factory=dict)
    targets: dict[tuple[str, int], Member] = field(default_factory=dict)
    seeds: dict[tuple[str, int], Member] = field(default_factory=dict)  # read in place of sources; see `seeded_by`
    check_replicas: bool = True
    drains: Drained = field(default_factory=dict)  # of all models; `refitd.coordinator.drains` changes it
    controllers: dict[str, Controller] = field(default_factory=dict)  # by replica
    # keys of comparisons in which all source ranks were equal
    compared: BoundedCache[str, bool] = field(default_factory=lambda: BoundedCache(MAX_COMPARED))
    forms: BoundedCache[str, Forms] = field(default_factory=lambda: BoundedCache(MAX_FORMS))  # by digest of a shard
    # canonical tensors that targets need unrounded, by digest of a source's and of a target's shard
    unrounded: BoundedCache[tuple[str, str], frozenset[str]] = field(default_factory=lambda: BoundedCache(MAX_FORMS))
    # the targets by replica and rank: most that is said of one rank concerns its replica, not thousands of others
    _replicas: dict[str, dict[int, Member]] = field(init=False)

    def __post_init__(self) -> None:
        self._replicas = {}
        for (replica, rank), member in self.targets.items():
            self._replicas.setdefault(replica, {})[rank] = member

    def members(self) -> list[Member]:
        """Return sources, seeds and targets, each in rank order."""
        return [*self.givers(), *(m for _, m in sorted(self.targets.items()))]

    def replicas(self) -> dict[str, list[Member]]:
        """Return the target ranks of each replica, by name and in rank order."""
        return {replica: self.replica(replica) for replica in sorted(self._replicas)}

    def replica(self, name: str) -> list[Member]:
        """Return the target ranks of a replica, in rank order."""
        return [m for _, m in sorted(self._replicas.get(name, {}).items())]

    def givers(self) -> list[Member]:
        """Return the ranks that a swap of these members may read: its seeds, or else the sources, in rank order."""
        return [m for _, m in sorted(self.seeds.items())] or [m for _, m in sorted(self.sources.items())]

    def source_world(self) -> int:
        """Return the world size of the sources; 0 while none is registered."""
        return next((m.added.world_size for m in self.sources.values()), 0)

    def missing_sources(self) -> list[int]:
        """Return the source ranks that have not registered."""
        return [rank for rank in range(self.source_world()) if rank not in self.sources]

    def run(self) -> str | None:
        """Return the run of all source ranks; None while they belong to several."""
        runs = {member.run for member in self.sources.values()}
        return runs.pop() if len(runs) == 1 else None

    def complete_versions(self) -> list[int]:
        """Return the versions of one run that every source rank holds, ascending."""
        if not self.sources or self.missing_sources() or self.run() is None:
            return []
        held = [member.versions for member in self.sources.values()]
        return sorted(set.intersection(*held))

    def completes(self, version: int) -> bool:
        """Return whether every source rank that has registered holds a version.

        Ranks that registered last are asked first: mostly they publish last, too.
        """
        return all(version in member.versions for member in reversed(self.sources.values()))

    def droppable(self) -> tuple[set[int], int]:
        """Return the versions that no rank needs to hold, and the newest complete one (-1: none).

        The newest complete version is needed until a newer one is complete. So is every newer version that all ranks
        hold or can still publish (version numbers only go up).
        """
        ranks = list(self.sources.values())
        complete = max(self.complete_versions(), default=-1)
        held = {version for member in ranks for version in member.versions}
        given_up = {v for v in held if any(v <= m.newest and v not in m.versions for m in ranks)}
        return {version for version in held if version < complete} | given_up, complete

    def lagging_sources(self, member: Member) -> str:
        """Name the ranks that have published least: the versions that `member` holds wait for them."""
        newest = max(member.versions, default=-1)
        late = [(m.newest, rank) for rank, m in sorted(self.sources.items()) if m.newest < newest]
        said = [
            f"source rank {rank} of {self.source_world()} has not registered" for rank in self.missing_sources()[:5]
        ]
        for behind, rank in sorted(late)[:5]:
            gone = "" if self.sources[rank].attached else ", and its trainer is gone"
            what = "nothing yet" if behind < 0 or not self.sources[rank].versions else f"{behind} last"
            said.append(f"{self.sources[rank].describe()} has published {what}{gone}")
        return "; ".join(said)

    def check_part(self, a: AddShard, shard: Shard) -> None:
        """Check that a source rank and the attached ones offer parts of one checkpoint, and agree on `partial`.

        Raises:
            RefusedError: it says that all is offered and others that a part is, or the reverse; or its part is of
                another checkpoint than theirs.
        """
        others = self.sources.values() if a.role == "source" else ()
        for other in others:
            if other.attached and other.shard.is_partial != shard.is_partial and other.added.rank != a.rank:
                raise RefusedError(
                    f"model {self.name!r} source rank {a.rank} has partial={shard.is_partial}, {other.describe()} has "
                    f"partial={other.shard.is_partial}; give all ranks of the trainer the same"
                )
            if other.attached and other.added.origin != a.origin and other.added.rank != a.rank:
                raise RefusedError(
                    f"model {self.name!r} source rank {a.rank} publishes from other files (names, sizes or times) than "
                    f"{other.describe()}; the folder was replaced, or the nodes see different folders: publish all "
                    "parts again, from one folder or from copies that keep their times (cp -p)"
                )

    def replaced_by(self, a: AddShard) -> list[Member]:
        """Return the detached ranks that a new rank replaces: its own, or a whole pool of another size.

        Raises:
            RefusedError: the rank is taken, or attached ranks have another size.
        """
        pool: dict[int, Member]
        if a.role == "source":
            pool, what = self.sources, f"model {self.name!r} source"
        else:
            pool = self._replicas.get(a.replica, {})
            what = f"model {self.name!r} replica {a.replica!r}"
        other_size = [other for other in pool.values() if other.added.world_size != a.world_size]
        for other in other_size:
            if other.attached:
                raise RefusedError(
                    f"{what} rank {a.rank} says there are {a.world_size} ranks, rank {other.added.rank} "
                    f"(host {other.host}, pid {other.added.pid}) said {other.added.world_size}; start all with one size"
                )
        if other_size:
            return other_size  # the trainer is gone and restarts with another number of ranks
        old = pool.get(a.rank)
        if old is not None and old.attached:
            raise RefusedError(
                f"{what} rank {a.rank} is already registered by pid {old.added.pid} on {old.host}; "
                "close that registration first, or use another rank"
            )
        return [] if old is None else [old]

    def add(self, member: Member) -> None:
        """Add a rank, replacing a detached one."""
        a = member.added
        if a.role == "source":
            self.sources[a.rank] = member
        else:
            self.targets[(a.replica, a.rank)] = self._replicas.setdefault(a.replica, {})[a.rank] = member

    def remove(self, member: Member) -> None:
        """Remove a rank."""
        a = member.added
        if a.role == "source" and self.sources.get(a.rank) is member:
            del self.sources[a.rank]
        elif a.role == "target" and self.targets.get((a.replica, a.rank)) is member:
            del self.targets[(a.replica, a.rank)], self._replicas[a.replica][a.rank]
            if not self._replicas[a.replica]:
                del self._replicas[a.replica]

    def only(self, replicas: Collection[str]) -> Membership:
        """Return this model with only these replicas; it shares the members."""
        targets = {key: member for key, member in self.targets.items() if key[0] in replicas}
        return replace(self, sources=dict(self.sources), targets=targets)

    def seeded_by(self, seeds: Collection[str], replicas: Collection[str]) -> Membership:
        """Return this model without sources and with only `replicas`, which receive what the replicas `seeds` serve."""
        given = {key: member for key, member in self.targets.items() if key[0] in seeds}
        return replace(self.only(replicas), sources={}, seeds=given)

    def in_control(self) -> list[Controller]:
        """Return the controllers of the replicas that have ranks here."""
        replicas = {replica for replica, _ in self.targets}
        return [found for replica, found in sorted(self.controllers.items()) if replica in replicas]

    def suspended(self) -> list[str]:
        """Return the replicas of which a rank is suspended."""
        return sorted({replica for (replica, _), m in self.targets.items() if m.suspended})

    def drained(self) -> list[str]:
        """Return the replicas that swaps leave out because of drained nodes.

        They have a rank or their controller there; or they had, and it has not registered elsewhere.
        """
        if not self.drains:
            return []
        ranks = Counter(replica for replica, _ in self.targets)
        controlled = {replica for replica, c in self.controllers.items() if c.node in self.drains}
        noted = {replica for found in self.drains.values() for model, replica in found if model == self.name}
        return sorted(
            {
                replica
                for (replica, _), m in self.targets.items()
                if m.node in self.drains
                or replica in controlled
                or (replica in noted and (ranks[replica] < m.added.world_size or self.lacks_controller(replica, [m])))
            }
        )

    def drained_sources(self) -> list[Member]:
        """Return the source ranks on drained nodes, in rank order."""
        return [m for _, m in sorted(self.sources.items()) if m.node in self.drains]

    def sources_give(self, live: LiveVersion) -> bool:
        """Whether every source rank holds this version, and may be read."""
        return live.version in self.complete_versions() and self.run() == live.run and not self.drained_sources()

    def left_out(self) -> str:
        """Return which replicas swaps leave out, with the reason and the next step; "" for none."""
        said = []
        if suspended := self.suspended():
            said.append(f"suspended: {', '.join(suspended)}; an engine wakes by target.resume()")
        if drained := self.drained():
            nodes = sorted({m.node for m in self.targets.values()} & self.drains.keys() or self.drains.keys())
            said.append(f"on a drained node: {', '.join(drained)}; refitctl resume {' or '.join(nodes)}")
        return f"every replica is left out ({'; '.join(said)})" if said else ""

    def engines(self) -> Membership:
        """Return this model without replicas that observe, are suspended or drained; itself if there are none."""
        observers = {replica for (replica, _), m in self.targets.items() if m.added.observes}
        left_out = observers | set(self.suspended()) | set(self.drained())
        return self.only({replica for replica, _ in self.targets} - left_out) if left_out else self

    def behind(self, live: LiveVersion, *, only_observers: bool = False) -> list[str]:
        """Return the complete replicas that can be caught up to the live version."""
        found, drained = [], self.drained()
        for replica, ranks in self.replicas().items():
            if only_observers and not any(m.added.observes for m in ranks):
                continue
            late = [m for m in ranks if not live.is_at(m.version, m.run)]
            ready = len(ranks) == ranks[0].added.world_size and all(m.staged is None for m in ranks)
            ready = ready and not self.lacks_controller(replica, ranks)
            ready = ready and replica not in drained and not any(m.suspended for m in ranks)
            if late and ready and not any(m.left_behind for m in late):
                found.append(replica)
        return found

    def lacks_controller(self, replica: str, ranks: Iterable[Member]) -> bool:
        """Whether ranks of a replica commit only when a controller says so, and it has none."""
        return replica not in self.controllers and any(member.added.controlled for member in ranks)

    def converted_bytes(self) -> int:
        """Return the bytes that targets read again for conversions."""
        return sum(m.added.converted_bytes for m in self.targets.values())

    def ranks(self) -> dict[str, int]:
        """Return the plan-wide rank of every member: sources first, then replica after replica by name.

        sources 0, 1; engine-a 0, 1 -> 2, 3; engine-b 0 -> 4
        """
        offsets = self._offsets()
        found = {m.id: rank for rank, m in self.sources.items()}
        return found | {m.id: offsets[replica] + rank for (replica, rank), m in self._receivers().items()}

    def pools(self) -> list[list[Registered]]:
        """Return the planner's input: the sources, then each replica, with ranks numbered as in `ranks`."""
        pools = {"": [_registered(m, rank, f"source rank {rank}", True) for rank, m in sorted(self.sources.items())]}
        offsets, is_seeded = self._offsets(), bool(self.seeds)
        for (replica, rank), m in sorted(self._receivers().items()):
            gives, label = (replica, rank) in self.seeds, f"{replica} rank {rank}"
            pools.setdefault(replica, []).append(_registered(m, offsets[replica] + rank, label, gives, is_seeded))
        return list(pools.values())

    def _offsets(self) -> dict[str, int]:
        offset, found = self.source_world(), {}
        worlds = {replica: m.added.world_size for (replica, _), m in self._receivers().items()}
        for replica in sorted(worlds):
            found[replica] = offset
            offset += worlds[replica]
        return found

    def _receivers(self) -> dict[tuple[str, int], Member]:
        return self.seeds | self.targets


def _registered(member: Member, rank: int, label: str, is_source: bool, as_held: bool = False) -> Registered:
    return Registered(rank, label, member.node, is_source, member.added.digest, member.shard, as_held)
