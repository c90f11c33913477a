"""The torch operators that the tracer follows, and the refusal of loaders that read values of traced tensors."""

from __future__ import annotations

import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from refitd.errors import PlanError
from refitd.tracing.held_bytes import storage_key
from refitd.tracing.walks import Origin, TracedStorage, Walk, Written, along, inside, meets, view_of, walk_through

aten = torch.ops.aten

# a copy in new memory
SAME = frozenset(
    {
        aten.clone,
        aten._to_copy,
        aten.contiguous,
        aten.lift_fresh_copy,
        aten._reshape_copy,
        aten.view_copy,
        aten.alias_copy,
        aten.detach_copy,
    }
)
HARMLESS = frozenset({aten.requires_grad_, aten.detach_})
# new memory shaped like a tensor, and its fill; None: uninitialized, or the fill is an argument
FACTORIES: dict[Any, float | None] = {
    aten.empty_like: None,
    aten.new_empty: None,
    aten.zeros_like: 0.0,
    aten.new_zeros: 0.0,
    aten.ones_like: 1.0,
    aten.new_ones: 1.0,
    aten.full_like: None,
    aten.new_full: None,
}
LAZY = frozenset({aten._conj, aten._neg_view, aten.view_as_real, aten.view_as_complex})


def without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the meta device, without values."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, list | tuple):
            return type(value)(moved(v) for v in value)
        return value

    kwargs = {k: moved(v) for k, v in kwargs.items()}
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    return func(*moved(args), **kwargs)


def is_lossless(held: torch.dtype, made: torch.dtype) -> bool:
    """Whether a dtype can represent every value of another."""
    if held == made:
        return True
    if held.is_floating_point != made.is_floating_point or held.is_complex != made.is_complex:
        return False
    try:
        if held.is_floating_point:  # no promotion is defined for the types of eight bits
            a, b = torch.finfo(held), torch.finfo(made)
            smallest = a.smallest_normal * a.eps >= b.smallest_normal * b.eps
            return a.eps >= b.eps and a.max <= b.max and a.min >= b.min and smallest
        return made.itemsize > held.itemsize and torch.promote_types(held, made) == made
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments or results of an operator."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes, in the order of its schema: in place, in lists, and to `out=`."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


