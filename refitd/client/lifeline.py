"""Watch, through pidfds, the processes that must live for this one to serve."""

from __future__ import annotations

import errno
import multiprocessing
import os
import select
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Self

from refitd.client.arguments import MAX_PID, text, whole
from refitd.errors import Orphaned, RefusedError
from refitd.text import shown


class Lifeline:
    """The processes that this one serves for, such as the server of an engine; pass it to `connect(lives_with=)`.

    A pidfd refers to a process; the kernel may reuse a pid, but not a pidfd. A pidfd is readable once the process has
    ended, for any reason, even before it is reaped. It works for a parent, for a grandparent (a worker's server), and
    for an unrelated process. After `fork`, `setsid` or a second fork of this process it still refers to the same
    process. Several clients of a process may share a lifeline.
    """

    def __init__(self, processes: Mapping[int, str]) -> None:
        """Open the pidfds and start the watching thread.

        Args:
            processes: {pid: name in messages}, such as {pid: "the API server"}. The pids belong to this process's pid
                namespace. Let a process that knows the pid for certain pass it on: if a child's parent has ended,
                `os.getppid()` returns the pid of another process.

        Raises:
            Orphaned: one of them has ended.
            RefusedError: an argument is invalid, or the kernel has no pidfds (Linux before 5.3, or a seccomp filter).
        """
        self._ended = ""
        self._calls: list[weakref.WeakMethod[Callable[[Orphaned], None]]] = []
        self._lock = threading.Lock()
        if not isinstance(processes, Mapping) or not processes:
            raise RefusedError(f"a lifeline's processes are {shown(processes)}, expected {{pid: name}}")
        names = {whole("pid", pid, 1, MAX_PID): text("process", what) for pid, what in processes.items()}
        fds: dict[int, str] = {}
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            for pid, what in names.items():
                fds[_opened(pid, what)] = f"{what} (pid {pid})"
            self._ended = _ended(fds)
            self.check()
        except BaseException:
            _close_all([*fds, wake])
            raise
        self._close = weakref.finalize(self, _stop, wake, os.getpid())
        self._close.atexit = False
        watched = fds, wake, weakref.ref(self)
        threading.Thread(target=_watch, args=watched, name="refitd-lifeline", daemon=True).start()

    @classmethod
    def of_parent(cls, what: str, others: Mapping[int, str] | None = None) -> Self:
        """Return the lifeline of the process that started this one; `what` is its name in messages.

        In a process of `multiprocessing` it watches the process that created this one. Elsewhere it watches the
        parent, which must live when this is called. `others` are further processes, as in the constructor.

        Raises:
            Orphaned: one of the processes has ended.
            RefusedError: as the constructor.
        """
        started = multiprocessing.parent_process()
        pid = os.getppid() if started is None or started.pid is None else started.pid
        lifeline = cls({pid: what, **(others or {})})
        # If the parent lives now, the pid is the parent's. Otherwise the kernel may have reused it.
        if os.getppid() != pid and (started is None or not started.is_alive()):
            lifeline.close()
            raise _orphaned(f"{what} (pid {pid}) has ended")
        return lifeline

    @property
    def ended(self) -> str:
        """The processes that have ended, such as "the API server (pid 71) has ended"; "" while all live."""
        return self._ended

    def check(self) -> None:
        """Raise Orphaned if one of the processes has ended."""
        if self._ended:
            raise _orphaned(self._ended)

    def on_end(self, call: Callable[[Orphaned], None]) -> None:
        """Call a bound method with the error, once, on the lifeline's thread; do not keep its object alive.

        If a process has ended already, this calls the method before it returns.
        """
        with self._lock:
            if not self._ended:
                self._calls.append(weakref.WeakMethod(call))
                return
        call(_orphaned(self._ended))

    def close(self) -> None:
        """Stop watching; `ended` does not change afterwards."""
        self._close()

    def _end(self, ended: str) -> None:
        with self._lock:
            self._ended = ended
            calls, self._calls = self._calls, []
        for each in calls:
            if (call := each()) is not None:
                call(_orphaned(ended))


def _orphaned(ended: str) -> Orphaned:
    return Orphaned(
        f"{ended}, and this process serves for it: its registrations are closed, and it must serve nothing; end this "
        "process, and start it again together with its server"
    )


def _opened(pid: int, what: str) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise _orphaned(f"{what} (pid {pid}) has ended") from None
    except OSError as exc:
        why = "the kernel is older than Linux 5.3" if exc.errno == errno.ENOSYS else f"pidfd_open: {exc.strerror}"
        raise RefusedError(
            f"the end of {what} (pid {pid}) cannot be noticed: {why}; allow pidfd_open in the container's seccomp "
            "profile, or connect without lives_with"
        ) from exc


def _ended(fds: Mapping[int, str], wake: int | None = None) -> str:
    """Return which processes have ended, "" if none; given `wake`, wait for an end or a write to `wake`."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    if wake is not None:
        poller.register(wake, select.POLLIN)
    ready = [fd for fd, _ in poller.poll(0 if wake is None else None) if fd != wake]
    return " and ".join(f"{fds[fd]} has ended" for fd in ready)


def _watch(fds: Mapping[int, str], wake: int, of: weakref.ref[Lifeline]) -> None:
    """Wait for the end of a process, then until the lifeline is closed: the body of a thread."""
    try:
        if (ended := _ended(fds, wake)) and (lifeline := of()) is not None:
            lifeline._end(ended)
            del lifeline
        _ended({}, wake)
    finally:
        _close_all([*fds, wake])


def _stop(wake: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child shares the descriptor with its parent's thread
        os.eventfd_write(wake, 1)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
