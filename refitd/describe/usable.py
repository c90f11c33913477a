"""Check that a refit can read and write a tensor: dense, in real memory, not lazily transformed."""

from __future__ import annotations

from typing import Any

from refitd.dtypes import ELEMENT_SIZES, dtype_name


def tensor_problem(value: Any) -> str:
    """Return why a value is not a tensor that can be read, and what to do; "" if it can be.

    For a DTensor, pass its local tensor.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        return f"it is {_shown(value)}, expected a tensor; leave out what is none"
    if problem := lazy_problem(value):
        return problem
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        return f"it is a {kind} tensor, expected a dense one; register the dense tensors that it is made of"
    if value.is_quantized:
        return "it is a quantized tensor of torch's, whose scales would not travel; register its int_repr(), or values"
    if value.is_meta:
        return "it is on the meta device and holds nothing; materialize it first (to_empty)"
    if dtype_name(value.dtype) not in ELEMENT_SIZES:
        return f"its dtype is {dtype_name(value.dtype)}, expected one of {', '.join(ELEMENT_SIZES)}"
    if value.is_conj() or value.is_neg():
        return (
            "it is a lazy conjugate or negative (its memory holds other values than it shows); register "
            "tensor.resolve_conj().resolve_neg()"
        )
    return _memory_problem(value)


def lazy_problem(value: Any) -> str:
    """Return why a parameter has no shape yet, "" if it has one."""
    if hasattr(type(value), "cls_to_become"):  # torch.nn.parameter.is_lazy, without an import for each
        return f"it is an {type(value).__name__}, which has no shape yet; run its module once, then register it"
    return ""


def _memory_problem(value: Any) -> str:
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, FakeTensor):
        return "it is a fake tensor, which has no memory; register the real one"
    if value.numel() == 0:
        return ""
    try:
        last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        needed = (value.storage_offset() + last + 1) * value.element_size()
        storage = value.untyped_storage()
        held, at, start = storage.nbytes(), storage.data_ptr(), value.data_ptr()
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as exc:
        kind, said = type(value).__name__, str(exc).partition(".")[0].splitlines()
        return f"it is a {kind} without memory of its own ({said[0] if said else exc}); register the tensors inside"
    if held < needed:
        return (
            f"its storage holds {held} bytes of the {needed} it needs: it has been freed (FSDP frees what it has "
            "unsharded); register, and publish, what this rank keeps"
        )
    if at == 0 or start == 0:
        return f"it is a {type(value).__name__} without memory of its own; register the tensors inside"
    return ""


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value) if isinstance(value, bool | int | float | str | bytes) else ""
    return f"{type(value).__name__} {text[:60]}".strip()
