"""Read from Megatron's modules how parameters are split where the parameters' attributes are missing or wrong.

    gated fc1           its rows are gate | up on every rank: stride 2, though most grouped experts' attribute says 1
    experts over ETP    grouped linears of Transformer Engine carry no tensor-parallel attribute at all
    experts over EP     some lack `allreduce = False`
    GroupedMLP          weight1 [hidden, E * f] and weight2 [E * f, hidden] are used as [E, hidden, f] and
                        [E, f, hidden]: one tensor per expert, named and laid out as in other expert modules
    softmax_offset      one number per attention head (attention sinks), split like the heads without any attribute

`gated_linear_unit` of a module or its config decides whether an fc1 is gated, else the sizes of fc1 and fc2. If neither
is conclusive, the stride is unknown: other descriptions of the tensor then decide, and a plan that depends on an
expert's unknown stride is refused (`refitd.plan.completion`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from refitd.describe.metadata import Repeat, Tile

if TYPE_CHECKING:
    import torch
    from torch import nn

_FC1 = frozenset({"linear_fc1", "fc1", "dense_h_to_4h", "gate_up_proj"})
_FC2 = frozenset({"linear_fc2", "fc2", "dense_4h_to_h", "down_proj"})
_GATED_ACTIVATIONS = frozenset({"swiglu", "geglu", "reglu", "glu"})
_PARAM = re.compile(r"^(?P<kind>weight|bias)\d*$")
_EXPERTS = re.compile(r"(?:^|\.)(?:local_)?experts\.")


@dataclass(frozen=True, slots=True)
class ExpertFinding:
    """The split of one parameter as its module tells it, beyond the parameter's attributes; None means unknown.

    Attributes:
        is_expert: it belongs to an expert, so the expert tensor-parallel group splits it, if there is one.
        is_ep: its experts are split over the expert-parallel group; the parameter does not declare it.
        dim: the dimension that the group splits; the parameter does not declare it.
        stride: the partition stride.
        stride_is_known: False if the stride may be 1 or 2.
        grouped: the layout of a tensor that holds several experts.
    """

    is_expert: bool = False
    is_ep: bool = False
    dim: int | None = None
    stride: int | None = None
    stride_is_known: bool = True
    grouped: Grouped | None = None


@dataclass(frozen=True, slots=True)
class Grouped:
    """weight1 or weight2 of a GroupedMLP: the experts' tensors one after the other in one tensor.

    Attributes:
        stem: the start of the canonical names, relative to the module; the expert's index follows.
        experts: the number of local experts.
        hidden: the size of the dimension that is not split.
        width: the local FFN size of one expert: of gate or up alone.
        parts: 2 if fc1 is gated, else 1.
        is_first: whether this is weight1.
        is_split: whether it is split over the expert tensor-parallel group.
    """

    stem: str
    experts: int
    hidden: int
    width: int
    parts: int
    is_first: bool
    is_split: bool

    def tiles(self, names: Sequence[str], index: int, size: int) -> tuple[Tile, ...]:
        """Return the tiles at position `index` of a group of `size`; `names[e]` is local expert e's canonical name."""
        index, size = (index, size) if self.is_split else (0, 1)
        width, hidden, row = self.width, self.hidden, self.width * self.parts
        found = []
        for expert, name in enumerate(names):
            start = expert * hidden * (row if self.is_first else width)
            if self.is_first:
                repeat = Repeat(0, self.parts, width * size, width) if self.parts > 1 else None
                found.append(Tile(name, (index * width, 0), (width, hidden), start, (1, row), repeat))
            else:
                found.append(Tile(name, (0, index * width), (hidden, width), start, (1, hidden)))
        return tuple(found)


