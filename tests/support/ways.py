"""Engines that go live in each way: a mode, which says how versions are written, and a commit point."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import mmap
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

import refitd
from refitd import Derived, MXFP8Buffer
from refitd.testing import Daemon, RunningSwap, eventually
from tests.support.controls import Controlled
from tests.support.programs import Program

POINTS = ("poll", "step", "wait", "wait_async", "controller")
# The commit points of each mode. An engine that is written in place must pause first, so it has a controller.
WAYS = {
    "shadow": POINTS,  # private tensors; each commit copies into them
    "copy": POINTS,  # an arena; a worker copies into it
    "flip": POINTS,  # an arena that is exchanged with another one
    "windows": POINTS,  # the engine's own addresses, where the pages of such an arena are mapped
    "in-place": ("controller",),
    "mxfp8": POINTS,  # as "shadow", converted
    "mxfp8-flip": POINTS,  # as "flip", converted
}
FLIPS = ("flip", "windows", "mxfp8-flip")
SHAPES = {"w": (512, 544), "n": (77,)}  # `w` is large enough for a window; MXFP8 modes convert it
WAIT_S = 60.0
TOKEN_S = 0.02

Values = dict[str, torch.Tensor]
_numbers = itertools.count()


def modes_of(point: str) -> tuple[str, ...]:
    """Return the modes that exist with a commit point."""
    return tuple(mode for mode, points in WAYS.items() if point in points)


@functools.cache
def values(version: int) -> Values:
    """Return a version's tensors: every element depends on its place, and is exact in bfloat16."""
    return {
        name: (torch.arange(torch.Size(shape).numel()) % 61 + version).to(torch.bfloat16).view(shape)
        for name, shape in SHAPES.items()
    }


def parts_of(tensors: dict[str, Any]) -> Values:
    """Return all tensors; for each MXFP8 buffer its data and its scales."""
    found: Values = {}
    for name, held in tensors.items():
        if isinstance(held, MXFP8Buffer):
            found |= {f"{name}.data": held.data, f"{name}.scale": held.scale}
        else:
            found[name] = held
    return found


@functools.cache
def _expected(version: int, is_converted: bool) -> Values:
    full: dict[str, Any] = dict(values(version))
    if is_converted:
        held = MXFP8Buffer.empty(SHAPES["w"])
        held.quantize(full["w"])
        full["w"] = held
    return parts_of(full)


def memory(client: refitd.Client, mode: str) -> dict[str, Any]:
    """Return zeroed tensors in the memory that a mode needs."""
    zeros: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in values(0).items()}
    if mode.startswith("mxfp8"):
        zeros["w"] = MXFP8Buffer.empty(SHAPES["w"])
    if mode == "windows":
        module = torch.nn.Module()
        count = zeros["w"].numel()
        flat = torch.zeros(2 * mmap.PAGESIZE + count, dtype=torch.bfloat16)
        # In each process `w` begins elsewhere in its page, but not at 0. Its bytes fill whole pages: it would need one
        # page less there, and a restarted engine could not take its retained arena.
        start = (-flat.data_ptr() % mmap.PAGESIZE) // 2 + 8 * random.randrange(1, mmap.PAGESIZE // 16)
        module.register_buffer("w", flat[start : start + count].view(SHAPES["w"]))
        module.register_buffer("n", zeros["n"])
        client.adopt(module, keep_addresses=True)
        return dict(module.named_buffers())
    if mode in ("shadow", "mxfp8"):
        return zeros
    live: dict[str, Any] = client.allocate({name: (tuple(t.shape), t.dtype) for name, t in parts_of(zeros).items()})
    if mode == "mxfp8-flip":
        live["w"] = MXFP8Buffer(live.pop("w.data"), live.pop("w.scale"))
    return live


