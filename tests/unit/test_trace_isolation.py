"""A trace leaves the engine as it was, whatever the loader does, and follows the loader into its threads."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import ctypes
import functools
import multiprocessing
import multiprocessing.pool
import os
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
    """An engine with all places where a module can keep state; `change` is what its loader does besides copying."""

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
    """Yield identities, memory and bytes of all that an engine holds, in order."""
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
    with pytest.raises(refitd.PlanError, match=r"gives [0-9]+ tensors other memory; put back"):
        trace(engine)
    assert [*everything(engine)] == before


def test_data_of_a_traced_tensor_is_refused_with_the_way_out() -> None:
    engine = Engine(lambda e, w: setattr(e.proj.weight, "data", w["proj.weight"]))
    with pytest.raises(refitd.RefusedError, match=r"gives a tensor other memory.* Let it copy: `p.data.copy_"):
        trace(engine)


def test_a_loader_that_keeps_tensors_of_an_earlier_load_is_told_so() -> None:
    kept: dict[str, torch.Tensor] = {}
    engine = Engine(lambda e, w: e.scale.copy_(kept.setdefault("scale", w["scale"])))
    with pytest.raises(refitd.RefusedError, match="keeps tensors of an earlier load"):
        trace(engine)


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
        with pytest.raises(refitd.PlanError, match="gives 1 tensors other memory; put back"):
            refitd.trace_loader({"w": weight}, load, {"scale": SHAPES["scale"]})
        assert all(holder[name] is tensor for name, tensor in was.items())


def test_an_attribute_made_of_canonical_tensors_is_computed() -> None:
    engine = Engine(lambda e, w: setattr(e.proj, "folded", w["proj.weight"].t().contiguous()))
    assert trace(engine).computed == {"proj.folded": ("proj.weight",)}
    assert not hasattr(engine.proj, "folded")


def test_a_buffer_that_is_not_given_and_holds_canonical_elements_is_computed() -> None:
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
    says = "late" if raises else "writes 1 tensors around the trace: through numpy .* put back"
    with pytest.raises(refitd.RefitdError, match=says):
        trace(engine, load)
    assert [*everything(engine)] == before


def test_bytes_are_only_digested_where_memory_and_disk_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_bytes, "ALWAYS", 400)
    monkeypatch.setattr(held_bytes, "_available", lambda: 0)
    monkeypatch.setattr(held_bytes, "_temporary", lambda size: None)
    tensors = {"small": torch.ones(9), "large": torch.ones(1000), "whole": torch.ones(1000)}
    held = HeldBytes()
    for name, tensor in tensors.items():
        held.add(name, tensor)
    held.take()
    assert (held.copied, held.digested) == (36, 8000)
    assert held.put_back() == ([], [], [])
    tensors["small"].zero_()
    tensors["large"][7] = 2
    assert held.put_back() == ([], ["small", "large"], ["large"])
    assert tensors["small"].all() and tensors["whole"].all()


def test_a_trace_says_what_it_kept() -> None:
    held = trace(Engine()).held
    assert held.tensors >= 7 and held.copied_bytes >= 4 * 27 and held.digested_bytes == 0 and held.seconds > 0


# --- threads --------------------------------------------------------------------------------------------------

POOL = concurrent.futures.ThreadPoolExecutor(2)
THREAD_POOL = multiprocessing.pool.ThreadPool(2)


def by_threads(tasks: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_subclass(tasks: list[Callable[[], object]]) -> None:
    class Worker(threading.Thread):
        def run(self) -> None:
            for task in tasks:
                task()

    worker = Worker()
    worker.start()
    worker.join()


def by_executor(tasks: list[Callable[[], object]]) -> None:
    """As SGLang's DeepSeek loader."""
    with concurrent.futures.ThreadPoolExecutor() as executor:
        futures = [executor.submit(task) for task in tasks]
        for future in concurrent.futures.as_completed(futures):
            future.result()


