"""A trace follows the loader into its threads, and leaves other threads alone."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import multiprocessing
import multiprocessing.pool
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import refitd

Weights = Iterable[tuple[str, torch.Tensor]]


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, name="writer")
    thread.start()
    thread.join()


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


def by_raw_threads(tasks: list[Callable[[], object]]) -> None:
    done = queue.SimpleQueue[None]()
    for task in tasks:
        _thread.start_new_thread(lambda task=task: (task(), done.put(None)), ())
    for _ in tasks:
        done.get(timeout=30)


HAND_OUT: dict[str, Callable[[list[Callable[[], object]]], object]] = {
    "threads": by_threads,
    "a subclass of Thread": by_subclass,
    "an executor": by_executor,
    "an older executor": lambda tasks: [*POOL.map(lambda task: task(), tasks)],
    "asyncio": by_asyncio,
    "a pool": by_pool,
    "an older pool": by_older_pool,
    "a thread of a thread": lambda tasks: in_thread(lambda: by_executor(tasks)),
    "raw threads": by_raw_threads,
    "threads that it does not wait for": lambda tasks: [threading.Thread(target=task).start() for task in tasks],
}


@pytest.mark.parametrize("hand_out", HAND_OUT.values(), ids=HAND_OUT)
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


def traced(weight: torch.Tensor, load: Callable[[Weights], object]) -> refitd.LoaderTrace:
    """Trace the loader of an engine of one tensor."""
    return refitd.trace_loader({"w": weight}, load, {"w": ((3,), torch.float32)})


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
    assert not traced(weight, load).problems()
    thread.join()
    assert results == [[2.0, 2.0]] * 3


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
        with pytest.raises(refitd.RefusedError, match="in a thread that is older than the trace"):
            traced(weight, load)
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
        traced(weight, load)


@pytest.mark.parametrize(
    "hand_out",
    [HAND_OUT["threads that it does not wait for"], lambda tasks: [POOL.submit(task) for task in tasks]],
)
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
        traced(weight, load)
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
        traced(weight, load)
