"""The tensors that a source offers: casts, MXFP8 and rounding, and tensors replaced since registration."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from refitd.buffers.arena import MappedArena
from refitd.client.arenas import Arena, Wrote, view_of
from refitd.client.given import (
    NONE,
    Keeps,
    Tensors,
    copied_cuts,
    difference,
    is_called,
    problem_of,
    refuse_all,
    unmatched,
)
from refitd.client.tensors import TensorSet, fingerprint, gpus_of, is_one_memory
from refitd.describe.layout import canonical_name
from refitd.describe.memory import extents, out_of_reach
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.module import is_dtensor
from refitd.describe.names import tie_by_memory
from refitd.describe.renames import Names
from refitd.dtypes import FLOATING, cast_problem, dtype_name
from refitd.errors import RefusedError
from refitd.mxfp8.buffers import quantize
from refitd.mxfp8.format import BLOCK, Rounding, Scratch
from refitd.mxfp8.parts import MARK, is_convertible, parts_of
from refitd.protocol.shards import shard_of, staged
from refitd.text import shown

Cast = str | torch.dtype | Mapping[str, str | torch.dtype] | None

NOTHING: frozenset[str] = frozenset()

# the number of elements converted to bfloat16 in one step
_CHUNK = 1 << 20


class SourceCasts:
    """Reads the argument `cast`.

    A single dtype allows rounding: each tensor is rounded to it unless some destination needs the tensor unrounded. A
    mapping {pattern: dtype} requires it: each tensor is cast to the dtype of its pattern for all destinations.
    """

    def __init__(self, cast: Cast, *, elsewhere: bool = False) -> None:
        """If `elsewhere` is set, a pattern may match only tensors of other ranks.

        Raises:
            RefusedError: tensors cannot be cast to a dtype, or the mapping is malformed.
        """
        self._elsewhere = elsewhere
        self._all: torch.dtype | None = None
        self._named: dict[str, torch.dtype] = {}
        if isinstance(cast, Mapping):
            for pattern, dtype in dict(cast).items():
                if not isinstance(pattern, str) or not pattern:
                    raise RefusedError(f"cast names {shown(pattern)}, expected {{name or pattern with '*': dtype}}")
                self._named[pattern] = _floating(f"cast of {pattern!r}", dtype)
            if "*" in self._named:
                self._named["*"] = self._named.pop("*")  # last: every other pattern comes before it
        elif cast is not None:
            self._all = _floating("cast", cast)

    def offered(
        self, metadata: Collection[ParameterMetadata], exact: Collection[str] = NOTHING
    ) -> list[ParameterMetadata]:
        """Return the descriptions of the offered tensors, in the same order.

        Args:
            metadata: descriptions of the tensors before any cast.
            exact: canonical names of tensors that some destination needs unrounded.

        Raises:
            RefusedError: a tensor cannot be cast to its dtype, or a pattern matches no tensor. Names all of them.
        """
        problems: list[str] = []
        found = [self._one(m, exact, problems) for m in metadata]
        if not self._elsewhere:
            for pattern in self._named:
                if pattern != "*" and not any(is_called(m.name, (pattern,)) for m in metadata):
                    problems.append(f"{pattern!r} has a cast, and no tensor registered here is called so")
        if problems:
            raise RefusedError("; ".join(problems))
        return found

    def _one(self, m: ParameterMetadata, exact: Collection[str], problems: list[str]) -> ParameterMetadata:
        if m.cast_from is not None:  # from a destination's description; below it is set for tensors that are rounded
            m = replace(m, cast_from=None)
        own = dtype_name(m.dtype)
        to = self._all or next((dtype for p, dtype in self._named.items() if is_called(m.name, (p,))), None)
        if to is None or own not in FLOATING or own == dtype_name(to):
            return m
        if problem := cast_problem(own, dtype_name(to)):
            problems.append(f"{m.name}: cast {problem}")
        elif self._all is None:
            return replace(m, dtype=to, element_size=to.itemsize, cast_to=None)
        elif any(name in exact for name in names_of(m)):
            return replace(m, cast_to=dtype_name(to))
        else:
            return replace(m, dtype=to, element_size=to.itemsize, cast_from=own, cast_to=None)
        return m


def names_of(m: ParameterMetadata) -> tuple[str, ...]:
    """Return the canonical tensors that a description is part of, with their aliases."""
    return (*(tile.tensor for tile in m.tiles or ()), canonical_name(m), *m.aliases)


def rounded_in(wire: Collection[ParameterMetadata], needed: Collection[str]) -> set[str]:
    """Return the canonical names of the tensors in a source's descriptions that are rounded and are `needed` exact."""
    wanted = set(needed)
    return {name for m in wire if m.cast_from is not None for name in names_of(m) if name in wanted}


