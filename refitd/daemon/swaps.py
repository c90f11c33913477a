"""One node's part in staging a version: copies and conversions by its workers, and recovery when a worker dies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from refitd.addressing.between_nodes import transfers_of
from refitd.addressing.conversions import pieces_of
from refitd.addressing.copies import address, fill_copies, joined
from refitd.addressing.places import Places
from refitd.daemon.actions import Instruction, ToCoordinator, ToWorker
from refitd.daemon.base_trust import BaseVersion
from refitd.daemon.bases import source_bases, target_bases
from refitd.daemon.commits import Commits, Committing
from refitd.daemon.epochs import LocalEpochs
from refitd.daemon.finishing import made_in
from refitd.daemon.jobs import JobTable, Run, WorkerShare, shares_of
from refitd.daemon.members import LocalMember
from refitd.daemon.plans import LocalPlans, NodePlan
from refitd.daemon.target_state import StageBegan, StageFinished, step_of
from refitd.daemon.worker_arenas import WorkerArenas
from refitd.errors import IllegalTransition
from refitd.events import Log
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Message, clipped
from refitd.protocol.reports import Crossing


@dataclass(frozen=True, slots=True)
class _Staging:
    """Purpose of a run: to stage a swap."""

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
    based: list[LocalMember] = field(default_factory=list)  # targets that may be made of what they hold
    comparing: set[int] = field(default_factory=set)  # runs that were told to stop that
    failed: bool = False
    unproven: set[str] = field(default_factory=set)  # seeds whose digests are being compared


class LocalSwaps:
    """Stages versions on this node. Instructions go to `out`; `restart` replaces a worker at once."""

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
        out: Callable[[Instruction], None],
        restart: Callable[[int], None],
        prove: Callable[[LocalMember, Collection[str] | None, Callable[[str], None]], None],
        slots_freed: Callable[[], None],
    ) -> None:
        """`prove(member, tensors, then)` compares them (None: all) with their digests and tells `then` what is wrong.

        `slots_freed` is called when slots of sources are no longer compared with newer versions.
        """
        self._slots_freed = slots_freed
        self._node = node
        self._workers = workers
        self._members = members
        self._plans = plans
        self._commits = commits
        self._jobs = jobs
        self._epochs = epochs
        self._maps = maps
        self._out = out
        self._restart = restart
        self._prove = prove
        self._swaps: dict[str, _LocalSwap] = {}  # being staged

    # --- staging ------------------------------------------------------------------------------------------

    def stage(self, message: cluster.Stage) -> None:
        """Start copying a version into the staging arenas of this node's members, and to other nodes."""
        swap, plan_id, version, run, verify = message.swap, message.plan, message.version, message.run, message.verify
        plan = self._plans.get(plan_id)
        if plan is None:
            self._stage_failed(swap, "", f"node {self._node} does not have plan {plan_id}")
            return
        places_key: list[Hashable] = []
        read: dict[int, LocalMember] = {}
        outer = plan.outer
        for rank in sorted(plan.read_ranks):
            member_id = plan.members.get(rank, "")
            member = self._members.get(member_id)
            if member is None or not member.offers(version, run):
                who = member_id if rank in plan.seeds else f"source rank {rank}"
                self._stage_failed(swap, who, f"version {version} is no longer held on node {self._node}")
                return
            read[rank] = member
            places_key.append(member.where(version))
        for rank in sorted(plan.written_ranks):
            member = self._members.get(plan.members.get(rank, ""))
            if member is None:
                self._stage_failed(swap, f"target rank {rank}", f"it is no longer registered on node {self._node}")
                return
        targets = self._targets(plan)
        try:
            # check all members before changing any: one that may not be written to fails the whole swap
            for _, member in targets:
                step_of(member.state, StageBegan(swap, version, run))
        except IllegalTransition as exc:
            self._log("illegal", reason=str(exc))
            self._stage_failed(swap, f"node {self._node}", clipped(str(exc)))
            return
        crossing = targets if outer is not None else []
        based = [(member, base) for _, member in crossing for base in target_bases(message, [member])]
        for _, member in targets:
            member.move(StageBegan(swap, version, run))
            member.verifies, member.spare_proof = verify, None
        local_swap = _LocalSwap(swap, plan, version, verify=verify, based=[member for member, _ in based])
        self._swaps[swap] = local_swap
        for member in read.values():
            readers = member.readers_of(version)
            if readers is not None:
                readers.add(swap)

        def sources() -> dict[int, Places]:
            return {rank: member.source_places(version) for rank, member in read.items()}

        def destinations() -> dict[int, Places]:
            return {rank: member.destinations() for rank, member in self._targets(plan)}

        def inner() -> list[WorkerShare]:
            copies = address(plan.table, sources(), writes := destinations())
            if plan.fills is not None:
                fills = fill_copies(plan.fills, writes, plan.constants, len(plan.table))
                copies = joined([copies, fills])
            return shares_of(copies, self._workers, self._maps.homes(copies.arenas()))

        def crossing_shares() -> list[WorkerShare]:
            assert outer is not None
            epoch, reads, writes = outer.epoch, sources(), destinations()
            return [
                WorkerShare(lane, transfers_of(outer.rows, outer.index, lane, reads, writes), epoch.id)
                for lane in range(epoch.lanes)
            ]

        self._log("swap", swap=swap, version=version, phase="stage", plan=plan_id)
        purpose = _Staging(swap)
        try:
            # copies within the node first: they are fast, and no other node waits for them
            runs = self._jobs.start(("stage", plan_id, *places_key), inner, purpose, verify=verify)
            if outer is not None:
                key = ("stage", plan_id, outer.epoch.id, *places_key)
                bases = [*source_bases(message, read.values()), *(base for _, base in based)]
                limit_s = message.timeout_s
                runs += self._jobs.start(key, crossing_shares, purpose, verify=verify, timeout_s=limit_s, bases=bases)
        except (KeyError, ValueError) as exc:
            self._stage_failed(swap, f"node {self._node}", f"the plan does not fit the tensors registered here: {exc}")
            return
        local_swap.outstanding = {run.number for run in runs}
        if not runs:
            self._arrived(local_swap)

    def _arrived(self, local_swap: _LocalSwap) -> None:
        """Handle that everything has arrived: copy onward what other targets of this node need."""
        local_swap.phase = "onward"
        plan = local_swap.plan
        if plan.onward is None:
            self._gathered(local_swap)
            return
        table = plan.onward

        def onward() -> list[WorkerShare]:
            places = {rank: member.destinations() for rank, member in self._targets(plan)}
            copies = address(table, places, places)
            return shares_of(copies, self._workers, self._maps.homes(copies.arenas()))

        key = ("stage", plan.id, "onward")
        try:
            runs = self._jobs.start(key, onward, _Staging(local_swap.swap), verify=local_swap.verify)
        except (KeyError, ValueError) as exc:
            reason = f"the plan does not fit the tensors registered here: {exc}"
            self._stage_failed(local_swap.swap, f"node {self._node}", reason)
            return
        local_swap.outstanding = {run.number for run in runs}
        if not runs:
            self._gathered(local_swap)

    def _gathered(self, local_swap: _LocalSwap) -> None:
        """Handle that all targets have what they need: start the conversions; without any, the version is staged."""
        local_swap.phase = "converting"
        targets = [member for _, member in self._targets(local_swap.plan)]

        def convert() -> list[WorkerShare]:
            made = [
                one
                for member in targets
                if isinstance(member.registration, local.RegisterTarget)
                for one in made_in(member.registration, member.staging, member.landing)
            ]
            homes = self._maps.homes({one.arena for one in made})
            return shares_of(pieces_of(made, on_gpus=homes), self._workers, homes)

        # dropped with the plan and with its members' arenas
        key = ("stage", local_swap.plan.id, "convert", *(member.id for member in targets))
        runs = self._jobs.start(key, convert, _Staging(local_swap.swap), verify=local_swap.verify)
        local_swap.outstanding = {run.number for run in runs}
        if not runs:
            self._converted(local_swap)

    def _converted(self, local_swap: _LocalSwap) -> None:
        """Handle the end of all reads: check that this node's seeds have not changed since their version went live."""
        local_swap.phase = "proving"
        plan = local_swap.plan
        seeds = {plan.members[rank]: plan.tensors_read(rank) for rank in plan.read_ranks & plan.seeds}
        if not (local_swap.verify and seeds):
            self._staged(local_swap)
            return
        local_swap.unproven = set(seeds)
        for member_id, tensors in sorted(seeds.items()):
            self._prove(self._members[member_id], tensors, partial(self._proven, local_swap, member_id))

    def _proven(self, local_swap: _LocalSwap, member: str, wrong: str) -> None:
        """Handle the check of a seed: `wrong` says how it differs or why it cannot be read; "" if it is unchanged."""
        if self._swaps.get(local_swap.swap) is not local_swap:
            return
        local_swap.unproven.discard(member)
        if wrong:
            self._stage_failed(local_swap.swap, member, wrong)
        elif not local_swap.unproven and not local_swap.failed:
            self._staged(local_swap)

    def _targets(self, plan: NodePlan) -> list[tuple[int, LocalMember]]:
        """Return (rank, member) of this node's targets, including those that receive nothing (all shards empty)."""
        here = [(rank, self._members.get(member)) for rank, member in plan.members.items() if rank not in plan.seeds]
        return [(rank, member) for rank, member in here if member is not None and not member.is_source]

    def _staged(self, local_swap: _LocalSwap) -> None:
        del self._swaps[local_swap.swap]
        self._log("swap", swap=local_swap.swap, version=local_swap.version, phase="staged")
        for _, member in self._targets(local_swap.plan):
            if member.state.swap == local_swap.swap:
                member.move(StageFinished(local_swap.swap))
        plan = local_swap.plan
        rows, nbytes = plan.outer.received() if plan.outer is not None else (0, 0)
        if plan.onward is not None:
            rows, nbytes = rows + len(plan.onward), nbytes + plan.onward.total_bytes
        self._say(
            cluster.StageDone(
                swap=local_swap.swap,
                copies=len(plan.table) + rows,
                bytes=plan.table.total_bytes + nbytes,
                seconds=local_swap.seconds,
                crossing_s=local_swap.crossing_s,
                staging_bytes=local_swap.staging_bytes,
                converted_bytes=sum(m.figures.converted_bytes for _, m in self._targets(plan)),
                crossing=local_swap.crossing,
            )
        )

    def _stage_failed(self, swap: str, where: str, reason: str) -> None:
        local_swap = self._swaps.get(swap)
        if local_swap is not None:
            if local_swap.failed:
                return  # report only the first cause
            local_swap.failed = True
        self._log("stage-failed", swap=swap, where=where, reason=reason)
        self._say(cluster.StageFailed(swap=swap, where=where or f"node {self._node}", reason=reason))

    def staging(self) -> set[str]:
        """Return the swaps being staged here."""
        return set(self._swaps)

    def abort(self, swap: str, reason: str) -> None:
        """Stop all writing for a swap, and forget it."""
        self._log("swap", swap=swap, phase="aborted", reason=reason)
        workers = sorted(self._jobs.busy_with(_Staging(swap)))
        self._swaps.pop(swap, None)
        self._replace(workers, f"it was replaced, as swap {swap} was aborted")
        self._commits.aborted(swap, reason)

    def stop_seeding(self, member: LocalMember, reason: str) -> None:
        """Abort the catch-ups that read a leaving seed, at once."""
        if member.seeding and member.state.version is not None:
            self.stop_reading(member, member.state.version, reason)

    def stop_reading(self, member: LocalMember, version: int, reason: str) -> None:
        """Abort the swaps that read a version that its source takes back, at once."""
        readers = member.readers_of(version)
        for swap in sorted(readers or ()):
            self._stage_failed(swap, member.id, f"version {version} was taken back while it was read: {reason}")
            self.abort(swap, reason)
        if readers is not None:
            readers.clear()

    def end_comparing(self, member: LocalMember) -> None:
        """Stop all comparisons with this source's slots, because a publish waits for one."""
        for swap in sorted({swap for slot in member.slots for swap in slot.compared}):
            local_swap = self._swaps.get(swap)
            runs = [run for run in self._jobs.runs_for(_Staging(swap)) if run.crosses]
            if not runs or local_swap is None:
                self._compared(swap)
            elif not local_swap.comparing:
                local_swap.comparing = {run.number for run in runs}
                for run in runs:
                    self._out(ToWorker(run.worker, sidecar.DropBases(run=run.number)))

    def _compared(self, swap: str) -> None:
        for member in self._members.values():
            for slot in member.slots:
                slot.compared.discard(swap)

    def _ends_comparing(self, run: int) -> None:
        """Note that a run compares nothing any more, if it was told to stop."""
        for swap, local_swap in self._swaps.items():
            if run in local_swap.comparing:
                local_swap.comparing.discard(run)
                if not local_swap.comparing:
                    self._compared(swap)
                    self._slots_freed()

    # --- workers ------------------------------------------------------------------------------------------

    def worker_said(self, worker: int, message: sidecar.FromWorker) -> None:
        """Handle a worker's message about a run."""
        match message:
            case sidecar.RunProgress(number, bytes_done):
                run = self._jobs.run(number)
                if run is not None and isinstance(run.purpose, _Staging):
                    self._progress(run, run.purpose.swap, bytes_done)
            case sidecar.BasesDropped(number):
                self._ends_comparing(number)
            case sidecar.RunDone(number):
                self._ends_comparing(number)
                run = self._jobs.end(number)
                if run is not None:
                    self._run_done(run, message)
            case sidecar.BaseWrong(number):
                run = self._jobs.run(number)
                if run is not None:
                    self._check_bases(run)
            case sidecar.RunFailed(number, reason, copy):
                run = self._jobs.end(number)
                if run is not None:
                    self._run_failed(run, reason, copy, worker)
            case sidecar.LanePut() | sidecar.EpochJoined() | sidecar.EpochFailed():
                self._epochs.worker_said(worker, message)
            case _:
                pass

    def _progress(self, run: Run, swap: str, bytes_done: int) -> None:
        local_swap = self._swaps.get(swap)
        if local_swap is not None:
            local_swap.progress[run.number] = bytes_done
            self._say(cluster.StageProgress(swap=swap, bytes_done=sum(local_swap.progress.values())))

    def _run_done(self, run: Run, done: sidecar.RunDone) -> None:
        if isinstance(run.purpose, Committing):
            self._commits.run_done(run.purpose)
            return
        if isinstance(run.purpose, _Staging) and (local_swap := self._swaps.get(run.purpose.swap)) is not None:
            local_swap.outstanding.discard(run.number)
            local_swap.seconds = max(local_swap.seconds, done.seconds)
            if run.crosses:
                local_swap.crossing_s = max(local_swap.crossing_s, done.seconds)
                local_swap.staging_bytes = max(local_swap.staging_bytes, done.staging_bytes)
                arrived = Crossing(done.bytes, done.crossed_bytes, done.delta_bytes, done.changed_bytes)
                local_swap.crossing += arrived
            if not local_swap.outstanding and not local_swap.failed:
                match local_swap.phase:
                    case "arriving":
                        self._arrived(local_swap)
                    case "onward":
                        self._gathered(local_swap)
                    case "converting":
                        self._converted(local_swap)
                    case "proving":
                        pass  # nothing runs any more

    def _check_bases(self, run: Run) -> None:
        """Compare the bases of a delta that gave wrong bytes with their digests: is a base wrong, or the delta?

        A rank that copies has rebuilt its base in place: it holds no version now, and the next one comes full anyway.
        """
        swap = self._swaps.get(run.purpose.swap) if isinstance(run.purpose, _Staging) else None
        for member in swap.based if swap is not None else ():
            base = member.state.holds, member.state.run
            if base[0] is None:
                self._log("delta-wrong", member=member.id, worker=run.worker, base="rebuilt")
            elif member.bases.doubt(base):
                self._prove(member, None, partial(self._base_checked, member, base))

    def _base_checked(self, member: LocalMember, base: BaseVersion, wrong: str) -> None:
        if (member.state.holds, member.state.run) != base:
            return  # another version went live, and will be the next base
        if wrong:
            member.bases.differed()
            self._log("base-wrong", member=member.id, version=base[0], reason=wrong)
        else:
            member.bases.matched(base)
            self._log("delta-wrong", member=member.id, version=base[0], base="right")

    def not_sent(self, worker: int, message: Message, reason: str) -> None:
        """Fail the runs that need a message which did not reach a worker; the next attempt sends it again."""
        self._log("not-sent", worker=worker, message=type(message).__name__, reason=reason)
        match message:
            case sidecar.MapArena(arena):
                self._maps.doubt(worker, arena)
            case sidecar.ExchangeArenas():
                self.replace_worker(worker, f"it could not be told that arenas have been exchanged: {reason}")
            case sidecar.JoinEpoch(epoch):
                self._epochs.worker_said(worker, sidecar.EpochFailed(epoch=epoch, reason=reason))
            case sidecar.LoadJob(job):
                for run in self._jobs.runs_of(job, worker):
                    self._jobs.end(run.number)
                    self._run_failed(run, f"it could not be given its part of the copies: {reason}", None, worker)

    def _run_failed(self, run: Run, reason: str, copy: int | None, worker: int) -> None:
        self._jobs.unload(run)
        for arena in self._maps.homes(run.job.shares[run.worker].rows.arenas()):
            self._maps.doubt(run.worker, arena)
        if isinstance(run.purpose, Committing):
            self._commits.applied(run.purpose, reason)
        elif isinstance(run.purpose, _Staging):
            local_swap = self._swaps.get(run.purpose.swap)
            row = self._jobs.copy_origin(run, copy)
            what = f"worker {worker} on node {self._node}"
            if not run.crosses and local_swap is not None and row is not None:
                what = local_swap.plan.row_name(row, is_onward=local_swap.phase == "onward") or what
            self._stage_failed(run.purpose.swap, what, reason)

    def worker_died(self, worker: int, who: str, how: str) -> None:
        """Fail or repeat everything that a dead worker was doing."""
        for run in self._jobs.ended_by(worker):
            if isinstance(run.purpose, _Staging):
                doing = "converting what has arrived" if run.converts else "staging"
                self._stage_failed(run.purpose.swap, who, f"{how} while {doing}")
            elif isinstance(run.purpose, Committing):
                self._commits.again(run.purpose, f"{who}: {how} while committing")
        self._epochs.worker_gone(worker, who, how)

    def tick(self) -> None:
        """Replace workers that are stuck in abandoned epochs."""
        for worker, reason in self._epochs.tick():
            self.replace_worker(worker, reason)

    def replace_worker(self, worker: int, reason: str) -> None:
        """Replace a worker whose work is no longer wanted."""
        self._log("worker-replaced", worker=worker, reason=reason)
        self._replace([worker], reason)

    def _replace(self, workers: Sequence[int], reason: str) -> None:
        """Replace workers. Their runs for other purposes are repeated if they stay within this node."""
        innocent: list[Run] = []
        for worker in workers:
            innocent += self._jobs.ended_by(worker)
            self._restart(worker)
            self._epochs.worker_gone(worker, f"worker {worker} on node {self._node}", reason)
        for run in innocent:
            where = f"worker {run.worker} on node {self._node}"
            if isinstance(run.purpose, Committing):
                self._commits.again(run.purpose, f"{where}: {reason}")
            elif isinstance(run.purpose, _Staging) and (found := self._swaps.get(run.purpose.swap)) is not None:
                if run.crosses:  # the peers have given up this exchange; this node cannot restart it
                    self._stage_failed(found.swap, where, reason)
                elif not found.failed:
                    # same copies: the swap still holds these versions and is the only writer of these arenas
                    found.outstanding.discard(run.number)
                    found.progress.pop(run.number, None)
                    found.outstanding.add(self._jobs.repeat(run).number)
                    self._log("repeated", swap=found.swap, worker=run.worker, reason=reason)

    # --- output -------------------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        self._out(ToCoordinator(0, message))

    def _log(self, event: str, **fields: object) -> None:
        self._out(Log(event, fields))