class Member:
    """A replica of one rank that serves on a thread. After each commit point it compares its values with its version.

    Attributes:
        hook: called at the end of each commit, after the tensors have been written. It may raise.
        paused: called when the controller pauses it.
        may_commit: whether the thread reaches commit points; the controller's always commits.
        restored: the version that it served as soon as it had registered.
        versions: all versions that it has served.
        wrong: the comparisons that have failed.
    """

    def __init__(
        self, client: refitd.Client, model: str, mode: str, point: str, replica: str, rank: int = 0, world_size: int = 1
    ) -> None:
        """Each rank of a replica has all tensors."""
        self.rank, self.world_size = rank, world_size
        self.client, self.mode, self.point, self.replica = client, mode, point, replica
        self.held = memory(client, mode)
        self.live = parts_of(self.held)
        self.addresses = [tensor.data_ptr() for tensor in self.live.values()]
        self.hook: Callable[[], None] | None = None
        self.paused: Callable[[], None] | None = None
        self.may_commit = True
        self.wrong: list[str] = []
        self.versions: set[int | None] = set()
        self.calls: list[tuple[str, int | None]] = []  # that the controller got
        self._model, self._steps = model, itertools.count()
        self._turn = threading.Lock()  # held at commit points, comparisons and during pauses
        self._end = threading.Event()
        self._is_paused = False
        self._control: Controlled | None = None
        self.restored = self.register().version
        self._thread = threading.Thread(target=self._run, daemon=True, name=replica)
        self._thread.start()

    def register(self) -> refitd.Target:
        """Register, for the first time or after a close."""
        options: dict[str, Any] = {"derived": {"d": Derived(torch.zeros(3), ("n",), self._refresh)}}
        options["mode"] = "flip" if self.mode in FLIPS else self.mode.replace("mxfp8", "shadow")
        if self.point == "controller":
            if self._control is not None:
                self._control.controller.close()
            self._control = Controlled(
                self.client, self._model, self.replica, pause=self._pause, commit=None, resume=self._resume
            )
            self.target = self._control.add(self.client, self.held, controlled=True, **options)
        else:
            options |= {"replica": self.replica, "rank": self.rank, "world_size": self.world_size}
            self.target = self.client.register_target(self._model, self.held, **options)
        self.may_commit = True
        return self.target

    def leave(self) -> None:
        """Close the target. The tensors stay as they are, and the thread reaches no commit point."""
        with self._turn:
            self.may_commit = False
            self.target.close()

    def _refresh(self, tensor: torch.Tensor) -> None:
        if self.hook is not None:
            self.hook()

    def _pause(self, version: int) -> None:
        self.calls.append(("pause", version))
        if self.paused is not None:
            self.paused()
        self._is_paused = self._turn.acquire(timeout=WAIT_S)
        assert self._is_paused

    def _resume(self, version: int | None) -> None:
        self.calls.append(("resume", version))
        if self._is_paused:
            self._is_paused = False
            self._turn.release()

    def holds(self, version: int) -> bool:
        """Whether all of its tensors have the values of a version, at their first addresses."""
        wanted = _expected(version, self.mode.startswith("mxfp8"))
        same = all(torch.equal(self.live[name], tensor) for name, tensor in wanted.items())
        return same and self.addresses == [tensor.data_ptr() for tensor in self.live.values()]

    def fill(self, value: int) -> None:
        """Write all tensors, as an engine does that discards its weights."""
        for tensor in self.live.values():
            tensor.fill_(value)

    @contextlib.contextmanager
    def resting(self) -> Iterator[refitd.Target]:
        """Keep the thread from commit points and comparisons during the block."""
        with self._turn:
            yield self.target

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        while not self._end.wait(TOKEN_S):
            with self._turn:
                try:
                    if self.may_commit:
                        self._commit_point(loop)
                    self._compare()
                except (refitd.CommitError, refitd.DeadlineExceeded, TimeoutError):
                    pass  # a swap reports a failed commit; a wait ends, or is cancelled, without a new version
                except Exception as exc:
                    self.wrong.append(f"{self.replica}: {exc!r}")
                    break
        loop.close()

    def _commit_point(self, loop: asyncio.AbstractEventLoop) -> None:
        next_version = (self.target.version or 0) + 1
        match self.point:
            case "poll":
                self.target.poll()
            case "step":
                self.target.poll(step=next(self._steps))
            case "wait":
                self.target.wait(next_version, timeout=0.02)
            case "wait_async":
                waits = self.target.wait_async(next_version, timeout=WAIT_S)
                loop.run_until_complete(asyncio.wait_for(waits, 0.02))

    def _compare(self) -> None:
        version = self.target.version
        is_same = version is None or self.holds(version)
        if version == self.target.version:
            self.versions.add(version)
            if not is_same:
                self.wrong.append(f"{self.replica}: it serves version {version}, and holds something else")

    def end(self) -> None:
        """Stop serving; fail if a comparison has failed."""
        self._end.set()
        self._thread.join(WAIT_S)
        assert not self.wrong, self.wrong