def findings(module: nn.Module, ep_size: int, expert_tp_size: int, num_experts: int | None) -> dict[str, ExpertFinding]:
    """Return the findings of a module, by the parameter's name in it.

    Args:
        module: a model, or a chunk of one.
        ep_size: the number of ranks that the experts are split over.
        expert_tp_size: the number of ranks that each expert's tensors are split over.
        num_experts: the number of experts in the whole model, if known.
    """
    modules = dict(module.named_modules())
    found: dict[str, ExpertFinding] = {}
    for path, child in modules.items():
        here = f"{path}." if path else ""
        if (grouped := _grouped_mlp(child, modules, path, expert_tp_size)) is not None:
            weight = child._parameters["weight1"]
            is_ep = weight is not None and _is_split_over_experts(path, weight, modules, ep_size, num_experts)
            for name, each in grouped.items():
                found[f"{here}{name}"] = ExpertFinding(is_expert=True, is_ep=is_ep, grouped=each)
            continue
        last = path.rpartition(".")[2]
        for name, param in child._parameters.items():
            if param is None:
                continue
            if name == "softmax_offset" and _is_share_of_heads(path, param, modules):
                found[f"{here}{name}"] = ExpertFinding(dim=0)
            is_first = last in _FC1 or (name == "weight1" and last not in _FC2)
            is_second = last in _FC2 or (name == "weight2" and last not in _FC1)
            if is_first or is_second:
                finding = _linear(path, name, param, modules, is_first, expert_tp_size)
                if finding is not None and finding.is_expert:
                    is_ep = _is_split_over_experts(path, param, modules, ep_size, num_experts)
                    finding = replace(finding, is_ep=is_ep)
                if finding is not None:
                    found[f"{here}{name}"] = finding
    return found


def _linear(
    path: str,
    name: str,
    param: torch.Tensor,
    modules: Mapping[str, nn.Module],
    is_first: bool,
    expert_tp_size: int,
) -> ExpertFinding | None:
    """Return the finding for a parameter of fc1 or fc2, or None."""
    if hasattr(param, "placements"):  # a DTensor describes its own split
        return None
    is_fused = name in ("weight1", "weight2") and path.rpartition(".")[2] not in _FC1 | _FC2
    kind = _PARAM.match(name)
    if kind is None:
        return None
    rows = 1 if is_fused else 0
    split_dim = rows if is_first else 1 - rows
    is_expert = _EXPERTS.search(f"{path}.") is not None or getattr(param, "allreduce", True) is False
    if kind["kind"] == "bias":
        if not is_first:
            return ExpertFinding(is_expert=is_expert)  # fc2's bias is added once, after the sum over ranks: not split
        split_dim = 0
    if split_dim >= param.dim():
        return None
    gated = _gated(path, modules, is_fused=is_fused)
    dim = None
    is_stamped = bool(getattr(param, "tensor_model_parallel", False))
    if is_expert and expert_tp_size > 1 and not is_stamped:
        dim = split_dim if _is_share(path, param, modules, split_dim, is_first, gated, expert_tp_size) else None
    if not is_first or getattr(param, "partition_sizes", None) is not None or not (is_stamped or dim is not None):
        return ExpertFinding(is_expert=is_expert, dim=dim)
    stamped = getattr(param, "partition_stride", 1)
    if not isinstance(stamped, Integral):  # describing the parameter will refuse it
        return ExpertFinding(is_expert=is_expert, dim=dim)
    split_elsewhere = is_stamped and getattr(param, "partition_dim", 0) != split_dim
    if int(stamped) > 1 or split_elsewhere or _interleaves(path, modules):
        return ExpertFinding(is_expert=is_expert, dim=dim)
    if gated is None:
        # gate and up are equally large, so an odd size cannot be gated
        return ExpertFinding(is_expert=is_expert, dim=dim, stride_is_known=bool(param.shape[split_dim] % 2))
    return ExpertFinding(is_expert=is_expert, dim=dim, stride=2 if gated else 1)


def _is_share_of_heads(path: str, param: torch.Tensor, modules: Mapping[str, nn.Module]) -> bool:
    heads = _nearest(path, modules, "num_attention_heads")
    return param.dim() == 1 and isinstance(heads, int) and 0 < param.shape[0] < heads


