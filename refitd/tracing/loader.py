"""An engine's layout, learned from its own weight loader."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import gcd

import numpy as np
import torch

from refitd.describe.layout import row_major
from refitd.describe.metadata import ParameterMetadata, Repeat, Tile
from refitd.dtypes import cast_number, dtype_name
from refitd.errors import PlanError, RefusedError
from refitd.text import nearest
from refitd.tracing.held_bytes import differing, tiles_of
from refitd.tracing.isolation import Held, Isolation
from refitd.tracing.probes import Proof, prove
from refitd.tracing.threads import TRACING, Following, ThreadRaised, around
from refitd.tracing.tracer import Shape, Tracer
from refitd.tracing.values import site_of
from refitd.tracing.walks import Axis, Laid, Origin, Walk, Written, along, bits_of

# Limit on the units of one tensor that are tracked where its writes overlap, four bytes each.
MAX_PAINTED = 1 << 28


@dataclass(frozen=True, slots=True)
class LoaderTrace:
    """The moves that a loader makes with each canonical tensor.

    Attributes:
        metadata: by the engine's name, the description of each tensor; for `register_target(metadata=)`.
        computed: the engine's tensors with other content than copies (quantised, packed, summed), each with its
            canonical sources; also attributes to which the loader binds tensors that it makes. They cannot be refitted;
            declare them as `Derived`.
        untouched: the engine's tensors that the loader does not write.
        unused: canonical tensors that the loader does not use.
        held: the bytes that were saved to restore the engine, and the time for it.
        proof: how the layout was proven on values that are new to the loader; None if the engine's tensors have no
            values (the meta device).
        reasons: for tensors of `computed` that looked like copies, by name: the probe on which the loader gave other
            values.
    """

    metadata: dict[str, ParameterMetadata]
    computed: dict[str, tuple[str, ...]]
    untouched: tuple[str, ...]
    unused: tuple[str, ...]
    held: Held = field(default_factory=Held)
    proof: Proof | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """Return one line for each tensor that a refit cannot update."""
        found = [
            f"{name}: computed from {', '.join(sources[:5]) or 'constants'}"
            + (f" ({self.reasons[name]})" if name in self.reasons else "")
            for name, sources in self.computed.items()
        ]
        return found + [f"{name}: the loader does not use it" for name in self.unused]


def trace_loader(
    params: Mapping[str, torch.Tensor],
    load_fn: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    shapes: Mapping[str, tuple[Shape, torch.dtype]],
    *,
    owner_rank: int | None = None,
) -> LoaderTrace:
    """Run a loader on tensors without values, and return the destination of every canonical element.

    The loader may slice, transpose, reshape, concatenate, stack, repeat, pad with a constant and convert; it writes
    with `copy_`, `fill_` or `load_state_dict`, in threads, too.

    Afterwards the loader runs on checkpoints of made-up values, in the engine's tensors. Its result must equal the
    layout's, bit for bit; a tensor that differs is `computed`. The engine must not serve before this returns. Its
    modules, their attributes, and the bytes of their tensors are copied first and restored afterwards, also on error.
    Tensors on the meta device prove no layout.

    Args:
        params: the engine's tensors by its own names, on any device (also meta). Pass the Parameters themselves if the
            loader may give one other memory (`p.data = ...`): this is then found, undone and refused.
        load_fn: takes (canonical name, tensor) pairs, as `load_weights` of vLLM's models does.
        shapes: shape and dtype of every canonical tensor.
        owner_rank: for the descriptions.

    Raises:
        PlanError: the loader replaces a tensor, writes it in a way that is not followed, writes only parts of one,
            writes other tensors for other values, or starts a process; by name.
        RefusedError: the loader itself raises, for example for an unknown name, or raises for all kinds of made-up
            values; or memory and disk have no room for a copy of the engine's tensors.
    """
    with TRACING:  # before the engine is examined: another trace may have written its own values
        return _traced(params, load_fn, shapes, owner_rank)


def _traced(
    params: Mapping[str, torch.Tensor],
    load_fn: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    shapes: Mapping[str, tuple[Shape, torch.dtype]],
    owner_rank: int | None,
) -> LoaderTrace:
    tracer = Tracer(params, shapes)
    isolation = Isolation(params, load_fn)
    following = Following(tracer, isolation.others)
    try:
        with torch.no_grad(), following.run():
            load_fn(tracer.canonical())
    except PlanError:
        raise
    except Exception as exc:
        if tracer.reader.refusals:
            raise tracer.reader.refusals[0] from exc
        if isinstance(exc, ThreadRaised):
            raise
        raise RefusedError(
            f"the loader raised{_at(tracer.last, shapes)}: {type(exc).__name__}: {exc}{around(exc)} ({site_of(exc)}); "
            "offer the tensors that it takes: those of the checkpoint that the engine was started with"
        ) from exc
    finally:
        changes = isolation.put_back(following.written)
    tracer.reader.check()
    changes.check()
    kept = [*changes.added, *((isolation.others[key], tensor) for key, tensor in following.written.items())]
    made = {name: tracer.sources_of(tensor) for name, tensor in kept if tracer.is_followed(tensor)}
    trace = _proven(tracer, _result(tracer, owner_rank), isolation, {*following.written}, load_fn)
    return replace(trace, computed=made | trace.computed, held=isolation.held)


def _proven(
    tracer: Tracer,
    trace: LoaderTrace,
    isolation: Isolation,
    others: set[int],
    load_fn: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
) -> LoaderTrace:
    """Return the trace with its proof; tensors that differ from the layout on a probe are computed."""
    proof, refuted = prove(trace.metadata, trace.untouched, tracer.written, others, isolation, load_fn, tracer.shapes)
    reasons = {
        name: f"it looked like a copy, but on probe {found.probe} differs from {found.source or 'a constant'}"
        for name, found in refuted.items()
    }
    return replace(
        trace,
        metadata={name: meta for name, meta in trace.metadata.items() if name not in refuted},
        computed=trace.computed
        | {name: _sources(trace.metadata[name]) if name in trace.metadata else () for name in refuted},
        untouched=tuple(name for name in trace.untouched if name not in refuted),
        proof=proof,
        reasons=reasons,
    )


def _at(name: str, shapes: Mapping[str, tuple[Shape, torch.dtype]]) -> str:
    """Return the loader's last input, for the error: many loaders refuse a wrong shape by an assertion without text."""
    if not name:
        return ""
    shape, dtype = shapes[name]
    return f" at {name!r}, which is offered as {list(shape)} of {dtype_name(dtype)}"


