"""Paths over nodes: what several nodes need alike is sent to the first of them, and each passes it on to the next.

    direct     n0 -> n1, n0 -> n2, n0 -> n3      n0 sends three copies
    one path   n0 -> n1 -> n2 -> n3              every node sends one copy at most, and receives one

The time is that of the cable that takes longest (cables.py), and a message more for each relay, since messages are
passed on while later ones arrive. Who ends a path sends nothing, and who stands before its end holds up those after it.
So paths end with the nodes whose sending would take longest, and slow receivers come after fast ones:

    n2 sends slowly      n0 -> n1 -> n3 -> n2
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from refitd.plan.cables import EQUAL, Cables, Floats
from refitd.plan.columns import Ints, distinct, hashed, mixed, numbered
from refitd.plan.table import CopyTable, CrossingTable

# A path is cut into about this many messages, as far as a message may be so small (copy_services/packed.py).
MESSAGES = 64
# A path costs messages of its own, however little it carries: what is smaller than this goes directly.
LEAST_BYTES = 256 << 10
# Relays have to shorten the predicted time by this much: each of them is one more that may fail.
WORTH = 0.9


@dataclass(frozen=True, slots=True)
class Path:
    """What `source` sends to the first of `nodes`, and each of them to the next."""

    source: str
    nodes: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Relays:
    """How relaying was decided. Bytes go through the busiest direction of any node's cable.

    `paths` is empty if every node gets everything directly. Seconds are predicted, relays' own included; they are
    bytes if nothing is known of the cables.
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
class _Family:
    """Source boxes on one node that the same other nodes need. `boxes` are numbers of boxes.

    `nodes` are in the order in which a path goes over them, but for its end: those that come last, then slow receivers
    after fast ones.

    `is_small`: they are not worth a path.
    """

    source: int
    nodes: Ints
    boxes: Ints
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

    def each(self) -> list[Ints]:
        """Return the nodes of each chain."""
        return np.split(self.nodes, self.start[1:-1])


@dataclass(frozen=True, eq=False, slots=True)
class _Forecast:
    """All families in at most so many chains each, and what is predicted of that."""

    chains: list[_Chains]
    busiest: int  # bytes through the busiest direction of a cable
    seconds: float


@dataclass(frozen=True, eq=False, slots=True)
class _Nodes:
    """The nodes by number: their names, what they send and receive a second, and whether they come last."""

    names: list[str]
    send: Floats
    receive: Floats
    is_last: npt.NDArray[np.bool_]


def relayed(
    table: CopyTable,
    box: Ints,
    node_of: Mapping[int, str],
    least_bytes: int = LEAST_BYTES,
    last: Collection[str] = (),
    cables: Cables = EQUAL,
) -> tuple[CrossingTable, Relays]:
    """Return rows that move the same over paths, where that is faster; and the decision.

    Args:
        table: rows that cross between nodes; each source box crosses to a node at most once (refitd.plan.onward).
        box: each row's source box (refitd.plan.onward.source_boxes), shape [n].
        node_of: rank -> node.
        least_bytes: what all nodes of a path need must be as much, else it goes directly.
        last: nodes that come last in every path: those after them get no deltas.
        cables: how fast the nodes' cables are.
    """
    rows = CrossingTable.of(table)
    if not len(rows):
        return rows, Relays()
    found = {node_of[rank] for rank in (*_ranks(rows.src_rank), *_ranks(rows.dst_rank))}
    names = sorted(found)
    nodes = _Nodes(names, cables.sends(names), cables.receives(names), np.array([name in last for name in names], bool))
    src, dst = _nodes(rows.src_rank, node_of, names), _nodes(rows.dst_rank, node_of, names)
    _, box = numbered(rows.src_rank.astype(np.int64) * (1 + int(box.max())) + box)
    families = _families(rows, box, src, dst, least_bytes, nodes)
    if all(len(family.nodes) < 2 or family.is_small for family in families):
        return rows, Relays()
    most = max(len(family.nodes) for family in families)
    forecasts = {chains: _forecast(families, chains, nodes) for chains in _counts(most)}
    direct = forecasts[most]
    fewest = min(forecasts, key=lambda chains: (forecasts[chains].seconds, -chains))
    best = forecasts[fewest]
    if best.seconds > WORTH * direct.seconds:
        return rows, Relays((), direct.busiest, direct.busiest, direct.seconds, direct.seconds)
    moved, paths = _over_paths(rows, box, dst, families, best.chains, names)
    return moved, Relays(tuple(paths), direct.busiest, best.busiest, direct.seconds, best.seconds)


