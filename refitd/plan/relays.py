"""Send elements that several nodes need along a path: to the first node, which passes them on to the next one.

    direct     n0 -> n1, n0 -> n2, n0 -> n3      n0 sends three copies
    one path   n0 -> n1 -> n2 -> n3              every node sends one copy at most, and receives one

The predicted time is the time of the slowest cable plus one message for each relay, because a relay passes messages on
while later ones arrive. The last node of a path does not send, and a slow node delays all nodes after it. So paths end
with the nodes that would need longest to send, and slow receivers come after fast ones:

    n2 sends slowly      n0 -> n1 -> n3 -> n2
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from refitd.plan.between_nodes import Deliveries
from refitd.plan.columns import Bools, Ints, first_alike, numbered, numbered_lists, offsets_of, range_values, ranges
from refitd.plan.cost import EQUAL, Cables, Floats

# A path is cut into about this many messages, as far as a message may be so small (copy_services/packed.py).
MESSAGES = 64
# Each path costs messages even if it carries little, so less than this goes directly.
LEAST_BYTES = 256 << 10
# Relays have to shorten the predicted time by this much: each of them is one more that may fail.
WORTH = 0.9


@dataclass(frozen=True, slots=True)
class Path:
    """Bytes that `source` sends to the first of `nodes`, and each of `nodes` to the next."""

    source: str
    nodes: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Relays:
    """How relaying was decided. Bytes go through the busiest direction of any node's cable.

    `paths` is empty if every node receives directly from sources. Seconds are predicted and include the relays; they
    are bytes if the cables' speeds are unknown.
    """

    paths: tuple[Path, ...] = ()
    direct_bytes: int = 0
    bytes: int = 0
    direct_seconds: float = 0.0
    seconds: float = 0.0

    def puts_last(self, last: Collection[str]) -> bool:
        """Return whether, in every path, the nodes of `last` come after all others."""
        return all(sorted(path.nodes, key=lambda node: node in last) == list(path.nodes) for path in self.paths)


@dataclass(frozen=True, eq=False, slots=True)
class Moves:
    """Transfers between nodes, in the order of sending and receiving.

    Move i brings the lots of set `lots[i]` of a delivery to its node. They come from the delivery's source or, on a
    path, from the node of another delivery of that source. Moves on no path come first.
    """

    delivery: Ints  # [n]
    before: Ints  # [n] the delivery, received where this one comes from; -1: this one comes from its source
    lots: Ints  # [n] number of a set of lots
    path: Ints  # [n] 0 for none
    hop: Ints  # [n] relays before it on its path
    set_start: Ints  # [sets + 1] into `set_lots`
    set_lots: Ints  # the lots of all sets, end to end, ascending in each


@dataclass(frozen=True, eq=False, slots=True)
class _Loads:
    """Lots that one source has, and that the same nodes need: sorted by (family, source)."""

    family: Ints  # [n]
    src: Ints  # [n] rank
    lots: Ints  # [n] number of a set of lots
    set_start: Ints  # as in Moves
    set_lots: Ints


@dataclass(frozen=True, eq=False, slots=True)
class _Family:
    """Loads of one node that the same other nodes need.

    `nodes` are in the order of a path, except its end: nodes that must come last are last, slow receivers after fast
    ones.

    `is_small`: they are not worth a path.
    """

    source: int
    nodes: Ints
    nbytes: int
    is_small: bool

    def count(self, most: int) -> int:
        """Return the number of chains if there may be at most so many."""
        return len(self.nodes) if self.is_small else min(most, len(self.nodes))


@dataclass(frozen=True, eq=False, slots=True)
class _Chains:
    """A family's nodes, chain after chain: chain j is nodes[start[j] : start[j + 1]]."""

    nodes: Ints
    start: Ints

    @property
    def relays(self) -> Ints:
        """The nodes that pass something on: all but the last of each chain."""
        return np.delete(self.nodes, self.start[1:] - 1)


@dataclass(frozen=True, eq=False, slots=True)
class _Forecast:
    """All families, each in a limited number of chains, and the predicted load and time."""

    chains: list[_Chains]
    busiest: int  # bytes through the busiest direction of a cable
    seconds: float


@dataclass(frozen=True, eq=False, slots=True)
class _Nodes:
    """The nodes by number: name, bytes per second each way, and whether they must come last in paths."""

    names: list[str]
    send: Floats
    receive: Floats
    is_last: Bools


