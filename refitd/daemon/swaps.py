"""Stage a version on one node: its workers copy and convert; recover when a worker dies."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from refitd.addressing.copies import CopyList, address, fill_copies, joined, pieces_of
from refitd.addressing.paths import transfers_of
from refitd.addressing.places import Places
from refitd.buffers.layout import Spans
from refitd.commit.target_state import StageBegan, StageFinished, step_of
from refitd.daemon.actions import RestartWorker
from refitd.daemon.commits import Commits
from refitd.daemon.comparisons import SeedProofs
from refitd.daemon.digest_work import DigestQueue
from refitd.daemon.effects import BaseOf, Effects, Proven, SeedOf, SlotsFreed, Unwritten
from refitd.daemon.jobs import JobTable, LocalEpochs, Run, WorkerArenas, WorkerShare, shares_of
from refitd.daemon.members import BaseVersion, LocalMember, Offered, SourceSide
from refitd.daemon.new_members import made_in
from refitd.daemon.plans import LocalPlans, NodePlan
from refitd.errors import IllegalTransition
from refitd.plan.table import CopyTable
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Message, clipped
from refitd.protocol.reports import Crossing


@dataclass(frozen=True, slots=True)
class _Staging:
    """Purpose of a worker's run: to stage a swap."""

    swap: str


@dataclass(slots=True)
class _LocalSwap:
    swap: str
    plan: NodePlan
    version: int
    outstanding: set[int] = field(default_factory=set)  # runs
    verify: bool = True
    phase: Literal["arriving", "onward", "converting", "proving"] = "arriving"
    progress: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    crossing_s: float = 0.0
    staging_bytes: int = 0
    crossing: Crossing = field(default_factory=Crossing)
    paths: set[str] = field(default_factory=set)
    based: list[LocalMember] = field(default_factory=list)  # targets that may receive a delta on their live version
    comparing: set[int] = field(default_factory=set)  # runs that were asked to stop comparing with a base
    failed: bool = False
    unproven: set[str] = field(default_factory=set)  # seeds whose digests are being compared


