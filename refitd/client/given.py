"""Check and describe the tensors that callers register, and choose those that versions exclude."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from refitd.client.calls import MAX_NAME, whole
from refitd.describe.layout import canonical_name
from refitd.describe.memory import lazy_problem, tensor_problem
from refitd.describe.metadata import ParameterMetadata, Roster, plain
from refitd.describe.module import (
    extract_param_metadata,
    is_dtensor,
)
from refitd.describe.names import unwrapped_name, without_module
from refitd.dtypes import ELEMENT_SIZES, dtype_name
from refitd.errors import RefusedError
from refitd.mxfp8.buffers import held_of, is_quantized
from refitd.mxfp8.parts import MARK
from refitd.protocol.shards import KeptTensor
from refitd.text import shown

# types that are never DTensors; most tensors have one of these
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
# attributes of a parameter that determine its description
CUT_ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "partition_sizes",
    "allreduce",
    "shared_embedding",
    "shared",
)

Tensors = torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.Tensor] | Mapping[str, Any]


def checked_wanted(wanted: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return {name: (shape, dtype)} in plain types; raises RefusedError naming the first invalid entry."""
    if not isinstance(wanted, Mapping):
        raise RefusedError(f"wanted is {shown(wanted)}, expected {{name: (shape, dtype)}}")
    found = {}
    for name, one in wanted.items():
        if not isinstance(name, str):
            raise RefusedError(f"wanted has a key {shown(name)}, expected the name of a tensor")
        if not isinstance(one, tuple | list) or len(one) != 2:
            raise RefusedError(f"wanted[{name!r}] is {shown(one)}, expected (shape, dtype)")
        shape, dtype = one
        if isinstance(shape, str | bytes) or not isinstance(shape, Iterable) or _is_single(shape):
            raise RefusedError(f"wanted[{name!r}]: shape is {shown(shape)}, expected a tuple of sizes")
        if not isinstance(dtype, torch.dtype) or dtype_name(dtype) not in ELEMENT_SIZES:
            raise RefusedError(
                f"wanted[{name!r}]: dtype is {shown(dtype)}, expected one of {', '.join(ELEMENT_SIZES)} of torch"
            )
        found[name] = tuple(whole(f"a size of wanted[{name!r}]", size) for size in shape), dtype
    return found