def _floating(what: str, cast: object) -> torch.dtype:
    """Return a type that tensors can be cast to; raises RefusedError for any other value."""
    if not isinstance(cast, str | torch.dtype) or dtype_name(cast) not in FLOATING:
        raise RefusedError(f"{what} is {shown(cast)}, expected the type to offer: {', '.join(sorted(FLOATING))}")
    found: torch.dtype = getattr(torch, dtype_name(cast))
    return found


@dataclass(frozen=True, slots=True)
class MXFP8Offer:
    """The tensors that a source offers in MXFP8; it converts them when it publishes a version.

    Attributes:
        names: tensor names as in this rank's module; "*" matches anything. With several ranks, a name with "*" need
            not match on every rank. Tensors must be bfloat16 or float32; float32 is rounded to bfloat16 first.
        rounding: how scales are rounded; targets that want another rounding are refused.
        instead: do not offer the unconverted tensors. Slots then take half the memory, and bfloat16 targets cannot
            load these tensors.
    """

    names: tuple[str, ...]
    rounding: Rounding = Rounding.RCEIL
    instead: bool = False

    def __post_init__(self) -> None:
        """Raise RefusedError unless `names` is a tuple or list of names."""
        names = self.names
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise RefusedError(f"MXFP8Offer: names are {shown(names)}, expected a tuple of names")

    def matches(self, name: str) -> bool:
        """Return whether the tensor of this name is offered in MXFP8."""
        return is_called(name, self.names)