def direct(found: Deliveries) -> Moves:
    """Return deliveries as moves that all come from their sources."""
    none, lots = np.zeros(len(found), np.int64), np.arange(len(found.patterns.lot_bytes))
    return Moves(np.arange(len(found)), none - 1, none, none, none, np.array([0, len(lots)]), lots)


def relayed(
    found: Deliveries,
    at: Ints,
    names: list[str],
    least_bytes: int = LEAST_BYTES,
    last: Collection[str] = (),
    cables: Cables = EQUAL,
) -> tuple[Moves, Relays]:
    """Return the moves of deliveries, over paths where that is faster; and the decision.

    Args:
        found: the deliveries.
        at: number of each rank's node.
        names: the nodes.
        least_bytes: less than this goes directly.
        last: nodes that come last in every path: those after them get no deltas.
        cables: how fast the nodes' cables are.
    """
    if not len(found):
        return direct(found), Relays()
    nodes = _Nodes(names, cables.sends(names), cables.receives(names), np.array([name in last for name in names], bool))
    if (hardly := _hardly_faster(found, at, nodes)) is not None:
        return direct(found), hardly
    families, loads = _families(found, at, least_bytes, nodes)
    if all(len(family.nodes) < 2 or family.is_small for family in families):
        return direct(found), Relays()
    most = max(len(family.nodes) for family in families)
    forecasts = {chains: _forecast(families, chains, nodes) for chains in _counts(most)}
    whole = forecasts[most]
    fewest = min(forecasts, key=lambda chains: (forecasts[chains].seconds, -chains))
    best = forecasts[fewest]
    if best.seconds > WORTH * whole.seconds:
        return direct(found), Relays((), whole.busiest, whole.busiest, whole.seconds, whole.seconds)
    moves, paths = _over_paths(found, loads, families, best.chains, names)
    return moves, Relays(tuple(paths), whole.busiest, best.busiest, whole.seconds, best.seconds)


def _hardly_faster(found: Deliveries, at: Ints, nodes: _Nodes) -> Relays | None:
    """Return the decision not to relay if the nodes that receive take about as long anyway; None if more must be known.

    In a large fleet with as many that send this is soon said.
    """
    alike = found.src * (1 + int(found.pattern.max())) + found.pattern
    if (first_alike(alike) == np.arange(len(alike))).all():
        return None  # perhaps no two nodes need the same
    patterns = found.patterns
    nbytes = np.add.reduceat(patterns.lot_bytes[patterns.lots], patterns.lot_start[:-1])[found.pattern]
    sent, received = np.zeros(len(nodes.names), np.int64), np.zeros(len(nodes.names), np.int64)
    np.add.at(sent, at[found.src], nbytes)
    np.add.at(received, found.node, nbytes)
    least = float((received / nodes.receive).max())
    seconds = max(float((sent / nodes.send).max()), least)
    if least <= WORTH * seconds:
        return None
    busiest = int(max(sent.max(), received.max()))
    return Relays((), busiest, busiest, seconds, seconds)


def _families(found: Deliveries, at: Ints, least_bytes: int, nodes: _Nodes) -> tuple[list[_Family], _Loads]:
    """Return the families, and the loads of each."""
    patterns = found.patterns
    delivery, lot = ranges(patterns.lot_start[found.pattern], np.diff(patterns.lot_start)[found.pattern])
    lot = patterns.lots[lot]
    # the nodes that need one lot of one source
    order = np.lexsort((found.node[delivery], lot, found.src[delivery]))
    src, lot, node = found.src[delivery[order]], lot[order], found.node[delivery[order]]
    begin = np.flatnonzero(np.append(True, (np.diff(src) != 0) | (np.diff(lot) != 0)))
    needing, need = numbered_lists(node, begin)
    ends, src, lot = np.append(begin, len(node)), src[begin], lot[begin]
    example, family = numbered(at[src] * len(needing) + need)
    total = np.zeros(len(example), np.int64)
    np.add.at(total, family, patterns.lot_bytes[lot])
    families = []
    for one, nbytes in zip(example.tolist(), total.tolist(), strict=True):
        mine = node[ends[one] : ends[one + 1]]
        mine = mine[np.lexsort((mine, -nodes.receive[mine], nodes.is_last[mine]))]
        families.append(_Family(int(at[src[one]]), mine, nbytes, nbytes < least_bytes))
    order = np.lexsort((lot, src, family))
    src, lot, family = src[order], lot[order], family[order]
    begin = np.flatnonzero(np.append(True, (np.diff(src) != 0) | (np.diff(family) != 0)))
    sets, number = numbered_lists(lot, begin)
    count = np.diff(np.append(begin, len(lot)))[sets]
    set_start = np.append(0, np.cumsum(count))
    return families, _Loads(family[begin], src[begin], number, set_start, lot[range_values(begin[sets], count)])