class LocalSwaps:
    """Stages versions on this node."""

    def __init__(
        self,
        node: str,
        workers: int,
        members: dict[str, LocalMember],
        plans: LocalPlans,
        commits: Commits,
        jobs: JobTable,
        epochs: LocalEpochs,
        maps: WorkerArenas,
        digests: DigestQueue,
        seeds: SeedProofs,
    ) -> None:
        self._digests, self._seeds = digests, seeds
        self._node = node
        self._workers = workers
        self._members = members
        self._plans = plans
        self._commits = commits
        self._jobs = jobs
        self._epochs = epochs
        self._maps = maps
        self._swaps: dict[str, _LocalSwap] = {}  # being staged

    # --- staging ------------------------------------------------------------------------------------------

    def stage(self, effects: Effects, message: cluster.Stage) -> None:
        """Start copying a version into the staging arenas of this node's members, and to other nodes."""
        swap, plan_id, version, run, verify = message.swap, message.plan, message.version, message.run, message.verify
        plan = self._plans.ready.get(plan_id)
        if plan is None:
            self._stage_failed(effects, swap, "", f"node {self._node} does not have plan {plan_id}")
            return
        places_key: list[Hashable] = []
        read: dict[int, tuple[LocalMember, Offered]] = {}
        outer = plan.outer
        for rank in sorted(plan.read_ranks):
            member_id = plan.members.get(rank, "")
            member = self._members.get(member_id)
            offered = member.offered(version, run, even_begun=True) if member is not None else None
            if member is None or offered is None:
                who = member_id if rank in plan.seeds else f"source rank {rank}"
                self._stage_failed(effects, swap, who, f"version {version} is no longer held on node {self._node}")
                return
            read[rank] = member, offered
            places_key.append((member_id, offered.slot))
        for rank in sorted(plan.written_ranks):
            if plan.members.get(rank, "") not in self._members:
                gone = f"it is no longer registered on node {self._node}"
                self._stage_failed(effects, swap, f"target rank {rank}", gone)
                return
        targets = self._targets(plan)
        try:
            # check all members before changing any: a single member that must not be written fails the whole swap
            for _, member in targets:
                step_of(member.state, StageBegan(swap, version, run))
        except IllegalTransition as exc:
            effects.log("illegal", reason=str(exc))
            self._stage_failed(effects, swap, f"node {self._node}", clipped(str(exc)))
            return
        crossing = targets if outer is not None else []
        based = [(member, base) for _, member in crossing if (base := member.target_base(message)) is not None]
        for _, member in targets:
            effects.move(member, StageBegan(swap, version, run))
            member.proofs = replace(member.proofs, verifies=verify, spare=None)
        local_swap = _LocalSwap(swap, plan, version, verify=verify, based=[member for member, _ in based])
        self._swaps[swap] = local_swap
        for _, offered in read.values():
            offered.readers.add(swap)
        unwritten = [Unwritten(o.slot, version, m.id, o.written) for m, o in read.values() if o.written is not None]

        def sources() -> dict[int, Places]:
            return {rank: member.source_places(offered) for rank, (member, offered) in read.items()}

        def destinations() -> dict[int, Places]:
            return {rank: member.destinations() for rank, member in self._targets(plan)}

        def inner() -> list[WorkerShare]:
            copies = address(plan.table, sources(), writes := destinations())
            if plan.fills is not None:
                fills = fill_copies(plan.fills, writes, plan.constants, len(plan.table))
                copies = joined([copies, fills])
            return self._shares_of(copies)

        def crossing_shares(*, on_gpus: bool) -> list[WorkerShare]:
            assert outer is not None
            epoch, reads, writes = outer.epoch, sources(), destinations()
            found = []
            for (lane, at), met in outer.met.items():
                if (lane == epoch.lanes) is on_gpus:
                    rows = transfers_of(outer.rows, at, lane, reads, writes, met)
                    worker, group = (outer.gpus[at], epoch.gpu_group) if on_gpus else (lane, epoch.id)
                    found.append(WorkerShare(worker, rows, group))
            return found

        effects.log("swap", swap=swap, version=version, phase="stage", plan=plan_id)
        start = partial(self._jobs.start, effects, purpose=_Staging(swap), verify=verify, timeout_s=message.timeout_s)
        start = partial(start, unwritten=unwritten)
        try:
            # start copies within the node first: they are fast, and no other node waits for them
            key: tuple[Hashable, ...] = ("stage", plan_id, *places_key)
            runs = start(key, () if key in self._jobs.known else inner())
            if outer is not None:
                key = ("stage", plan_id, outer.epoch.id, *places_key)
                sent = (member.source_base(message) for member, _ in read.values())
                bases = [*(base for base in sent if base is not None), *(base for _, base in based)]
                runs += start(key, () if key in self._jobs.known else crossing_shares(on_gpus=False), bases=bases)
                if outer.gpus:  # after the lanes on every node: a worker of both must not wait for itself
                    key = ("stage", plan_id, outer.epoch.gpu_group, *places_key)
                    runs += start(key, () if key in self._jobs.known else crossing_shares(on_gpus=True))
        except (KeyError, ValueError) as exc:
            reason = f"the plan does not fit the tensors registered here: {exc}"
            self._stage_failed(effects, swap, f"node {self._node}", reason)
            return
        local_swap.outstanding = {run.number for run in runs}
        if not runs:
            self._go_on(effects, local_swap)

    def wrote(self, effects: Effects, arena: int, spans: Spans) -> None:
        """Tell the workers that stage a version which of its bytes are written."""
        reads = {(run.worker, one) for run in self._jobs.runs.values() for one in run.unwritten if one.arena == arena}
        for worker, one in reads:
            one.tell(effects, worker, spans)

    def _go_on(self, effects: Effects, local_swap: _LocalSwap) -> None:
        """Start the next phase that has work on this node, once the runs of a phase have ended.

        Without further work, the version is staged.
        """
        plan, runs = local_swap.plan, list[Run]()
        if local_swap.phase == "arriving":
            local_swap.phase = "onward"
            if plan.onward is not None:
                try:
                    runs = self._copy_onward(effects, local_swap, plan.onward)
                except (KeyError, ValueError) as exc:
                    reason = f"the plan does not fit the tensors registered here: {exc}"
                    self._stage_failed(effects, local_swap.swap, f"node {self._node}", reason)
                    return
        if not runs and local_swap.phase == "onward":
            local_swap.phase = "converting"
            requests = [member.registration.request for _, member in self._targets(plan)]
            if any(isinstance(asked, local.RegisterTarget) and asked.conversions for asked in requests):
                runs = self._convert(effects, local_swap)
        local_swap.outstanding = {run.number for run in runs}
        if runs:
            return
        # this node has read everything: have its seeds changed since their commit?
        local_swap.phase = "proving"
        seeds = {plan.members[rank]: plan.tensors_read(rank) for rank in plan.read_ranks & plan.seeds}
        if not (local_swap.verify and seeds):
            self._staged(effects, local_swap)
            return
        local_swap.unproven = set(seeds)
        for member_id, tensors in sorted(seeds.items()):
            self._seeds.prove(effects, self._members[member_id], tensors, SeedOf(local_swap.swap))

    def _copy_onward(self, effects: Effects, local_swap: _LocalSwap, onward: CopyTable) -> list[Run]:
        """Start the copies between targets of this node."""
        key, shares = ("stage", local_swap.plan.id, "onward"), list[WorkerShare]()
        if key not in self._jobs.known:
            places = {rank: member.destinations() for rank, member in self._targets(local_swap.plan)}
            shares = self._shares_of(address(onward, places, places))
        return self._jobs.start(effects, key, shares, _Staging(local_swap.swap), verify=local_swap.verify)

    def _convert(self, effects: Effects, local_swap: _LocalSwap) -> list[Run]:
        """Start the conversions. Their job is dropped with the plan and with its members' arenas."""
        targets = [member for _, member in self._targets(local_swap.plan)]
        key, shares = ("stage", local_swap.plan.id, "convert", *(member.id for member in targets)), list[WorkerShare]()
        if key not in self._jobs.known:
            made = [
                one
                for member in targets
                if isinstance(member.registration.request, local.RegisterTarget)
                for one in made_in(member.registration.request, member.memory.staging, member.memory.landing)
            ]
            homes = self._maps.homes({one.arena for one in made})
            shares = shares_of(pieces_of(made, on_gpus=homes), self._workers, homes)
        return self._jobs.start(effects, key, shares, _Staging(local_swap.swap), verify=local_swap.verify)

    def proven(self, effects: Effects, note: Proven) -> None:
        """Handle the check of a seed, or of the base of a delta."""
        if isinstance(note.purpose, SeedOf):
            self._seed_checked(effects, note.purpose.swap, note.member, note.wrong)
        elif (member := self._members.get(note.member)) is not None:
            self._base_checked(effects, member, note.purpose.base, note.wrong)

    def _seed_checked(self, effects: Effects, swap: str, member: str, wrong: str) -> None:
        """Handle the check of a seed; `wrong` is the difference or the read error, "" if the seed is unchanged."""
        local_swap = self._swaps.get(swap)
        if local_swap is None or member not in local_swap.unproven:
            return
        local_swap.unproven.discard(member)
        if wrong:
            self._stage_failed(effects, local_swap.swap, member, wrong)
        elif not local_swap.unproven and not local_swap.failed:
            self._staged(effects, local_swap)

    def _shares_of(self, copies: CopyList) -> list[WorkerShare]:
        return shares_of(copies, self._workers, self._maps.homes(copies.arenas()))

    def _targets(self, plan: NodePlan) -> list[tuple[int, LocalMember]]:
        """Return (rank, member) of this node's targets, including targets whose shards are all empty."""
        here = [(rank, self._members.get(member)) for rank, member in plan.members.items() if rank not in plan.seeds]
        return [(rank, member) for rank, member in here if member is not None and not member.registration.is_source]

    def _staged(self, effects: Effects, local_swap: _LocalSwap) -> None:
        del self._swaps[local_swap.swap]
        effects.log("swap", swap=local_swap.swap, version=local_swap.version, phase="staged")
        for _, member in self._targets(local_swap.plan):
            if member.state.swap == local_swap.swap:
                effects.move(member, StageFinished(local_swap.swap))
        plan = local_swap.plan
        copies, nbytes = plan.staged
        effects.say(
            cluster.StageDone(
                swap=local_swap.swap,
                copies=copies,
                bytes=nbytes,
                seconds=local_swap.seconds,
                crossing_s=local_swap.crossing_s,
                staging_bytes=local_swap.staging_bytes,
                converted_bytes=sum(m.registration.figures.converted_bytes for _, m in self._targets(plan)),
                crossing=local_swap.crossing,
                paths=tuple(sorted(local_swap.paths)),
            )
        )

    def _stage_failed(self, effects: Effects, swap: str, where: str, reason: str) -> None:
        local_swap = self._swaps.get(swap)
        if local_swap is not None:
            if local_swap.failed:
                return  # report only the first cause
            local_swap.failed = True
        effects.log("stage-failed", swap=swap, where=where, reason=reason)
        effects.say(cluster.StageDone(swap=swap, where=where or f"node {self._node}", reason=reason))

    def staging(self) -> set[str]:
        """Return the swaps being staged here."""
        return set(self._swaps)

    def abort(self, effects: Effects, swap: str, reason: str) -> None:
        """Stop all writing for a swap, and drop it."""
        effects.log("swap", swap=swap, phase="aborted", reason=reason)
        workers = sorted(self._jobs.busy_with(_Staging(swap)))
        self._swaps.pop(swap, None)
        self._replace(effects, workers, f"it was replaced, as swap {swap} was aborted")
        self._commits.aborted(effects, swap, reason)

    def stop_seeding(self, effects: Effects, member: LocalMember, reason: str) -> None:
        """Abort the catch-ups that read a leaving seed; no worker reads it once this returns."""
        if member.seeding and member.state.version is not None:
            self.stop_reading(effects, member, member.state.version, reason)

    def stop_reading(self, effects: Effects, member: LocalMember, version: int, reason: str) -> None:
        """Fail the swaps that read a version which its source withdraws.

        A version that is already staged here stays until the coordinator aborts, because the swap may be decided.
        """
        readers = member.readers_of(version)
        for swap in sorted(readers or ()):
            taken = f"version {version} was taken back while it was read: {reason}"
            self._stage_failed(effects, swap, member.id, taken)
            if swap in self._swaps:
                self.abort(effects, swap, reason)
        if readers is not None:
            readers.clear()

    def end_comparing(self, effects: Effects, source: SourceSide) -> None:
        """Stop all comparisons with this source's slots, because a publish waits for a slot."""
        for swap in sorted({swap for slot in source.slots for swap in slot.compared}):
            local_swap = self._swaps.get(swap)
            runs = [run for run in self._jobs.runs_for(_Staging(swap)) if run.crosses]
            if not runs or local_swap is None:
                self._compared(swap)
            elif not local_swap.comparing:
                local_swap.comparing = {run.number for run in runs}
                for run in runs:
                    effects.order(run.worker, sidecar.DropBases(run=run.number))

    def _compared(self, swap: str) -> None:
        for member in self._members.values():
            for slot in member.source.slots if member.source is not None else ():
                slot.compared.discard(swap)

    def _ends_comparing(self, effects: Effects, run: int) -> None:
        """Record that a run no longer compares, if it was asked to stop."""
        for swap, local_swap in self._swaps.items():
            if run in local_swap.comparing:
                local_swap.comparing.discard(run)
                if not local_swap.comparing:
                    self._compared(swap)
                    effects.notes.append(SlotsFreed())

    # --- workers ------------------------------------------------------------------------------------------

    def worker_said(self, effects: Effects, worker: int, message: sidecar.FromWorker) -> None:
        """Handle a worker's message about a run."""
        match message:
            case sidecar.RunProgress(number, bytes_done):
                run = self._jobs.runs.get(number)
                if run is not None and isinstance(run.purpose, _Staging):
                    self._progress(effects, run, run.purpose.swap, bytes_done)
            case sidecar.DropBases(number):
                self._ends_comparing(effects, number)
            case sidecar.RunDone(number):
                run = self._jobs.end(number)
                if run is not None and message.reason:
                    self._run_failed(effects, run, message.reason, message.copy, worker)
                elif run is not None:
                    self._run_done(effects, run, message)
            case sidecar.BaseWrong(number):
                run = self._jobs.runs.get(number)
                if run is not None:
                    self._check_bases(effects, run)

    def _progress(self, effects: Effects, run: Run, swap: str, bytes_done: int) -> None:
        local_swap = self._swaps.get(swap)
        if local_swap is not None:
            local_swap.progress[run.number] = bytes_done
            effects.say(cluster.StageProgress(swap=swap, bytes_done=sum(local_swap.progress.values())))

    def _run_done(self, effects: Effects, run: Run, done: sidecar.RunDone) -> None:
        if isinstance(run.purpose, _Staging) and (local_swap := self._swaps.get(run.purpose.swap)) is not None:
            local_swap.outstanding.discard(run.number)
            local_swap.seconds = max(local_swap.seconds, done.seconds)
            local_swap.paths.update(done.paths)
            if run.crosses:
                local_swap.crossing_s = max(local_swap.crossing_s, done.seconds)
                local_swap.staging_bytes = max(local_swap.staging_bytes, done.staging_bytes)
                arrived = Crossing(done.bytes, done.crossed_bytes, done.delta_bytes, done.changed_bytes)
                local_swap.crossing += arrived
            if run.number in local_swap.comparing:
                self._ends_comparing(effects, run.number)
            if not local_swap.outstanding and not local_swap.failed:
                self._go_on(effects, local_swap)

    def _check_bases(self, effects: Effects, run: Run) -> None:
        """After a delta gave wrong bytes, compare its bases with their digests: is a base wrong, or the delta?

        A rank that copies has overwritten its base. It holds no version now, and its next version comes full anyway.
        """
        swap = self._swaps.get(run.purpose.swap) if isinstance(run.purpose, _Staging) else None
        for member in swap.based if swap is not None else ():
            base = member.state.holds, member.state.run
            if base[0] is None:
                effects.log("delta-wrong", member=member.id, worker=run.worker, base="rebuilt")
                continue
            if member.bases.doubt(base):
                self._seeds.prove(effects, member, None, BaseOf(base))
            _report_base(effects, member)

    def _base_checked(self, effects: Effects, member: LocalMember, base: BaseVersion, wrong: str) -> None:
        if (member.state.holds, member.state.run) != base:
            return  # another version was committed; it will be the next base
        if wrong:
            member.bases.differed()
            effects.log("base-wrong", member=member.id, version=base[0], reason=wrong)
        else:
            member.bases.matched(base)
            effects.log("delta-wrong", member=member.id, version=base[0], base="right")
        _report_base(effects, member)

    def not_sent(self, effects: Effects, worker: int, message: Message, reason: str) -> None:
        """Fail the runs that need a message which did not reach a worker; the next attempt resends it."""
        effects.log("not-sent", worker=worker, message=type(message).__name__, reason=reason)
        match message:
            case sidecar.MapArena(arena):
                self._maps.doubt(worker, arena)
            case sidecar.ExchangeArenas():
                self.replace_worker(effects, worker, f"it could not be told that arenas have been exchanged: {reason}")
            case sidecar.JoinEpoch(epoch):
                self._epochs.worker_said(effects, worker, sidecar.EpochJoined(epoch=epoch, reason=reason))
            case sidecar.LoadJob(job):
                for run in self._jobs.runs_of(job, worker):
                    self._jobs.end(run.number)
                    failed = f"it could not be given its part of the copies: {reason}"
                    self._run_failed(effects, run, failed, None, worker)

    def _run_failed(self, effects: Effects, run: Run, reason: str, copy: int | None, worker: int) -> None:
        self._jobs.unload(effects, run)
        for arena in self._maps.homes(run.job.shares[run.worker].rows.arenas()):
            self._maps.doubt(run.worker, arena)
        if isinstance(run.purpose, _Staging):
            local_swap = self._swaps.get(run.purpose.swap)
            row = self._jobs.copy_origin(run, copy)
            what = f"worker {worker} on node {self._node}"
            if not run.crosses and local_swap is not None and row is not None:
                what = local_swap.plan.row_name(row, is_onward=local_swap.phase == "onward") or what
            self._stage_failed(effects, run.purpose.swap, what, reason)

    def worker_died(self, effects: Effects, worker: int, who: str, how: str) -> None:
        """Fail or repeat each run of a dead worker."""
        for run in self._jobs.ended_by(worker):
            if isinstance(run.purpose, _Staging):
                doing = "converting what has arrived" if run.converts else "staging"
                self._stage_failed(effects, run.purpose.swap, who, f"{how} while {doing}")
        self._epochs.worker_gone(effects, worker, who, how)

    def replace_worker(self, effects: Effects, worker: int, reason: str) -> None:
        """Replace a worker whose work is no longer needed."""
        effects.log("worker-replaced", worker=worker, reason=reason)
        self._replace(effects, [worker], reason)

    def _restart(self, effects: Effects, worker: int) -> None:
        effects.append(RestartWorker(worker))
        self._maps.renewed(effects, worker)
        self._digests.worker_gone(effects, worker, died=False)

    def _replace(self, effects: Effects, workers: Sequence[int], reason: str) -> None:
        """Replace workers, and repeat their runs for other swaps; a run that crosses nodes fails its swap instead."""
        innocent: list[Run] = []
        for worker in workers:
            innocent += self._jobs.ended_by(worker)
            self._restart(effects, worker)
            self._epochs.worker_gone(effects, worker, f"worker {worker} on node {self._node}", reason)
        for run in innocent:
            where = f"worker {run.worker} on node {self._node}"
            if isinstance(run.purpose, _Staging) and (found := self._swaps.get(run.purpose.swap)) is not None:
                if run.crosses:  # the peers have dropped this exchange; this node cannot restart it
                    self._stage_failed(effects, found.swap, where, reason)
                elif not found.failed:
                    # safe to repeat: the swap still holds these versions, and only it writes these arenas
                    found.outstanding.discard(run.number)
                    found.progress.pop(run.number, None)
                    found.outstanding.add(self._jobs.repeat(effects, run).number)
                    effects.log("repeated", swap=found.swap, worker=run.worker, reason=reason)


def _report_base(effects: Effects, member: LocalMember) -> None:
    """Report whether the member lacks a base before the coordinator plans the next swap's relay paths."""
    effects.moved[member.id], effects.is_news = member, True
