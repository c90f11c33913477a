"""Descriptions of experts in Megatron's modules, checked by brute force over whole tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from refitd import PlanError, Roster
from refitd.describe.experts import findings
from refitd.describe.module import RankGroups, describe_module
from refitd.plan.build import plan_copies
from refitd.testing import oracle

EXPERTS, FFN, HIDDEN = 4, 8, 3
Weights = dict[str, np.ndarray]


def whole(*, gated: bool) -> Weights:
    """All experts' weights, as one rank of a model of separate experts holds them."""
    found = {}
    for e in range(EXPERTS):
        found[f"experts.linear_fc1.weight{e}"] = np.arange(FFN * (1 + gated) * HIDDEN).reshape(-1, HIDDEN) + 1000 * e
        found[f"experts.linear_fc2.weight{e}"] = np.arange(FFN * HIDDEN).reshape(HIDDEN, -1) + 1000 * e + 500
    return found


def share(name: str, value: np.ndarray, index: int, size: int, *, gated: bool) -> np.ndarray:
    if "fc2" in name:
        return np.split(value, size, axis=1)[index]
    return np.concatenate([np.split(part, size)[index] for part in np.split(value, 1 + gated)])


class Experts(nn.Module):
    """The experts of one rank: TE's grouped linears, one module each, or a GroupedMLP."""

    def __init__(
        self, kind: str, etp: tuple[int, int], ep: tuple[int, int], *, gated: bool, says: str, is_stamped: bool
    ) -> None:
        super().__init__()
        (index, size), (position, parts) = etp, ep
        self.config = SimpleNamespace(num_moe_experts=EXPERTS)
        if says in ("config", "all"):
            self.config.gated_linear_unit = gated
        if says in ("all", "ffn"):
            self.config.moe_ffn_hidden_size = FFN
        self.experts = nn.Module()
        mine = range(position * EXPERTS // parts, (position + 1) * EXPERTS // parts)
        self.experts.num_local_experts = len(mine)
        weights = whole(gated=gated)
        stamped = dict(is_stamped=is_stamped, is_ep=parts > 1)
        if kind == "fused":
            first, second = (
                np.stack([
                    share(n, weights[n], index, size, gated=gated).T
                    for n in (f"experts.{which}.weight{e}" for e in mine)
                ])
                for which in ("linear_fc1", "linear_fc2")
            )  # fmt: skip
            self.experts.weight1 = param(first.reshape(HIDDEN, -1), 1, **stamped)
            self.experts.weight2 = param(second.reshape(-1, HIDDEN), 0, **stamped)
            return
        for which, dim in (("linear_fc1", 0), ("linear_fc2", 1)):
            if which == "linear_fc2" and says == "nothing":
                continue
            for local, e in enumerate(mine):
                value = share(which, weights[f"experts.{which}.weight{e}"], index, size, gated=gated)
                path = f"local_experts.{local}.{which}" if kind == "modules" else which
                name = "weight" if kind == "modules" else f"weight{local}"
                child(self.experts, path).register_parameter(name, param(value, dim, **stamped))


def param(value: np.ndarray, dim: int, *, is_stamped: bool, is_ep: bool) -> nn.Parameter:
    found = nn.Parameter(torch.from_numpy(np.ascontiguousarray(value)).to(torch.float64))
    if is_stamped:
        found.tensor_model_parallel, found.partition_dim, found.partition_stride = True, dim, 1
    found.allreduce = not is_ep
    return found


def child(module: nn.Module, path: str) -> nn.Module:
    for name in path.split("."):
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module._modules[name]
    return module


Sizes = tuple[int, int]  # expert tensor parallel, expert parallel


def side(sizes: Sizes, first: int, make: Callable[[Sizes, Sizes], Experts]) -> dict[int, tuple[list[Any], Weights]]:
    """Return each rank's description and local tensors."""
    etp, ep = sizes
    found = {}
    for position, index in itertools.product(range(ep), range(etp)):
        rank = first + position * etp + index
        groups = RankGroups(
            tp=[rank],
            expt_tp=[first + position * etp + i for i in range(etp)],
            ep=[first + i * etp + index for i in range(ep)],
        )
        module = make((index, etp), (position, ep))
        local = {name: p.detach().numpy() for name, p in module.named_parameters()}
        found[rank] = describe_module(module, rank, groups), local
    return found


def check(source: Any, target: Any) -> None:
    """Plan, copy every row, and compare with the tensors that the targets construct."""
    found = [Roster(rank, metas) for rank, (metas, _) in source.items()]
    found += [Roster(rank, (), metas) for rank, (metas, _) in target.items()]
    held = {(rank, name): np.asarray(v, np.int64) for rank, (_, local) in source.items() for name, v in local.items()}
    wanted = {(rank, name): np.asarray(v, np.int64) for rank, (_, local) in target.items() for name, v in local.items()}
    oracle.run(plan_copies(found).table, held, wanted)


SIZES: Sequence[Sizes] = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("one", "other"), list(itertools.product(("grouped", "modules", "fused"), repeat=2)))
def test_experts_arrive_whatever_holds_them_and_however_they_are_cut(one: str, other: str, gated: bool) -> None:
    for here, there in itertools.product(SIZES, repeat=2):
        says = "config" if (here[0] + there[1]) % 2 else "sizes"  # otherwise the sizes of fc1 and fc2 show it
        check(
            side(here, 0, lambda i, p: Experts(one, i, p, gated=gated, says=says, is_stamped=True)),  # noqa: B023
            side(there, 8, lambda i, p: Experts(other, i, p, gated=gated, says=says, is_stamped=True)),  # noqa: B023
        )


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", ["grouped", "modules", "fused"])
def test_experts_without_attributes_are_found_by_the_config(kind: str, gated: bool) -> None:
    for here, there in itertools.product(SIZES, repeat=2):
        check(
            side(here, 0, lambda i, p: Experts(kind, i, p, gated=gated, says="all", is_stamped=False)),
            side(there, 8, lambda i, p: Experts(kind, i, p, gated=gated, says="all", is_stamped=False)),
        )