# --- from writes to a description -------------------------------------------------------------------------


def _result(tracer: Tracer, owner_rank: int | None) -> LoaderTrace:
    metadata, computed, untouched = {}, {}, []
    for written in itertools.chain.from_iterable(tracer.written.values()):
        if written.is_computed:
            computed[written.name] = tuple(sorted(written.computed))
            continue
        try:
            described = _described(written, owner_rank)
        except _SeveralDtypes:  # a description declares one cast
            computed[written.name] = tuple(sorted({o.name for _, o in written.writes if isinstance(o, Origin)}))
            continue
        if described is not None:
            held, wanted = described.cast_from, dtype_name(described.dtype)
            if held is None or cast_number(held, wanted) is not None:
                metadata[written.name] = described
            else:  # a conversion that no worker does
                computed[written.name] = _sources(described)
        else:
            untouched.append(written.name)
    unused = tuple(name for name in tracer.given if name not in tracer.used)
    return LoaderTrace(metadata, computed, tuple(untouched), unused)


class _SeveralDtypes(PlanError):
    """A tensor of the engine has elements of canonical tensors of several dtypes."""


def _sources(meta: ParameterMetadata) -> tuple[str, ...]:
    return tuple(sorted({tile.tensor for tile in tiles_of(meta)}))


def _described(written: Written, owner_rank: int | None) -> ParameterMetadata | None:
    """Return the description of one of the engine's tensors; None if it has no element of a canonical tensor.

    Raises:
        PlanError: parts of it are not written.
        _SeveralDtypes: it has elements of canonical tensors of several dtypes.
    """
    name, tensor = written.name, written.tensor
    if not any(isinstance(what, Origin) for _, what in written.writes):
        return None
    shape = tuple(tensor.shape)
    pieces, fill = _visible([(_local(walk, tensor, name), what) for walk, what in written.writes], tensor.numel(), name)
    if not pieces:
        return None
    tiles = [tile for walk, origin in pieces for tile in _tiles(walk, origin)]
    dtypes = {dtype_name(origin.dtype) for _, origin in pieces}
    if len(dtypes) > 1:
        raise _SeveralDtypes(f"{name}: has elements of tensors of several dtypes: {', '.join(sorted(dtypes))}")
    own, found = dtype_name(tensor.dtype), dtypes.pop()
    origins = {origin.name: origin for _, origin in pieces}
    (first,) = {origin.shape for origin in origins.values()} if len(origins) == 1 else (None,)
    whole = (
        len(tiles) == 1
        and first == shape
        and tiles[0] == Tile(tiles[0].tensor, (0,) * len(shape), shape, 0, row_major(shape))
    )
    return ParameterMetadata(
        name=name,
        shape=shape,
        dtype=tensor.dtype,
        element_size=tensor.element_size(),
        owner_rank=owner_rank,
        resolved_name=tiles[0].tensor if len(origins) == 1 else None,
        tiles=None if whole else tuple(tiles),
        global_shape=None if whole else first,
        fill=fill,
        cast_from=None if own == found else found,
    )