def _ranks(column: npt.NDArray[np.int32]) -> list[int]:
    found: list[int] = distinct(column).tolist()
    return found


def _nodes(column: npt.NDArray[np.int32], node_of: Mapping[int, str], names: list[str]) -> Ints:
    number = {name: i for i, name in enumerate(names)}
    at = np.zeros(int(column.max()) + 1, np.int64)
    for rank in _ranks(column):
        at[rank] = number[node_of[rank]]
    return at[column]


def _families(rows: CopyTable, box: Ints, src: Ints, dst: Ints, least_bytes: int, nodes: _Nodes) -> list[_Family]:
    # boxes are of one family if they are on one node and the hashes of the nodes that need them have one sum
    needed_by = np.zeros(int(box.max()) + 1, np.uint64)
    np.add.at(needed_by, box, mixed(dst))
    first = np.zeros(len(needed_by), np.int64)
    first[box[::-1]] = np.arange(len(rows))[::-1]
    _, family = numbered(hashed([needed_by, src[first]]))
    order = np.argsort(family, kind="stable")
    starts = np.searchsorted(family[order], np.arange(int(family.max()) + 2))
    nbytes, row_order = rows.row_bytes, np.argsort(box, kind="stable")
    row_starts = np.searchsorted(box[row_order], np.arange(len(needed_by) + 1))
    found = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        boxes = np.sort(order[begin:end])
        one = int(boxes[0])
        needing = dst[row_order[row_starts[one] : row_starts[one + 1]]]
        needing = needing[np.lexsort((needing, -nodes.receive[needing], nodes.is_last[needing]))]
        total = int(nbytes[first[boxes]].sum())
        found.append(_Family(int(src[first[one]]), needing, boxes, total, total < least_bytes))
    return found


def _counts(most: int) -> list[int]:
    """Return the numbers of chains to be tried: all small ones, and fewer of the larger ones."""
    return sorted({most, *(n for n in range(1, 9) if n < most), *(2**k for k in range(3, most.bit_length()))} - {0})


def _forecast(families: list[_Family], most: int, nodes: _Nodes) -> _Forecast:
    """Put all families into chains, the largest first, and predict the time.

    Whoever would send for longest ends a chain. What takes no longer than receiving does, which nothing shortens,
    counts as equally long, so that there slow receivers come last.
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
    rows: CrossingTable, box: Ints, dst: Ints, families: list[_Family], chains: list[_Chains], names: list[str]
) -> tuple[CrossingTable, list[Path]]:
    """Return the rows with their paths, ordered by path, hop and box, and the paths."""
    path, hop = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
    giver = np.full(len(rows), -1, np.int64)
    paths: list[Path] = []
    order = np.lexsort((dst, box))
    key = box[order] * len(names) + dst[order]
    for family, found in zip(families, chains, strict=True):
        for chain in found.each():
            if len(chain) < 2:
                continue
            wanted = [family.boxes * len(names) + node for node in chain.tolist()]
            places = [np.minimum(np.searchsorted(key, keys), len(key) - 1) for keys in wanted]
            if any((key[at] != keys).any() for at, keys in zip(places, wanted, strict=True)):
                continue  # two sets of nodes of one hash: these boxes go directly
            number, before = len(paths) + 1, np.empty(0, np.int64)
            for relays, at in enumerate(places):
                here = order[at]
                path[here], hop[here] = number, relays
                if relays:
                    giver[here] = before
                before = here
            paths.append(Path(names[family.source], tuple(names[node] for node in chain.tolist()), family.nbytes))
    passed = giver >= 0
    columns = {f.name: getattr(rows, f.name) for f in fields(rows)} | {"path": path, "hop": hop}
    for name in ("rank", "local", "offset", "stride"):
        column = columns[f"src_{name}"].copy()
        column[passed] = columns[f"dst_{name}"][giver[passed]]
        columns[f"src_{name}"] = column
    columns["cast"] = np.where(passed, 0, rows.cast).astype(np.int32)
    moved = CrossingTable(**columns)
    # rows on no path stay in their order
    return moved.select(np.lexsort((np.where(path > 0, box, np.arange(len(rows))), hop, path))), paths
