"""A module's tensors move into an arena as they are, or not at all; a module is built there from the start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from refitd.buffers.arena import MappedArena
from refitd.client import adopt
from refitd.client.adopt import Adoption
from refitd.errors import RefusedError
from tests.support.arenas import arena_of


def adopted(module: Any) -> tuple[Adoption, MappedArena]:
    adoption = Adoption(module, {})
    arena = arena_of(adoption.nbytes)
    adoption.perform(arena)
    return adoption, arena


def lies_in(arena: MappedArena, tensor: torch.Tensor) -> bool:
    return arena.offset_of(tensor.data_ptr(), tensor.nbytes) is not None


class Model(nn.Module):
    """Tied, transposed, overlapping and odd tensors, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 50, bias=False)
        self.head.weight = self.embed.weight
        self.columns = nn.Parameter(torch.arange(35.0).view(5, 7).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(3.0))
        flat = torch.arange(20.0, dtype=torch.bfloat16)
        self.front, self.back = nn.Parameter(flat[:10]), nn.Parameter(flat[10:], requires_grad=False)
        self.register_buffer("mean", torch.ones(3, dtype=torch.float64))
        self.register_buffer("mean_again", self.mean[1:])
        self.register_buffer("tail", torch.arange(9)[5:])
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))


def test_every_tensor_stays_the_object_it_was_and_shows_the_same_values() -> None:
    model = Model()
    model.norm.weight.loader = "kept"  # type: ignore[attr-defined]
    before = copy.deepcopy(model).state_dict()
    objects = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    about = {n: (id(t), t.shape, t.stride(), t.requires_grad, t.dtype, type(t)) for n, t in objects.items()}
    adoption, arena = adopted(model)
    now = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    assert {n: (id(t), t.shape, t.stride(), t.requires_grad, t.dtype, type(t)) for n, t in now.items()} == about
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name for name, tensor in now.items() if not lies_in(arena, tensor)} == {"table", "empty"}
    assert adoption.left.keys() == {"table"}
    assert adoption.contents.keys() == dict(model.named_parameters()).keys() - {"empty"} | {
        *("mean", "mean_again", "tail", "mask")
    }
    assert model.norm.weight.loader == "kept"  # type: ignore[attr-defined]
    model.mean[1] = 7.0
    assert model.mean_again[0] == 7.0, "views stay views"
    assert model.embed.weight.data_ptr() == model.head.weight.data_ptr()
    aligned = adoption.contents.keys() - {"mean_again", "tail"}
    assert not any(adoption.contents[name][0] % 256 for name in aligned)


def test_an_optimizer_and_gradients_go_on_as_if_nothing_had_moved() -> None:
    torch.manual_seed(0)
    model, tokens = Model(), torch.arange(50)
    twin = copy.deepcopy(model)

    def step(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        one(tokens).square().mean().backward()
        optimizer.step()

    pairs = [(one, torch.optim.AdamW(one.parameters(), lr=0.1)) for one in (model, twin)]
    for pair in pairs:
        step(*pair)
    grad = model.embed.weight.grad
    arena = adopted(model)[1]
    assert model.embed.weight.grad is grad
    for pair in pairs:
        step(*pair)
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())
    assert lies_in(arena, model.embed.weight)


def test_tensors_that_overlap_in_part_move_as_one_and_still_do() -> None:
    flat = torch.arange(12.0)
    model = with_buffer(flat[:8])
    model.register_buffer("y", flat[4:])
    del flat
    adoption, arena = adopted(model)
    assert adoption.contents["y"][0] - adoption.contents["x"][0] == 16
    model.x[6] = 99.0
    assert model.y.tolist() == [4.0, 5.0, 99.0, *range(7, 12)] and lies_in(arena, model.y)


def test_the_old_memory_is_given_back() -> None:
    model = nn.Linear(64, 64, bias=False)
    old = StorageWeakRef(model.weight.untyped_storage())
    assert not old.expired()
    arena = adopted(model)[1]
    assert old.expired()
    assert lies_in(arena, model.weight)


def test_inference_tensors_stay_such_and_others_too() -> None:
    with torch.inference_mode():
        frozen = nn.Linear(3, 3)
        frozen.add_module("other", None)
    frozen.extra = nn.Parameter(torch.ones(2))
    for inside in (False, True):
        model = copy.deepcopy(frozen) if not inside else frozen
        kinds = {name: param.is_inference() for name, param in model.named_parameters()}
        with torch.inference_mode(inside):
            arena = adopted(model)[1]
        assert {name: param.is_inference() for name, param in model.named_parameters()} == kinds
        assert all(lies_in(arena, param) for param in model.parameters())
    assert frozen.weight.is_inference() and not frozen.extra.is_inference()


