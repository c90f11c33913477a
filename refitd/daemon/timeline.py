"""Record a timeline of this node's last swaps from the daemon's events and instructions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from refitd.daemon.actions import (
    CoordinatorSaid,
    Event,
    Instruction,
    RestartWorker,
    ToClient,
    ToCoordinator,
    ToWorker,
    WorkerDied,
    WorkerSaid,
)
from refitd.daemon.jobs import JobTable
from refitd.daemon.links import Alignment, CoordinatorClock
from refitd.daemon.members import LocalMember
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.reports import MAX_SPANS, GetTrace, NodeTrace, TraceSpan

# Limit on stored swaps, and on stored loads of plans.
MAX_SWAPS = 16

# Limit on progress marks of one run; later progress extends the last mark.
MAX_CHUNKS = 32

DAEMON = "daemon"

# Identifies a worker's run: copies and digests have separate numbers.
_Key = tuple[str, int]
_JOB, _DIGESTS = "job", "digests"


@dataclass(slots=True)
class _Open:
    """A span that has not ended."""

    who: str
    name: str
    began: float
    chunks: list[tuple[float, int]] = field(default_factory=list)  # (end, bytes so far)


@dataclass(slots=True)
class _SwapTimeline:
    spans: list[TraceSpan] = field(default_factory=list)
    open: dict[Hashable, _Open] = field(default_factory=dict)
    dropped: int = 0
    alignment: Alignment | None = None  # of the clocks while the span ran

    def add(self, *spans: TraceSpan) -> None:
        room = max(0, MAX_SPANS - len(self.spans))
        self.spans += spans[:room]
        self.dropped += len(spans[room:])


class Timeline:
    """Stores the spans of the last MAX_SWAPS swaps; it never acts on events."""

    def __init__(
        self,
        jobs: JobTable,
        members: Mapping[str, LocalMember],
        worker_pids: Mapping[int, int],
        clock: CoordinatorClock,
    ) -> None:
        self._jobs, self._members, self._worker_pids, self._clock = jobs, members, worker_pids, clock
        self._swaps: OrderedDict[str, _SwapTimeline] = OrderedDict()
        self._latest: str | None = None  # the swap that owns new digests
        self._runs: dict[_Key, tuple[str, int]] = {}  # open runs -> (swap, worker)
        self._plans: OrderedDict[str, tuple[float, float | None]] = OrderedDict()  # loads that no swap has used
        self._now = 0.0

    def watch(self, event: Event, instructions: Iterable[Instruction], now: float) -> None:
        """Record the swaps' progress from an event and from the instructions that the state returned for it."""
        self._now = now
        match event.message if isinstance(event, CoordinatorSaid | WorkerSaid) else event:
            case sidecar.RunProgress(run, nbytes):
                self._progressed((_JOB, run), nbytes)
            case sidecar.RunDone(run, reason=reason) if reason:
                self._ran((_JOB, run), note=reason)
            case sidecar.RunDone() as done:
                self._ran((_JOB, done.run), done.bytes, seconds=done.seconds, steps=done.steps)
            case sidecar.SpansRead(run):
                self._ran((_DIGESTS, run))
            case WorkerDied(worker):
                self._ended_with(worker)
            case cluster.LoadPlan(plan=plan):
                self._plans[plan] = self._now, None
                while len(self._plans) > MAX_SWAPS:
                    self._plans.popitem(last=False)
            case cluster.DigestRegions(swap=swap):
                self._begin(swap)
                self._open(swap, "regions", DAEMON, "compare sources")
            case cluster.Stage(swap, plan, version):
                self._begin(swap, version)
                began, ended = self._plans.pop(plan, (0.0, None))
                if ended is not None:
                    self._swaps[swap].add(TraceSpan(DAEMON, "load plan", began, ended))
                self._open(swap, "stage", DAEMON, "stage")
            case local.Control(member, swap, "pause" | "commit" as what):
                self._begin(swap)
                self._open(swap, (what, member), f"controller {member[:200]}", what)
            case cluster.Abort(swap) if (found := self._swaps.get(swap)) is not None:
                for key in list(found.open):
                    self._close(swap, key, "aborted")
            case cluster.CheckMembers():
                self._latest = None  # later digests belong to a verification, not to the swap
        for instruction in instructions:
            match instruction.message if isinstance(instruction, ToCoordinator) else instruction:
                case ToWorker(worker, sidecar.RunJob(_, number)):
                    if (job := self._jobs.runs.get(number)) is not None:
                        name = "exchange with other nodes" if job.crosses else "convert" if job.converts else "copy"
                        name = f"{name}, compared" if job.verify else name
                        self._runs_on(worker, getattr(job.purpose, "swap", ""), (_JOB, number), name)
                case ToWorker(worker, sidecar.ReadSpans(run)):
                    self._runs_on(worker, self._latest, (_DIGESTS, run), "digests")
                case RestartWorker(worker):
                    self._ended_with(worker)
                case cluster.PlanLoaded(plan, reason="", missing=0) if plan in self._plans:
                    self._plans[plan] = self._plans[plan][0], self._now
                case cluster.RegionsDigested(swap=swap):
                    self._close(swap, "regions")
                case cluster.StageDone(swap=swap, bytes=nbytes, reason=reason):
                    self._close(swap, "stage", reason, nbytes)
                case local.Publish(member) | local.Withdraw(member) as said:
                    note = "the version was withdrawn" if isinstance(said, local.Withdraw) else ""
                    known = self._members.get(member)
                    for swap in self._swaps:
                        nbytes = 0 if known is None else known.registration.nbytes
                        self._close(swap, ("publish", member), note, nbytes)
                case local.CommitDone(swap, member, paused_s) if (found := self._swaps.get(swap)) is not None:
                    self._close(swap, ("commit", member))
                    since, who = self._now - paused_s, f"{self._name(member)}: pause"
                    found.add(TraceSpan(who, "stands still", since, self._now))
                    found.alignment = self._clock.alignment or found.alignment
                case local.Controlled(member, swap, what, _, reason):
                    self._close(swap, (what, member), reason)
                case local.CommitFailed(swap, member, reason):
                    self._close(swap, ("pause", member), reason)
                    self._close(swap, ("commit", member), reason)
                case ToClient(message=local.PrepareCommit(swap, member)):
                    self._open(swap, ("commit", member), self._name(member), "commit")

    def part(self, asked: GetTrace, node: str, host: str, now: float) -> NodeTrace:
        """Return this node's section of a swap's trace; it has no spans if the swap is no longer stored."""
        found = self._swaps.get(asked.swap) or _SwapTimeline()
        unended = [TraceSpan(one.who, one.name, one.began, now, is_open=True) for one in found.open.values()]
        kept = (*found.spans, *unended)
        at = found.alignment or self._clock.alignment
        return NodeTrace(
            asked.asked,
            node,
            host,
            kept[:MAX_SPANS],
            found.dropped + max(0, len(kept) - MAX_SPANS),
            at.offset_s if at is not None else 0.0,
            at.error_s if at is not None else None,
        )

    # --- events -------------------------------------------------------------------------------------------

    def _begin(self, swap: str, version: int | None = None) -> None:
        """Begin a swap's timeline, with a span for each source of this node that still writes its version."""
        self._latest = swap
        found = self._swaps.setdefault(swap, _SwapTimeline())
        while len(self._swaps) > MAX_SWAPS:
            gone, _ = self._swaps.popitem(last=False)
            self._runs = {run: at for run, at in self._runs.items() if at[0] != gone}
        for member in self._members.values():
            for slot in member.source.slots if member.source is not None else ():
                if version is not None and slot.writing == version:
                    found.open["publish", member.id] = _Open(self._name(member.id), "publish", slot.since)

    def _open(self, swap: str, key: Hashable, who: str, name: str) -> None:
        if (found := self._swaps.get(swap)) is not None:
            found.open.setdefault(key, _Open(who, name, self._now))

    def _close(
        self,
        swap: str,
        key: Hashable,
        note: str = "",
        nbytes: int = 0,
        *,
        seconds: float | None = None,
        steps: Sequence[sidecar.StepTimes] = (),
    ) -> None:
        """End a span; `seconds` is its duration as a worker measured it, without the wait for earlier runs.

        `steps` overlap, so the steps of each kind are a line of their own.
        """
        found = self._swaps.get(swap)
        if found is None or (one := found.open.pop(key, None)) is None:
            return
        began = max(one.began, self._now - seconds) if seconds is not None else one.began
        made = [TraceSpan(one.who, one.name, began, self._now, nbytes, note=note[:200])]
        for each in steps:
            first, last = (max(began, self._now - ago) for ago in (each.began_s, each.ended_s))
            busy = f"busy for {each.busy_s:.6f} s"
            made.append(TraceSpan(f"{one.who}: {each.kind}", each.kind, first, last, note=busy))
        since, before = began, 0
        for until, so_far in one.chunks:
            if until > since:
                made.append(TraceSpan(one.who, "chunks", since, until, max(0, so_far - before)))
                since, before = until, so_far
        found.add(*made)
        # the most accurate alignment of the clocks during the swap
        found.alignment = self._clock.alignment or found.alignment

    # --- runs of workers ----------------------------------------------------------------------------------

    def _runs_on(self, worker: int, swap: str | None, run: _Key, name: str) -> None:
        if swap is not None and swap in self._swaps:
            pid = self._worker_pids.get(worker)
            self._runs[run] = swap, worker
            self._open(swap, run, f"worker {worker} (pid {pid})" if pid else f"worker {worker}", name)

    def _progressed(self, run: _Key, nbytes: int) -> None:
        if (at := self._runs.get(run)) is not None and (found := self._swaps[at[0]].open.get(run)) is not None:
            if len(found.chunks) == MAX_CHUNKS:
                found.chunks.pop()
            found.chunks.append((self._now, nbytes))

    def _ran(
        self,
        run: _Key,
        nbytes: int = 0,
        note: str = "",
        *,
        seconds: float | None = None,
        steps: Sequence[sidecar.StepTimes] = (),
    ) -> None:
        if (at := self._runs.pop(run, None)) is not None:
            self._close(at[0], run, note, nbytes, seconds=seconds, steps=steps)

    def _ended_with(self, worker: int) -> None:
        for run in [run for run, (_, by) in self._runs.items() if by == worker]:
            self._ran(run, note="its worker ended")

    def _name(self, member: str) -> str:
        found = self._members.get(member)
        if found is None:
            return member[:200]
        replica = found.registration.replica or "source"
        return f"{replica[:200]} rank {found.registration.request.rank} (pid {found.registration.pid})"