def _local(walk: Walk, tensor: torch.Tensor, name: str) -> Walk:
    """Convert a walk over a tensor's memory to a walk over its elements, row-major in its own shape."""
    if tensor.is_contiguous():
        return replace(walk, a=walk.a - int(tensor.storage_offset()))
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    order = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -strides[d])
    dense = tuple(shape[d] for d in order)
    if row_major(dense) != tuple(strides[d] for d in order):
        raise PlanError(f"{name}: strides {strides} of shape {shape} leave gaps, which is not followed")
    moved = replace(walk, a=walk.a - int(tensor.storage_offset()))
    laid = list(along(moved.swapped(), dense))
    if len(laid) != 1:
        raise PlanError(f"{name}: a write to it runs across its dimensions")
    logical = row_major(shape)
    (one,) = laid
    a = sum(c * logical[order[i]] for i, c in enumerate(one.start))
    axes = tuple(
        Axis(axis.count, step * logical[order[dim]], axis.a)
        for axis, dim, step in zip(one.walk.axes, one.dims, one.steps, strict=True)
    )
    return Walk(a, one.walk.a, axes)


def _visible(
    writes: list[tuple[Walk, Origin | float]], numel: int, name: str
) -> tuple[list[tuple[Walk, Origin]], float | None]:
    """Return the writes that are visible in the end, and the fill of the remaining elements.

    Raises:
        PlanError: a write leaves the tensor; elements are not written, are filled with several values, or a write is
            covered in part by a later one.
    """
    latest: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[Walk, Origin | float]] = {}
    for walk, what in writes:
        place = walk.a, tuple((axis.count, axis.a) for axis in walk.axes)
        latest.pop(place, None)
        latest[place] = walk, what
    spans = sorted((walk.a, walk.a + sum((x.count - 1) * x.a for x in walk.axes) + 1) for walk, _ in latest.values())
    if spans and (spans[0][0] < 0 or max(end for _, end in spans) > numel):
        raise PlanError(f"{name}: the loader writes beyond its {numel} elements, through a view of its memory")
    pieces = [(walk, what) for walk, what in latest.values() if isinstance(what, Origin)]
    apart = all(before <= start for (_, before), (start, _) in itertools.pairwise(spans))
    if apart and len(pieces) == len(latest) and sum(walk.count for walk, _ in pieces) == numel:
        return pieces, None
    kept = list(latest.values())
    unit = _unit([walk for walk, _ in kept], numel)
    if numel // unit > MAX_PAINTED:
        raise PlanError(f"{name}: the loader writes it in pieces too small and too many to be told apart")
    shown = np.full(numel // unit, -1, np.int32)
    cells = []
    for number, (walk, _) in enumerate(kept):
        axes = [(x.count // unit, 1) if x.a == 1 else (x.count, x.a // unit) for x in walk.axes] or [(1, 1)]
        view = np.lib.stride_tricks.as_strided(
            shown[walk.a // unit :], [n for n, _ in axes], [4 * step for _, step in axes]
        )
        view[...] = number
        cells.append(view.size)
    seen = np.bincount(shown[shown >= 0], minlength=len(kept))
    left = numel - unit * int((shown < 0).sum())
    if left < numel:
        raise PlanError(f"{name}: the loader writes {left} of its {numel} elements; the rest keeps its old values")
    shown_fills = (what for (_, what), count in zip(kept, seen, strict=True) if not isinstance(what, Origin) and count)
    fills = {bits_of(what): what for what in shown_fills}
    if len(fills) > 1:
        several = sorted(fills.values())
        raise PlanError(f"{name}: the loader fills parts of it with {several}; one value can be declared")
    found = []
    for (walk, what), count, all_of_it in zip(kept, seen, cells, strict=True):
        if isinstance(what, Origin) and 0 < count < all_of_it:
            raise PlanError(f"{name}: the loader overwrites a part of its copy of {what.name}")
        if isinstance(what, Origin) and count:
            found.append((walk, what))
    return found, next(iter(fills.values()), None)


def _unit(walks: list[Walk], numel: int) -> int:
    """Return the number of adjacent elements that all writes cover together."""
    unit = numel
    for walk in walks:
        run = next((axis.count for axis in walk.axes if axis.a == 1), 1)
        unit = gcd(unit, walk.a, run, *(axis.a for axis in walk.axes if axis.a != 1))
    return max(1, unit)


def _tiles(walk: Walk, origin: Origin) -> Iterator[Tile]:
    """Yield the tiles of one walk; side b is a canonical tensor."""
    for laid in along(walk, origin.shape):
        yield from _cut(laid, origin)


def _cut(laid: Laid, origin: Origin) -> Iterator[Tile]:
    rank = len(origin.shape)
    size, stride = [1] * rank, [0] * rank
    extra: list[int] = []
    for index, (axis, dim, step) in enumerate(zip(laid.walk.axes, laid.dims, laid.steps, strict=True)):
        if dim >= 0 and step == 1 and size[dim] == 1:
            size[dim], stride[dim] = axis.count, axis.a
        else:
            extra.append(index)
    natural = row_major(tuple(size))
    stride = [n if s == 0 else s for s, n in zip(stride, natural, strict=True)]
    # a repeat takes each element once; overlapping ones (`unfold`) become separate tiles
    moving = [i for i in extra if laid.dims[i] >= 0 and laid.steps[i] >= size[laid.dims[i]]]
    kept = max(moving, key=lambda i: laid.walk.axes[i].count, default=None)
    repeat = None
    if kept is not None:
        axis = laid.walk.axes[kept]
        repeat = Repeat(laid.dims[kept], axis.count, laid.steps[kept], axis.a)
    others = [i for i in extra if i != kept]
    for shift, offset in _combinations(laid, others):
        yield Tile(origin.name, offset, tuple(size), laid.walk.a + shift, tuple(stride), repeat)


def _combinations(laid: Laid, indices: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (local offset, canonical offset) for every combination of indices of the given axes."""
    found = [(0, laid.start)]
    for index in indices:
        axis, dim, step = laid.walk.axes[index], laid.dims[index], laid.steps[index]
        found = [
            (shift + i * axis.a, tuple(c + (i * step if d == dim else 0) for d, c in enumerate(offset)))
            for shift, offset in found
            for i in range(axis.count)
        ]
    yield from found


# --- check against a loaded engine ------------------------------------------------------------------------


def check_layout(
    trace: LoaderTrace,
    params: Mapping[str, torch.Tensor],
    weights: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Check that the engine's tensors equal the checkpoint that it was started with, by the learned layout.

    A layout is useful only if the engine computes with the copies that its loader makes: some engines repack weights
    after loading.

    Args:
        trace: the result of `trace_loader`.
        params: the engine's tensors, with their values.
        weights: the checkpoint, one canonical tensor after the other; unused ones are skipped.

    Raises:
        RefusedError: names the tensors that differ, or that the checkpoint lacks.
    """
    found, lacking = differing(trace.metadata, params, weights)
    if found:
        shown = "; ".join(f"{local} (from {name or 'nothing, but filled'})" for local, name in list(found.items())[:5])
        raise RefusedError(
            f"{len(found)} tensors differ from the loader's copy of the checkpoint: {shown}. The engine "
            "repacks them after loading, or was started with another checkpoint; declare them as Derived, or start it "
            "with the given checkpoint"
        )
    if lacking:
        known = nearest(lacking[0], trace.unused)
        raise RefusedError(
            f"the checkpoint lacks {len(lacking)} tensors that the engine loads: {', '.join(lacking[:5])}"
            + (f"; nearest: {', '.join(known)}" if known else "")
        )
