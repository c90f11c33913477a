"""One process of a world: its arenas, its service, and the errors that it catches."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

from refitd.buffers.arena import MappedArena
from refitd.copy_services import Epoch
from refitd.copy_services.registry import installed
from refitd.testing.actors import Mailroom
from refitd.testing.conformance.services import OneSided, TwoSided
from refitd.testing.conformance.transfers import Answer, Orders, Plan, Stop, Vitals

LABELS = ("alpha", "beta", "gamma", "delta")


class Member:
    """One process's arenas and service."""

    def __init__(self, backend: str, device: str, number: int, room: Mailroom) -> None:
        # two processes of one node may share its only GPU
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        os.environ.setdefault("NCCL_HOSTID", f"conformance{number}")
        self._number = number
        self._room = room
        self._backend = installed().find(backend)
        self._device = device
        self._arenas: dict[int, MappedArena] = {}
        self._service: OneSided | TwoSided | None = None

    def map(self, number: int, nbytes: int, write: bool) -> None:
        """Map the arena whose descriptor comes with this call."""
        descriptor = self._room.take_descriptor()
        self._arenas[number] = MappedArena(descriptor, nbytes, write=write)
        os.close(descriptor)

    def nothing(self) -> None:
        """End a `scribble`."""

    def scribble(self, number: int, start: int, end: int) -> None:
        """Write to a part of an arena until the next call."""
        part = self._arenas[number].bytes[start:end]
        value = 0
        while not self._room.is_asked():
            for _ in range(50):
                part[:] = value = (value + 1) % 251

    def join(self, epoch: str, size: int, staging_bytes: int, timeout: float) -> Answer:
        """Make a service to replace the present one."""
        self.leave()
        started = time.monotonic()

        def make() -> Answer:
            if self._backend.mapped is not None:
                self._service = OneSided(self._backend, self._arenas, self._device)
                return Answer()
            import torch

            torch.set_num_threads(1)
            assert self._backend.join is not None
            devices = self._backend.capabilities.devices
            on_device = "cuda" in devices and torch.cuda.is_available()
            service = self._backend.join(
                Epoch(
                    id=epoch,
                    index=self._number,
                    labels=LABELS[:size],
                    address="127.0.0.1",
                    staging_bytes=staging_bytes,
                    mailbox=self._room.mailbox(epoch),
                    timeout=timeout,
                    key=hashlib.sha256(epoch.encode()).digest(),
                    device=f"cuda:{self._number % torch.cuda.device_count()}" if on_device else "cpu",
                )
            )
            assert service.name == self._backend.name and service.capabilities == self._backend.capabilities
            self._service = TwoSided(self._number, service, self._arenas, self._device)
            return Answer()

        answer = _answered(make)
        return replace(answer, seconds=time.monotonic() - started, is_usable=self._service is not None)

    def leave(self) -> None:
        """Close the service, twice: that is allowed."""
        service, self._service = self._service, None
        if service is not None:
            service.close()
            service.close()
            assert not service.is_usable

    def prepare(self, plan: Plan, written: int | None) -> Answer:
        """Prepare a plan without running it; see World.prepare."""
        assert isinstance(self._service, OneSided)
        return _answered(partial(self._service.prepare, plan, Orders(), written))

    def run(self, plan: Plan, orders: Orders) -> Answer:
        """Prepare a plan and run it."""
        service = self._service
        assert service is not None
        told: list[int] = []
        started = time.monotonic()

        def on_progress(nbytes: int) -> None:
            told.append(nbytes)
            if orders.kill_at is not None and nbytes >= orders.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if (
                orders.stop_at is not None
                and nbytes >= orders.stop_at
                and not any(n >= orders.stop_at for n in told[:-1])
            ):
                os.kill(os.getpid(), signal.SIGSTOP)
            if orders.raise_at is not None and nbytes >= orders.raise_at:
                raise Stop(f"at {nbytes} bytes")
            if orders.pause_s:
                time.sleep(orders.pause_s)

        def run() -> Answer:
            service.prepare(plan, orders)
            return service.run(orders, on_progress)

        seconds = 0.0

        def watch() -> bool:
            nonlocal seconds
            seconds = time.monotonic() - started
            before = self._targets()
            time.sleep(orders.linger_s)
            service.look_again()
            return self._targets() != before

        answer = _answered(run, watch)
        return replace(
            answer, seconds=seconds or time.monotonic() - started, progress=tuple(told), is_usable=service.is_usable
        )

    def vitals(self) -> Vitals:
        """Return the resources of this process, once no more threads are ending."""
        threads, since = len(os.listdir("/proc/self/task")), time.monotonic()
        while time.monotonic() < since + 0.1:
            time.sleep(0.01)
            if len(os.listdir("/proc/self/task")) != threads:
                threads, since = len(os.listdir("/proc/self/task")), time.monotonic()
        assert threading.active_count() <= threads
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Vitals(len(os.listdir("/proc/self/fd")), threads, resident)

    def _targets(self) -> list[bytes]:
        return [arena.bytes.tobytes() for arena in self._arenas.values() if arena.writable]


def _answered(step: Any, watch: Any = None) -> Answer:
    """Return the answer of a step, or its error; `watch` is called while the error is still referenced."""
    try:
        answer = step()
        return answer if isinstance(answer, Answer) else Answer()
    except Exception as exc:
        return Answer(
            error=type(exc).__name__,
            said=str(exc),
            kinds=tuple(kind.__name__ for kind in type(exc).__mro__),
            copy=getattr(exc, "copy", -1),
            wrote_late=bool(watch and watch()),
        )