class Fleet:
    """A trainer and engines of some ways, on one node or on two."""

    def __init__(self, daemon: Daemon, *, slots: int = 4, reconnect: bool = False) -> None:
        self.daemon, self._reconnect = daemon, reconnect
        self.model = f"policy{next(_numbers)}"
        self.members: dict[str, Member] = {}
        self.trainer = daemon.connect("trainer", reconnect=reconnect)
        self._clients = [self.trainer]
        self._given = {name: tensor.clone() for name, tensor in values(0).items()}
        self.source = self.trainer.register_source(self.model, self._given, slots=slots)

    def connect(self, name: str, daemon: Daemon | None = None) -> refitd.Client:
        """Return a client that `close` closes."""
        self._clients.append((daemon or self.daemon).connect(name, reconnect=self._reconnect))
        return self._clients[-1]

    def add(
        self,
        mode: str,
        point: str,
        replica: str = "",
        *,
        daemon: Daemon | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> Member:
        """Register an engine's rank with a separate client, and let it serve."""
        replica = replica or f"{mode}-{point}"
        client = self.connect(replica, daemon)
        found = Member(client, self.model, mode, point, replica, rank, world_size)
        self.members[replica if world_size == 1 else f"{replica}:{rank}"] = found
        assert found.target.flips == (mode in FLIPS), replica
        return found

    def add_all(self, point: str) -> list[Member]:
        """Register an engine of each mode that has a commit point."""
        return [self.add(mode, point) for mode in modes_of(point)]

    def publish(self, version: int) -> None:
        for name, tensor in values(version).items():
            self._given[name].copy_(tensor)
        self.source.publish(version, timeout=WAIT_S)

    def swap(self, version: int, **options: Any) -> refitd.SwapReport:
        self.publish(version)
        return self.trainer.swap(self.model, version, timeout=WAIT_S, **options)

    def swap_whenever(self, version: int) -> None:
        """Publish and swap to a version while the daemon restarts; wait until all serve it."""
        self.publish(version)

        def swapped() -> bool:
            try:
                return self.trainer.swap(self.model, version, timeout=WAIT_S).outcome == "committed"
            except refitd.RefitdError as exc:
                # the version was decided when the daemon ended, and the engines committed it afterwards
                return "already" in str(exc) and all(one.target.version == version for one in self.members.values())

        eventually(swapped, f"version {version} goes live", WAIT_S)
        self.serve(version)

    def rollback(self, version: int | None = None) -> refitd.SwapReport:
        return self.trainer.rollback(self.model, version, timeout=WAIT_S)

    def serve(self, version: int, *members: Member) -> None:
        """Wait until these members, or all, serve a version; check their values."""
        those = members or tuple(self.members.values())
        for one in those:
            eventually(lambda one=one: one.target.version == version, f"{one.replica} serves {version}", WAIT_S)
            assert one.holds(version) and not one.wrong, one.replica

    def verify(self, outcome: str = "proven") -> None:
        report = self.trainer.verify(self.model, timeout=WAIT_S)
        assert report.outcome == outcome, report

    def running(self, version: int) -> RunningSwap:
        """Publish a version, and begin to swap to it."""
        self.publish(version)
        return RunningSwap(self.daemon.connect("operator"), self.model, version)

    def is_known(self) -> bool:
        """Whether a coordinator knows the source and all engines."""
        with contextlib.suppress(refitd.RefitdError):
            found = [m for m in self.trainer.status().models if m.model == self.model]
            return bool(found) and bool(found[0].sources) and len(found[0].targets) == len(self.members)
        return False

    def states(self) -> dict[str, str]:
        """Return the state of each replica, by the coordinator."""
        models = [m for m in self.trainer.status().models if m.model == self.model]
        return {t.replica: str(t.state) for m in models for t in m.targets}

    def close(self) -> None:
        """End everything; fail if an engine has held something else than its version."""
        try:
            for one in self.members.values():
                one.end()
        finally:
            for one in self.members.values():
                with contextlib.suppress(refitd.RefitdError):
                    one.target.close()
            with contextlib.suppress(refitd.RefitdError):
                self.source.close()
            for client in self._clients:
                client.close()
            self.members.clear()


def refusing(fleet: Fleet, refused: Callable[[int], bool]) -> refitd.Target:
    """Add a replica whose controller refuses to pause for some versions, which aborts their swaps."""

    def pause(version: int) -> None:
        if refused(version):
            raise RuntimeError(f"not {version}")

    client = fleet.connect("refuses")
    return Controlled(client, fleet.model, "refuses", pause=pause).add(client, memory(client, "flip"), mode="flip")


class Engines:
    """A process with an engine of each mode that polls; it can be killed and started again."""

    def __init__(self, fleet: Fleet) -> None:
        self._command = [sys.executable, "-m", "tests.support.ways", str(fleet.daemon.directory), fleet.model]
        self._now: Program | None = None

    def start(self) -> Any:
        """Start it; return for each mode the version that it restored; "torn" if values are not that version's."""
        self._now = Program(self._command)
        return json.loads(self._now.line())

    def stop(self) -> str:
        """Let it close its client; return the comparisons that have failed."""
        assert self._now is not None
        return self._now.process.communicate("\n", timeout=WAIT_S)[0]

    def kill(self) -> None:
        if self._now is not None:
            self._now.kill()


def main(directory: str, model: str) -> None:
    """Serve until a line or the end of stdin comes."""
    with refitd.connect(directory, name="engines") as client:
        members = [Member(client, model, mode, "poll", f"{mode}-process") for mode in modes_of("poll")]
        found = {
            one.mode: one.restored if one.restored is None or one.holds(one.restored) else "torn" for one in members
        }
        print(json.dumps(found), flush=True)
        sys.stdin.readline()
        print("".join(text for one in members for text in one.wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
