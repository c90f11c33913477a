"""Follow a loader into its threads: torch installs a dispatch mode for one thread only."""

from __future__ import annotations

import _thread
import concurrent.futures
import concurrent.futures.thread
import contextlib
import functools
import multiprocessing.pool
import multiprocessing.process
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from refitd.errors import PlanError, RefusedError
from refitd.tracing.held_bytes import storage_key
from refitd.tracing.values import tensors_in, written_by

# Seconds that a trace waits for running threads after the loader has returned.
DEADLINE_S = 10.0

# One trace at a time: a trace temporarily replaces methods of `threading` and of pools, and values in an engine.
TRACING = threading.RLock()

# Threads of a pool outlive a loader. Their tasks are followed, one by one.
_WORKERS = (concurrent.futures.thread._worker, multiprocessing.pool.worker)  # type: ignore[attr-defined]


def around(exc: BaseException) -> str:
    """Return the likely cause if a loader's error comes from tensors without values; "" for other errors."""
    if isinstance(exc, RuntimeError) and "set_data" in str(exc):
        return " The loader gives a tensor other memory (`p.data = ...`). Let it copy: `p.data.copy_(...)`"
    if not isinstance(exc, NotImplementedError) or "meta tensor" not in str(exc):
        return ""
    return (
        " The loader copies tensors around the trace: in a thread that is older than the trace, or with dispatch modes "
        "disabled. Let it start its threads, or submit to a ThreadPoolExecutor, while it loads"
    )


class ThreadRaised(RefusedError):
    """A thread or a task of the loader has raised, although the loader has returned."""


class Operators(Protocol):
    """A tracer: it is called with each operator of a loader.

    Attributes:
        functions: follows the loader's calls of torch's Python functions; None if they need not be followed.
        is_for_threads: it needs no operators of the thread that calls the loader.
    """

    functions: TorchFunctionMode | None
    is_for_threads: bool

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform one operator."""

    def is_followed(self, tensor: torch.Tensor) -> bool:
        """Whether a thread that uses this tensor must end before the loader's run ends."""


class _Work:
    """A thread, or a function given to a pool: `left` calls have not returned."""

    def __init__(self, name: str, left: int) -> None:
        self.name = name
        self.left = left
        self.has_touched = False
        self.is_late = False


