"""MXFP8 and casts in registrations: conversions of a target's tensors, and of a source's at publishing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from refitd.buffers.arena import MappedArena
from refitd.client.arena_copies import view_of
from refitd.client.derived import Derived, check_derived, refresh
from refitd.client.devices import Arena
from refitd.client.given import Tensors, held_here, is_called, refuse_all, unmatched
from refitd.client.kept import NONE, Keeps
from refitd.client.source_casts import NOTHING, SourceCasts
from refitd.client.tensors import TensorSet, fingerprint
from refitd.client.written_memory import WrittenMemory
from refitd.describe.casts import FLOATING, cast_problem
from refitd.describe.layout import canonical_name, tiles_of
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.mxfp8 import DATA_DTYPE, MARK, SCALE_DTYPE, check_blocks, is_convertible, parts_of
from refitd.describe.renames import Names
from refitd.describe.ties import tie_by_memory
from refitd.describe.usable import tensor_problem
from refitd.dtypes import dtype_name
from refitd.errors import CommitError, PlanError, RefusedError
from refitd.mxfp8 import BLOCK, Rounding
from refitd.protocol.shards import KeptTensor, shard_of
from refitd.protocol.target_forms import Conversion, DerivedTensor, HeldTensor, staged
from refitd.text import shown
from refitd.transforms.mxfp8_buffers import CheckedBuffer, held_of, holds_columns, quantize
from refitd.transforms.mxfp8_format import Scratch

# elements converted to bfloat16 at a time
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class MXFP8Offer:
    """Which tensors a source offers in MXFP8, converted when a version is published.

    Attributes:
        names: tensor names as in this rank's module; "*" matches anything. With several ranks, a name with "*" may
            match nothing on this one. Tensors must be bfloat16 or float32; float32 is rounded to bfloat16 first.
        rounding: how scales are rounded; targets that want another rounding are refused.
        instead: do not offer the unconverted tensors, so that slots take half the memory; bfloat16 targets are then
            left without a source.
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
        """Return whether the tensor of this name is offered."""
        return is_called(name, self.names)