OWN = (os.path.dirname(__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep)


def site_here() -> str:
    """Return the file and line of the innermost call that is neither torch's nor the tracer's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def site_of(exc: BaseException) -> str:
    """Return the file and line of the innermost such call in an exception's traceback."""
    frames = traceback.extract_tb(exc.__traceback__)
    found = [frame for frame in frames if not frame.filename.startswith(OWN)] or frames[-1:]
    return f"{found[-1].filename}:{found[-1].lineno}" if found else "an unknown line"


class Reader:
    """Knows which tensors have no values, and refuses the loader that reads one.

    Attributes:
        scalars: placeholders of elements of canonical tensors.
        refusals: the errors that refused the loader.
    """

    def __init__(
        self,
        memories: Mapping[int, TracedStorage],
        written: Mapping[int, Sequence[Written]],
        names: Callable[[torch.Tensor], frozenset[str]],
    ) -> None:
        """Use a tracer's memories and writes; `names` returns the canonical sources of a tensor."""
        self._memories, self._written, self._names = memories, written, names
        self.scalars: dict[float, tuple[Origin, int]] = {}
        self.refusals: list[PlanError] = []
        self._unused: dict[float, PlanError] = {}

    def is_unreadable(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has no values, or outdated ones: the loader has written it."""
        key = storage_key(tensor)
        written = self._written.get(key, ())
        return key in self._memories or any(
            (one.writes or one.is_computed) and meets(one.tensor, tensor) for one in written
        )

    def refuse(self, tensor: torch.Tensor, use: str) -> NoReturn:
        """Refuse the loader for reading a tensor, even if it catches the error."""
        refusal = self._refusal(tensor, use)
        self.refusals.append(refusal)
        raise refusal

    def _refusal(self, tensor: torch.Tensor, use: str) -> PlanError:
        names = ", ".join(sorted(self._names(tensor))[:5]) or "a tensor that it wrote"
        return PlanError(
            f"the loader reads {names} {use}, at {site_here()}: its result depends on values, which differ from "
            "version to version; load without this read, or declare the dependent tensors as Derived"
        )

    def use(self, arguments: Iterable[object]) -> None:
        """Note the numbers that an operator takes."""
        for value in arguments:
            if isinstance(value, float):
                self._unused.pop(value, None)

    def check(self) -> None:
        """Refuse the loader, once it has returned, if it caught a refusal, or compared a number without using it."""
        for refusal in (*self.refusals, *self._unused.values()):
            raise refusal

    def check_single(self, tensor: torch.Tensor) -> None:
        """Refuse the loader if a tensor is not one element of a canonical tensor."""
        memory = self._memories.get(storage_key(tensor))
        if tensor.numel() != 1 or (memory is not None and (memory.is_tainted or not memory.boxes)):
            self._lack(tensor)

    def number(self, tensor: torch.Tensor) -> float:
        """Return a placeholder for the value of one element; a later write of the placeholder is recognised.

        From then on no other number counts as a constant: it may have been computed from the placeholder.
        """
        found = self._element(tensor)
        if found is None:
            self._lack(tensor)
        if not tensor.is_floating_point():
            self.refuse(tensor, "as a number")
        number = 1.0e30 + len(self.scalars) * 1.0e16
        self.scalars[number] = found
        self._unused[number] = self._refusal(tensor, "as a number that no operator takes")
        return number

    def _lack(self, tensor: torch.Tensor) -> NoReturn:
        names = ", ".join(sorted(self._names(tensor))[:5]) or "one of the engine's tensors"
        refusal = PlanError(f"the loader needs a value of {names}, at {site_here()}: this is no plain copy")
        self.refusals.append(refusal)
        raise refusal

    def _element(self, tensor: torch.Tensor) -> tuple[Origin, int] | None:
        """Return the canonical tensor of a single element, and its offset there."""
        memory = self._memories.get(storage_key(tensor))
        if memory is None or memory.is_tainted or memory.through or tensor.numel() != 1:
            return None
        (laid,) = along(Walk(0, view_of(tensor)[0], ()), memory.shape)
        for box in memory.boxes:
            for piece in inside(laid, box.start, box.size):
                return box.origin, walk_through(piece, box).b
        return None


class TracedNumber:
    """The answer of `item()` for a traced tensor: a loader may write it and compute with it, but not read it.

    A result of arithmetic counts as computed. Comparisons, conversions and uses as an index or a size are refused.
    """

    __slots__ = ("reader", "tensor")

    def __init__(self, tensor: torch.Tensor, reader: Reader) -> None:
        self.tensor, self.reader = tensor, reader

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with tensors for traced numbers."""
        return called(func, args, kwargs or {})

    def __float__(self) -> float:
        return self.reader.number(self.tensor)

    def __repr__(self) -> str:
        return "<a number without a value>"


def _arithmetic(name: str) -> None:
    function: Callable[..., Any] = getattr(operator, name)

    def forward(self: TracedNumber, *others: Any) -> TracedNumber:
        return TracedNumber(function(self.tensor, *map(_tensors, others)), self.reader)

    def reflected(self: TracedNumber, other: Any) -> TracedNumber:
        return TracedNumber(function(_tensors(other), self.tensor), self.reader)

    plain = name.strip("_")
    setattr(TracedNumber, f"__{plain}__", forward)
    if plain not in ("neg", "pos", "abs", "invert"):
        setattr(TracedNumber, f"__r{plain}__", reflected)


def _refusal(name: str, use: str) -> None:
    def refuse(self: TracedNumber, *_: Any) -> NoReturn:
        self.reader.refuse(self.tensor, use)

    setattr(TracedNumber, name, refuse)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "neg", "pos", "abs"):
    _arithmetic(_name)
for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__", "__hash__"):
    _refusal(_name, "as a condition")
for _name in (
    "__float__",
    "__int__",
    "__index__",
    "__round__",
    "__trunc__",
    "__floor__",
    "__ceil__",
    "__complex__",
    "__divmod__",
):
    _refusal(_name, "as a number")
for _name in ("__str__", "__format__"):
    _refusal(_name, "as text")


def _tensors(value: Any) -> Any:
    """Return an argument with tensors for traced numbers."""
    if isinstance(value, TracedNumber):
        return value.tensor
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(_tensors, value))
    return value