def _counts(most: int) -> list[int]:
    """Return the numbers of chains to be tried: all small ones, and fewer of the larger ones."""
    return sorted({most, *(n for n in range(1, 9) if n < most), *(2**k for k in range(3, most.bit_length()))} - {0})


def _forecast(families: list[_Family], most: int, nodes: _Nodes) -> _Forecast:
    """Put all families into chains, the largest first, and predict the time.

    The nodes that would send for longest end the chains. Sending times below the longest receiving time, which no path
    can shorten, count as equal; among such nodes slow receivers come last.
    """
    sent, received = np.zeros(len(nodes.names), np.int64), np.zeros(len(nodes.names), np.int64)
    for family in families:
        received[family.nodes] += family.nbytes
        sent[family.source] += family.nbytes * family.count(most)
    least = float((received / nodes.receive).max())
    chains: dict[int, _Chains] = {}
    last = 0.0
    for number in sorted(range(len(families)), key=lambda at: (-families[at].nbytes, at)):
        family = families[number]
        found = chains[number] = _chained(family, family.count(most), sent, least, nodes)
        sent[found.relays] += family.nbytes
        last = max(last, _passing_on(found, family.nbytes, nodes))
    seconds = max(float((sent / nodes.send).max()), least) + last
    return _Forecast([chains[at] for at in range(len(families))], int(max(sent.max(), received.max())), seconds)


def _chained(family: _Family, count: int, sent: Ints, least: float, nodes: _Nodes) -> _Chains:
    mine = family.nodes
    takes = np.maximum((sent[mine] + family.nbytes) / nodes.send[mine], least)
    others, ends = mine[: len(mine) - count], mine[len(mine) - count :]
    if takes.max() > least:
        at = np.lexsort((takes, nodes.is_last[mine]))
        others, ends = mine[np.sort(at[: len(at) - count])], mine[at[len(at) - count :]]
    length, longer = divmod(len(others), count)
    start = np.append(0, np.cumsum(np.full(count, length) + (np.arange(count) < longer)))
    return _Chains(np.insert(others, start[1:], ends), start + np.arange(count + 1))


def _passing_on(chains: _Chains, nbytes: int, nodes: _Nodes) -> float:
    """Return by how much the last node of a chain is behind the first: the time of one message for each relay."""
    if len(chains.nodes) < len(chains.start):
        return 0.0  # no relay
    message = nbytes // MESSAGES
    behind = np.append(
        0, np.cumsum(message / np.minimum(nodes.send[chains.nodes[:-1]], nodes.receive[chains.nodes[1:]]))
    )
    return float((behind[chains.start[1:] - 1] - behind[chains.start[:-1]]).max())


def _over_paths(
    found: Deliveries, loads: _Loads, families: list[_Family], chains: list[_Chains], names: list[str]
) -> tuple[Moves, list[Path]]:
    """Return the moves, ordered by path, hop and load, and the paths."""
    # places: nodes in chains, chain after chain, family after family
    family = np.repeat(np.arange(len(families)), [len(each.nodes) for each in chains])
    node = np.concatenate([each.nodes for each in chains])
    length = np.concatenate([np.diff(each.start) for each in chains])
    chain, hop = ranges(np.zeros(len(length), np.int64), length)
    path = np.where(length > 1, np.cumsum(length > 1), 0)[chain]
    load_start = offsets_of(loads.family, len(families))
    place, load = ranges(load_start[family], np.diff(load_start)[family])
    src = loads.src[load]
    delivery = found.find(src, node[place])
    before = np.where(hop[place] > 0, found.find(src, node[place - 1]), -1)
    order = np.lexsort((load, hop[place], path[place]))
    place = place[order]
    moves = Moves(
        delivery[order],
        before[order],
        loads.lots[load[order]],
        path[place],
        hop[place],
        loads.set_start,
        loads.set_lots,
    )
    paths = []
    for each, chained in zip(families, chains, strict=True):
        for some in np.split(chained.nodes, chained.start[1:-1]):
            if len(some) > 1:
                paths.append(Path(names[each.source], tuple(names[at] for at in some.tolist()), each.nbytes))
    return moves, paths