def is_called(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns matches the name; "*" matches anything."""
    return any(re.fullmatch(".*".join(map(re.escape, p.split("*"))), name) for p in patterns)


def unmatched(patterns: Iterable[str], metadata: Iterable[ParameterMetadata], *, elsewhere: bool) -> list[str]:
    """Return the patterns that match no tensor of this rank. With `elsewhere`, ignore patterns with "*"."""
    names = [m.name for m in metadata]
    return [p for p in patterns if not (elsewhere and "*" in p) and not any(is_called(name, (p,)) for name in names)]


def held_of_given(name: str, value: Any) -> Any:
    """Return the local tensor of a published value; raises RefusedError if it cannot be read."""
    if problem := problem_of(value):
        raise RefusedError(f"{name}: {problem}")
    return held_here(value)


def checked_tensors(tensors: Any) -> Tensors:
    """Return `tensors` unchanged; raises RefusedError unless it is a module, a list of modules or a dict by name."""
    if isinstance(tensors, Mapping):
        refuse_all(
            f"module_or_tensors: a key is {shown(name)}, expected the name of a tensor"
            for name in tensors
            if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME
        )
        return tensors
    if isinstance(tensors, torch.nn.Module):
        _refuse_frozen(tensors)
        return tensors
    if isinstance(tensors, Sequence) and not isinstance(tensors, str | bytes):
        for index, chunk in enumerate(tensors):
            if not isinstance(chunk, torch.nn.Module):
                raise RefusedError(f"module_or_tensors[{index}] is {shown(chunk)}, expected a module")
            _refuse_frozen(chunk)
        return tensors
    raise RefusedError(
        f"module_or_tensors is {shown(tensors)}, expected a module, a list of modules, or {{name: tensor}}"
    )


def _refuse_frozen(module: torch.nn.Module) -> None:
    """Refuse a scripted module without tensors: `torch.jit.freeze` has turned them into constants."""
    if isinstance(module, torch.jit.ScriptModule) and not [*module.parameters(), *module.buffers()]:
        raise RefusedError(
            f"module_or_tensors: this {type(module).__name__} has no parameters and no buffers; torch.jit.freeze makes "
            "constants of weights, so that no version would reach them; register the module unfrozen"
        )


def _is_single(value: Any) -> bool:
    """Return whether this is a zero-dimensional array or tensor, which cannot be iterated over."""
    return getattr(value, "ndim", None) == 0


def matched_metadata(metadata: Any, named: Mapping[str, Any]) -> list[ParameterMetadata]:
    """Return one description per tensor, in plain values and in the order of the tensors."""
    if (
        isinstance(metadata, str | bytes | Mapping | ParameterMetadata)
        or not isinstance(metadata, Iterable)
        or (_is_single(metadata))
    ):
        raise RefusedError(f"metadata is {shown(metadata)}, expected a list of ParameterMetadata")
    described: dict[str, ParameterMetadata] = {}
    for index, m in enumerate(metadata):
        if not isinstance(m, ParameterMetadata):
            raise RefusedError(f"metadata[{index}] is {shown(m)}, expected a ParameterMetadata")
        found = plain(m)
        if found.is_tp and found.tiles is None and not found.tensor_parallel_group_ranks:
            raise RefusedError(
                f"{found.name}: is_tp is True, and tensor_parallel_group_ranks names no ranks; "
                "give the ranks over which it is split, in order, or is_tp=False"
            )
        if found.name in described:
            raise RefusedError(f"{found.name}: metadata describes it twice; give one ParameterMetadata per tensor")
        described[found.name] = found
    if missing := sorted(named.keys() ^ described.keys()):
        raise RefusedError(
            f"tensors and metadata name different parameters: {missing[:10]}; give one ParameterMetadata per tensor"
        )
    return [described[name] for name in named]


def problem_of(value: Any) -> str:
    """Return why a registered value cannot be read, "" if it can."""
    if problem := lazy_problem(value):
        return problem
    problem = tensor_problem(held_here(value))
    is_buffer = not isinstance(value, torch.Tensor) and hasattr(value, "data") and hasattr(value, "scale")
    if problem and (is_buffer or is_quantized(value)):
        return ""  # held_of reports the problem
    return problem


def held_here(value: Any) -> Any:
    """Return the local tensor of a DTensor, any other value unchanged."""
    # most values have a plain type, which is cheap to test
    return value._local_tensor if type(value) not in PLAIN_TYPES and is_dtensor(value) else value


def mismatch(m: ParameterMetadata, value: Any) -> str:
    """Return the error text for a description that differs from its tensor, "" if they agree."""
    found = difference(m, value)
    return f"{m.name}: {found}; correct its ParameterMetadata" if found else ""


def difference(m: ParameterMetadata, value: Any) -> str:
    """Return how a description differs from its tensor, "" if they agree."""
    shape, dtype = _stands_for(m.name, value)
    if m.shape != shape or dtype_name(m.dtype) != dtype_name(dtype):
        return f"described as {tuple(m.shape)} {dtype_name(m.dtype)}, the tensor is {shape} {dtype_name(dtype)}"
    if m.element_size != dtype.itemsize:
        return f"element_size is {m.element_size}, expected {dtype.itemsize} bytes for {dtype_name(dtype)}"
    return ""


def refuse_all(problems: Iterable[str]) -> None:
    """Raise RefusedError listing these problems, if any."""
    found = list(problems)
    if found:
        more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
        raise RefusedError("; ".join(found[:10]) + more)


def described_dict(named: Mapping[str, Any], rank: int, num_experts: int | None) -> list[ParameterMetadata]:
    """Describe the tensors of a dict: a DTensor is split as its spec says; other tensors are not split."""
    further = without_module(unwrapped_name(name) for name in named)
    found: list[ParameterMetadata] = []
    owners: dict[str, str] = {}
    for name, value in named.items():
        known = unwrapped_name(name)
        if (other := owners.setdefault(known, name)) != name:
            raise RefusedError(f"{other} and {name}: without their wrappers both are called {known}; register one")
        if is_dtensor(value):
            m = replace(extract_param_metadata(value, known, rank, None, num_experts), name=name)
        else:
            shape, dtype = _stands_for(name, value)
            m = ParameterMetadata(
                name=name, shape=shape, dtype=dtype, element_size=dtype.itemsize, owner_rank=rank, resolved_name=known
            )
        if known in further and not is_quantized(value):
            m.aliases = (further[known],)
        found.append(m)
    return found


def described_again(
    before: Sequence[ParameterMetadata], rank: int, num_experts: int | None, raw: Mapping[str, Any]
) -> list[ParameterMetadata]:
    """Describe the DTensors of a dict again. Other tensors have only a shape, which has already been compared."""
    found = []
    for m in before:
        value: Any = raw.get(m.name)  # None for a kept tensor
        if is_dtensor(value):
            now = extract_param_metadata(value, unwrapped_name(m.name), rank, None, num_experts)
            found.append(replace(now, name=m.name, aliases=m.aliases))
    return found


def _stands_for(name: str, value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a tensor; an MXFP8 tensor counts as the bfloat16 tensor that it represents."""
    if isinstance(value, torch.Tensor) and not is_quantized(value):
        return tuple(value.shape), value.dtype
    return tuple(held_of(name, value).data.shape), torch.bfloat16


def cuts_of(values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return each tensor's CUT_ATTRIBUTES and, last, its DTensor chunks; () for a plain tensor without attributes."""
    # one loop without calls for plain tensors: each check covers 100,000 tensors
    return [
        (*(getattr(value, name, None) for name in CUT_ATTRIBUTES), chunks_of(value))
        if type(value) not in PLAIN_TYPES
        else tuple(map(said.get, CUT_ATTRIBUTES))
        if (said := value.__dict__)
        else ()
        for value in values
    ]


def copied_cuts(values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Do as `cuts_of`, and copy lists, because the originals may change later."""
    return [tuple(list(each) if isinstance(each, list) else each for each in cut) for cut in cuts_of(values)]


def chunks_of(value: Any) -> Any:
    """Return the boxes (offsets, sizes) that a DTensor's local tensor lists; None if it lists none."""
    say = getattr(getattr(value, "_local_tensor", None), "__create_chunk_list__", None)
    if say is None:
        return None
    try:
        return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in say()]
    except Exception as exc:
        return f"unreadable ({type(exc).__name__})"


def laid_out(spec: Any) -> str:
    """Return a DTensor's spec as text for an error message."""
    return "no DTensor" if spec is None else f"{tuple(spec.placements)} on a mesh of {tuple(spec.mesh.shape)}"


@dataclass(frozen=True, slots=True)
class Keeps:
    """Choose tensors by registered name ("*" matches anything), or by the tensors that sources offer.

    Attributes:
        patterns: the names; each must match a tensor, unless it has a "*" and `elsewhere` is set.
        offered: the canonical tensors that partial sources offer, and their aliases: keep all other tensors. None:
            choose by name only.
        all_but: keep all tensors except the named ones.
    """

    patterns: tuple[str, ...] = ()
    offered: frozenset[str] | None = None
    all_but: bool = False
    elsewhere: bool = False  # a pattern may match only tensors of other ranks
    shared: frozenset[str] = frozenset()  # names of tensors that another target's versions write

    def of(self, metadata: Sequence[ParameterMetadata]) -> list[ParameterMetadata]:
        """Return the descriptions of the kept tensors.

        Raises:
            RefusedError: a pattern or a shared name matches no tensor.
        """
        if missing := unmatched(self.patterns, metadata, elsewhere=self.elsewhere):
            what = "partial" if self.all_but else "keeps"
            raise RefusedError(f"{what}: no tensor registered here is called {missing[0]!r}")
        if missing := unmatched(sorted(self.shared), metadata, elsewhere=False):
            raise RefusedError(f"shared: no tensor registered here is called {missing[0]!r}")
        return [m for m in metadata if m.name in self.shared or self._keeps(m)]

    def _keeps(self, m: ParameterMetadata) -> bool:
        if self.offered is not None:
            return self.offered.isdisjoint(_tensors_in(m))
        return is_called(m.name, self.patterns) is not self.all_but


NONE = Keeps()


def checked_part(what: str, value: Any) -> bool | tuple[str, ...]:
    """Return the argument `keeps` or `partial` in plain types: True, False or names.

    Raises:
        RefusedError: the value has another type, or a name is empty.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    raise RefusedError(f"{what} is {shown(value)}, expected True, False, or names of tensors")


def offered_by(rosters: Sequence[Roster]) -> frozenset[str]:
    """Return the canonical tensors that source ranks offer, and their aliases."""
    return frozenset(name for roster in rosters for m in roster.source for name in _tensors_in(m))


def kept_tensor(m: ParameterMetadata) -> KeptTensor:
    """Return a kept tensor in the form of the message to the coordinator."""
    return KeptTensor(m.name, tuple(sorted(_tensors_in(m))), prod(m.shape) * m.element_size)


def _tensors_in(m: ParameterMetadata) -> set[str]:
    """Return the canonical names and aliases of a local tensor; MXFP8 data and scales count as their tensor."""
    names = {tile.tensor for tile in m.tiles} if m.tiles else {canonical_name(m)}
    return {name.partition(MARK)[0] for name in (*names, *m.aliases)}
