"""A trace does not change the engine, for any loader."""

from __future__ import annotations

import ctypes
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import refitd
from refitd.tracing import held_bytes
from refitd.tracing.held_bytes import HeldBytes

Weights = Iterable[tuple[str, torch.Tensor]]
SHAPES = {name: ((3, 3), torch.float32) for name in ("proj.weight", "head.weight", "scale")}


class Kind(torch.Tensor):
    pass


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3, 3), 5.0), requires_grad=False)
        self.weight.loads = 0
        self.register_buffer("cos", torch.arange(4.0), persistent=False)
        self.calls = 0


class Engine(torch.nn.Module):
    """An engine with every kind of module state; its loader calls `change` in addition to copying."""

    def __init__(self, change: Callable[[Engine, dict[str, torch.Tensor]], object] = lambda *_: None) -> None:
        super().__init__()
        self.proj, self.head = Layer(), Layer()
        self.register_buffer("scale", torch.full((3, 3), 7.0))
        self.table = torch.arange(6)
        self.cached: list[Any] = [torch.ones(2), {"rows": torch.ones(3)}]
        self.recent = deque([1, 2])
        self.names = {"a"}
        self.state = SimpleNamespace(step=3, held=torch.ones(2))
        self.is_loaded = False
        self.change = change

    def load_weights(self, weights: Weights) -> None:
        given = dict(weights)
        for name, parameter in (*self.named_parameters(), ("scale", self.scale)):
            parameter.copy_(given[name])
        self.change(self, given)

    def given(self) -> dict[str, torch.Tensor]:
        return {**dict(self.named_parameters()), "scale": self.scale}


