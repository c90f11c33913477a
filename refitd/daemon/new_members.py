"""Check a registration; make its member, with the places of its tensors and their conversions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import xxhash

from refitd.addressing.copies import QUANTIZE, QUANTIZE_SWIZZLED, QUANTIZE_TILES, SWIZZLE, Made
from refitd.addressing.places import LocalTensor, Places, places_of
from refitd.buffers.layout import extent, row_major_strides
from refitd.commit.target_state import Suspended, fresh, step_of
from refitd.daemon.members import Arena, LocalMember, Registration, SourceSide, TargetFigures
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import RefusedError
from refitd.mxfp8.format import BLOCK, swizzled_bytes, tiles_shape
from refitd.mxfp8.parts import DATA_DTYPE, SCALE_DTYPE
from refitd.protocol.base import digest_of, pack
from refitd.protocol.local import RegisterSource, RegisterTarget
from refitd.protocol.shards import (
    Conversion,
    HeldTensor,
    Place,
    WireTensor,
    check_shard,
    converted_bytes,
    held_bytes,
    landed,
    staged,
)
from refitd.text import brief, unprintable

# A rank's shard cannot be larger; a description that claims more is a mistake or an attack.
MAX_SHARD_BYTES = 1 << 46

# Characters of a registration's id: a name of the protocol, with room for the names of its arenas.
MAX_ID = 480


def held_of(r: RegisterSource | RegisterTarget) -> Sequence[HeldTensor | WireTensor]:
    """Return the tensors that a rank holds: a target's `held` if declared, else the tensors of its shard."""
    return r.held if isinstance(r, RegisterTarget) and r.held else r.shard.tensors


def wires_of(r: RegisterSource | RegisterTarget) -> Sequence[int | None]:
    """Return each held tensor's index in the shard, None for one made by a conversion."""
    return [t.wire for t in r.held] if isinstance(r, RegisterTarget) and r.held else range(len(r.shard.tensors))