class Loaded(nn.Parameter):
    """A Parameter subclass with behaviour and ordinary memory, as in engines."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "__set__" in str(func):
            raise AssertionError("an engine's own rules")
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """A tensor subclass that owns no storage."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2))  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("not asked")


def test_parameters_of_a_subclass_with_ordinary_memory_move() -> None:
    model = nn.Linear(3, 3)
    model.weight = Loaded(torch.ones(3, 3))
    arena = adopted(model)[1]
    assert type(model.weight) is Loaded and lies_in(arena, model.weight)


def with_buffer(tensor: torch.Tensor, *, persistent: bool = True) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("x", tensor, persistent=persistent)
    return module


def kept_by_numpy() -> nn.Module:
    return with_buffer(torch.from_numpy(np.ones(4, np.float32)))


def with_a_view(held: list[torch.Tensor]) -> nn.Module:
    module = nn.Linear(2, 2)
    held.append(module.weight.detach())
    return module


def with_unsaved_neighbour() -> nn.Module:
    flat = torch.zeros(12)
    module = with_buffer(flat[:8])
    module.register_buffer("y", flat[4:], persistent=False)
    return module


HELD: list[torch.Tensor] = []
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a dict": (lambda: {"w": torch.ones(2)}, "pass the module itself"),
    "no module": (lambda: torch.ones(2), "expected a module"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "weight: it is on the meta device.*; bias: "),
    "sparse": (lambda: with_buffer(torch.eye(2).to_sparse()), "x: it is a sparse"),
    "lazy": (lambda: nn.LazyLinear(2), "no shape yet"),
    "quantized": (lambda: with_buffer(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)), "x: .*quantized"),
    "conjugate": (lambda: with_buffer(torch.ones(2, dtype=torch.cfloat).conj()), "x: "),
    "wrapper": (lambda: with_buffer(Wrapper()), "x: it is a Wrapper, which has no memory"),
    "shared": (lambda: with_buffer(torch.ones(2).share_memory_()), "x: its memory is shared with other processes"),
    "numpy": (kept_by_numpy, "x: its memory belongs to another object"),
    "view": (lambda: with_a_view(HELD), "weight: tensors outside this module .1: "),
    "unsaved": (with_unsaved_neighbour, "y: it shares memory with x, and no version has it"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_moved_is_refused_by_name_and_stays(kind: str) -> None:
    make, problem = REFUSED[kind]
    module = make()
    with pytest.raises(RefusedError, match=problem):
        Adoption(module, {})


def test_a_fake_tensor_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        module = nn.Linear(2, 2)
    with pytest.raises(RefusedError, match="weight: it is a "):
        Adoption(module, {})


def test_a_private_view_of_a_file_moves_and_the_file_keeps_its_bytes(tmp_path: Path) -> None:
    """Cover the private file mappings that safetensors and torch.load(mmap=True) return."""
    path = tmp_path / "weights"
    path.write_bytes(np.arange(16, dtype=np.float32).tobytes())
    model = with_buffer(torch.from_file(str(path), shared=False, size=16)[3:].view(13))
    arena = adopted(model)[1]
    assert lies_in(arena, model.x) and torch.equal(model.x, torch.arange(3.0, 16.0))  # type: ignore[arg-type]


def test_a_failure_in_the_middle_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    before, values = {n: p.data_ptr() for n, p in model.named_parameters()}, copy.deepcopy(model).state_dict()
    adoption = Adoption(model, {})
    works, calls = adopt.point, []

    def fails(*about: Any) -> None:
        calls.append(about)
        if len(calls) == 5:
            raise RuntimeError("torch refuses")
        works(*about)

    monkeypatch.setattr(adopt, "point", fails)
    with pytest.raises(RuntimeError, match="torch refuses"):
        adoption.perform(arena_of(adoption.nbytes))
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_chunks_of_a_pipeline_move_into_one_arena() -> None:
    chunks = [nn.Linear(3, 3), nn.Linear(3, 2)]
    adoption, arena = adopted(chunks)
    assert adoption.contents.keys() == {f"chunk{i}.{name}" for i in (0, 1) for name in ("weight", "bias")}
    assert all(lies_in(arena, param) for chunk in chunks for param in chunk.parameters())
