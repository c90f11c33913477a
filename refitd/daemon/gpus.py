"""What workers do not do with arenas on GPUs: found in a plan before anything of it is written."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from refitd.execute.copies import PROCESS_MEMORY, LocalTensor
from refitd.plan.table import CopyTable

Places = Mapping[tuple[int, str], LocalTensor]
Bools = npt.NDArray[np.bool_]

_WAY_OUT = "register with device='cpu', so that refitd's arenas of that rank are in main memory"


def refused_here(table: CopyTable, sources: Places, destinations: Places, gpu_arenas: set[int]) -> tuple[int, str]:
    """Return the first row within this node that cannot be done, and why; (-1, "") where all can."""
    reads_gpu = _lies(table, table.src_rank, table.src_local, sources, gpu_arenas)
    writes_gpu = _lies(table, table.dst_rank, table.dst_local, destinations, gpu_arenas)
    converts = np.flatnonzero((table.cast != 0) & (reads_gpu | writes_gpu))
    if len(converts):
        return int(converts[0]), f"elements are not converted on a GPU; publish the target's dtype, or {_WAY_OUT}"
    lent = _lies(table, table.src_rank, table.src_local, sources, {PROCESS_MEMORY})
    pulled = np.flatnonzero(lent & writes_gpu)
    if len(pulled):
        what = "a worker does not read a trainer's private memory into a GPU"
        return int(
            pulled[0]
        ), f"{what}; publish() instead of lend(), register the source with pull=False, or {_WAY_OUT}"
    return -1, ""


def refused_crossing(
    table: CopyTable, sent: Bools, received: Bools, sources: Places, destinations: Places, gpu_arenas: set[int]
) -> tuple[int, str]:
    """Return the first row, of those this node sends or receives, that cannot be done and why; (-1, "") if all can."""
    reads_gpu = _lies(table, table.src_rank, table.src_local, sources, gpu_arenas, sent)
    writes_gpu = _lies(table, table.dst_rank, table.dst_local, destinations, gpu_arenas, received)
    found = np.flatnonzero(reads_gpu | writes_gpu)
    if not len(found):
        return -1, ""
    end = "read from" if reads_gpu[found[0]] else "written to"
    what = f"what crosses between nodes cannot be {end} an arena on a GPU yet"
    return int(found[0]), f"{what}; keep live tensors of that rank out of GPU arenas and {_WAY_OUT}"


def _lies(
    table: CopyTable,
    ranks: npt.NDArray[np.int32],
    local: npt.NDArray[np.int32],
    places: Places,
    arenas: set[int],
    among: Bools | None = None,
) -> Bools:
    """Return which rows (of those `among`) have this end in one of these arenas."""
    names = len(table.locals) + 1
    keys, which = np.unique(ranks.astype(np.int64) * names + local.astype(np.int64), return_inverse=True)
    found = [places.get((key // names, table.locals[key % names])) for key in keys.tolist()]
    lies = np.array([place is not None and place.arena in arenas for place in found], dtype=np.bool_)
    result: Bools = lies[which.reshape(-1)] if len(keys) else np.zeros(len(ranks), dtype=np.bool_)
    return result if among is None else result & among
