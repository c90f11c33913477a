"""Run transfers between processes, each with its own arenas, over each backend that can run here.

A `World` is some processes with a source and a target arena each, and a service that moves between them:

    one-sided     process 0 maps all arenas and runs every transfer
    two-sided     process i maps its own arenas, joins an epoch with the others and runs its halves

The last process, the client, writes outside its bounds when a test asks for it. Tests may kill it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from refitd.buffers import arena as memory
from refitd.buffers.arena import MappedArena
from refitd.copy_services import Backend, Capabilities
from refitd.copy_services.registry import installed
from refitd.testing.actors import Actors
from refitd.testing.conformance.member import Member
from refitd.testing.conformance.transfers import TIMEOUT_S, Answer, Orders, Plan, Vitals, performed, put_numbers


@dataclass(frozen=True)
class Contestant:
    """A backend, and the device of the tensors that it is given."""

    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities in the registry."""
        return _backend(self.backend).capabilities

    @property
    def is_shared(self) -> bool:
        """Whether any process reaches the tensors."""
        return self.device == "cpu"

    @property
    def converts(self) -> bool:
        """Whether it converts dtypes during the transfer."""
        return self.device == "cpu" or not self.capabilities.is_one_sided

    @property
    def takes_any_address(self) -> bool:
        """Whether an element's address need not be a multiple of its size; torch's tensors need that."""
        return self.device == "cpu" or self.capabilities.is_one_sided

    def found(self) -> Backend:
        """Return the backend from the registry."""
        return installed().find(self.backend)

    def missing(self) -> str:
        """Return the reason why it cannot be tested here, or ""."""
        backend = _backend(self.backend)
        if missing := backend.missing():
            return missing
        if backend.mapped is None and backend.join is None:
            return f"{self.backend} can neither be made for arenas nor join an epoch; this suite needs one of them"
        if self.device not in ("cpu", "cuda"):
            return f"this suite has no memory on {self.device}; add it to refitd/testing/conformance/services.py"
        if self.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                return "no CUDA device on this machine"
        return ""


def contestants() -> list[Contestant]:
    """Return every installed backend, once for each kind of memory that it declares."""
    return [
        Contestant(backend.name, device) for backend in installed() for device in sorted(backend.capabilities.devices)
    ]


def _backend(name: str) -> Backend:
    return next(backend for backend in installed() if backend.name == name)


ROOM = 2 << 20  # bytes of each arena
STAGING_BYTES = 512 << 10  # of each service; the largest transfers are larger


@dataclass(frozen=True)
class Outcome:
    """The result of one run: answers by process, and the target bytes before, expected, and now.

    Target bytes cover only the room of the plan. Bytes beyond it have not changed.
    """

    answers: dict[int, Answer]
    before: list[np.ndarray]
    wanted: list[np.ndarray]
    found: list[np.ndarray]

    @property
    def arrived(self) -> bool:
        """Whether exactly the expected bytes were written."""
        return _equal(self.found, self.wanted)

    @property
    def untouched(self) -> bool:
        """Whether no target has changed."""
        return _equal(self.found, self.before)

    def errors(self) -> set[str]:
        """Return the names of the raised errors, including "" if some process succeeded."""
        return {answer.error for answer in self.answers.values()}