class TargetTensors(TensorSet):
    """A target's live tensors, the tensors that arrive for it, and the conversions between them.

    Attributes:
        wire: descriptions of the tensors that arrive.
        held: the live tensors if they differ from the arriving ones; else empty.
        conversions: how the live tensors are made from the arriving ones.
        derived: the derived tensors, as the coordinator is told of them.
        shared: names of tensors in memory that another target's versions write.
        written: the memory of live and derived tensors; no other registration may write it.
    """

    _writes = True

    def __init__(
        self,
        tensors: Tensors,
        rank: int,
        metadata: Sequence[ParameterMetadata] | None,
        pg_collection: Any,
        num_experts: int | None,
        convert_on_send: bool = False,
        derived: Mapping[str, Derived] | None = None,
        keeps: Keeps = NONE,
        names: Names | None = None,
    ) -> None:
        """Describe the tensors.

        Raises:
            RefusedError: as TensorSet; or tensors cannot be held in MXFP8 as they are split. Names all of them.
        """
        super().__init__(tensors, rank, metadata, pg_collection, num_experts, keeps, names)
        self.shared = keeps.shared
        if derived is not None and not isinstance(derived, Mapping):
            raise RefusedError(f"derived is {type(derived).__name__}, expected {{name: refitd.Derived}}")
        self._made = dict(derived or {})
        self.derived: tuple[DerivedTensor, ...] = check_derived(
            self._made, [*(m.name for m in self.metadata), *(one.name for one in self.kept)]
        )
        refuse_all(f"{name}: {problem}" for name, one in self._made.items() if (problem := tensor_problem(one.tensor)))
        self._made_prints = {name: fingerprint(one.tensor) for name, one in self._made.items()}
        self.wire: list[ParameterMetadata] = list(self.metadata)
        self.held: tuple[HeldTensor, ...] = ()
        self.conversions: tuple[Conversion, ...] = ()
        buffers = {m.name: held_of(m.name, self.values[m.name]) for m in self.metadata if m.name in self.quantized}
        if buffers:
            self._check(buffers)
            self._declare(buffers, convert_on_send)
            self.offsets = list(staged(shard_of(self.wire), self.held).held)
        made = {name: one.tensor for name, one in self._made.items()}
        self.written = WrittenMemory(self.names, self.tensors, self.metadata, made)
        self.written.check_kept(*self._live(self._unwritten))
        self._unwritten = {}  # replaced ones may be freed

    def kept_here(self) -> tuple[KeptTensor, ...]:
        """Return what keeps its own values, without the tensors that another target's versions write."""
        return tuple(one for one in self.kept if one.name not in self.shared)

    def unwritten(self) -> tuple[list[str], list[torch.Tensor]]:
        """Return the names and the present tensors of what is kept; none if the module or dict cannot be read."""
        if not self.kept:
            return [], []
        try:
            raw = self._read()
            return self._live({one.name: held_here(raw[one.name]) for one in self.kept if one.name in raw})
        except (RefusedError, PlanError):
            return [], []

    def take_cast(self, offered: str | torch.dtype | Mapping[str, torch.dtype]) -> None:
        """Declare casts for tensors of another type than is offered: one for all, or by canonical name.

        Raises:
            RefusedError: `offered` is no floating type, or a tensor cannot be made of what is offered.
        """
        if not isinstance(offered, Mapping) and dtype_name(offered) not in FLOATING:
            known = ", ".join(sorted(FLOATING))
            raise RefusedError(f"cast is {shown(offered)}, expected True, or the type that sources offer: {known}")
        problems = []
        for index, m in enumerate(self.wire):
            own = dtype_name(m.dtype)
            if m.cast_from is not None or own not in FLOATING:
                continue
            names = {tile.tensor for tile in m.tiles} if m.tiles else {canonical_name(m)}
            if isinstance(offered, Mapping):
                given = {dtype_name(offered[name]) for name in names if name in offered}
            else:
                given = {dtype_name(offered)}
            for held in sorted(given - {own}):
                if len(given) > 1 or (problem := cast_problem(held, own)):
                    several = f"is made of tensors of several types: {', '.join(sorted(given))}"
                    problems.append(f"{m.name}: {several if len(given) > 1 else f'cast {problem}'}")
                    break
                self.wire[index] = replace(m, cast_from=held)
        refuse_all(problems)

    def check_unmoved(self, when: str = "since registration", *, is_described: bool = False) -> None:
        """Do as TensorSet.check_unmoved, for derived tensors too."""
        super().check_unmoved(when, is_described=is_described)
        for name, one in self._made.items():
            if (found := fingerprint(one.tensor)) != self._made_prints[name]:
                raise CommitError(
                    f"{name}: the storage of this derived tensor has changed {when} ({self._made_prints[name]} is now "
                    f"{found}); write it in place, or register again"
                )

    def restore(self, arena: Arena) -> None:
        """Copy a retained target's weights from the staging arena into the live tensors, and compare them.

        Raises:
            CommitError: a tensor does not hold what was copied into it.
        """
        self.settle()
        self.read_from(arena)
        self.settle()
        if (name := self.differing(arena)) is not None:
            raise CommitError(f"{name}: it does not hold what was restored to it; something else writes to it")
        self.refresh()

    def refresh(self) -> None:
        """Recompute the derived tensors; raises CommitError naming the one whose hook raised."""
        with torch.no_grad():
            refresh(self._made)

    def _check(self, buffers: Mapping[str, CheckedBuffer]) -> None:
        problems = []
        for m in self.metadata:
            if m.name in buffers and holds_columns(self.values[m.name]):
                problems.append(
                    f"{m.name}: it holds column-wise data, too, which would stay as it is; make it row-wise only"
                )
            if m.name in buffers:
                try:
                    check_blocks(m)
                except RefusedError as exc:
                    problems.append(str(exc))
        swizzled = [name for name, held in buffers.items() if held.swizzled is not None]
        if swizzled and len(swizzled) < len(buffers):
            plain = next(name for name, held in buffers.items() if held.swizzled is None)
            problems.append(f"{swizzled[0]} has swizzled scales and {plain} has not; expected one layout for all")
        problems += _twice([m for m in self.metadata if m.name in buffers], buffers) if not problems else []
        if problems:
            raise RefusedError("; ".join(problems))

    def _declare(self, buffers: Mapping[str, CheckedBuffer], convert_on_send: bool) -> None:
        wire: list[ParameterMetadata] = []
        held: list[HeldTensor] = []
        conversions: list[Conversion] = []
        for m in self.metadata:
            if m.name not in buffers:
                held.append(HeldTensor(m.name, tuple(m.shape), dtype_name(m.dtype), len(wire)))
                wire.append(m)
                continue
            found = buffers[m.name]
            swizzled = found.swizzled is not None
            scale = found.swizzled if found.swizzled is not None else found.scale
            assert scale is not None
            at, made = len(wire), len(held)
            rounding = found.rounding or Rounding.RCEIL
            names, shapes = (f"{m.name}.data", f"{m.name}.scale"), (tuple(m.shape), tuple(scale.shape))
            if not convert_on_send:
                wire.append(m)
                held += [HeldTensor(names[0], shapes[0], DATA_DTYPE), HeldTensor(names[1], shapes[1], SCALE_DTYPE)]
                conversions.append(Conversion("quantize", at, (made, made + 1), rounding, swizzled))
                continue
            wire += parts_of(m, rounding)
            held.append(HeldTensor(names[0], shapes[0], DATA_DTYPE, at))
            held.append(HeldTensor(names[1], shapes[1], SCALE_DTYPE, None if swizzled else at + 1))
            if swizzled:
                conversions.append(Conversion("swizzle", at + 1, (made + 1,)))
        self.wire, self.held, self.conversions = wire, tuple(held), tuple(conversions)