def everything(value: Any, seen: set[int] | None = None) -> Iterator[object]:
    """Yield identities, memory and bytes of all objects in an engine, in order."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield id(value), type(value), value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
        yield value.requires_grad, value.detach().contiguous().view(torch.uint8).tolist()
    elif not isinstance(value, (dict, list, deque, set, torch.nn.Module, SimpleNamespace)):
        yield repr(value)
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    inside = vars(value) if isinstance(value, (torch.Tensor, torch.nn.Module, SimpleNamespace)) else value
    for key, item in inside.items() if isinstance(inside, dict) else enumerate(inside):
        yield repr(key), id(item) if isinstance(item, (dict, list, deque, set)) else 0
        yield from everything(item, seen)


def trace(engine: Engine, load: Callable[..., object] | None = None) -> refitd.LoaderTrace:
    return refitd.trace_loader(engine.given(), load or engine.load_weights, SHAPES)


def unmoded(write: Callable[[], object]) -> None:
    with _disable_current_modes():
        write()


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, name="writer")
    thread.start()
    thread.join()


OTHER_MEMORY = {
    "assign=True": lambda e, w: e.load_state_dict({**w, "proj.weight": w["proj.weight"]}, strict=False, assign=True),
    "assign in a submodule": lambda e, w: e.proj.load_state_dict({"weight": w["proj.weight"]}, assign=True),
    "a new Parameter": lambda e, w: setattr(e.head, "weight", torch.nn.Parameter(w["head.weight"], False)),
    "_parameters": lambda e, w: e.head._parameters.__setitem__("weight", torch.nn.Parameter(torch.ones(3, 3))),
    "deleted": lambda e, w: delattr(e.proj, "weight"),
    "a buffer anew": lambda e, w: e.register_buffer("scale", w["scale"].clone()),
    "a buffer that is not saved": lambda e, w: setattr(e.proj, "cos", torch.zeros(4)),
    "a tensor in a dictionary": lambda e, w: e.cached[1].__setitem__("rows", torch.zeros(3)),
    "data": lambda e, w: setattr(e.proj.weight, "data", torch.empty(3, 3)),
    "data of a buffer": lambda e, w: setattr(e.head.cos, "data", torch.empty(4)),
    "data of another dtype": lambda e, w: e.half(),
    "a module": lambda e, w: setattr(e, "head", Layer()),
    "swap_tensors": lambda e, w: torch.utils.swap_tensors(e.proj.weight, torch.nn.Parameter(w["proj.weight"], False)),
    "swap_tensors of two": lambda e, w: torch.utils.swap_tensors(e.proj.weight, e.head.weight),
    "swap_tensors with another class": lambda e, w: torch.utils.swap_tensors(e.scale, w["scale"].as_subclass(Kind)),
}


@pytest.mark.parametrize("change", OTHER_MEMORY.values(), ids=OTHER_MEMORY)
def test_tensors_that_a_loader_replaces_are_put_back_and_refused_by_name(change: Callable[..., object]) -> None:
    engine = Engine(change)
    before = [*everything(engine)]
    with pytest.raises(refitd.PlanError, match=r"gives [0-9]+ tensors other memory; it was restored"):
        trace(engine)
    assert [*everything(engine)] == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda e, w: setattr(e.proj.weight, "data", w["proj.weight"]),
            r"gives a tensor other memory.* Let it copy: `p.data.copy_",
        ),
        (lambda e, w, kept={}: e.scale.copy_(kept.setdefault("scale", w["scale"])), "keeps tensors of an earlier load"),
    ],
)
def test_tensors_of_the_trace_that_a_loader_keeps_are_refused(change: Callable[..., object], says: str) -> None:
    with pytest.raises(refitd.RefusedError, match=says):
        trace(Engine(change))


ATTRIBUTES = {
    "flag": lambda e, w: setattr(e, "is_loaded", True),
    "counter of a submodule": lambda e, w: setattr(e.proj, "calls", e.proj.calls + 1),
    "attribute of a Parameter": lambda e, w: setattr(e.proj.weight, "loads", 1),
    "list": lambda e, w: e.cached.append("more"),
    "deque": lambda e, w: e.recent.append(3),
    "set": lambda e, w: e.names.add("b"),
    "object": lambda e, w: setattr(e.state, "step", 4),
    "new attribute": lambda e, w: setattr(e, "seen", ["proj"]),
    "deleted attribute": lambda e, w: delattr(e, "is_loaded"),
    "new module": lambda e, w: e.add_module("extra", torch.nn.Linear(2, 2)),
    "requires_grad": lambda e, w: e.proj.weight.requires_grad_(),
    "hook": lambda e, w: e.register_forward_hook(lambda *_: None),
    "constant to a buffer that is not given": lambda e, w: e.proj.cos.fill_(9),
    "constant to a plain tensor": lambda e, w: e.table.zero_(),
    "the same memory in a new Parameter": lambda e, w: setattr(
        e.proj, "weight", torch.nn.Parameter(e.proj.weight.data, False)
    ),
}


@pytest.mark.parametrize("change", ATTRIBUTES.values(), ids=ATTRIBUTES)
@pytest.mark.parametrize("raises", [False, True])
def test_attributes_are_as_before_a_trace_also_where_the_loader_raises(
    change: Callable[..., object], raises: bool
) -> None:
    def both(engine: Engine, given: dict[str, torch.Tensor]) -> None:
        change(engine, given)
        if raises:
            raise ValueError("late")

    engine = Engine(both)
    before = [*everything(engine)]
    if raises:
        with pytest.raises(refitd.RefusedError, match="late"):
            trace(engine)
    else:
        assert trace(engine).metadata.keys() == SHAPES.keys()
    assert [*everything(engine)] == before


def test_modules_are_found_behind_any_loader() -> None:
    """A bound method, a closure over a part, a module that only wraps the engine, tensors without their Parameters."""
    engine = Engine()
    outer = torch.nn.Module()
    outer.inner = engine
    outer.version = 1

    def load(weights: Weights) -> None:
        engine.load_weights(weights)
        outer.version, engine.head.calls = 2, 5

    def count(weights: Weights, part: Layer = engine.head) -> None:
        part.calls = 9
        engine.load_weights(weights)

    before = [*everything(outer)]
    for one in (load, count, functools.partial(load)):
        trace(engine, one)
        assert [*everything(outer)] == before
    refitd.trace_loader({n: t.detach() for n, t in engine.state_dict().items()}, load, SHAPES)
    assert [*everything(outer)] == before


def test_tensors_that_are_in_no_module_are_put_back() -> None:
    class Plain:
        def __init__(self) -> None:
            self.weight = torch.ones(3, 3)

        def load(self, weights: Weights) -> None:
            self.weight = dict(weights)["scale"]

    plain, held = Plain(), {"w": torch.ones(3, 3)}
    for weight, holder, load in (
        (plain.weight, plain.__dict__, plain.load),
        (held["w"], held, lambda weights: held.update(w=dict(weights)["scale"])),
    ):
        was = dict(holder)
        with pytest.raises(refitd.PlanError, match="gives 1 tensors other memory; it was restored"):
            refitd.trace_loader({"w": weight}, load, {"scale": SHAPES["scale"]})
        assert all(holder[name] is tensor for name, tensor in was.items())


def test_what_is_not_given_and_made_of_canonical_tensors_is_computed() -> None:
    engine = Engine(lambda e, w: setattr(e.proj, "folded", w["proj.weight"].t().contiguous()))
    assert trace(engine).computed == {"proj.folded": ("proj.weight",)}
    assert not hasattr(engine.proj, "folded")
    engine = Engine(lambda e, w: e.proj.cos[:3].copy_(w["proj.weight"][0]))
    assert trace(engine).computed == {"proj.cos": ("proj.weight",)}
    assert engine.proj.cos.tolist() == [0, 1, 2, 3]


AROUND = {
    "numpy": lambda e: e.proj.weight.numpy().__setitem__(..., 0),
    "a pointer": lambda e: ctypes.memset(e.proj.weight.data_ptr(), 1, 36),
    "modes disabled": lambda e: unmoded(lambda: e.proj.weight.fill_(2)),
    "modes disabled, a buffer": lambda e: unmoded(lambda: e.head.cos.fill_(2)),
    "a thread without modes": lambda e: in_thread(lambda: unmoded(e.scale.zero_)),
    "numpy of a plain tensor": lambda e: e.table.numpy().__setitem__(0, 5),
}


@pytest.mark.parametrize("write", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("raises", [False, True])
def test_writes_around_the_trace_are_put_back_and_refused_by_name(write: Callable[..., object], raises: bool) -> None:
    def load(weights: Weights) -> None:
        write(engine)
        if raises:
            raise ValueError("late")
        engine.load_weights(weights)

    engine = Engine()
    before = [*everything(engine)]
    says = "late" if raises else "writes 1 tensors around the trace: through numpy .* were restored"
    with pytest.raises(refitd.RefitdError, match=says):
        trace(engine, load)
    assert [*everything(engine)] == before


def test_large_tensors_are_copied_to_a_file_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_bytes, "ALWAYS", 400)
    monkeypatch.setattr(held_bytes, "_available", lambda: 0)
    tensors = {"small": torch.ones(9), "large": torch.ones(1000), "whole": torch.ones(1000)}
    held = HeldBytes()
    for name, tensor in tensors.items():
        held.add(name, tensor)
    held.take()
    assert (held.copied, held.filed) == (8036, 8000)
    assert held.put_back() == ([], [])
    tensors["small"].zero_()
    tensors["large"][7] = 2
    assert held.put_back() == ([], ["small", "large"])
    assert all(tensor.all() for tensor in tensors.values()) and tensors["large"][7] == 1


def test_a_trace_says_what_it_kept() -> None:
    held = trace(Engine()).held
    assert held.tensors >= 7 and held.copied_bytes >= 4 * 27 and held.file_bytes == 0 and held.seconds > 0


def test_traces_of_one_engine_in_several_threads_wait_for_each_other() -> None:
    engine, learned = Engine(), queue.Queue[set[str]]()
    before = [*everything(engine)]
    threads = [threading.Thread(target=lambda: learned.put({*trace(engine).metadata})) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [learned.get_nowait() for _ in threads] == [{*SHAPES}] * 4
    assert [*everything(engine)] == before