def _equal(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


class World:
    """`size` processes with arenas, one more as a client, and a service between them. See the module."""

    def __init__(self, contestant: Contestant, size: int = 3, room: int = ROOM) -> None:
        self.contestant = contestant
        self.size = size
        self.room = room
        self.client = size if not contestant.capabilities.is_one_sided else 1
        self._random = np.random.default_rng(size)
        self._noise = self._random.integers(0, 256, 2 * room + 4099, dtype=np.uint8)
        self._name, self._ids = secrets.token_hex(4), count()  # names of epochs are never reused
        self.is_ready = False
        self.actors = Actors(partial(Member, contestant.backend, contestant.device), self.client + 1)
        self._descriptors: list[int] = []
        self._arenas: list[MappedArena] = []  # source and target of each process
        self._known: list[np.ndarray] = []  # their contents
        try:
            for number in range(2 * size):
                self._descriptors.append(memory.create(room, f"conformance{number}"))
                self._arenas.append(MappedArena(self._descriptors[-1], room, write=True))
                self._arenas[-1].bytes[:] = self._noise[:room]
                self._known.append(self._noise[:room].copy())
            for process in [*self.runners, self.client]:
                self._equip(process)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes and free all memory."""
        self.is_ready = False
        self.actors.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors, self._arenas = [], []

    @property
    def runners(self) -> list[int]:
        """The processes that run transfers."""
        return [0] if self.contestant.capabilities.is_one_sided else list(range(self.size))

    def _equip(self, process: int) -> None:
        """Map the arenas that a process needs. The kernel maps sources read-only."""
        is_everywhere = process == self.client or self.contestant.capabilities.is_one_sided
        for number, descriptor in enumerate(self._descriptors):
            if not is_everywhere and number // 2 != process:
                continue
            is_target = bool(number % 2)
            given = descriptor if is_target else memory.read_only(descriptor)
            self.actors.hand(process, given, "map", number, self.room, is_target)
            if given != descriptor:
                os.close(given)

    def replace(self, process: int) -> None:
        """Start a fresh process after one has ended."""
        self.actors.replace(process)
        self._equip(process)

    # --- epochs ---

    def new_epoch(self) -> str:
        """Return a new name for an epoch."""
        return f"{self._name}-{next(self._ids)}"

    def join(
        self, processes: Sequence[int] | None = None, *, timeout: float = TIMEOUT_S, **how: Any
    ) -> dict[int, Answer]:
        """Do as `tell_to_join`, and return the answers."""
        self.tell_to_join(processes, timeout=timeout, **how)
        answers: dict[int, Answer] = self.actors.collect(self.runners if processes is None else processes, timeout + 10)
        self.is_ready = not any(answer.error for answer in answers.values())
        return answers

    def tell_to_join(
        self,
        processes: Sequence[int] | None = None,
        *,
        epoch: str | None = None,
        staging: Mapping[int, int] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        """Have processes make their services. Two-sided services join one epoch of all runners.

        Args:
            processes: the processes that join, by default all runners.
            epoch: its name, by default a new one.
            staging: staging_bytes by process, where they are not STAGING_BYTES.
            timeout: seconds until joining ends.
        """
        name = epoch or self.new_epoch()
        for process in self.runners if processes is None else processes:
            bytes_there = (staging or {}).get(process, STAGING_BYTES)
            self.actors.tell(process, "join", name, len(self.runners), bytes_there, timeout)

    def leave(self) -> None:
        """Have all runners close their services."""
        for process in self.runners:
            self.actors.tell(process, "leave")
        self.actors.collect(self.runners, 20)

    # --- runs ---

    def lay(self, plan: Plan) -> None:
        """Fill all bytes of arenas that a plan may access with noise."""
        assert plan.room <= self.room
        for arena in self._arenas:
            start = int(self._random.integers(0, len(self._noise) - plan.room))
            arena.bytes[: plan.room] = self._noise[start : start + plan.room]
        put_numbers(plan, self._sources, self._random)
        self._note(plan.room)

    def _note(self, room: int) -> None:
        for known, arena in zip(self._known, self._arenas, strict=True):
            known[:room] = arena.bytes[:room]

    @property
    def _sources(self) -> list[np.ndarray]:
        return [arena.bytes for arena in self._arenas[0::2]]

    @property
    def _targets(self) -> list[np.ndarray]:
        return [arena.bytes for arena in self._arenas[1::2]]

    def run(
        self,
        plan: Plan,
        orders: Orders | None = None,
        *,
        orders_of: Mapping[int, Orders] | None = None,
        plan_of: Mapping[int, Plan] | None = None,
        answering: Sequence[int] | None = None,
        during: Callable[[], object] | None = None,
    ) -> Outcome:
        """Run a plan with fresh noise in the arenas. Return once all processes that can answer have done so.

        Args:
            plan: the transfers.
            orders: for all processes, by default `Orders()`.
            orders_of: orders of single processes, instead of `orders`.
            plan_of: different plans for single processes.
            answering: the processes that survive and answer, by default all runners.
            during: called while they run.
        """
        self.lay(plan)
        before = [known[: plan.room].copy() for known in self._known[1::2]]
        self.tell_to_run(plan, orders, orders_of, plan_of)
        if during is not None:
            during()
        self.is_ready = False
        timeout = max(o.timeout + o.linger_s for o in [orders or Orders(), *(orders_of or {}).values()]) + 20
        answers = self.actors.collect(self.runners if answering is None else answering, timeout)
        self.is_ready = all(answer.is_usable for answer in answers.values())
        held = self._known[0::2]
        assert _equal(self._sources, held), "a source has been written to"
        behind = [target[plan.room :] for target in self._targets]
        assert _equal(behind, [known[plan.room :] for known in self._known[1::2]]), "bytes behind the plan have changed"
        wanted = performed(plan, held, before)
        self._note(plan.room)
        return Outcome(answers, before, wanted, [target[: plan.room].copy() for target in self._targets])

    def prepare(self, plan: Plan, *, written: int | None = None) -> Answer:
        """Have a one-sided service prepare a plan. `written`: number of the only target arena."""
        self.lay(replace(plan, transfers=()))
        answer: Answer = self.actors.ask(0, "prepare", plan, written)
        return answer

    @property
    def untouched(self) -> bool:
        """Whether the targets are as they were before `prepare`."""
        return _equal(self._targets, self._known[1::2])

    def tell_to_run(
        self,
        plan: Plan,
        orders: Orders | None = None,
        orders_of: Mapping[int, Orders] | None = None,
        plan_of: Mapping[int, Plan] | None = None,
    ) -> None:
        """Have all runners begin; do not wait."""
        for process in self.runners:
            mine = (plan_of or {}).get(process, plan)
            how = (orders_of or {}).get(process, orders or Orders())
            self.actors.tell(process, "run", mine, how)

    def run_one(self, process: int, plan: Plan) -> Answer:
        """Have one process run a plan that the other processes do not have."""
        answer: Answer = self.actors.ask(process, "run", plan, Orders())
        return answer

    def still_is(self, outcome: Outcome) -> bool:
        """Whether the targets have not changed since a run."""
        return _equal([target[: len(outcome.found[0])] for target in self._targets], outcome.found)

    def vitals(self) -> dict[int, Vitals]:
        """Return the resources of every runner, once they are stable for a moment: threads end with some delay."""
        for process in self.runners:
            self.actors.tell(process, "vitals")
        return self.actors.collect(self.runners, 20)

    @contextlib.contextmanager
    def scribbling(self, process: int, start: int, end: int) -> Iterator[None]:
        """Have the client write to part of a target repeatedly."""
        self.actors.tell(self.client, "scribble", 2 * process + 1, start, end)
        try:
            yield
        finally:
            self.actors.tell(self.client, "nothing")
            self.actors.collect([self.client], 10)
            self.actors.collect([self.client], 10)