def _grouped_mlp(
    module: nn.Module, modules: Mapping[str, nn.Module], path: str, expert_tp_size: int
) -> dict[str, Grouped] | None:
    """Return the layouts of weight1 and weight2 of a GroupedMLP; None if the module is not one."""
    first, second = _pair(module)
    experts = getattr(module, "num_local_experts", None)
    if first is None or second is None or isinstance(experts, bool) or not isinstance(experts, int) or experts < 1:
        return None
    if hasattr(first, "placements") or first.dim() != 2 or second.dim() != 2:
        return None
    hidden, wide = first.shape
    if second.shape[1] != hidden or second.shape[0] % experts or wide % experts:
        return None
    width, row = second.shape[0] // experts, wide // experts
    if row not in (width, 2 * width) or _interleaves(path, modules):
        return None
    is_split = bool(getattr(first, "tensor_model_parallel", False))
    total = _ffn_size(path, modules)
    if not is_split and expert_tp_size > 1 and total is not None:
        is_split = width * expert_tp_size == total
    shared = (experts, hidden, width, row // width)
    return {
        "weight1": Grouped("linear_fc1.weight", *shared, is_first=True, is_split=is_split),
        "weight2": Grouped("linear_fc2.weight", *shared, is_first=False, is_split=is_split),
    }


def _is_split_over_experts(
    path: str, param: torch.Tensor, modules: Mapping[str, nn.Module], ep_size: int, num_experts: int | None
) -> bool:
    """Return whether an expert's tensor is split over the expert-parallel group without declaring it."""
    if ep_size < 2 or getattr(param, "allreduce", None) is False:
        return False
    local = _nearest(path, modules, "num_local_experts")
    total = num_experts if num_experts is not None else _nearest(path, modules, "num_moe_experts")
    return isinstance(local, int) and isinstance(total, int) and local < total


def _is_share(
    path: str,
    param: torch.Tensor,
    modules: Mapping[str, nn.Module],
    dim: int,
    is_first: bool,
    gated: bool | None,
    size: int,
) -> bool:
    """Return whether the parameter is one rank's share of the FFN size in the config."""
    total = _ffn_size(path, modules)
    if total is None:
        return False
    factors = (1,) if not is_first else (2,) if gated else (1,) if gated is False else (1, 2)
    held = param.shape[dim]
    return any(held * size == total * n for n in factors) and all(held != total * n for n in factors)


def _gated(path: str, modules: Mapping[str, nn.Module], *, is_fused: bool) -> bool | None:
    """Return whether the fc1 at this path is gated; None if unknown."""
    for name in ("gated_linear_unit", "swiglu"):
        said = _nearest(path, modules, name)
        if isinstance(said, bool):
            return said
    activation = _nearest(path, modules, "activation")
    if isinstance(activation, str) and activation.lower() in _GATED_ACTIVATIONS:
        return True
    if is_fused:
        first, second = _pair(modules[path])
        sizes = None if first is None or second is None or first.dim() < 2 else (first.shape[-1], second.shape[-2])
    else:
        sizes = _sizes_of_pair(path, modules)
    if sizes is None or sizes[0] not in (sizes[1], 2 * sizes[1]):
        return None
    return sizes[0] == 2 * sizes[1]


def _sizes_of_pair(path: str, modules: Mapping[str, nn.Module]) -> tuple[int, int] | None:
    """Return the local output size of an fc1 and the local input size of the fc2 beside it."""
    parent, _, last = path.rpartition(".")
    if last not in _FC1:
        return None
    first = _matrix(modules[path])
    siblings = [modules.get(f"{parent}.{name}" if parent else name) for name in sorted(_FC2)]
    second = next((m for s in siblings if s is not None and (m := _matrix(s)) is not None), None)
    if first is None or second is None:
        return None
    # if only one of fc1 and fc2 is split, their local sizes cannot be compared
    if bool(getattr(first, "tensor_model_parallel", False)) != bool(getattr(second, "tensor_model_parallel", False)):
        return None
    return first.shape[0], second.shape[1]


def _pair(module: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a module's own weight1 and weight2."""
    own = dict(module._parameters.items())  # scripted modules have no `get`
    return own.get("weight1"), own.get("weight2")


def _matrix(module: nn.Module) -> torch.Tensor | None:
    for name, param in module._parameters.items():
        if param is not None and name.startswith("weight") and param.dim() == 2 and not hasattr(param, "placements"):
            return param
    return None


def _ffn_size(path: str, modules: Mapping[str, nn.Module]) -> int | None:
    for name in ("moe_ffn_hidden_size", "ffn_hidden_size"):
        said = _nearest(path, modules, name)
        if isinstance(said, int) and not isinstance(said, bool):
            return said
    return None


def _interleaves(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether gate and up alternate in small blocks; a contiguous part then holds both."""
    return any(_nearest(path, modules, name) for name in ("moe_mlp_glu_interleave_size", "glu_interleave_size"))


def _nearest(path: str, modules: Mapping[str, nn.Module], name: str) -> Any:
    """Return an attribute of the module at a path, its config, or the nearest enclosing module; None if none has it."""
    while True:
        module = modules.get(path)
        if module is not None:
            for holder in (module, getattr(module, "config", None)):
                said = getattr(holder, name, None) if holder is not None else None
                if isinstance(said, bool | int | str):
                    return said
        if not path:
            return None
        path = path.rpartition(".")[0]
