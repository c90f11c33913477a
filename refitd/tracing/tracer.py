"""Follow a loader: record every move of elements between tensors without values, and taint all other results."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from refitd.describe.layout import row_major
from refitd.errors import PlanError, RefusedError
from refitd.tracing.held_bytes import bytes_of, storage_key
from refitd.tracing.values import (
    FACTORIES,
    HARMLESS,
    LAZY,
    SAME,
    Reader,
    Reads,
    is_lossless,
    tensors_in,
    without_values,
    written_by,
)
from refitd.tracing.walks import (
    Laid,
    Origin,
    OriginBox,
    TracedStorage,
    Walk,
    Written,
    along,
    bits_of,
    constant_walk,
    grid_of,
    inside,
    meets,
    ordered_like,
    overlap,
    span_of,
    view_of,
    walk_between,
    walk_through,
)

aten = torch.ops.aten

Shape = Sequence[int]


class Tracer(TorchDispatchMode):
    """Intercepts a loader's torch calls: records moves of elements, makes views, and taints all other results."""

    def __init__(self, params: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[Shape, torch.dtype]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes = shapes
        self._memories: dict[int, TracedStorage] = {}
        self.written: dict[int, list[Written]] = {}  # by storage
        self.reader = Reader(self._memories, self.written, self._names)
        self._scalars = self.reader.scalars
        self.functions: TorchFunctionMode | None = Reads(self.reader)
        self.is_for_threads = False
        self.used: set[str] = set()
        self.given: list[str] = []
        self.last = ""
        for name, tensor in params.items():
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                raise RefusedError(
                    f"{name}: {type(tensor).__name__} is no dense tensor; the trace follows dense ones only"
                )
            plain = tensor.detach()
            self.written.setdefault(storage_key(plain), []).append(Written(name, plain))
        self._spans = sorted((*span_of(one[0].tensor), one[0].name) for one in self.written.values())

    def canonical(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each canonical tensor, without values."""
        for name, (shape, dtype) in self.shapes.items():
            self.last = name
            tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
            size = tuple(tensor.shape)
            origin = Origin(name, size, dtype)
            self._memories[storage_key(tensor)] = TracedStorage(
                tensor, size, [OriginBox((0,) * len(size), size, origin, 0, row_major(size))]
            )
            self.given.append(name)
            yield name, tensor
        self.last = ""

    def is_followed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the memory of a canonical tensor, of the engine, or of a result of either."""
        return self._is_ours(tensor)

    def sources_of(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Return the names of a tensor's canonical sources."""
        return tuple(sorted(self._names(tensor)))

    # --- operators ----------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Follow one operator."""
        kwargs = kwargs or {}
        if self._scalars:
            self.reader.use((*args, *kwargs.values()))
        tensors, writes = list(tensors_in((args, kwargs))), written_by(func, args, kwargs)
        if [id(write) for write in writes] not in ([], [id(args[0])] if args else []):
            return self._overwrite(func, writes, tensors) if any(map(self._is_ours, tensors)) else func(*args, **kwargs)
        target = writes[0] if writes else None
        if target is not None and self._is_ours(target):
            return self._write(func, target, args, kwargs)
        if not any(self._is_ours(t) for t in tensors):
            return func(*args, **kwargs)
        if target is not None:  # a tensor that the loader made; follow it from now on
            self._adopt(target)
            return self._write(func, target, args, kwargs)
        packet = func.overloadpacket
        if packet is aten._local_scalar_dense:
            return self.reader.number(args[0])
        if packet in FACTORIES:
            return self._make(func, packet, args, kwargs)
        if func.is_view or packet is aten._unsafe_view:
            made = func(*args, **kwargs)
            if packet is aten.as_strided and self._is_reordered(args[0]):
                self._compute(args[0], self._names(args[0]))
            if packet in LAZY or any(view.dtype != tensors[0].dtype for view in tensors_in(made)):
                self._compute(tensors[0], self._names(tensors[0]))  # the values, or the size of elements, change
            return made
        if packet is aten.index:
            args = (args[0], self._numbered(args[1]))
        made = without_values(func, args, kwargs)
        ordered = ordered_like(made) if isinstance(made, torch.Tensor) else made
        self._follow(packet, args, kwargs, ordered, tensors)
        if ordered is not made and (memory := self._memories.get(storage_key(ordered))) is not None:
            memory.is_reordered = True
        return ordered

    def _make(self, func: Any, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Make new memory in the form of a followed tensor (`new_zeros`, `empty_like`), and follow it."""
        made = without_values(func, args, kwargs)
        ordered = ordered_like(made)
        value = FACTORIES[packet]
        if packet in (aten.full_like, aten.new_full):
            value = args[-1]
        fill = None if value is None else self._constant(value, ordered.dtype)
        memory = TracedStorage(ordered, tuple(ordered.shape), fill=fill, is_reordered=ordered is not made)
        if value is not None and fill is None:
            memory.is_tainted, memory.tainted = True, self._scalar_names()
        self._memories[storage_key(ordered)] = memory
        return ordered

    def _is_reordered(self, tensor: torch.Tensor) -> bool:
        memory = self._memories.get(storage_key(tensor))
        return memory is not None and memory.is_reordered

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor)
        return key in self.written or key in self._memories

    def _adopt(self, tensor: torch.Tensor) -> None:
        """Follow a tensor that the loader has created (zeros or empty) and now writes to.

        Raises:
            PlanError: it is memory of the engine's under another storage (`torch.from_numpy(p.numpy())`).
        """
        (start, end), key = span_of(tensor), storage_key(tensor)
        before = bisect.bisect_left(self._spans, (end,)) - 1
        if start and before >= 0 and self._spans[before][1] > start:
            raise PlanError(
                f"{self._spans[before][2]}: the loader writes it through memory that numpy or DLPack share with it"
            )
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        base = tensor.as_strided((count,), (1,), 0)
        fill = None if base.device.type == "meta" else self._uniform(base)
        self._memories[key] = TracedStorage(base, grid_of(tensor, count), fill=fill)

    def _follow(
        self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any, tensors: list[torch.Tensor]
    ) -> None:
        """Record where the elements of a new tensor come from."""
        if isinstance(made, torch.Tensor):
            memory = TracedStorage(made, tuple(made.shape))
            try:
                if self._moves(packet, args, kwargs, memory):
                    self._memories[storage_key(made)] = memory
                    return
            except PlanError:
                pass
        sources = frozenset().union(*(self._names(t) for t in tensors))
        self.used |= sources
        for tensor in tensors_in(made):
            self._memories[storage_key(tensor)] = TracedStorage(tensor, (), tainted=sources, is_tainted=True)

    def _moves(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], memory: TracedStorage) -> bool:
        """Record the moves of an operator that only moves elements; return False for any other operator."""
        zero = (0,) * len(memory.shape)
        if packet in SAME:
            self._put(memory, zero, args[0])
            if not is_lossless(args[0].dtype, memory.keep.dtype):
                memory.through |= {memory.keep.dtype}
        elif packet in (aten.cat, aten.concat, aten.concatenate):
            dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(1, len(memory.shape))
            at = 0
            for part in args[0]:
                if part.dim() == 1 and part.numel() == 0 and len(memory.shape) != 1:
                    continue
                self._put(memory, tuple(at if d == dim else 0 for d in range(len(memory.shape))), part)
                at += part.shape[dim]
        elif packet is aten.stack:
            dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(memory.shape)
            for at, part in enumerate(args[0]):
                self._put(memory, tuple(at if d == dim else 0 for d in range(len(memory.shape))), part.unsqueeze(dim))
        elif packet is aten.constant_pad_nd:
            pad = list(args[1])
            value = args[2] if len(args) > 2 else kwargs.get("value", 0)
            inner = args[0]
            start = list(zero)
            for i in range(len(pad) // 2):
                dim, before, after = len(start) - 1 - i, pad[2 * i], pad[2 * i + 1]
                cut = max(0, -before)
                inner = inner.narrow(dim, cut, inner.shape[dim] - cut - max(0, -after))
                start[dim] = max(0, before)
            memory.fill = self._constant(value, memory.keep.dtype)
            if memory.fill is None:
                raise PlanError("padded with a computed value")
            self._put(memory, tuple(start), inner)
        elif packet is aten.repeat:
            part = args[0]
            times = tuple(args[1])
            part = part.reshape((1,) * (len(times) - part.dim()) + tuple(part.shape))
            for index in torch.cartesian_prod(*(torch.arange(n) for n in times)).reshape(-1, len(times)).tolist():
                self._put(memory, tuple(i * n for i, n in zip(index, part.shape, strict=True)), part)
        elif packet is aten.index_select or (packet is aten.index and sum(i is not None for i in args[1]) == 1):
            self._select(packet, args, memory)
        else:
            return False
        return True

    def _select(self, packet: Any, args: tuple[Any, ...], memory: TracedStorage) -> None:
        """Record an indexed selection of slices along a dimension; the index has values."""
        if packet is aten.index_select:
            dim, index = args[1] % max(1, args[0].dim()), args[2]
        else:
            dim, index = next((d, i) for d, i in enumerate(args[1]) if i is not None)
        has_values = index.device.type != "meta" and not self.reader.is_unreadable(index)
        if not has_values or index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
            raise PlanError("an index without values")
        for at, row in enumerate(index.tolist()):
            start = tuple(at if d == dim else 0 for d in range(len(memory.shape)))
            self._put(memory, start, args[0].narrow(dim, row % args[0].shape[dim], 1))

    def _numbered(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return indices with the places of a constant mask's elements instead of the mask."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8) and index.device.type != "meta"
            if index is None or not is_mask or self.reader.is_unreadable(index):
                found.append(index)
            else:
                found += index.nonzero(as_tuple=True)
        return found

    def _put(self, memory: TracedStorage, start: tuple[int, ...], part: torch.Tensor) -> None:
        """Record that a box of new memory holds a tensor's elements."""
        if not part.numel():
            return
        source = self._memories.get(storage_key(part))
        if source is None:
            self._fill(memory, self._uniform(part))
            return
        if source.is_tainted or part.dtype != source.keep.dtype:
            raise PlanError("computed")
        size = tuple(part.shape)
        memory.through |= source.through
        if part.dtype != memory.keep.dtype and not is_lossless(part.dtype, memory.keep.dtype):
            memory.through |= {memory.keep.dtype}  # for example, concatenated with tensors of another dtype
        whole = sum(prod(b.size) for b in source.boxes) == prod(source.shape)
        if not whole:
            self._fill(memory, source.fill)
        for laid in along(walk_between(size, (0, row_major(size)), view_of(part)), source.shape):
            for box in source.boxes:
                for piece in inside(laid, box.start, box.size):
                    self._box(memory, start, size, piece, box)

    def _fill(self, memory: TracedStorage, value: float | None) -> None:
        """Record that elements outside all boxes of new memory hold a constant."""
        value = None if value is None else self._constant(value, memory.keep.dtype)
        if value is None or (memory.fill is not None and bits_of(memory.fill) != bits_of(value)):
            raise PlanError("no constant, or two of them")
        memory.fill = value

    def _uniform(self, tensor: torch.Tensor) -> float | None:
        """Return the constant in one of the loader's own tensors, by its bits; None if it has several values."""
        if tensor.device.type == "meta" or not tensor.numel() or storage_key(tensor) in self.written:
            return None
        bits = bytes_of(tensor).view(-1, tensor.element_size())
        if not bool((bits == bits[:1]).all()):
            return None
        value = self._constant(tensor[(0,) * tensor.dim()].item(), tensor.dtype)
        if value is None:
            return None
        said = torch.tensor(value, dtype=torch.float64).to(tensor.dtype).reshape(1).view(torch.uint8)
        return value if torch.equal(said, bits[0].cpu()) else None  # the bits of a NaN, say

    def _constant(self, value: Any, dtype: torch.dtype) -> float | None:
        """Return the constant that memory of a dtype holds once this number is written to it.

        None if no fill can express it: an integer beyond float64, a complex number, or, once the loader has used
        a value of a canonical tensor, any number except zero.
        """
        if value and self._scalars:
            return None
        try:
            held = torch.tensor(value, device="cpu").to(dtype).item()
        except (RuntimeError, NotImplementedError):
            return None
        if isinstance(held, complex) or (isinstance(held, int) and int(float(held)) != held):
            return None
        return float(held)

    def _scalar_names(self) -> frozenset[str]:
        return frozenset(origin.name for origin, _ in self._scalars.values())

    def _box(
        self, memory: TracedStorage, start: tuple[int, ...], size: tuple[int, ...], piece: Laid, box: OriginBox
    ) -> None:
        """Record one piece of a tensor: side a runs over `size`, side b over a box of the source."""
        for mine in along(walk_through(piece, box).swapped(), size):
            # each axis follows one dimension of the part; split axes that share a dimension
            todo = [mine]
            while todo:
                one = todo.pop()
                double = [d for d in {*one.dims} if one.dims.count(d) > 1 or one.steps[one.dims.index(d)] != 1]
                if not double:
                    sizes, strides = [1] * len(size), [0] * len(size)
                    for axis, dim in zip(one.walk.axes, one.dims, strict=True):
                        sizes[dim], strides[dim] = axis.count, axis.a
                    at = tuple(s + c for s, c in zip(start, one.start, strict=True))
                    memory.boxes.append(OriginBox(at, tuple(sizes), box.origin, one.walk.a, tuple(strides)))
                    continue
                widest = max((i for i, d in enumerate(one.dims) if d == double[0]), key=lambda i: one.steps[i])
                for i in range(one.walk.axes[widest].count):
                    todo.extend(along(one.walk.cut(widest, i, i + 1), size))

    def _names(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the canonical sources of a tensor; for an engine's tensor, of the writes so far."""
        memory = self._memories.get(storage_key(tensor))
        if memory is not None:
            return memory.tainted | {box.origin.name for box in memory.boxes}
        written = self.written.get(storage_key(tensor), ())
        return frozenset(
            origin.name for one in written for _, origin in one.writes if isinstance(origin, Origin)
        ).union(*(one.computed for one in written))

    # --- writes -------------------------------------------------------------------------------------------

    def _write(self, func: Any, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a write to one of the engine's tensors, or to followed memory of the loader's own."""
        packet = func.overloadpacket
        if packet is aten.copy_:
            source = args[1]
            self._copy(target, source.expand(target.shape) if source.shape != target.shape else source)
        elif packet is aten.fill_:
            value = args[1]
            if isinstance(value, torch.Tensor):
                self._copy(target, value.expand(target.shape))
            elif value in self._scalars:
                origin, offset = self._scalars[value]
                self._record(target, [(constant_walk(target, offset), origin)], None)
            else:
                self._record_fill(target, self._constant(value, target.dtype))
        elif packet is aten.zero_:
            self._record(target, [], 0.0)
        elif packet in HARMLESS:
            return func(*args, **kwargs)
        elif packet is aten.set_:
            names = ", ".join(one.name for one in self.written.get(storage_key(target), ()))
            raise PlanError(f"{names or 'a tensor'}: the loader gives it other memory; this was refused")
        else:
            others = frozenset().union(*(self._names(t) for t in tensors_in((args, kwargs))))
            self._compute(target, others)
        return target

    def _overwrite(self, func: Any, writes: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        """Record an operator that writes to `out=`, a list or several tensors; their contents count as computed."""
        returns = func._schema.returns
        sources = frozenset().union(*(self._names(t) for t in tensors))
        if any(returned.alias_info is None for returned in returns):
            raise PlanError(f"the loader calls {func}, which is not followed, with {', '.join(sorted(sources)[:5])}")
        for target in writes:
            if not self._is_ours(target):
                self._adopt(target)
            self._compute(target, sources)
        given = tuple(writes[len(writes) - len(returns) :])
        return given[0] if len(given) == 1 else given or None

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not target.numel():
            return
        memory = self._memories.get(storage_key(source))
        if memory is None and storage_key(source) in self.written:
            self._compute(target, self._names(source))  # the present content of one of the engine's own tensors
            return
        if memory is None:
            self._constant_copy(target, source)
            return
        # rounded through an intermediate dtype, which no declared cast does; or bits reinterpreted as other numbers
        if memory.is_tainted or memory.through - {target.dtype} or source.dtype != memory.keep.dtype:
            self._compute(target, self._names(source))
            return
        pieces: list[tuple[Walk, Origin]] = []
        whole = walk_between(tuple(target.shape), view_of(target), view_of(source))
        for laid in along(whole, memory.shape):
            for box in memory.boxes:
                pieces += [(walk_through(piece, box), box.origin) for piece in inside(laid, box.start, box.size)]
        covered = sum(walk.count for walk, _ in pieces)
        if covered != target.numel():
            if memory.fill is None:
                self._compute(target, self._names(source))
                return
            self._record_fill(target, self._constant(memory.fill, target.dtype))
        self._record(target, pieces, None)

    def _constant_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Record a write of the loader's own values: one constant, or values that cannot be followed."""
        value = self._uniform(source)
        self._record_fill(target, None if value is None else self._constant(value, target.dtype))

    def _record_fill(self, target: torch.Tensor, value: float | None) -> None:
        """Record that a view of a tensor is filled with a constant; None: with unknown values."""
        if value is None:
            self._compute(target, self._scalar_names())
        else:
            self._record(target, [], value)

    def _compute(self, target: torch.Tensor, sources: frozenset[str]) -> None:
        self.used |= sources
        for written in self.written.get(storage_key(target), ()):
            if meets(written.tensor, target):
                written.is_computed = True
                written.computed |= sources
        memory = self._memories.get(storage_key(target))
        if memory is not None:
            memory.tainted |= sources | {box.origin.name for box in memory.boxes}
            memory.is_tainted = True

    def _record(self, target: torch.Tensor, pieces: list[tuple[Walk, Origin]], fill: float | None) -> None:
        """Record the new content of a view of a tensor."""
        view = walk_between(tuple(target.shape), view_of(target), (0, row_major(tuple(target.shape))))
        memory = self._memories.get(storage_key(target))
        if memory is not None and target.dtype != memory.keep.dtype:
            self._compute(target, frozenset(origin.name for _, origin in pieces))
            return
        if memory is not None:
            self._record_in(memory, view, pieces, fill)
            return
        for written in self.written[storage_key(target)]:
            if not meets(written.tensor, target):
                continue
            if fill is not None:
                written.writes.append((view, fill))
            for walk, origin in pieces:
                written.writes.append((walk, origin))
                self.used.add(origin.name)

    def _record_in(
        self, memory: TracedStorage, view: Walk, pieces: list[tuple[Walk, Origin]], fill: float | None
    ) -> None:
        """As `_record`, for memory that the loader made: each box is written once, or all memory again."""
        total = prod(memory.shape)
        if view.count == total and (fill is not None or sum(walk.count for walk, _ in pieces) == total):
            memory.boxes, memory.fill, memory.through = [], None, frozenset()
            memory.is_tainted, memory.tainted = False, frozenset()
        if memory.is_tainted:
            memory.tainted |= {origin.name for _, origin in pieces}
            return
        try:
            if fill is not None:
                partly = memory.fill is None and view.count < prod(memory.shape)  # the other elements are unknown
                if memory.boxes or partly or (memory.fill is not None and bits_of(memory.fill) != bits_of(fill)):
                    raise PlanError("filled again")
                memory.fill = fill
            made = memory.keep.dtype
            if not all(is_lossless(origin.dtype, made) for _, origin in pieces):
                memory.through |= {made}
            before = len(memory.boxes)
            for walk, origin in pieces:
                source = OriginBox((0,) * len(origin.shape), origin.shape, origin, 0, row_major(origin.shape))
                for laid in along(walk, origin.shape):
                    self._box(memory, (0,) * len(memory.shape), memory.shape, laid, source)
            if any(overlap(new, old) for new in memory.boxes[before:] for old in memory.boxes[:before]):
                raise PlanError("written twice")
        except (PlanError, ValueError):
            memory.tainted = frozenset(box.origin.name for box in memory.boxes) | {o.name for _, o in pieces}
            memory.is_tainted = True
