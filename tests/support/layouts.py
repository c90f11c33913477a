"""Short notations for layouts in tests, and the refusals of plans that cannot be made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from refitd.describe.metadata import ParameterMetadata, Roster
from refitd.errors import PlanError
from refitd.plan.build import plan_copies
from refitd.plan.table import CopyTable, CrossingTable


def meta(name: str, shape: Sequence[int], rank: int | None = None, **fields: Any) -> ParameterMetadata:
    """A bf16 tensor."""
    fields = {"dtype": "bfloat16", "element_size": 2, "owner_rank": rank, **fields}
    return ParameterMetadata(name=name, shape=tuple(shape), **fields)


def tp(
    name: str, shape: Sequence[int], ranks: Sequence[int], dim: int = 0, **fields: Any
) -> dict[int, ParameterMetadata]:
    """One tensor of this *local* shape on each rank of a tensor-parallel group."""
    group = list(ranks)
    return {
        rank: meta(name, shape, rank, is_tp=True, partition_dim=dim, tensor_parallel_group_ranks=group, **fields)
        for rank in ranks
    }


def replicated(name: str, shape: Sequence[int], ranks: Sequence[int], **fields: Any) -> dict[int, ParameterMetadata]:
    """The whole tensor on each rank."""
    return {rank: meta(name, shape, rank, **fields) for rank in ranks}


def rosters(
    sources: Iterable[dict[int, ParameterMetadata]],
    destinations: Iterable[dict[int, ParameterMetadata]],
    nodes: dict[int, str] | None = None,
) -> list[Roster]:
    """One roster for each rank in these sides."""
    held, wanted = list(sources), list(destinations)
    ranks = sorted({rank for side in (*held, *wanted) for rank in side})
    return [
        Roster(
            rank,
            source=[side[rank] for side in held if rank in side],
            destination=[side[rank] for side in wanted if rank in side],
            node=(nodes or {}).get(rank, ""),
        )
        for rank in ranks
    ]


def refusals(found: list[Roster]) -> list[str]:
    """Return every problem that prevents a plan."""
    with pytest.raises(PlanError) as caught:
        plan_copies(found)
    return list(caught.value.violations)


def refusal(found: list[Roster]) -> str:
    """Return the only problem that prevents a plan."""
    violations = refusals(found)
    assert len(violations) == 1, violations
    return violations[0]


def crossing(table: CopyTable) -> CrossingTable:
    """Return the rows of a table as copies between nodes, none of them on a path."""
    none = np.zeros(len(table), np.int32)
    return CrossingTable(**{f.name: getattr(table, f.name) for f in fields(CopyTable)}, path=none, hop=none)