def by_older_executor(tasks: list[Callable[[], object]]) -> None:
    list(POOL.map(lambda task: task(), tasks))


def by_asyncio(tasks: list[Callable[[], object]]) -> None:
    async def run() -> None:
        await asyncio.gather(*(asyncio.to_thread(task) for task in tasks))

    asyncio.run(run())


def by_pool(tasks: list[Callable[[], object]]) -> None:
    with multiprocessing.pool.ThreadPool(2) as pool:
        pool.map(lambda task: task(), tasks)


def by_older_pool(tasks: list[Callable[[], object]]) -> None:
    THREAD_POOL.starmap(lambda task: task(), [(task,) for task in tasks])
    list(THREAD_POOL.imap_unordered(lambda task: task(), tasks))
    [each.get() for each in [THREAD_POOL.apply_async(task) for task in tasks]]


def by_a_thread_of_a_thread(tasks: list[Callable[[], object]]) -> None:
    in_thread(lambda: by_executor(tasks))


def by_raw_threads(tasks: list[Callable[[], object]]) -> None:
    done = queue.SimpleQueue[None]()
    for task in tasks:
        _thread.start_new_thread(lambda task=task: (task(), done.put(None)), ())
    for _ in tasks:
        done.get(timeout=30)


def unwaited(tasks: list[Callable[[], object]]) -> None:
    for task in tasks:
        threading.Thread(target=task).start()


@pytest.mark.parametrize(
    "hand_out",
    [
        by_threads,
        by_subclass,
        by_executor,
        by_older_executor,
        by_asyncio,
        by_pool,
        by_older_pool,
        by_a_thread_of_a_thread,
        by_raw_threads,
        unwaited,
    ],
)
def test_a_loader_is_followed_into_its_threads(hand_out: Callable[..., None]) -> None:
    params = {f"p{i}": torch.full((6, 3), 5.0) for i in range(8)}

    def load(weights: Weights) -> None:
        given = dict(weights)

        def one(name: str) -> None:
            params[name][:4].copy_(given[name])
            params[name][4:].fill_(2)

        hand_out([lambda name=name: one(name) for name in params])

    methods = threading.Thread.start, concurrent.futures.ThreadPoolExecutor.submit, os.fork, _thread.start_new_thread
    found = refitd.trace_loader(params, load, {name: ((4, 3), torch.float32) for name in params})
    assert all(bool((tensor == 5).all()) for tensor in params.values())
    assert {name: meta.fill for name, meta in found.metadata.items()} == dict.fromkeys(params, 2.0)
    assert not found.problems()
    now = threading.Thread.start, concurrent.futures.ThreadPoolExecutor.submit, os.fork, _thread.start_new_thread
    assert now == methods
    assert POOL.submit(lambda: torch.ones(2).mul_(2).tolist()).result() == [2.0, 2.0]


def test_other_threads_of_the_process_are_left_alone() -> None:
    weight, began, ended = torch.zeros(3), threading.Event(), threading.Event()
    results: list[Any] = []

    def other() -> None:
        assert began.wait(30)
        results.append(torch.ones(2).add_(1).tolist())
        results.append(POOL.submit(lambda: torch.ones(2).add_(1).tolist()).result())
        thread = threading.Thread(target=lambda: results.append(torch.zeros(2).add_(2).tolist()))
        thread.start()
        thread.join()
        ended.set()

    def load(weights: Weights) -> None:
        began.set()
        assert ended.wait(30)
        for _, w in weights:
            weight.copy_(w)

    thread = threading.Thread(target=other)
    thread.start()
    assert not refitd.trace_loader({"w": weight}, load, {"w": ((3,), torch.float32)}).problems()
    thread.join()
    assert results == [[2.0, 2.0]] * 3


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


