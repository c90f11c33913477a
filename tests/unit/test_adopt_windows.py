"""A module's tensors (malloc, mmap, tied, views) are adopted in place; the others are refused with a reason."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from refitd.buffers.layout import extent
from refitd.buffers.windows import WindowedArena, WindowPair
from refitd.client import adopt
from refitd.client.adopt import WindowedAdoption
from refitd.errors import RefusedError
from tests.support.arenas import arena_of
from tests.support.mapped import is_arena


def adopted(module: Any) -> tuple[WindowedAdoption, WindowedArena]:
    adoption = WindowedAdoption(module, {})
    return adoption, adoption.show(arena_of(adoption.nbytes))


def middle(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return storage.data_ptr() + storage.nbytes() // 2


class Model(nn.Module):
    """Small, large, tied, transposed, overlapping and odd tensors; one storage with three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2000, 300)
        self.head = nn.Linear(300, 2000)
        self.head.weight = self.embed.weight
        self.columns = nn.Parameter(torch.arange(200_000.0).view(500, 400).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        flat = torch.arange(600_001.0)
        self.front, self.back = nn.Parameter(flat[1:200_000]), nn.Parameter(flat[200_000:], requires_grad=False)
        fused = torch.arange(300_000.0).view(300, 1000)
        self.left, self.right = nn.Parameter(fused[:, :400]), nn.Parameter(fused[:, 400:])
        self.register_buffer("mean", torch.ones(3, dtype=torch.float64))
        self.register_buffer("tail", self.back.detach()[7:])
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def test_nothing_moves_and_versions_are_exchanged_under_it() -> None:
    model = Model()
    twin = copy.deepcopy(model).state_dict()
    view, old = model.head.weight.detach()[5], model.front.untyped_storage()
    about = {n: (id(t), t.data_ptr(), t.stride(), t.requires_grad, type(t)) for n, t in state(model).items()}
    adoption, arena = adopted(model)

    assert {n: (id(t), t.data_ptr(), t.stride(), t.requires_grad, type(t)) for n, t in state(model).items()} == about
    assert all(torch.equal(value, twin[name]) for name, value in model.state_dict().items())
    assert adoption.left.keys() == {"mean", "table", "head.bias"}
    assert adoption.left["mean"] == "each commit copies it: it has less than 256 KiB"
    assert all(is_arena(middle(tensor)) for tensor in (model.embed.weight, model.columns, model.back, model.right))
    for name, (offset, nbytes) in adoption.contents.items():
        tensor = state(model)[name]
        assert arena.offset_of(tensor.data_ptr(), 1) == offset and nbytes >= tensor.nbytes

    with torch.no_grad():
        model.front -= 1
    assert torch.equal(model.front, twin["front"] - 1)
    staging = arena_of(adoption.nbytes)
    pair = WindowPair(arena, staging)
    values = np.random.default_rng(0).integers(0, 120, adoption.nbytes, np.uint8)  # no NaN
    staging.bytes[:] = values
    pair.exchange()
    for name, tensor in state(model).items():
        if name in adoption.contents:
            offset, size = adoption.contents[name][0], tensor.element_size()
            nbytes = extent(tensor.shape, [size * stride for stride in tensor.stride()], size)
            flat = torch.from_numpy(values[offset : offset + nbytes].copy()).view(tensor.dtype)
            assert torch.equal(flat.as_strided(tensor.shape, tensor.stride()), tensor), name
    assert torch.equal(view, model.head.weight[5]), "a view that others hold shows it, too"
    assert torch.equal(model.table, torch.arange(4.0))
    pair.exchange()
    assert torch.equal(model.front, twin["front"] - 1) and torch.equal(model.embed.weight, twin["embed.weight"])
    assert not old.resizable()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    arena.leave()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(is_arena(middle(tensor)) for tensor in state(model).values() if tensor.numel())
    with torch.no_grad():
        model.front.fill_(3.0)
    assert torch.equal(model.back.detach(), twin["back"])


def test_storages_cannot_be_freed_under_the_arena() -> None:
    model = nn.Linear(1000, 1000, bias=False)
    view = model.weight.detach()[3:]
    arena = adopted(model)[1]
    address = middle(model.weight)
    for tensor in (model.weight, view):
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.untyped_storage().resize_(0)
    model.share_memory()  # replaces the storage and would free the old one
    assert model.weight.data_ptr() != view.data_ptr() - 12000
    model.weight.data = torch.ones(2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and is_arena(address)
    arena.leave()
    assert not is_arena(address) and torch.isfinite(view).all()


def of_a_file(path: Path, *, shared: bool) -> nn.Module:
    np.arange(300_000, dtype=np.float32).tofile(path)
    return with_buffer(torch.from_file(str(path), shared=shared, size=300_000))


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("x", tensor)
    return module


KINDS: dict[str, tuple[Callable[[Path], nn.Module], str]] = {
    "a private view of a file": (lambda path: of_a_file(path, shared=False), ""),
    "numpy's": (lambda _: with_buffer(torch.from_numpy(np.ones(300_000, np.float32))), ""),
    "inference": (lambda _: with_buffer(torch.inference_mode()(torch.ones)(300_000)), ""),
    "shared": (lambda _: with_buffer(torch.ones(300_000).share_memory_()), "shared with other processes"),
    "a shared view of a file": (lambda path: of_a_file(path, shared=True), "shared with other processes"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_owns_the_memory_gets_it_back_or_versions_are_copied_there(tmp_path: Path, kind: str) -> None:
    make, reason = KINDS[kind]
    module = make(tmp_path / "x")
    before: Any = module.x.clone()
    adoption, arena = adopted(module)
    assert reason in adoption.left.get("x", "") and ("x" in adoption.left) is bool(reason)
    assert torch.equal(module.x, before)  # type: ignore[arg-type]
    staging = arena_of(adoption.nbytes)
    offset, nbytes = adoption.contents["x"]
    staging.bytes[offset : offset + nbytes] = np.full(300_000, 5, np.float32).view(np.uint8)
    WindowPair(arena, staging).exchange()
    assert (module.x == 5).all()  # type: ignore[union-attr]
    arena.leave()
    assert (module.x == 5).all() and not is_arena(middle(module.x))  # type: ignore[union-attr, arg-type]
    again, arena = adopted(module)
    assert ("x" in again.left) is bool(reason) and (module.x == 5).all()  # type: ignore[union-attr]


def test_gaps_that_others_may_hold_are_refused() -> None:
    fused = torch.zeros(300, 1000)
    module = nn.Module()
    module.left = nn.Parameter(fused[:, :400])
    with pytest.raises(RefusedError, match=r"left: tensors outside this module .1. share its memory, and may lie in"):
        WindowedAdoption(module, {})
    del fused
    WindowedAdoption(module, {})


def test_too_many_ranges_are_copied_the_smallest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in (200_000, 400_000, 300_000)])
    monkeypatch.setattr(adopt, "most_windows", lambda: 1)
    adoption, _ = adopted(module)
    assert adoption.left.keys() == {"0", "2"} and "vm.max_map_count leaves room for 1 ranges" in adoption.left["0"]


def test_a_failure_in_the_middle_leaves_the_module_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    before, values = {n: t.data_ptr() for n, t in state(model).items()}, copy.deepcopy(model).state_dict()
    adoption, works, calls = WindowedAdoption(model, {}), adopt.point, []

    def fails(*about: Any) -> None:
        calls.append(about)
        if len(calls) == 4:
            raise RuntimeError("torch refuses")
        works(*about)

    monkeypatch.setattr(adopt, "point", fails)
    with pytest.raises(RuntimeError, match="torch refuses"):
        adoption.show(arena_of(adoption.nbytes))
    assert {n: t.data_ptr() for n, t in state(model).items()} == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert not any(is_arena(middle(tensor)) for tensor in state(model).values() if tensor.numel())
