"""From a plan and the places of tensors to addressed copies, and how they are dealt to workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from refitd.addressing.places import PROCESS_MEMORY, Form, Int64, Places, choose
from refitd.buffers.layout import row_major_strides
from refitd.plan.fills import FillTable
from refitd.plan.table import Columns, CopyTable

# A copy longer than this is cut, so that several workers can share one large tensor.
SPLIT_BYTES = 32 << 20

# room for one element of any dtype in the arena that fills are read from
CONSTANT_BYTES = 16


@dataclass(frozen=True, eq=False)
class CopyList:
    """Addressed copies, one row each; offsets and strides in bytes, sizes in elements. All columns are int64.

    Where elements are converted, `element_size` and `row_bytes` are those of the destination.
    """

    size: Int64  # [n, D]
    element_size: Int64  # [n] of the destination
    cast: Int64  # [n] number of the conversion (refitd.describe.casts), 0 for none
    src_arena: Int64  # [n] arena id or PROCESS_MEMORY
    src_pid: Int64  # [n] for PROCESS_MEMORY
    src_offset: Int64  # [n]
    src_stride: Int64  # [n, D]
    dst_arena: Int64  # [n]
    dst_offset: Int64  # [n]
    dst_stride: Int64  # [n, D]
    origin: Int64  # [n] row of the table this copy was cut from

    def __len__(self) -> int:
        return len(self.origin)

    @property
    def row_bytes(self) -> Int64:
        """Bytes of each copy, shape [n]."""
        elements: Int64 = np.prod(self.size, axis=1, dtype=np.int64)
        return elements * self.element_size

    def select(self, rows: npt.NDArray[np.int64]) -> CopyList:
        """Return these copies only."""
        return CopyList(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def arenas(self) -> set[int]:
        """Return the ids of all arenas the copies touch."""
        found = set(np.unique(self.src_arena).tolist()) | set(np.unique(self.dst_arena).tolist())
        return found - {PROCESS_MEMORY}

    def to_bytes(self) -> bytes:
        """Return the copies as one block: rows, dims, then the columns, little-endian int64."""
        parts = [np.array(self.size.shape, dtype="<i8").tobytes()]
        parts += [np.ascontiguousarray(getattr(self, f.name), dtype="<i8").tobytes() for f in fields(self)]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> CopyList:
        """Rebuild the copies; raises ValueError when the block has another length than its head says."""
        head = np.frombuffer(data[:16], dtype="<i8")
        rows, dims = (int(head[0]), int(head[1])) if len(head) == 2 else (-1, -1)
        widths = {f.name: dims if f.name in ("size", "src_stride", "dst_stride") else 1 for f in fields(cls)}
        if rows < 0 or not 0 < dims <= 16 or len(data) != 16 + 8 * rows * sum(widths.values()):
            raise ValueError(f"copy list of {len(data)} bytes does not hold {rows} rows of {dims} dimensions")
        at, columns = 16, {}
        for name, width in widths.items():
            column = np.frombuffer(data, dtype="<i8", count=rows * width, offset=at)
            columns[name] = column.reshape(rows, dims) if name in ("size", "src_stride", "dst_stride") else column
            at += column.nbytes
        return cls(**columns)


def address(
    table: CopyTable,
    sources: Mapping[int, Places],
    destinations: Mapping[int, Places],
) -> CopyList:
    """Give every row of a plan its addresses.

    Args:
        table: the rows to perform.
        sources: rank -> places of the source tensors.
        destinations: likewise for the tensors to be written.

    Raises:
        KeyError: a tensor that the plan names has no place.
    """
    src = side(
        table, table.src_element_size, table.src_rank, table.src_local, table.src_offset, table.src_stride, sources
    )
    dst = side(
        table, table.element_size, table.dst_rank, table.dst_local, table.dst_offset, table.dst_stride, destinations
    )
    copies = CopyList(
        size=table.size.astype(np.int64),
        element_size=table.element_size.astype(np.int64),
        cast=table.cast.astype(np.int64),
        src_arena=src.arena,
        src_pid=src.pid,
        src_offset=src.offset,
        src_stride=src.stride,
        dst_arena=dst.arena,
        dst_offset=dst.offset,
        dst_stride=dst.stride,
        origin=np.arange(len(table), dtype=np.int64),
    )
    return split_large(copies)


def fill_copies(
    fills: FillTable,
    destinations: Mapping[int, Places],
    constants: int,
    first_origin: int = 0,
) -> CopyList:
    """Turn fills into copies that read one element again and again, from an arena that holds `constant_bytes(fills)`.

    Args:
        fills: the rows to perform.
        destinations: rank -> places of the tensors to be written.
        constants: id of the arena whose first bytes are `constant_bytes(fills)`.
        first_origin: `origin` of the first fill; the number of copies that they are joined to.

    Raises:
        KeyError: a tensor that the fills name has no place.
    """
    dst = side(fills, fills.element_size, fills.rank, fills.local, fills.offset, fills.stride, destinations)
    _, slot = np.unique(fills.pattern, return_inverse=True)
    n = len(fills)
    copies = CopyList(
        size=fills.size.astype(np.int64),
        element_size=fills.element_size.astype(np.int64),
        cast=np.zeros(n, dtype=np.int64),
        src_arena=np.full(n, constants, dtype=np.int64),
        src_pid=np.zeros(n, dtype=np.int64),
        src_offset=slot.reshape(-1).astype(np.int64) * CONSTANT_BYTES,
        src_stride=np.zeros_like(dst.stride),
        dst_arena=dst.arena,
        dst_offset=dst.offset,
        dst_stride=dst.stride,
        origin=np.arange(first_origin, first_origin + n, dtype=np.int64),
    )
    return split_large(copies)


def constant_bytes(fills: FillTable) -> bytes:
    """Return the bit patterns that fills write, CONSTANT_BYTES each, lowest first; equal for equal patterns."""
    patterns = np.unique(fills.pattern)
    slots = np.zeros((len(patterns), CONSTANT_BYTES // 8), dtype="<i8")
    slots[:, 0] = patterns
    return slots.tobytes()


def joined(parts: Sequence[CopyList]) -> CopyList:
    """Put copies end to end; boxes of fewer dimensions are padded in front."""
    dims = max(part.size.shape[1] for part in parts)

    def column(part: CopyList, name: str) -> Int64:
        values: Int64 = getattr(part, name)
        if values.ndim == 1:
            return values
        lead = np.full((len(part), dims - values.shape[1]), name == "size", dtype=np.int64)
        return np.concatenate([lead, values], axis=1)

    return CopyList(**{f.name: np.concatenate([column(part, f.name) for part in parts]) for f in fields(CopyList)})


def whole_tensors(sources: Places, destinations: Places, element_size: Int64) -> CopyList:
    """Return copies of whole tensors, row by row; both ends have equal shapes, elements of `element_size` bytes [n]."""
    n, longest = len(sources), [len(form.shape) for form in sources.forms]
    dims = max(longest, default=1) or 1

    def padded(of: Places, name: str, lead: int) -> Int64:
        boxes = [(lead,) * (dims - len(form.shape)) + getattr(form, name) for form in of.forms]
        return np.array(boxes, np.int64).reshape(-1, dims)[of.form]

    copies = CopyList(
        size=padded(sources, "shape", 1),
        element_size=element_size,
        cast=np.zeros(n, dtype=np.int64),
        src_arena=sources.arena,
        src_pid=sources.pid,
        src_offset=sources.offset,
        src_stride=padded(sources, "strides", 0),
        dst_arena=destinations.arena,
        dst_offset=destinations.offset,
        dst_stride=padded(destinations, "strides", 0),
        origin=np.arange(n, dtype=np.int64),
    )
    return split_large(copies.select(np.flatnonzero(np.prod(copies.size, axis=1) > 0)))


def split_large(copies: CopyList, limit: int = SPLIT_BYTES) -> CopyList:
    """Cut copies of more than `limit` bytes along their outermost dimension of more than one element."""
    large = np.flatnonzero(copies.row_bytes > limit)
    if not len(large):
        return copies
    columns: dict[str, list[Int64]] = {f.name: [] for f in fields(copies)}
    kept = np.setdiff1d(np.arange(len(copies)), large)
    for name, column in columns.items():
        column.append(getattr(copies, name)[kept])
    for row in large.tolist():
        size = copies.size[row]
        dim = int(np.argmax(size > 1))
        total = int(copies.row_bytes[row])
        step = max(1, int(size[dim]) * limit // total)
        starts = np.arange(0, int(size[dim]), step, dtype=np.int64)
        piece = copies.select(np.full(len(starts), row, dtype=np.int64))
        piece.size[:, dim] = np.minimum(step, size[dim] - starts)
        piece.src_offset[:] += starts * copies.src_stride[row, dim]
        piece.dst_offset[:] += starts * copies.dst_stride[row, dim]
        for name, column in columns.items():
            column.append(getattr(piece, name))
    return CopyList(**{name: np.concatenate(column) for name, column in columns.items()})


def deal(copies: CopyList, workers: int) -> list[Int64]:
    """Return which copies each worker performs: contiguous runs in destination order, equal bytes each.

    Neighbours in memory stay with one worker; a run is never empty unless there are fewer copies than workers.
    """
    order = np.lexsort((copies.dst_offset, copies.dst_arena))
    done = np.cumsum(copies.row_bytes[order])
    total = int(done[-1]) if len(done) else 0
    # copy i goes to the worker in whose share of the bytes its middle lies
    middle = done - copies.row_bytes[order] / 2
    worker = np.minimum((middle * workers / max(1, total)).astype(np.int64), workers - 1)
    return [order[worker == w] for w in range(workers)]


@dataclass(frozen=True, eq=False)
class Side:
    """One end of addressed copies, a value per row."""

    arena: Int64
    pid: Int64
    offset: Int64
    stride: Int64


def side(
    table: Columns,
    element_size: npt.NDArray[np.int32],
    ranks: npt.NDArray[np.int32],
    local: npt.NDArray[np.int32],
    offsets: Int64,
    strides: Int64,
    places: Mapping[int, Places],
) -> Side:
    """Turn one end's row-major element addresses into byte addresses in memory.

    Raises:
        KeyError: a tensor has no place.
        ValueError: a box cannot be addressed in its tensor.
    """
    names = len(table.locals) + 1
    keys, which = np.unique(ranks.astype(np.int64) * names + local.astype(np.int64), return_inverse=True)
    found = choose(places, keys // names, [table.locals[key] for key in (keys % names).tolist()])
    es = element_size.astype(np.int64)
    offset = offsets * es + found.offset[which]
    stride = strides * es[:, None]
    # rows of one form and element size are addressed at once: there may be as many tensors as rows
    sizes, size_number = np.unique(es, return_inverse=True)
    kinds, number = np.unique(found.form[which] * len(sizes) + size_number, return_inverse=True)
    forms = [(found.forms[kind // len(sizes)], int(sizes[kind % len(sizes)])) for kind in kinds.tolist()]
    otherwise = [i for i, (form, size) in enumerate(forms) if not _is_row_major(form, size)]
    order = np.argsort(number, kind="stable") if otherwise else number
    begins = np.searchsorted(number[order], [otherwise, [i + 1 for i in otherwise]])
    for i, begin, end in zip(otherwise, *begins.tolist(), strict=True):
        rows = order[begin:end]
        place, stride[rows] = _in_memory(forms[i][0], offsets[rows], strides[rows], table.size[rows])
        offset[rows] = found.offset[which[rows]] + place
    return Side(arena=found.arena[which], pid=found.pid[which], offset=offset, stride=stride)


def _is_row_major(form: Form, es: int) -> bool:
    want = row_major_strides(form.shape, es)
    return form.strides == want or all(n == 1 or a == b for n, a, b in zip(form.shape, form.strides, want, strict=True))


def _in_memory(form: Form, offset: Int64, strides: Int64, size: Int64) -> tuple[Int64, Int64]:
    """Translate row-major addresses (elements) to the tensors' own strides: (bytes from their start, strides in bytes).

    A [4, 6] tensor stored transposed has strides (2, 8): row-major stride 6 means dimension 0, hence 2 bytes.
    """
    steps = row_major_strides(form.shape, 1)
    place, rest = np.zeros_like(offset), offset
    for step, held in zip(steps, form.strides, strict=True):
        place += rest // step * held
        rest = rest % step
    # each stride walks the dimension with the longest step that divides it
    best, dim = np.zeros_like(strides), np.full_like(strides, -1)
    for number, step in enumerate(steps):
        fits = (strides % step == 0) & (step > best)
        best[fits], dim[fits] = step, number
    walked = size != 1
    shape, held_strides = np.array([*form.shape, 0], np.int64), np.array([*form.strides, 0], np.int64)
    times = strides // np.maximum(best, 1)
    if (walked & ((size - 1) * times >= shape[dim])).any():
        raise ValueError(
            f"a copy walks across dimensions of a tensor of shape {form.shape} that is not contiguous; "
            "make it contiguous before registering it"
        )
    return place, np.where(walked, times * held_strides[dim], 0)