def test_an_fc1_of_which_nothing_is_known_is_refused_where_its_cut_changes() -> None:
    def make(etp: Sizes, ep: Sizes) -> Experts:
        return Experts("grouped", etp, ep, gated=True, says="nothing", is_stamped=True)

    check(side((2, 1), 0, make), side((2, 1), 8, make))
    with pytest.raises(PlanError, match=r"experts.linear_fc1.weight0: an expert's fc1.*gated_linear_unit"):
        check(side((2, 1), 0, make), side((4, 1), 8, make))


def test_experts_whose_flag_is_missing_are_numbered_by_the_counts() -> None:
    def make(etp: Sizes, ep: Sizes) -> Experts:
        module = Experts("grouped", etp, ep, gated=True, says="config", is_stamped=True)
        for each in module.parameters():
            del each.allreduce
        return module

    check(side((1, 2), 0, make), side((2, 1), 8, make))


def test_a_dense_gated_fc1_that_is_stamped_1_is_gated() -> None:
    module = nn.Module()
    module.config = SimpleNamespace(gated_linear_unit=True)
    module.linear_fc1 = nn.Linear(3, 8)
    for each in module.parameters():
        each.tensor_model_parallel, each.partition_dim, each.partition_stride = True, 0, 1
    metas = describe_module(module, 0, {"tp": [0, 1]})
    assert [m.partition_stride for m in metas] == [2, 2]
    module.config.gated_linear_unit = False
    assert [m.partition_stride for m in describe_module(module, 0, {"tp": [0, 1]})] == [1, 1]
    module.linear_fc1.weight.partition_stride = 2  # an explicit stride of 2 is used as it is
    assert describe_module(module, 0, {"tp": [0, 1]})[0].partition_stride == 2


def test_what_is_no_pair_of_linears_says_nothing() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    assert findings(module, 2, 2, None) == {}
