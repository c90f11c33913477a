"""Worlds that differ only in the names of nodes or replicas count as one: choose the one that represents them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from refitd.commit.decision import Swap
from tests.exploration.fleet import NODES, Fleet
from tests.exploration.nodes import WHY, Node
from tests.exploration.worlds import Journal, Store, World


class Symmetry:
    """Mirrors worlds; each part of a world is mirrored once."""

    def __init__(self, fleets: Store, nodes: Store, journals: Store) -> None:
        self.fleets, self.nodes, self.journals = fleets, nodes, journals
        self._swapped: dict[tuple[int, str], int] = {}

    def canonical(self, world: World) -> World:
        """Return the representative of all worlds that differ from this one in names of nodes and replicas."""
        fleet, journal, (one, two), faults, delays = world
        other_one, other_two = self._mirrored_node(one), self._mirrored_node(two)
        best = world
        for kind, nodes in (
            ("nodes", (two, one)),
            ("replicas", (other_one, other_two)),
            ("both", (other_two, other_one)),
        ):
            mirrored = fleet if fleet < 0 else self._mirrored_fleet(fleet, kind)
            if mirrored < best.fleet or (mirrored == best.fleet and nodes <= best.nodes):
                best = World(mirrored, self._mirrored_journal(journal, kind), nodes, faults, delays)
        return best

    def _mirrored_node(self, node: int) -> int:
        found = self._swapped.get((node, "node"))
        if found is None:
            value: Node = self.nodes.values[node]
            found = self.nodes(
                value._replace(
                    ranks=value.ranks[::-1],
                    down=tuple(_mirrored(m) for m in value.down),
                    up=tuple(_mirrored(m) for m in value.up),
                )
            )
            self._swapped[node, "node"] = found
        return found

    def _mirrored_journal(self, journal: int, kind: str) -> int:
        found = self._swapped.get((journal, f"{kind} in the journal"))
        if found is None:
            node, index = _exchanged(kind)
            value: Journal = self.journals.values[journal]
            ranks = frozenset((node[n], index[i]) for n, i in value.ranks)
            write = value.write
            if write is not None:
                write = write._replace(ranks=frozenset((node[n], index[i]) for n, i in write.ranks))
            found = self.journals(value._replace(ranks=ranks, write=write))
            self._swapped[journal, f"{kind} in the journal"] = found
        return found

    def _mirrored_fleet(self, fleet: int, kind: str) -> int:
        found = self._swapped.get((fleet, kind))
        if found is None:
            value: Fleet = self.fleets.values[fleet]
            node, index = _exchanged(kind)
            names = dict(zip(NODES, [NODES[n] for n in node], strict=True))
            members = [m._replace(node=node[m.node], index=index[m.index]) for m in value.members]

            def renamed(name: str) -> str:
                if name in names or len(name) < 3 or name[2] != ".":
                    return names.get(name, name)
                return f"{'ab'[index['ab'.index(name[0])]]}{node[int(name[1])]}{name[2:]}"

            found = self.fleets(
                value._replace(
                    swap=None if value.swap is None else _renamed(value.swap, renamed),
                    known=(value.known[node[0]], value.known[node[1]]),
                    members=tuple(sorted(members, key=lambda m: m[:3])),
                    absent=frozenset((node[n], index[i], number) for n, i, number in value.absent),
                )
            )
            self._swapped[fleet, kind] = found
        return found


def _exchanged(kind: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the new numbers of nodes and of replicas in a mirrored world."""
    return (0, 1) if kind == "replicas" else (1, 0), (0, 1) if kind == "nodes" else (1, 0)


def _mirrored(message: Any) -> Any:
    """Return a message about the other rank of its node."""
    match message:
        case ("stage" | "spare" as kind, swap, version, indices):
            return kind, swap, version, tuple(sorted(1 - index for index in indices))
        case ("committed" | "commit-failed" as kind, swap, index, *rest):
            return (kind, swap, 1 - index, *rest)
        case ("all", *added):
            return ("all", *(_mirrored(one) for one in reversed(added)))
        case ("fence" | "evict" | "admitted" | "suspended" | "add" | "left" | "suspend" as kind, index, *rest):
            return (kind, 1 - index, *rest)
    return message


def _renamed(swap: Swap, name: Callable[[str], str]) -> Swap:
    def all_of(names: frozenset[str]) -> frozenset[str]:
        return frozenset(map(name, names))

    return replace(
        swap,
        names=dict.fromkeys(map(name, swap.names), ""),
        members={name(member): name(node) for member, node in swap.members.items()},
        nodes=all_of(swap.nodes),
        asked=all_of(swap.asked),
        halts=all_of(swap.halts),
        in_place=all_of(swap.in_place),
        waiting=all_of(swap.waiting),
        failed=dict.fromkeys(map(name, swap.failed), WHY),
    )