def test_a_thread_that_is_older_than_the_trace_is_refused_by_name() -> None:
    weight, tasks, answers = torch.zeros(3), queue.Queue[Any](), queue.Queue[Any]()

    def serve() -> None:
        while (task := tasks.get()) is not None:
            try:
                answers.put(task())
            except Exception as exc:
                answers.put(exc)

    thread = threading.Thread(target=serve)
    thread.start()

    def load(weights: Weights) -> None:
        for _, w in weights:
            tasks.put(lambda w=w: weight.copy_(w))
            if isinstance(answer := answers.get(timeout=30), Exception):
                raise answer

    try:
        with pytest.raises(refitd.RefusedError, match="in a thread of its own that is older than the trace"):
            refitd.trace_loader({"w": weight}, load, {"w": ((3,), torch.float32)})
    finally:
        tasks.put(None)
        thread.join()


def test_a_refusal_that_a_loader_catches_refuses_it_still() -> None:
    weight = torch.zeros(3)

    def load(weights: Weights) -> None:
        for _, w in weights:
            weight.copy_(w)
            POOL.submit(lambda w=w: w.sum().item())  # its result is never read

    with pytest.raises(refitd.PlanError, match="needs a value of w"):
        refitd.trace_loader({"w": weight}, load, {"w": ((3,), torch.float32)})


@pytest.mark.parametrize("hand_out", [unwaited, lambda tasks: [POOL.submit(task) for task in tasks]])
def test_an_error_in_a_thread_refuses_a_loader_that_does_not_see_it(hand_out: Callable[..., object]) -> None:
    weight, other = torch.zeros(3), torch.zeros(3)

    def load(weights: Weights) -> None:
        given = dict(weights)
        weight.copy_(given["w"].neg())

        def choose() -> None:
            other.copy_(given["missing"])

        hand_out([choose])

    with pytest.raises(refitd.RefitdError, match=r"^thread or task .* of the loader raised"):
        refitd.trace_loader({"w": weight, "other": other}, load, {"w": ((3,), torch.float32)})


def test_an_operator_that_needs_values_refuses_a_loader_that_catches_its_error() -> None:
    weight = torch.zeros(3)

    def load(weights: Weights) -> None:
        given = dict(weights)
        try:
            chosen = given["a"] if len(given["a"].nonzero()) == 1 else given["b"]
        except Exception:
            chosen = given["b"]
        weight.copy_(chosen)

    with pytest.raises(refitd.PlanError, match=r"calls aten.nonzero.*, which needs values"):
        refitd.trace_loader({"w": weight}, load, dict.fromkeys("ab", ((3,), torch.float32)))


def test_a_thread_that_copies_on_after_its_loader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd.tracing.threads.DEADLINE_S", 0.2)
    weight, go, threads = torch.zeros(3), threading.Event(), []
    errors: list[BaseException] = []

    def slow(w: torch.Tensor) -> None:
        weight.copy_(w)
        assert go.wait(30)
        try:
            weight.fill_(1)
        except refitd.RefitdError as exc:
            errors.append(exc)

    def load(weights: Weights) -> None:
        for _, w in weights:
            threads.append(threading.Thread(target=slow, args=(w,), name="slow one"))
            threads[-1].start()

    with pytest.raises(refitd.PlanError, match="thread 'slow one' of the loader still copies"):
        refitd.trace_loader({"w": weight}, load, {"w": ((3,), torch.float32)})
    go.set()
    threads[0].join()
    assert errors and not weight.any()


@pytest.mark.parametrize(
    "start",
    [
        lambda: multiprocessing.get_context("spawn").Process(target=print, name="writer").start(),
        lambda: concurrent.futures.ProcessPoolExecutor(1).submit(print).result(),
        lambda: os._exit(7) if os.fork() == 0 else None,
    ],
)
def test_a_loader_that_starts_processes_is_refused(start: Callable[[], object]) -> None:
    weight = torch.zeros(3)

    def load(weights: Weights) -> None:
        for _, w in weights:
            weight.copy_(w)
        start()

    with pytest.raises(refitd.PlanError, match=r"starts a process.*, which cannot be followed"):
        refitd.trace_loader({"w": weight}, load, {"w": ((3,), torch.float32)})