def form_of(r: RegisterSource | RegisterTarget) -> str:
    """Return a key for a target's held form: targets with equal shard and form hold the same bytes."""
    said = (r.held, r.conversions) if isinstance(r, RegisterTarget) else ()
    return xxhash.xxh3_128_hexdigest(repr(said).encode())


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
    """Check that each held tensor arrives or is converted exactly once, and that each wire tensor is used.

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
    wanted = 1 if conversion.kind == "swizzle" else 2
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
    if conversion.kind == "quantize-tiles":
        if source.dtype != "bfloat16" or len(shape) < 2:
            raise RefusedError(
                f"{source.name}: {source.dtype} {list(shape)} cannot be made FP8; expected bfloat16 [n, k]"
            )
        return [(shape, DATA_DTYPE), (tiles_shape(shape), "float32")]
    if source.dtype != "bfloat16" or not shape or shape[-1] % BLOCK:
        raise RefusedError(
            f"{source.name}: {source.dtype} {list(shape)} cannot be made MXFP8; expected bfloat16 with a last "
            f"dimension of a multiple of {BLOCK}"
        )
    blocks = shape[-1] // BLOCK
    scale = (swizzled_bytes(prod(shape[:-1]), blocks),) if conversion.swizzled else (*shape[:-1], blocks)
    return [(shape, DATA_DTYPE), (scale, SCALE_DTYPE)]


def held_places(r: RegisterTarget) -> Places:
    """Return the places of held tensors in a staging arena before commit; the arena number is still 0."""
    placed = (
        LocalTensor(0, offset, t.shape, row_major_strides(t.shape, ELEMENT_SIZES[t.dtype]))
        for offset, t in zip(staged(r.shard, r.held).held, held_of(r), strict=True)
    )
    return places_of(placed, {name: row for row, name in enumerate(arriving_names(r)) if name is not None})


def arriving_names(r: RegisterSource | RegisterTarget) -> list[str | None]:
    """Return the name under which each held tensor arrives, None for one made by a conversion."""
    return [None if wire is None else r.shard.tensors[wire].name for wire in wires_of(r)]


def arriving_places(r: RegisterTarget) -> tuple[Places, int]:
    """Return the places of arriving tensors for a target that flips, and the bytes of its landing arena (0: none).

    Arena number 0 means its staging arena, which has the layout of the live arena; 1 means the landing arena.
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
    """Return the conversions to run for a target once all tensors have arrived.

    They read and write the staging arena `arena`; for a target that flips, they read the arena `landing` instead.
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
        kind = QUANTIZE_TILES if c.kind == "quantize-tiles" else QUANTIZE_SWIZZLED if c.swizzled else QUANTIZE
        data, scale = held[c.held[0]], held[c.held[1]]
        found.append(Made(kind, source.shape, read, arena, at, data, scale, c.rounding))
    return found


def member_id(model: str, who: str, node: str, number: int) -> str:
    """Return the unique id of a registration, which also names it in errors.

    Raises:
        RefusedError: the names in it are too long to travel.
    """
    found = f"model {model!r} {who} on {node} (#{number})"
    if len(found) > MAX_ID:
        raise RefusedError(
            f"model {brief(model)!r}: the names of model, replica and node have {len(found)} characters together, at "
            f"most {MAX_ID} can be; choose shorter ones"
        )
    return found


def checked(
    session: int, pid: int, request: RegisterSource | RegisterTarget, arenas: Mapping[int, Arena]
) -> Registration:
    """Check a registration of a session's process `pid`; no memory is allocated.

    Raises:
        RefusedError: ranks, shapes, sizes or places are invalid.
        ProtocolError: a dtype or group is unknown, or a name occurs twice.
    """
    r = request
    for what, name in (("model", r.model), ("replica", getattr(r, "replica", ""))):
        if wrong := unprintable(name):
            raise RefusedError(f"{what} {name[:80]!r} {wrong}; choose another name")
    if not 0 <= r.rank < r.world_size:
        raise RefusedError(f"model {r.model!r}: rank {r.rank} is not in 0..{r.world_size - 1} (world_size)")
    check_shard(r.shard)
    target = r if isinstance(r, RegisterTarget) else None
    flips, in_place = target is not None and target.flips, target is not None and target.in_place
    if target is not None:
        check_held(target)
        is_placed = bool(r.live) or not any(prod(tensor.shape) for tensor in r.shard.tensors)
        if in_place and (not is_placed or not target.controlled or target.conversions):
            raise RefusedError(
                f"model {r.model!r} replica {target.replica!r} rank {r.rank}: to be written in place, tensors must be "
                "in arenas (client.allocate), of the types that the sources offer (no MXFP8), and the replica "
                "controlled"
            )
    lies = staged(r.shard, target.held if target is not None else ())
    offsets, nbytes = lies.wire, lies.nbytes
    figures = figures_of(r)
    if target is not None and flips:
        nbytes = _twin_bytes(target, arenas)
    if nbytes > MAX_SHARD_BYTES:
        raise RefusedError(
            f"model {r.model!r} rank {r.rank}: {nbytes} bytes in one shard, the limit is {MAX_SHARD_BYTES}"
        )
    packed = places_of(
        (
            LocalTensor(0, offset, t.shape, row_major_strides(t.shape, ELEMENT_SIZES[t.dtype]))
            for offset, t in zip(offsets, r.shard.tensors, strict=True)
        ),
        {t.name: row for row, t in enumerate(r.shard.tensors)},
    )
    live = _live_places(r, session, arenas)
    to_commit = held_places(target) if target is not None and target.held else packed
    if target is not None and flips:
        packed, landing_bytes = arriving_places(target)
        figures = replace(figures, staging_bytes=nbytes + landing_bytes)
    return Registration(
        request=r,
        pid=pid,
        replica="" if target is None else target.replica,
        nbytes=nbytes,
        digest=digest_of(r.shard),
        described=pack(r.shard),
        form=form_of(r),
        packed=packed,
        to_commit=to_commit,
        live=live,
        figures=figures,
        is_source=target is None,
        flips=flips,
        in_place=in_place,
        is_proven_live=flips or in_place,
        in_lockstep=target is not None and target.world_size > 1 and not target.controlled,
    )


def new_member(member_id: str, session: int, registration: Registration) -> LocalMember:
    """Return a rank without arenas; a target serves the version that its request names."""
    member, r = LocalMember(member_id, session, registration), registration.request
    if isinstance(r, RegisterSource):
        member.source = SourceSide()
        return member
    member.state = fresh(in_place=r.in_place, version=r.version, run=r.run, flips=r.flips)
    if r.suspended:
        member.state = step_of(member.state, Suspended())
    return member


def _twin_bytes(r: RegisterTarget, arenas: Mapping[int, Arena]) -> int:
    """Return the size of a flipping target's staging arena: equal to its live arena, as commits exchange the two.

    Raises:
        RefusedError: its live tensors are not all in one arena, or workers cannot convert into them.
    """
    numbers = {place.arena for place in r.live}
    if len(numbers) != 1 or r.in_place or not numbers <= arenas.keys():
        raise RefusedError(
            f"model {r.model!r} replica {r.replica!r} rank {r.rank}: to flip, its tensors must be all of one arena "
            f"(found {len(numbers)} arenas)"
        )
    for index in sorted({index for conversion in r.conversions for index in conversion.held}):
        held, place = r.held[index], r.live[index] if index < len(r.live) else None
        if place is not None and place.strides != row_major_strides(held.shape, ELEMENT_SIZES[held.dtype]):
            raise RefusedError(f"{held.name}: to flip, what is made by a conversion must be contiguous")
    return arenas[numbers.pop()].nbytes


def _live_places(r: RegisterSource | RegisterTarget, session: int, arenas: Mapping[int, Arena]) -> Places:
    if not r.live:
        return places_of(())
    held = held_of(r)
    if len(r.live) != len(held):
        raise RefusedError(f"model {r.model!r} rank {r.rank}: {len(r.live)} places for {len(held)} tensors")
    placed = (_live_place(place, tensor, session, arenas) for place, tensor in zip(r.live, held, strict=True))
    return places_of(placed, {name: row for row, name in enumerate(arriving_names(r)) if name is not None})


def _live_place(
    place: Place, tensor: HeldTensor | WireTensor, session: int, arenas: Mapping[int, Arena]
) -> LocalTensor:
    arena = arenas.get(place.arena)
    if arena is None or arena.session != session or not arena.write:
        raise RefusedError(f"{tensor.name}: arena {place.arena} is not one of this client's; allocate it first")
    if len(place.strides) != len(tensor.shape):
        raise RefusedError(f"{tensor.name}: {len(place.strides)} strides for shape {tensor.shape}")
    end = place.offset + extent(tensor.shape, place.strides, ELEMENT_SIZES[tensor.dtype])
    if end > arena.nbytes:
        raise RefusedError(f"{tensor.name}: ends at byte {end} of arena {arena.id}, which has {arena.nbytes}")
    return LocalTensor(place.arena, place.offset, tensor.shape, place.strides)
