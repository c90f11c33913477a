"""A target's held tensors and the conversions that make them: check them, place them, list them for workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import xxhash

from refitd.addressing.conversions import QUANTIZE, QUANTIZE_SWIZZLED, SWIZZLE, Made
from refitd.addressing.places import LocalTensor, Places, places_of
from refitd.buffers.layout import row_major_strides
from refitd.describe.mxfp8 import DATA_DTYPE, SCALE_DTYPE
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import RefusedError
from refitd.mxfp8 import BLOCK, swizzled_bytes
from refitd.protocol.local import RegisterSource, RegisterTarget
from refitd.protocol.shards import WireTensor
from refitd.protocol.target_forms import Conversion, HeldTensor, converted_bytes, held_bytes, landed, staged


def held_of(r: RegisterSource | RegisterTarget) -> Sequence[HeldTensor | WireTensor]:
    """Return the tensors that a rank holds: a target's `held` if declared, else those of its shard."""
    return r.held if isinstance(r, RegisterTarget) and r.held else r.shard.tensors


def wires_of(r: RegisterSource | RegisterTarget) -> Sequence[int | None]:
    """Return each held tensor's index in the shard, None for one made by a conversion."""
    return [t.wire for t in r.held] if isinstance(r, RegisterTarget) and r.held else range(len(r.shard.tensors))


def form_of(r: RegisterSource | RegisterTarget) -> str:
    """Return a key for a target's held form: targets with equal shard and form hold the same bytes."""
    said = (r.held, r.conversions) if isinstance(r, RegisterTarget) else ()
    return xxhash.xxh3_128_hexdigest(repr(said).encode())


@dataclass(frozen=True, slots=True)
class TargetFigures:
    """What the coordinator is told about a target beyond its shard: byte counts, and derived tensors without a hook."""

    held_bytes: int = 0
    staging_bytes: int = 0
    converted_bytes: int = 0
    stale: tuple[str, ...] = ()


def figures_of(r: RegisterSource | RegisterTarget) -> TargetFigures:
    """Return a target's figures; all zeros for a source."""
    if isinstance(r, RegisterSource):
        return TargetFigures()
    return TargetFigures(
        held_bytes=sum(held_bytes(tensor) for tensor in held_of(r)),
        staging_bytes=staged(r.shard, r.held).nbytes,
        converted_bytes=converted_bytes(r.shard, r.conversions),
        stale=tuple(d.name for d in r.derived if not d.is_refreshed),
    )


def check_held(r: RegisterTarget) -> None:
    """Check that every held tensor arrives or is made exactly once, and that every wire tensor is used.

    Raises:
        RefusedError: a declaration is wrong; names the tensor.
    """
    if not r.held:
        if r.conversions:
            raise RefusedError(f"model {r.model!r} rank {r.rank}: conversions are declared, but no tensors they make")
        return
    used, made = [0] * len(r.shard.tensors), [0] * len(r.held)
    for tensor in r.held:
        if tensor.dtype not in ELEMENT_SIZES:
            raise RefusedError(f"{tensor.name}: unknown dtype {tensor.dtype!r}; known: {', '.join(ELEMENT_SIZES)}")
        if tensor.wire is None:
            continue
        if tensor.wire >= len(used):
            raise RefusedError(f"{tensor.name}: tensor {tensor.wire} is not among the {len(used)} that arrive")
        found = r.shard.tensors[tensor.wire]
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise RefusedError(
                f"{tensor.name}: held as {list(tensor.shape)} {tensor.dtype}, it arrives as {list(found.shape)} "
                f"{found.dtype}; declare how it is converted"
            )
        used[tensor.wire] += 1
    for conversion in r.conversions:
        _check_conversion(r, conversion)
        used[conversion.wire] += 1
        for index in conversion.held:
            made[index] += 1
    for arriving, times in zip(r.shard.tensors, used, strict=True):
        if times != 1:
            raise RefusedError(f"{arriving.name}: it arrives and is used {times} times, expected once")
    for held, times in zip(r.held, made, strict=True):
        if times != (held.wire is None):
            raise RefusedError(f"{held.name}: {times} conversions write it, expected {int(held.wire is None)}")


