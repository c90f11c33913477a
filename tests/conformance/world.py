"""Some processes with arenas and a service between them, which are told what to do and asked what they did.

A `World` is some processes with a source and a target arena each, and a service that moves between them:

    one-sided     process 0 maps all arenas and runs every transfer
    two-sided     process i maps its own arenas, joins an epoch with the others and runs its halves

One more process, the last one, lends its memory, and writes where it should not when a test asks for that. It stands
for a client, and may be killed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from refitd.buffers import arena as memory
from refitd.buffers.arena import MappedArena
from tests.conformance.contestants import Contestant
from tests.conformance.member import Member
from tests.conformance.orders import TIMEOUT_S, Answer, Lent, Orders, Vitals
from tests.conformance.transfers import Plan, performed, put_numbers
from tests.support.actors import Actors

if TYPE_CHECKING:
    pass

ROOM = 2 << 20  # bytes of each arena
STAGING_BYTES = 512 << 10  # of each service; the largest transfers are larger


@dataclass(frozen=True)
class Outcome:
    """What became of one run: answers by process, and what lay in the targets before, should, and does now.

    Of the targets these are the bytes that the plan has room in; behind them nothing has changed.
    """

    answers: dict[int, Answer]
    before: list[np.ndarray]
    wanted: list[np.ndarray]
    found: list[np.ndarray]

    @property
    def arrived(self) -> bool:
        """Whether every byte that was to be written was, and no other was."""
        return _equal(self.found, self.wanted)

    @property
    def untouched(self) -> bool:
        """Whether the targets are as they were."""
        return _equal(self.found, self.before)

    def errors(self) -> set[str]:
        """Return the names of what was raised, "" among them if some process succeeded."""
        return {answer.error for answer in self.answers.values()}


def _equal(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


class World:
    """`size` processes with arenas, one more that lends, and a service between them. See the module."""

    def __init__(self, contestant: Contestant, size: int = 3, room: int = ROOM) -> None:
        self.contestant = contestant
        self.size = size
        self.room = room
        self.lender = size if not contestant.capabilities.is_one_sided else 1
        self._random = np.random.default_rng(size)
        self._noise = self._random.integers(0, 256, 2 * room + 4099, dtype=np.uint8)
        self._ids = count()
        self.is_ready = False
        self.lenders_pid = 0
        self.actors = Actors(partial(Member, contestant.backend, contestant.device), self.lender + 1)
        self._descriptors: list[int] = []
        self._arenas: list[MappedArena] = []  # source and target of each process
        self._known: list[np.ndarray] = []  # what lies in them
        try:
            for number in range(2 * size):
                self._descriptors.append(memory.create(room, f"conformance{number}"))
                self._arenas.append(MappedArena(self._descriptors[-1], room, write=True))
                self._arenas[-1].bytes[:] = self._noise[:room]
                self._known.append(self._noise[:room].copy())
            for process in [*self.runners, self.lender]:
                self._equip(process)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes and give back all memory."""
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
        """Map the arenas that a process needs; sources so that the kernel lets nobody write to them."""
        is_everywhere = process == self.lender or self.contestant.capabilities.is_one_sided
        for number, descriptor in enumerate(self._descriptors):
            if not is_everywhere and number // 2 != process:
                continue
            is_target = bool(number % 2)
            given = descriptor if is_target else memory.read_only(descriptor)
            self.actors.hand(process, given, "map", number, self.room, is_target)
            if given != descriptor:
                os.close(given)

    def replace(self, process: int) -> None:
        """Start a fresh process in the place of one that has ended."""
        self.actors.replace(process)
        self._equip(process)

    # --- epochs ---

    def new_epoch(self) -> str:
        """Return the name of an epoch that has not been yet."""
        return f"e{next(self._ids)}"

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
        """Have processes make their services: together, as an epoch of all runners, where they are two-sided.

        Args:
            processes: who comes, by default all runners.
            epoch: its name, by default a new one.
            staging: staging_bytes of some processes, where they are not STAGING_BYTES.
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
        """Fill what a plan may touch of every arena with noise."""
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
        lender_dies: bool = False,
    ) -> Outcome:
        """Run a plan with fresh noise in the arenas; return once all who can answer have.

        Args:
            plan: the transfers.
            orders: how, by default as `Orders()` says.
            orders_of: orders of processes for which others count.
            plan_of: plans of processes that believe in another one.
            answering: who lives to answer, by default all runners.
            during: what is done while they run.
            lender_dies: whether it does, before anything is read from it.
        """
        self.lay(plan)
        lent = self.lend() if any(t.lent for t in plan.transfers) else {}
        if lender_dies:
            self.actors.kill(self.lender)
        before = [known[: plan.room].copy() for known in self._known[1::2]]
        self.tell_to_run(plan, lent, orders, orders_of, plan_of)
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
        """Have a one-sided service prepare a plan; `written` is the number of an arena in the place of all targets."""
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
        lent: Lent,
        orders: Orders | None = None,
        orders_of: Mapping[int, Orders] | None = None,
        plan_of: Mapping[int, Plan] | None = None,
    ) -> None:
        """Have all runners begin; nothing is waited for."""
        for process in self.runners:
            mine = (plan_of or {}).get(process, plan)
            how = (orders_of or {}).get(process, orders or Orders())
            self.actors.tell(process, "run", mine, lent, how)

    def lend(self) -> Lent:
        """Have the lender copy all source arenas into memory of its own; return where the copies lie."""
        found: dict[int, tuple[int, int]] = self.actors.ask(self.lender, "lend")
        self.lenders_pid = found[0][0]
        return found

    def run_one(self, process: int, plan: Plan) -> Answer:
        """Have one process run a plan that the others know nothing of."""
        answer: Answer = self.actors.ask(process, "run", plan, {}, Orders())
        return answer

    def still_is(self, outcome: Outcome) -> bool:
        """Whether the targets are as a run left them."""
        return _equal([target[: len(outcome.found[0])] for target in self._targets], outcome.found)

    def vitals(self) -> dict[int, Vitals]:
        """Return what every runner holds, once it has stayed the same for a moment: threads end when they like."""
        for process in self.runners:
            self.actors.tell(process, "vitals")
        return self.actors.collect(self.runners, 20)

    @contextlib.contextmanager
    def scribbling(self, process: int, start: int, end: int) -> Iterator[None]:
        """Have the lender write to part of a target, again and again."""
        self.actors.tell(self.lender, "scribble", 2 * process + 1, start, end)
        try:
            yield
        finally:
            self.actors.tell(self.lender, "nothing")
            self.actors.collect([self.lender], 10)
            self.actors.collect([self.lender], 10)