class SourceTensors(TensorSet):
    """A source's tensors, and `wire`, the descriptions of what it offers."""

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
        """Describe the tensors. `elsewhere`: other ranks have tensors too, which a pattern of `offer` may be for.

        Raises:
            RefusedError: as TensorSet; or tensors cannot be offered in MXFP8 as they are split, or in the type that
                `casts` says. Names all of them.
        """
        super().__init__(tensors, rank, metadata, pg_collection, num_experts, left_out, names)
        self._unwritten = {}
        # tie names that share memory, for targets that hold the weight once
        self.metadata = [replace(m) for m in self.metadata]
        held = {n: v for n, v in self.values.items() if n not in self.quantized}
        self._one_memory = tie_by_memory(self.metadata, held)
        self.offer, self._elsewhere = offer, elsewhere
        self._scratch: dict[str, Scratch] = {}
        self._casts = casts or SourceCasts(None)
        self._lay_out(NOTHING)

    def widen(self, exact: Collection[str]) -> list[ParameterMetadata]:
        """Offer these canonical tensors unrounded from now on; return the new `wire`. The size of slots changes."""
        self._lay_out(self._exact | {*exact})
        return self.wire

    def _lay_out(self, exact: Collection[str]) -> None:
        """Describe what is offered, and where it is in a slot.

        Raises:
            RefusedError: see `__init__`.
        """
        # tensors that are copied, as (index of tensor, place in `wire`); those that are cast, with their dtype
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
        """Whether any tensor is offered in another form than it is held in."""
        return bool(self._converted or self._cast)

    @torch.no_grad()
    def write_to(self, arena: Arena) -> None:
        """Write a version into a slot: first the unconverted tensors, then data and scales of the MXFP8 ones."""
        super().write_to(arena)
        for index, place, dtype in self._cast:
            tensor = self.tensors[index]
            view_of(arena, self._slot[place], tensor.shape, dtype).copy_(tensor)
        offsets = iter(self._slot[self._parts_from :])
        for index in self._converted:
            tensor = self.tensors[index]
            slot = torch.from_numpy(arena.bytes) if isinstance(arena, MappedArena) else arena.tensor
            data = slot[(at := next(offsets)) : at + tensor.numel()]
            rows = slot[(at := next(offsets)) : at + tensor.numel() // BLOCK]
            self._quantize(tensor, data, rows)

    @torch.no_grad()
    def _quantize(self, tensor: torch.Tensor, data: torch.Tensor, rows: torch.Tensor) -> None:
        """Convert a tensor, through bfloat16 whatever its dtype, into flat `data` and `rows` (uint8).

        All code paths give the same bytes.
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


def _twice(metas: Sequence[ParameterMetadata], buffers: Mapping[str, CheckedBuffer]) -> list[str]:
    """Return an error text for each pair of parameters that convert into the same memory or the same elements."""
    problems = []
    memory: dict[int, str] = {}
    boxes: dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = {}
    for m in metas:
        if (other := memory.setdefault(buffers[m.name].data.data_ptr(), m.name)) != m.name:
            problems.append(f"{m.name} and {other} are the same memory; register each MXFP8 tensor once")
            continue
        for tile in tiles_of(m):
            end = tuple(low + size for low, size in zip(tile.offset, tile.size, strict=True))
            for name, low, high in boxes.setdefault(tile.tensor, []):
                meets = all(a < d and c < b for a, b, c, d in zip(tile.offset, end, low, high, strict=True))
                if name != m.name and len(low) == len(end) and meets:
                    problems.append(f"{m.name} and {name} both hold {tile.tensor} in MXFP8; register it once")
            boxes[tile.tensor].append((m.name, tile.offset, end))
    return problems