def _check_conversion(r: RegisterTarget, conversion: Conversion) -> None:
    wanted = 2 if conversion.kind == "quantize" else 1
    if conversion.wire >= len(r.shard.tensors) or any(index >= len(r.held) for index in conversion.held):
        raise RefusedError(f"model {r.model!r} rank {r.rank}: a conversion names tensors that there are not")
    source, held = r.shard.tensors[conversion.wire], [r.held[index] for index in conversion.held]
    if len(held) != wanted:
        raise RefusedError(f"{source.name}: {conversion.kind} makes {wanted} tensors, found {len(held)}")
    for tensor, (shape, dtype) in zip(held, _made(source, conversion), strict=True):
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise RefusedError(
                f"{tensor.name}: {list(tensor.shape)} {tensor.dtype}, expected {list(shape)} {dtype} from "
                f"{source.name} {list(source.shape)} {source.dtype}"
            )


def _made(source: WireTensor, conversion: Conversion) -> list[tuple[tuple[int, ...], str]]:
    """Return (shape, dtype) of each tensor that a conversion makes from `source`."""
    shape = source.shape
    if conversion.kind == "swizzle":
        if source.dtype != SCALE_DTYPE or not shape:
            raise RefusedError(f"{source.name}: {source.dtype} {list(shape)} are no scales to be swizzled")
        return [((swizzled_bytes(prod(shape[:-1]), shape[-1]),), SCALE_DTYPE)]
    if source.dtype != "bfloat16" or not shape or shape[-1] % BLOCK:
        raise RefusedError(
            f"{source.name}: {source.dtype} {list(shape)} cannot be made MXFP8; expected bfloat16 with a last "
            f"dimension of a multiple of {BLOCK}"
        )
    blocks = shape[-1] // BLOCK
    scale = (swizzled_bytes(prod(shape[:-1]), blocks),) if conversion.swizzled else (*shape[:-1], blocks)
    return [(shape, DATA_DTYPE), (scale, SCALE_DTYPE)]


def held_places(r: RegisterTarget) -> Places:
    """Return where held tensors lie in a staging arena before commit; the arena number is still 0."""
    placed = (
        LocalTensor(0, offset, t.shape, row_major_strides(t.shape, ELEMENT_SIZES[t.dtype]))
        for offset, t in zip(staged(r.shard, r.held).held, held_of(r), strict=True)
    )
    return places_of(placed, {name: row for row, name in enumerate(arriving_names(r)) if name is not None})


def arriving_names(r: RegisterSource | RegisterTarget) -> list[str | None]:
    """Return the name under which each held tensor arrives, None for one made by a conversion."""
    return [None if wire is None else r.shard.tensors[wire].name for wire in wires_of(r)]


def arriving_places(r: RegisterTarget) -> tuple[Places, int]:
    """Return where tensors arrive for a target that flips, and the bytes of its landing arena (0: it needs none).

    Arena 0 stands for its staging arena, which is laid out like the live one, and 1 for the landing arena.
    """
    lands, nbytes = landed(r.shard, r.conversions)
    live = {held.wire: place for held, place in zip(held_of(r), r.live, strict=True) if isinstance(held, HeldTensor)}
    found = []
    for wire, tensor in enumerate(r.shard.tensors):
        if wire in lands:
            strides = row_major_strides(tensor.shape, ELEMENT_SIZES[tensor.dtype])
            found.append(LocalTensor(1, lands[wire], tensor.shape, strides))
        else:
            place = live[wire] if r.held else r.live[wire]
            found.append(LocalTensor(0, place.offset, tensor.shape, place.strides))
    return places_of(found, {t.name: row for row, t in enumerate(r.shard.tensors)}), nbytes


def made_in(r: RegisterTarget, arena: int, landing: int) -> Sequence[Made]:
    """Return the conversions to run for a target once everything has arrived.

    They write the staging arena `arena`, and read it, too; for a target that flips they read the arena `landing`.
    """
    if not r.conversions:
        return ()
    lies = staged(r.shard, r.held)
    held = [place.offset for place in r.live] if r.flips else lies.held
    lands = landed(r.shard, r.conversions)[0] if r.flips else dict(enumerate(lies.wire))
    read = landing if r.flips else arena
    found = []
    for c in r.conversions:
        source, at = r.shard.tensors[c.wire], lands[c.wire]
        if c.kind == "swizzle":
            # the shape of the data that the scales belong to, not of the scales
            shape = (*source.shape[:-1], source.shape[-1] * BLOCK)
            found.append(Made(SWIZZLE, shape, read, arena, at, 0, held[c.held[0]]))
            continue
        kind = QUANTIZE_SWIZZLED if c.swizzled else QUANTIZE
        data, scale = held[c.held[0]], held[c.held[1]]
        found.append(Made(kind, source.shape, read, arena, at, data, scale, c.rounding))
    return found
