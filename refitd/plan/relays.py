"""Paths over nodes: what several nodes need alike is sent to the first of them, and each passes it on to the next.

    direct     n0 -> n1, n0 -> n2, n0 -> n3      n0 sends three copies
    one path   n0 -> n1 -> n2 -> n3              every node sends one copy at most, and receives one

All cables are taken to be equally fast in each direction, and both directions to be independent. Then the time is that
of the busiest cable, and a message more for each relay, since messages are passed on while later ones arrive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

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
    """How relaying was decided. Figures count bytes through the busiest direction of any node's cable.

    `paths` is empty if every node gets everything directly.
    """

    paths: tuple[Path, ...] = ()
    direct_bytes: int = 0
    bytes: int = 0

    def puts_last(self, last: Collection[str]) -> bool:
        """Return whether, in every path, the nodes of `last` come after all others."""
        return all(sorted(path.nodes, key=lambda node: node in last) == list(path.nodes) for path in self.paths)


@dataclass(frozen=True, eq=False, slots=True)
class _Family:
    """Source boxes on one node that the same other nodes need. `boxes` are numbers of boxes.

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

    def chains(self, most: int) -> list[Ints]:
        """Return the nodes in at most so many chains, the longest first."""
        return np.array_split(self.nodes, self.count(most))

    def relays(self, most: int) -> Ints:
        """Return the nodes that pass something on: all but the last of each chain."""
        count = self.count(most)
        length, longer = divmod(len(self.nodes), count)
        ends = np.cumsum(np.full(count, length) + (np.arange(count) < longer)) - 1
        return np.delete(self.nodes, ends)


def relayed(
    table: CopyTable,
    box: Ints,
    node_of: Mapping[int, str],
    least_bytes: int = LEAST_BYTES,
    last: Collection[str] = (),
) -> tuple[CrossingTable, Relays]:
    """Return rows that move the same over paths, where that is faster; and the decision.

    Args:
        table: rows that cross between nodes; each source box crosses to a node at most once (refitd.plan.onward).
        box: each row's source box (refitd.plan.onward.source_boxes), shape [n].
        node_of: rank -> node.
        least_bytes: what all nodes of a path need must be as much, else it goes directly.
        last: nodes that come last in every path: those after them get no deltas.
    """
    rows = CrossingTable.of(table)
    if not len(rows):
        return rows, Relays()
    found = {node_of[rank] for rank in (*_ranks(rows.src_rank), *_ranks(rows.dst_rank))}
    names = sorted(found, key=lambda name: (name in last, name))  # paths go in this order
    src, dst = _nodes(rows.src_rank, node_of, names), _nodes(rows.dst_rank, node_of, names)
    _, box = numbered(rows.src_rank.astype(np.int64) * (1 + int(box.max())) + box)
    families = _families(rows, box, src, dst, least_bytes)
    if all(len(family.nodes) < 2 or family.is_small for family in families):
        return rows, Relays()
    most = max(len(family.nodes) for family in families)
    predicted = {chains: _busiest(families, chains, len(names)) for chains in _counts(most)}
    direct, _ = predicted[most]
    best = min(predicted, key=lambda chains: (sum(predicted[chains]), -chains))
    if sum(predicted[best]) > WORTH * direct:
        return rows, Relays((), direct, direct)
    moved, paths = _over_paths(rows, box, dst, families, best, names)
    return moved, Relays(tuple(paths), direct, predicted[best][0])


def _ranks(column: npt.NDArray[np.int32]) -> list[int]:
    found: list[int] = distinct(column).tolist()
    return found


def _nodes(column: npt.NDArray[np.int32], node_of: Mapping[int, str], names: list[str]) -> Ints:
    number = {name: i for i, name in enumerate(names)}
    at = np.zeros(int(column.max()) + 1, np.int64)
    for rank in _ranks(column):
        at[rank] = number[node_of[rank]]
    return at[column]


def _families(rows: CopyTable, box: Ints, src: Ints, dst: Ints, least_bytes: int) -> list[_Family]:
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
        nodes = np.sort(dst[row_order[row_starts[one] : row_starts[one + 1]]])
        total = int(nbytes[first[boxes]].sum())
        found.append(_Family(int(src[first[one]]), nodes, boxes, total, total < least_bytes))
    return found


def _counts(most: int) -> list[int]:
    """Return the numbers of chains to be tried: all small ones, and fewer of the larger ones."""
    return sorted({most, *(n for n in range(1, 9) if n < most), *(2**k for k in range(3, most.bit_length()))} - {0})


def _busiest(families: list[_Family], most: int, nodes: int) -> tuple[int, int]:
    """Return (bytes through the busiest direction of a cable, bytes that relays add to the time)."""
    sent, received, last = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64), 0
    for family in families:
        received[family.nodes] += family.nbytes
        chains = family.count(most)
        sent[family.source] += family.nbytes * chains
        sent[family.relays(most)] += family.nbytes
        last = max(last, (-(-len(family.nodes) // chains) - 1) * (family.nbytes // MESSAGES))
    return int(max(sent.max(), received.max())), last


def _over_paths(
    rows: CrossingTable, box: Ints, dst: Ints, families: list[_Family], most: int, names: list[str]
) -> tuple[CrossingTable, list[Path]]:
    """Return the rows with their paths, ordered by path, hop and box, and the paths."""
    path, hop = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int32)
    giver = np.full(len(rows), -1, np.int64)
    paths: list[Path] = []
    order = np.lexsort((dst, box))
    key = box[order] * len(names) + dst[order]
    for family in families:
        for chain in family.chains(most):
            if len(chain) < 2:
                continue
            wanted = [family.boxes * len(names) + node for node in chain.tolist()]
            found_at = [np.minimum(np.searchsorted(key, keys), len(key) - 1) for keys in wanted]
            if any((key[at] != keys).any() for at, keys in zip(found_at, wanted, strict=True)):
                continue  # two sets of nodes of one hash: these boxes go directly
            number, before = len(paths) + 1, np.empty(0, np.int64)
            for relays, at in enumerate(found_at):
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
    found = CrossingTable(**columns)
    # rows on no path stay in their order
    return found.select(np.lexsort((np.where(path > 0, box, np.arange(len(rows))), hop, path))), paths