class _Mode(TorchDispatchMode):
    """Passes the operators of one thread to the tracer."""

    def __init__(self, following: Following, work: _Work) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._following, self._work = following, work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass one operator on."""
        return self._following.dispatch(self._work, func, types, args, kwargs or {})


class Following:
    """Runs a loader under a tracer, in its thread, in threads that it starts, and in pools that it submits to.

    Threads and tasks of a pool are followed if a followed thread starts or submits them, even if the pool is older than
    the trace. Other threads of the process are not followed. Operators of several threads are traced one by one.

    Attributes:
        written: the storages of `others` that operators have written, with a tensor in each.
    """

    def __init__(self, tracer: Operators, others: Mapping[int, str]) -> None:
        """Follow a loader by `tracer`; `others` names storages of the engine that the tracer does not know."""
        self._tracer, self._others = tracer, others
        self.written: dict[int, torch.Tensor] = {}
        self._one_by_one = threading.RLock()
        self._ended = threading.Condition()
        self._here = threading.local()
        self._works: list[_Work] = []
        self._is_over = False
        self._refusals: list[PlanError] = []
        self._raised: list[tuple[str, BaseException]] = []

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Follow the code inside the block, and wait for its threads.

        Raises:
            PlanError: a thread still copies at the deadline, the loader starts a process, or it has caught a refusal of
                the tracer.
            ThreadRaised: a thread or a task of a pool raised, and the loader has returned.
        """
        with TRACING, contextlib.ExitStack() as stack:
            main = _Work("main", 0)
            self._here.work = main
            stack.callback(self._leave)
            self._replace_methods(stack)
            with self._functions(), contextlib.nullcontext() if self._tracer.is_for_threads else _Mode(self, main):
                try:
                    yield
                finally:
                    late = self._wait()
            if late:
                raise PlanError(
                    f"thread {late[0]!r} of the loader still copies tensors {DEADLINE_S:.0f} s after the loader has "
                    "returned; let the loader wait for its threads"
                )
            if self._refusals:  # the loader has caught it
                raise self._refusals[0]
            if self._raised:
                name, exc = self._raised[0]
                raise ThreadRaised(
                    f"thread or task {name!r} of the loader raised {type(exc).__name__}: {exc}{around(exc)}"
                ) from exc

    def dispatch(self, work: _Work, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace one operator of a followed thread."""
        with self._one_by_one:
            if not self._is_over:
                work.has_touched = work.has_touched or any(map(self._tracer.is_followed, tensors_in((args, kwargs))))
                for tensor in written_by(func, args, kwargs) if self._others else ():
                    if (key := storage_key(tensor)) in self._others:
                        self.written[key] = tensor
                try:
                    return self._tracer.__torch_dispatch__(func, types, args, kwargs)
                except PlanError as exc:
                    self._refusals.append(exc)
                    raise
                except NotImplementedError as exc:  # its result or the size of it depends on values
                    self._refusals.append(PlanError(f"the loader calls {func}, which needs values: {exc}"))
                    raise
        if work.is_late and any(map(self._tracer.is_followed, tensors_in((args, kwargs)))):
            raise RefusedError(f"thread {work.name!r} of a traced loader copies tensors after the trace has ended")
        return func(*args, **kwargs)

    # --- threads ----------------------------------------------------------------------------------------------

    def _is_followed(self) -> bool:
        """Whether the calling thread is followed."""
        return getattr(self._here, "work", None) is not None and not self._is_over

    def _followed(self, fn: Callable[..., Any], work: _Work, *, once: bool = True) -> Callable[..., Any]:
        """Return a function that runs another one under the tracer, in any thread."""

        @functools.wraps(fn, assigned=("__name__", "__doc__"), updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_over or self._is_followed():
                self._end(work if once else None)
                return fn(*args, **kwargs)
            if not once:
                with self._ended:
                    work.left += 1
            self._here.work = work
            _push_mode(_Mode(self, work))
            try:
                with self._functions():
                    return fn(*args, **kwargs)
            finally:
                _pop_mode()
                self._here.work = None
                self._end(work)

        with self._ended:
            self._works.append(work)
        return run

    def _watched(self, fn: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a function that records errors of another one: a thread's error is otherwise lost."""

        @functools.wraps(fn, assigned=("__name__", "__doc__"), updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return fn(*args, **kwargs)
            except BaseException as exc:
                self._raised.append((name, exc))
                raise

        return run

    def _functions(self) -> contextlib.AbstractContextManager[object]:
        return self._tracer.functions or contextlib.nullcontext()

    def _end(self, work: _Work | None) -> None:
        if work is not None:
            with self._ended:
                work.left -= 1
                self._ended.notify_all()

    def _wait(self) -> list[str]:
        """Wait for followed threads, end the trace, and return the names of threads that still copy."""
        with self._ended:
            self._ended.wait_for(lambda: all(work.left <= 0 for work in self._works), DEADLINE_S)
        with self._one_by_one:
            self._is_over = True
            for work in self._works:
                work.is_late = work.left > 0 and work.has_touched
        return [work.name for work in self._works if work.is_late]

    def _leave(self) -> None:
        self._here.work = None

    # --- starting threads ----------------------------------------------------------------------------------

    def _replace_methods(self, stack: contextlib.ExitStack) -> None:
        """Replace the methods that start threads and processes, until the stack closes."""

        def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            original = getattr(owner, name)
            is_own = name in vars(owner)
            setattr(owner, name, make(original))
            stack.callback(setattr, owner, name, original) if is_own else stack.callback(delattr, owner, name)

        replace(threading.Thread, "start", self._thread_start)
        replace(_thread, "start_new_thread", self._raw_start)
        replace(concurrent.futures.ThreadPoolExecutor, "submit", self._submit)
        for name in ("apply_async", "_map_async", "imap", "imap_unordered"):
            replace(multiprocessing.pool.ThreadPool, name, self._pooled)
        replace(multiprocessing.process.BaseProcess, "start", self._refused)
        replace(os, "fork", self._refused)

    def _thread_start(self, original: Any) -> Any:
        @functools.wraps(original)
        def start(thread: threading.Thread) -> None:
            if not self._is_followed() or getattr(thread, "_target", None) in _WORKERS:
                return original(thread)  # type: ignore[no-any-return]
            work = _Work(thread.name, 1)
            followed = self._followed(self._watched(thread.run, thread.name), work)

            def run() -> None:
                thread.__dict__.pop("run", None)
                followed()

            thread.run = run  # type: ignore[method-assign]
            try:
                original(thread)
            except BaseException:
                thread.__dict__.pop("run", None)
                self._end(work)
                raise
            return None

        return start

    def _raw_start(self, original: Any) -> Any:
        @functools.wraps(original)
        def start_new_thread(function: Callable[..., Any], *args: Any) -> int:
            if self._is_followed():
                work = _Work(getattr(function, "__name__", "thread"), 1)
                function = self._followed(self._watched(function, work.name), work)
            return int(original(function, *args))

        return start_new_thread

    def _submit(self, original: Any) -> Any:
        @functools.wraps(original)
        def submit(pool: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if not self._is_followed():
                return original(pool, fn, *args, **kwargs)
            work = _Work(getattr(fn, "__name__", "task of a pool"), 0)
            followed = self._followed(self._watched(fn, work.name), work, once=False)
            future = original(pool, followed, *args, **kwargs)
            with self._ended:
                work.left += 1
            future.add_done_callback(lambda _: self._end(work))  # also if it is cancelled
            return future

        return submit

    def _pooled(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(pool: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._is_followed():
                work = _Work(getattr(func, "__name__", "task of a pool"), 0)
                func = self._followed(self._watched(func, work.name), work, once=False)
            return original(pool, func, *args, **kwargs)

        return call

    def _refused(self, original: Any) -> Any:
        @functools.wraps(original)
        def start(*args: Any) -> Any:
            if not self._is_followed():
                return original(*args)
            name = f" {args[0].name!r}" if args else ""
            refusal = PlanError(
                f"the loader starts a process{name}, which cannot be followed: load in threads, or declare the tensors "
                "that the process writes as Derived"
            )
            self._refusals.append(refusal)
            raise refusal

        return start