class SourceTensors(TensorSet):
    """A source's tensors; `wire` describes the tensors that it offers."""

    def __init__(
        self,
        tensors: Tensors,
        rank: int,
        metadata: Sequence[ParameterMetadata] | None,
        pg_collection: Any,
        num_experts: int | None,
        offer: MXFP8Offer | None = None,
        left_out: Keeps = NONE,
        names: Names | None = None,
        casts: SourceCasts | None = None,
        *,
        elsewhere: bool = False,
    ) -> None:
        """Describe the tensors. `elsewhere`: a pattern of `offer` may match only tensors of other ranks.

        Raises:
            RefusedError: as TensorSet; or the way that tensors are split does not allow MXFP8, or `casts` asks for a
                type that they cannot be offered in. Names all of them.
        """
        super().__init__(tensors, rank, metadata, pg_collection, num_experts, left_out, names)
        self._unwritten = {}
        # tie names that share memory: a target may have the weight only once
        self.metadata = [replace(m) for m in self.metadata]
        held = {n: v for n, v in self.values.items() if n not in self.quantized}
        self._one_memory = tie_by_memory(self.metadata, held)
        self.offer, self._elsewhere = offer, elsewhere
        self._scratch: dict[str, Scratch] = {}
        self._casts = casts or SourceCasts(None)
        self._lay_out(NOTHING)

    def widen(self, exact: Collection[str]) -> list[ParameterMetadata]:
        """Offer these canonical tensors unrounded from now on, in slots of another size; return the new `wire`."""
        self._lay_out(self._exact | {*exact})
        return self.wire

    def follow(self) -> bool:
        """Adopt tensors that replaced registered tensors with an equal description; return whether any did.

        The registered module or dict is read again. The replacements are published from now on.

        Raises:
            RefusedError: names, shapes, dtypes or layouts differ from the registration, memory was freed, or a tensor
                is no longer in the arena that it is lent from. The error names the tensor; no tensor was adopted.
        """
        raw, named, captured, changed = self._current()
        replaced = [
            name for name, old, new in zip(raw, self._raw.values(), raw.values(), strict=True) if new is not old
        ]
        if changed is None and not replaced:
            if not self._is_cut_as_before(raw):
                self._check_described(raw)
                self._cuts = copied_cuts(raw.values())
            return False
        for m in self.metadata:
            problem = problem_of(raw[m.name]) or difference(m, named[m.name])
            if problem:
                was_cut, is_cut = m.name in self._specs, is_dtensor(raw[m.name])
                todo = "register the source again"
                if was_cut and not is_cut:
                    todo = (
                        "it was a DTensor, and is none now: where FSDP has gathered it (after a forward pass, the "
                        "outermost module and those with reshard_after_forward=False), call reshard() on that module, "
                        "which does not reshard those inside, before you publish"
                    )
                elif is_cut and not was_cut:
                    todo = (
                        "it is a DTensor, and was none then: where FSDP had gathered it (after a forward pass), call "
                        "reshard() on that module, and register the source again"
                    )
                raise RefusedError(f"{m.name}: {problem}; it has changed since registration; {todo}")
        is_cut_as_before = self._is_cut_as_before(raw, replaced)
        # skip this if only memory has moved: describing 100,000 tensors takes as long as registering them
        if replaced or not is_cut_as_before:
            self._check_described(raw)
        self._check_one_memory(raw)
        prints = [fingerprint(tensor) for tensor in captured]
        names, tensors = self._live(named)
        if self.arena_places:
            for name, was, now in zip(names, self._fingerprints, prints, strict=True):
                if was != now:
                    raise RefusedError(
                        f"{name}: it has left the arena that it is lent from ({was} is now {now}); write tensors of "
                        "client.allocate() in place, or register the source again"
                    )
        lies = extents(tensors)
        if unreadable := out_of_reach(lies, write=False):
            raise RefusedError(f"{names[unreadable[0]]}: its memory cannot be read; register the source again")
        self._raw, self.values, self.tensors, self.gpus = raw, named, tensors, gpus_of(tensors)
        self._fingerprints, self._copies = prints, None
        self._cuts = copied_cuts(raw.values())
        return True

    def check_still(self, when: str) -> None:
        """Raise RefusedError if a tensor was replaced, moved or freed since `follow`; `when` goes into the message."""
        if (index := self._current().changed) is not None:
            raise RefusedError(
                f"{self.names[index]}: it was replaced, moved or freed {when}; publish between two changes of the "
                "tensors, not beside them"
            )

    def _check_one_memory(self, raw: Mapping[str, Any]) -> None:
        """Refuse names that were tied by their memory and no longer share it: targets have one value for them."""
        for first, *others in self._one_memory:
            for other in others:
                if not is_one_memory(raw[first], raw[other]):
                    raise RefusedError(
                        f"{other}: it is no longer the memory of {first}, which it was tied to at registration; keep "
                        "them tied, or register the source again"
                    )

    def _lay_out(self, exact: Collection[str]) -> None:
        """Describe the offered tensors and their offsets in a slot.

        Raises:
            RefusedError: see `__init__`.
        """
        # (index of tensor, place in `wire`) of each copied tensor; a cast tensor also has its dtype
        self._whole: list[tuple[int, int]] = []
        self._cast: list[tuple[int, int, torch.dtype]] = []
        self._converted: list[int] = []  # indices of tensors that are offered in MXFP8
        self._exact = {*exact}
        wire: list[ParameterMetadata] = []
        offer = self.offer
        problems: list[str] = [
            f"{name}: it is held in MXFP8, and sources offer bfloat16 or float32; register its master weights"
            for name in sorted(self.quantized)
        ]
        parts: list[ParameterMetadata] = []
        instead: set[int] = set()
        for i, m in enumerate(self.metadata if not problems else ()):
            if MARK in m.name or MARK in canonical_name(m):
                problems.append(f"{m.name}: {MARK!r} stands for parts of MXFP8 tensors; give it another name")
            elif offer is not None and offer.matches(m.name):
                try:
                    parts += _offered(m, offer)
                    self._converted.append(i)
                    instead |= {i} if offer.instead else set()
                except RefusedError as exc:
                    problems.append(str(exc))
        if offer is not None and not problems:
            missing = unmatched(offer.names, self.metadata, elsewhere=self._elsewhere)
            problems += [f"{p!r} is offered in MXFP8, and no tensor registered here is called so" for p in missing]
        refuse_all(problems)
        for i, (m, offered) in enumerate(zip(self.metadata, self._casts.offered(self.metadata, exact), strict=True)):
            if i in instead:
                continue
            if dtype_name(m.dtype) == dtype_name(offered.dtype):
                self._whole.append((i, len(wire)))
            else:
                self._cast.append((i, len(wire), getattr(torch, dtype_name(offered.dtype))))
            wire.append(offered)
        self._parts_from = len(wire)
        self.wire = wire + parts
        self._slot = staged(shard_of(self.wire), ()).wire
        self._copies = None

    def _moved(self) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
        return [self.tensors[index] for index, _ in self._whole], [self._slot[place] for _, place in self._whole]

    @property
    def is_converted(self) -> bool:
        """Whether any tensor is cast or converted for publishing."""
        return bool(self._converted or self._cast)

    @torch.no_grad()
    def write_to(self, arena: Arena, wrote: Wrote = None) -> None:
        """Write a version into a slot: first copied tensors, then cast ones, then data and scales of MXFP8 tensors.

        `wrote` is called with the offset and bytes of each part.
        """
        self.copy(arena, into_arena=True, wrote=wrote)
        for index, place, dtype in self._cast:
            tensor = self.tensors[index]
            view_of(arena, self._slot[place], tensor.shape, dtype).copy_(tensor)
            if wrote is not None:
                wrote(self._slot[place], tensor.numel() * dtype.itemsize)
        offsets = iter(self._slot[self._parts_from :])
        for index in self._converted:
            tensor = self.tensors[index]
            slot = torch.from_numpy(arena.bytes) if isinstance(arena, MappedArena) else arena.tensor
            data = slot[(at := next(offsets)) : at + tensor.numel()]
            rows = slot[(at := next(offsets)) : at + tensor.numel() // BLOCK]
            self._quantize(tensor, data, rows)

    @torch.no_grad()
    def _quantize(self, tensor: torch.Tensor, data: torch.Tensor, rows: torch.Tensor) -> None:
        """Convert a tensor to MXFP8, through bfloat16, into flat `data` and scales `rows` (both uint8).

        All code paths write the same bytes.
        """
        assert self.offer is not None
        if not tensor.numel():
            return
        shape = tensor.shape
        data, rows = data.view(shape), rows.view(*shape[:-1], shape[-1] // BLOCK)
        if tensor.device == data.device and tensor.dtype == torch.bfloat16 and tensor.is_contiguous():
            quantize(tensor, data, rows, self.offer.rounding, self._scratch)
            return
        if tensor.ndim == 1:
            tensor, data, rows = (t.view(-1, n) for t, n in ((tensor, BLOCK), (data, BLOCK), (rows, 1)))
        step = max(1, _CHUNK // max(1, tensor[0].numel()))
        for start in range(0, tensor.shape[0], step):
            part = tensor[start : start + step].to(torch.bfloat16).contiguous()
            here, there = data[start : start + step], rows[start : start + step]
            if part.device == here.device:
                quantize(part, here, there, self.offer.rounding, self._scratch)
                continue
            made = (
                torch.empty_like(part, dtype=torch.uint8),
                torch.empty(there.shape, dtype=torch.uint8, device=part.device),
            )
            quantize(part, *made, self.offer.rounding)
            here.copy_(made[0])
            there.copy_(made[1])


def _offered(m: ParameterMetadata, offer: MXFP8Offer) -> Sequence[ParameterMetadata]:
    if not is_convertible(m.dtype):
        raise RefusedError(f"{m.name}: it is {dtype_name(m.dtype)}, and only bfloat16 and float32 are made MXFP8")
    return parts_of(m, Rounding(offer.rounding).value)
