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
    writes_gpu = _lies(table, table.dst_rank, table.dst_local, destinations, gpu_arenas)
    lent = _lies(table, table.src_rank, table.src_local, sources, {PROCESS_MEMORY})
    pulled = np.flatnonzero(lent & writes_gpu)
    if len(pulled):
        what = "a worker does not read a trainer's private memory into a GPU"
        return int(
            pulled[0]
        ), f"{what}; publish() instead of lend(), register the source with pull=False, or {_WAY_OUT}"
    return -1, ""


def _lies(
    table: CopyTable,
    ranks: npt.NDArray[np.int32],
    local: npt.NDArray[np.int32],
    places: Places,
    arenas: set[int],
) -> Bools:
    """Return which rows have this end in one of these arenas."""
    names = len(table.locals) + 1
    keys, which = np.unique(ranks.astype(np.int64) * names + local.astype(np.int64), return_inverse=True)
    found = [places.get((key // names, table.locals[key % names])) for key in keys.tolist()]
    lies = np.array([place is not None and place.arena in arenas for place in found], dtype=np.bool_)
    result: Bools = lies[which.reshape(-1)] if len(keys) else np.zeros(len(ranks), dtype=np.bool_)
    return result