def _holds_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_number, value))
    if isinstance(value, dict):
        return any(map(_holds_number, value.values()))
    return isinstance(value, TracedNumber)


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch that was given traced numbers."""
    name = getattr(func, "__name__", "")
    if name in ("tensor", "as_tensor", "asarray", "new_tensor"):
        data = kwargs.get("data", args[-1] if args else None)
        dtype = kwargs.get("dtype") or (args[0].dtype if name == "new_tensor" else None)
        return _made(data, dtype)
    if name in ("full", "new_full", "full_like") and len(args) > 1:
        like = args[0] if isinstance(args[0], torch.Tensor) else None
        shape = like.shape if like is not None and name == "full_like" else args[-2]
        dtype = kwargs.get("dtype") or (like.dtype if like is not None else None)
        return _made(kwargs.get("fill_value", args[-1]), dtype).expand(tuple(shape)).clone()
    return func(*_tensors(args), **{key: _tensors(value) for key, value in kwargs.items()})


def _made(data: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a tensor of traced and other numbers, as `torch.tensor` makes one."""
    if isinstance(data, list | tuple):
        return torch.stack([_made(one, dtype) for one in data])
    if not isinstance(data, TracedNumber):
        return torch.tensor(data, dtype=dtype)
    held = data.tensor
    usual = torch.get_default_dtype() if held.is_floating_point() else held.dtype if held.dtype == torch.bool else None
    return held.to(dtype or usual or torch.int64) + 0  # computed


# functions that read the values of their first argument
READS: dict[Any, str] = {
    torch.Tensor.__bool__: "as a condition",
    torch.Tensor.__contains__: "as a condition",
    torch.Tensor.is_nonzero: "as a condition",
    torch.is_nonzero: "as a condition",
    torch.Tensor.equal: "as a condition",
    torch.equal: "as a condition",
    torch.Tensor.allclose: "as a condition",
    torch.allclose: "as a condition",
    torch.Tensor.__int__: "as a number",
    torch.Tensor.__complex__: "as a number",
    torch.Tensor.__index__: "as an index or a size",
    torch.Tensor.tolist: "as a list",
    torch.Tensor.numpy: "as an array",
    torch.Tensor.__array__: "as an array",
    torch.Tensor.__dlpack__: "as an array",
}


def _index(key: Any) -> Any:
    """Return an index with tensors in main memory for lists of numbers; torch puts these on the meta device."""
    if isinstance(key, tuple):
        return tuple(map(_index, key))
    if isinstance(key, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(key))
    if isinstance(key, list | range) and key and all(isinstance(number, int) for number in key):
        return torch.tensor(key)
    return key


class Reads(TorchFunctionMode):
    """Answers `item()` of traced tensors with a `TracedNumber`, and refuses other reads."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Follow one call of torch's Python functions."""
        kwargs = kwargs or {}
        if func is torch.Tensor.item and self._reader.is_unreadable(args[0]):
            self._reader.check_single(args[0])
            return TracedNumber(args[0].detach().reshape(()), self._reader)
        if (use := READS.get(func)) is not None:
            for value in args[:2]:
                if isinstance(value, torch.Tensor) and self._reader.is_unreadable(value):
                    self._reader.refuse(value, use)
        if func is torch.Tensor.__getitem__ and self._reader.is_unreadable(args[0]):
            args = (args[0], _index(args[1]))
        if _holds_number(args) or _holds_number(kwargs):
            return called(func, args, kwargs)
        return func(*args, **kwargs)
