"""One node's part in swaps: staging runs, commits of its members, and what happens when a worker dies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.ma  # np.unique loads it at its first call, which may be when no file can be opened

from refitd.daemon.actions import Instruction, Log, ToClient, ToCoordinator
from refitd.daemon.epochs import LocalEpochs
from refitd.daemon.gpus import refused_crossing, refused_here
from refitd.daemon.held import figures_of, held_of, made_in
from refitd.daemon.jobs import JobTable, Run, Share, dealt, dealt_conversions
from refitd.daemon.mapped import WorkerArenas
from refitd.daemon.members import Member
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import ArenaError
from refitd.execute.conversions import pieces_of
from refitd.execute.copies import (
    LocalTensor,
    address,
    constant_bytes,
    fill_copies,
    joined,
    whole_tensors,
)
from refitd.execute.halves import Crossing, crossing, halves_of
from refitd.plan.fills import FillTable
from refitd.plan.table import CopyTable
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Message

# A commit copy that a dying worker left half done is done again; it is the same copy, so once more is harmless.
COMMIT_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class _Plan:
    id: str
    members: dict[int, str]  # plan-wide rank -> member
    table: CopyTable
    fills: FillTable | None
    constants: int  # arena of what is filled in; -1 where nothing is
    outer: _Outer | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Loading:
    """A plan that is being loaded; `epoch` is the one that is being formed for it, if any."""

    epoch: str


@dataclass(frozen=True, slots=True)
class _Outer:
    """What a plan moves between this node and others."""

    rows: Crossing
    index: int  # this node's position in the epoch
    epoch: cluster.EpochPlan

    def sent_ranks(self) -> set[int]:
        return set(np.unique(self.rows.table.src_rank[self.rows.src_node == self.index]).tolist())

    def received_ranks(self) -> set[int]:
        return set(np.unique(self.rows.table.dst_rank[self.rows.dst_node == self.index]).tolist())

    def received(self) -> tuple[int, int]:
        """Return (rows of the plan, bytes) that come here."""
        here = self.rows.dst_node == self.index
        return len(np.unique(self.rows.origin[here])), int(self.rows.table.row_bytes[here].sum())


@dataclass(frozen=True, slots=True)
class _Staging:
    """Why a run is performed: to stage a swap."""

    swap: str


@dataclass(frozen=True, slots=True)
class _Committing:
    """Why a run is performed: to make a staged version live in a member's arena."""

    swap: str
    member: str
    attempt: int


@dataclass(slots=True)
class _LocalSwap:
    swap: str
    plan: _Plan
    version: int
    outstanding: set[int] = field(default_factory=set)  # runs
    verify: bool = True
    converts: bool = False  # everything has arrived
    progress: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    crossing_s: float = 0.0
    staging_bytes: int = 0
    failed: bool = False


class LocalSwaps:
    """Stages and commits on this node. Instructions go to `out`; `restart` replaces a worker at once."""

    def __init__(
        self,
        node: str,
        workers: int,
        address: str,
        members: dict[str, Member],
        out: Callable[[Instruction], None],
        restart: Callable[[int], None],
        make_constants: Callable[[bytes, str, Callable[[int], None]], None],
        maps: WorkerArenas,
    ) -> None:
        self._node = node
        self._workers = workers
        self._members = members
        self._out = out
        self._restart = restart
        self._make_constants = make_constants
        self._plans: dict[str, _Plan] = {}
        self._loading: dict[str, _Loading] = {}  # plans of which something is not there yet
        self._unneeded: set[int] = set()  # arenas that came too late for the plan they were made for
        self._swaps: dict[str, _LocalSwap] = {}  # being staged
        self._attempts: dict[str, _Committing] = {}  # latest commit copy, by member
        self._maps = maps
        self.jobs = JobTable(out, maps.need)
        self.epochs = LocalEpochs(node, address, out)

    # --- plans --------------------------------------------------------------------------------------------

    def load_plan(self, message: cluster.LoadPlan) -> None:
        """Keep a plan until it is dropped; have the workers meet those of other nodes where it crosses to them."""
        self._unneeded |= self.drop_plan(message.plan)
        try:
            table = CopyTable.from_wire(message.table)
            fills = FillTable.from_wire(message.fills) if message.fills else None
            outer = self._outer(message)
        except ValueError as exc:
            self._plan_refused(message, str(exc))
            return
        members = dict(zip(message.ranks, message.members, strict=True))
        missing = {"constants"} if fills is not None else set()
        missing |= {"epoch"} if outer is not None else set()
        constants = -1
        loading = self._loading[message.plan] = _Loading(outer.epoch.id if outer is not None else "")

        def is_dropped() -> bool:
            return self._loading.get(message.plan) is not loading

        def done(what: str) -> None:
            missing.discard(what)
            if not missing and not is_dropped():
                del self._loading[message.plan]
                self._plans[message.plan] = _Plan(message.plan, members, table, fills, constants, outer)
                epoch = outer.epoch.id if outer is not None else ""
                self._say(cluster.PlanLoaded(plan=message.plan, epoch=epoch))

        def made(arena: int) -> None:
            nonlocal constants
            constants = arena
            if is_dropped():
                self._unneeded.add(arena)
            done("constants")

        if outer is not None:
            self.epochs.join(message.plan, outer.epoch, lambda: done("epoch"))
        if fills is not None:
            try:
                self._make_constants(constant_bytes(fills), f"fills of plan {message.plan}", made)
            except ArenaError as exc:
                self._plan_refused(message, str(exc))
        done("")

    def _outer(self, message: cluster.LoadPlan) -> _Outer | None:
        epoch = message.epoch
        if epoch is None:
            return None
        if self._node not in epoch.nodes or not 0 < epoch.lanes <= self._workers:
            raise ValueError(f"an epoch of nodes {epoch.nodes} with {epoch.lanes} lanes does not fit this node")
        node_of = dict(zip(message.ranks, message.crossing_nodes, strict=True))
        table = CopyTable.from_wire(message.crossing)
        used = {*np.unique(table.src_rank).tolist(), *np.unique(table.dst_rank).tolist()}
        if not all(0 <= node_of.get(rank, -1) < len(epoch.nodes) for rank in used):
            raise ValueError("a crossing row names a rank whose node is not in the epoch")
        return _Outer(crossing(table, node_of, epoch.lanes), epoch.nodes.index(self._node), epoch)

    def _plan_refused(self, message: cluster.LoadPlan, reason: str) -> None:
        self._log("bad-plan", plan=message.plan, reason=reason)
        epoch = message.epoch.id if message.epoch is not None else ""
        where = f"node {self._node}"
        self._say(cluster.PlanRefused(plan=message.plan, epoch=epoch, where=where, reason=reason))

    def drop_plan(self, plan_id: str) -> set[int]:
        """Forget a plan and the jobs made from it; return the arenas that nobody needs any more."""
        plan, loading = self._plans.pop(plan_id, None), self._loading.pop(plan_id, None)
        if loading is not None and loading.epoch:
            # its workers are still waiting for each other: they are wanted for the next epoch
            self.epochs.leave(loading.epoch)
        self.jobs.drop_keys(lambda key: isinstance(key, tuple) and key[:2] == ("stage", plan_id))
        if plan is not None and plan.outer is not None:
            self.epochs.leave(plan.outer.epoch.id)
        return {plan.constants} if plan is not None and plan.constants >= 0 else set()

    def drop_plans(self) -> set[int]:
        """Forget all plans: another coordinator knows nothing of them, and one that lost this node has dropped them."""
        return {arena for plan in [*self._plans, *self._loading] for arena in self.drop_plan(plan)}

    # --- staging ------------------------------------------------------------------------------------------

    def stage(self, swap: str, plan_id: str, version: int, timeout_s: float, verify: bool = True) -> None:
        """Start copying a version into the staging arenas of this node's members, and to other nodes."""
        plan = self._plans.get(plan_id)
        if plan is None:
            self._stage_failed(swap, "", f"node {self._node} does not have plan {plan_id}")
            return
        sources: dict[tuple[int, str], LocalTensor] = {}
        places_key: list[Hashable] = []
        read: list[Member] = []
        outer = plan.outer
        for rank in sorted({*np.unique(plan.table.src_rank).tolist(), *(outer.sent_ranks() if outer else ())}):
            member = self._members.get(plan.members.get(rank, ""))
            places = member.source_places(version) if member is not None else None
            if member is None or places is None:
                who = f"source rank {rank}"
                self._stage_failed(swap, who, f"version {version} is no longer held on node {self._node}")
                return
            read.append(member)
            sources |= {(rank, name): place for name, place in places.items()}
            places_key.append(member.where(version))
        destinations: dict[tuple[int, str], LocalTensor] = {}
        for rank in sorted({*np.unique(plan.table.dst_rank).tolist(), *(outer.received_ranks() if outer else ())}):
            member = self._members.get(plan.members.get(rank, ""))
            if member is None:
                self._stage_failed(swap, f"target rank {rank}", f"it is no longer registered on node {self._node}")
                return
        for rank, member in self._targets(plan):
            member.staged, member.staged_version, member.holds = None, version, None
            member.verifies = verify
            destinations |= {(rank, name): place for name, place in member.destinations().items()}
        if refusal := self._refused(plan, sources, destinations):
            self._stage_failed(swap, *refusal)
            return
        for _, member in self._targets(plan):
            if member.in_place:
                member.writing = swap
        local_swap = _LocalSwap(swap, plan, version, verify=verify)
        self._swaps[swap] = local_swap
        for member in read:
            readers = member.readers_of(version)
            if readers is not None:
                readers.add(swap)

        def inner() -> list[Share]:
            copies = address(plan.table, sources, destinations)
            if plan.fills is not None:
                fills = fill_copies(plan.fills, destinations, plan.constants, len(plan.table))
                copies = joined([copies, fills])
            return dealt(copies, self._workers, self._maps.homes(copies.arenas()))

        def crossing_shares() -> list[Share]:
            assert outer is not None
            epoch = outer.epoch
            return [
                Share(lane, halves_of(outer.rows, outer.index, lane, sources, destinations), epoch.id)
                for lane in range(epoch.lanes)
            ]

        self._log("swap", swap=swap, version=version, phase="stage", plan=plan_id)
        purpose = _Staging(swap)
        try:
            # what stays here first: it is soon done, and nobody else waits for it
            runs = self.jobs.start(("stage", plan_id, *places_key), inner, purpose, verify=verify)
            if outer is not None:
                key = ("stage", plan_id, outer.epoch.id, *places_key)
                runs += self.jobs.start(key, crossing_shares, purpose, verify=verify, timeout_s=timeout_s)
        except (KeyError, ValueError) as exc:
            self._stage_failed(swap, f"node {self._node}", f"the plan does not fit the tensors registered here: {exc}")
            return
        local_swap.outstanding = {run.number for run in runs}
        if not runs:
            self._arrived(local_swap)

    def _refused(
        self,
        plan: _Plan,
        sources: dict[tuple[int, str], LocalTensor],
        destinations: dict[tuple[int, str], LocalTensor],
    ) -> tuple[str, str] | None:
        """Return which parameter workers cannot move to or from a GPU, and why; None where they can move all."""
        places = [*sources.values(), *destinations.values()]
        gpu_arenas = set(self._maps.homes({place.arena for place in places}))
        if not gpu_arenas:
            return None
        table = plan.table
        row, why = refused_here(table, sources, destinations, gpu_arenas)
        if not why and plan.outer is not None:
            rows, here = plan.outer.rows, plan.outer.index
            table = rows.table
            sent, received = rows.src_node == here, rows.dst_node == here
            row, why = refused_crossing(table, sent, received, sources, destinations, gpu_arenas)
        return (self._row_name(plan, table, row), why) if why else None

    def _row_name(self, plan: _Plan, table: CopyTable, row: int) -> str:
        src, dst = (plan.members.get(int(rank[row]), f"rank {rank[row]}") for rank in (table.src_rank, table.dst_rank))
        return f"parameter {table.tensors[int(table.tensor[row])]!r} of {dst} from {src}"

    def _arrived(self, local_swap: _LocalSwap) -> None:
        """Everything has arrived: have what is held in another form made of it, then it is staged."""
        local_swap.converts = True
        targets = [member for _, member in self._targets(local_swap.plan)]

        def convert() -> list[Share]:
            made = [
                one
                for member in targets
                if isinstance(member.registration, local.RegisterTarget)
                for one in made_in(member.registration, member.staging)
            ]
            return dealt_conversions(pieces_of(made), self._workers)

        # it goes with the plan, and with the arenas of its members
        key = ("stage", local_swap.plan.id, "convert", *(member.id for member in targets))
        runs = self.jobs.start(key, convert, _Staging(local_swap.swap), verify=local_swap.verify)
        local_swap.outstanding = {run.number for run in runs}
        if not runs:
            self._staged(local_swap)

    def _targets(self, plan: _Plan) -> list[tuple[int, Member]]:
        """Return this node's targets and their ranks; one that receives nothing (all its shards are empty) too."""
        here = [(rank, self._members.get(member)) for rank, member in plan.members.items()]
        return [(rank, member) for rank, member in here if member is not None and not member.is_source]

    def _staged(self, local_swap: _LocalSwap) -> None:
        del self._swaps[local_swap.swap]
        self._log("swap", swap=local_swap.swap, version=local_swap.version, phase="staged")
        for _, member in self._targets(local_swap.plan):
            member.staged = local_swap.swap
        plan = local_swap.plan
        rows, nbytes = plan.outer.received() if plan.outer is not None else (0, 0)
        self._say(
            cluster.StageDone(
                swap=local_swap.swap,
                copies=len(plan.table) + rows,
                bytes=plan.table.total_bytes + nbytes,
                seconds=local_swap.seconds,
                crossing_s=local_swap.crossing_s,
                staging_bytes=local_swap.staging_bytes,
                converted_bytes=sum(figures_of(m.registration).converted_bytes for _, m in self._targets(plan)),
            )
        )

    def _stage_failed(self, swap: str, where: str, reason: str) -> None:
        local_swap = self._swaps.get(swap)
        if local_swap is not None:
            if local_swap.failed:
                return  # the first cause is the one to tell
            local_swap.failed = True
        self._log("stage-failed", swap=swap, where=where, reason=reason)
        self._say(cluster.StageFailed(swap=swap, where=where or f"node {self._node}", reason=reason))

    def staging(self) -> set[str]:
        """Return the swaps that are being staged here."""
        return set(self._swaps)

    def pause(self, swap: str, version: int, members: Sequence[str]) -> None:
        """Ask members to stand still until they have committed or the swap is aborted."""
        self._log("swap", swap=swap, version=version, phase="pause", members=list(members))
        for member_id in members:
            member = self._members.get(member_id)
            if member is None or member.session is None:
                self._say(cluster.MemberCommitFailed(swap=swap, member=member_id, reason="it is not registered here"))
                continue
            member.paused = swap
            self._out(ToClient(member.session, 0, local.AskPause(swap=swap, member=member.id, version=version)))

    def paused(self, swap: str, member: Member) -> None:
        """The member stands still."""
        if member.paused == swap:
            self._say(cluster.MemberQuiet(swap=swap, member=member.id))

    def fence(self, reason: str) -> None:
        """Have members that hold a staged version of which nobody here knows whether it was decided serve nothing."""
        for member in self._members.values():
            if (member.staged is not None or member.writing is not None) and not member.fenced:
                self._fence(member, "doubt", reason)

    def fence_behind(self, member: Member, reason: str) -> None:
        """Have a member that holds another version than the live one serve nothing until it has caught up."""
        self._fence(member, "behind", reason)

    def _fence(self, member: Member, kind: str, reason: str) -> None:
        member.fenced = kind
        if member.session is not None:
            self._log("fenced" if reason else "unfenced", member=member.id, reason=reason)
            self._out(ToClient(member.session, 0, local.Fence(member=member.id, reason=reason)))

    def abort(self, swap: str, reason: str) -> None:
        """Make sure that nothing is written for this swap any more, and forget it."""
        self._log("swap", swap=swap, phase="aborted", reason=reason)
        for worker in sorted(self.jobs.busy_with(_Staging(swap))):
            self.jobs.ended_by(worker)
            self._restart(worker)
            self.epochs.worker_gone(worker, f"worker {worker} on node {self._node}", f"ended with swap {swap}")
        self._swaps.pop(swap, None)
        for member in self._members.values():
            if member.staged == swap:
                member.staged = None
            if member.writing == swap:
                member.writing, member.version = None, None
                member.poisoned = f"swap {swap} ended while it was written in place: {reason}"
            if member.paused == swap:
                member.paused = None
                if member.session is not None:
                    is_poisoned = bool(member.poisoned)
                    resume = local.Resume(swap=swap, member=member.id, reason=reason, is_poisoned=is_poisoned)
                    self._out(ToClient(member.session, 0, resume))
            if member.fenced == "doubt" and member.staged is None:
                self._fence(member, "", "")

    def stop_reading(self, member: Member, version: int, reason: str) -> None:
        """A source takes a version back: end whatever reads it, now."""
        readers = member.readers_of(version)
        for swap in sorted(readers or ()):
            self._stage_failed(swap, member.id, f"version {version} was taken back while it was read: {reason}")
            self.abort(swap, reason)
        if readers is not None:
            readers.clear()

    # --- commit -------------------------------------------------------------------------------------------

    def commit(self, swap: str, version: int) -> None:
        """Tell every member that has this swap staged to take it over at its next commit point."""
        self._log("swap", swap=swap, version=version, phase="commit")
        for member in self._members.values():
            if member.staged != swap or member.session is None:
                continue
            member.staged_version, member.committing = version, swap
            prepare = local.PrepareCommit(
                swap=swap,
                member=member.id,
                version=version,
                by_worker=bool(member.live) and not member.in_place,
                in_place=member.in_place,
            )
            self._out(ToClient(member.session, 0, prepare))

    def quiet(self, swap: str, member: Member) -> None:
        """The member stands still: a worker may write its live tensors."""
        if member.staged == swap and member.live and not member.in_place:
            self._copy_live(swap, member, attempt=1)

    def _copy_live(self, swap: str, member: Member, attempt: int) -> None:
        def make() -> list[Share]:
            pairs = zip(member.held_places(), member.live, held_of(member.registration), strict=True)
            copies = whole_tensors([(src, dst, ELEMENT_SIZES[tensor.dtype]) for src, dst, tensor in pairs])
            return dealt(copies, self._workers, self._maps.homes(copies.arenas()))

        purpose = _Committing(swap, member.id, attempt)
        self._attempts[member.id] = purpose
        if not self.jobs.start(("commit", member.id), make, purpose, verify=member.verifies):
            self._applied(purpose, "")

    def _applied(self, purpose: _Committing, reason: str) -> None:
        member = self._members.get(purpose.member)
        if member is not None and member.session is not None:
            applied = local.CommitApplied(swap=purpose.swap, member=purpose.member, reason=reason)
            self._out(ToClient(member.session, 0, applied))

    def committed(self, swap: str, member: Member, paused_s: float) -> bool:
        """The member has the version live; return whether that was what it had been told to do."""
        if member.staged != swap:
            return False
        self._log(
            "swap", swap=swap, version=member.staged_version, phase="committed", member=member.id, paused=paused_s
        )
        member.version = member.staged_version
        member.holds = None if member.in_place else member.staged_version
        member.writing, member.poisoned = None, ""
        member.fenced = ""  # the client knows: it has taken the version over
        member.staged = member.committing = member.paused = None
        self._say(cluster.MemberCommitted(swap=swap, member=member.id, paused_s=paused_s))
        return True

    def commit_failed(self, swap: str, member: Member, reason: str) -> None:
        """The member could not take the version over, and serves none until a swap succeeds; or not stand still."""
        self._log("swap", swap=swap, phase="failed", member=member.id, reason=reason)
        if member.committing == swap:
            member.version = member.staged = member.committing = member.paused = member.writing = None
        elif member.paused != swap:
            return
        self._say(cluster.MemberCommitFailed(swap=swap, member=member.id, reason=reason))

    def member_left(self, member: Member, reason: str) -> None:
        """A member is gone; its jobs are of no use."""
        self._attempts.pop(member.id, None)
        self.jobs.drop_keys(lambda key: key == ("commit", member.id))

    # --- workers ------------------------------------------------------------------------------------------

    def worker_said(self, worker: int, message: sidecar.FromWorker) -> None:
        """Take a worker's word about a run."""
        match message:
            case sidecar.RunProgress(number, bytes_done):
                run = self.jobs.run(number)
                if run is not None and isinstance(run.purpose, _Staging):
                    self._progress(run, run.purpose.swap, bytes_done)
            case sidecar.RunDone(number):
                run = self.jobs.end(number)
                if run is not None:
                    self._run_done(run, message)
            case sidecar.RunFailed(number, reason, copy):
                run = self.jobs.end(number)
                if run is not None:
                    self._run_failed(run, reason, copy, worker)
            case sidecar.EpochPut() | sidecar.EpochJoined() | sidecar.EpochFailed():
                self.epochs.worker_said(worker, message)
            case _:
                pass

    def _progress(self, run: Run, swap: str, bytes_done: int) -> None:
        local_swap = self._swaps.get(swap)
        if local_swap is not None:
            local_swap.progress[run.number] = bytes_done
            self._say(cluster.StageProgress(swap=swap, bytes_done=sum(local_swap.progress.values())))

    def _run_done(self, run: Run, done: sidecar.RunDone) -> None:
        if isinstance(run.purpose, _Committing):
            self._commit_run_done(run.purpose)
            return
        if isinstance(run.purpose, _Staging) and (local_swap := self._swaps.get(run.purpose.swap)) is not None:
            local_swap.outstanding.discard(run.number)
            local_swap.seconds = max(local_swap.seconds, done.seconds)
            if run.crosses:
                local_swap.crossing_s = max(local_swap.crossing_s, done.seconds)
                local_swap.staging_bytes = max(local_swap.staging_bytes, done.staging_bytes)
            if not local_swap.outstanding and not local_swap.failed:
                if local_swap.converts:
                    self._staged(local_swap)
                else:
                    self._arrived(local_swap)

    def _commit_run_done(self, purpose: _Committing) -> None:
        # a share of an attempt that was repeated says nothing; only the latest attempt counts
        latest = self._attempts.get(purpose.member) == purpose
        if latest and not self.jobs.busy_with(purpose):
            self._applied(purpose, "")

    def not_sent(self, worker: int, message: Message, reason: str) -> None:
        """A worker was not told of something: what needs that fails, and is tried anew next time."""
        self._log("not-sent", worker=worker, message=type(message).__name__, reason=reason)
        match message:
            case sidecar.MapArena(arena):
                self._maps.doubt(worker, arena)
            case sidecar.LoadJob(job):
                for run in self.jobs.runs_of(job, worker):
                    self.jobs.end(run.number)
                    self._run_failed(run, f"it could not be given its part of the copies: {reason}", None, worker)

    def _run_failed(self, run: Run, reason: str, copy: int | None, worker: int) -> None:
        self.jobs.unload(run)
        for arena in self._maps.homes(run.job.shares[run.worker].rows.arenas()):
            self._maps.doubt(run.worker, arena)
        if isinstance(run.purpose, _Committing):
            self._applied(run.purpose, reason)
        elif isinstance(run.purpose, _Staging):
            local_swap = self._swaps.get(run.purpose.swap)
            row = self.jobs.copy_origin(run, copy)
            what = f"worker {worker} on node {self._node}"
            if not run.crosses and local_swap is not None and row is not None and row < len(local_swap.plan.table):
                what = self._row_name(local_swap.plan, local_swap.plan.table, row)
            self._stage_failed(run.purpose.swap, what, reason)

    def worker_died(self, worker: int, who: str, how: str) -> None:
        """Account for everything a dead worker was doing."""
        for run in self.jobs.ended_by(worker):
            if isinstance(run.purpose, _Staging):
                doing = "converting what has arrived" if run.converts else "staging"
                self._stage_failed(run.purpose.swap, who, f"{how} while {doing}")
            elif isinstance(run.purpose, _Committing):
                self._commit_again(run.purpose, f"{who}: {how} while committing")
        self.epochs.worker_gone(worker, who, how)

    def unneeded(self) -> set[int]:
        """Return, once, the arenas that nobody needs any more."""
        found, self._unneeded = self._unneeded, set()
        return found

    def tick(self) -> None:
        """Replace workers that are stuck in something nobody wants any more."""
        for worker, why in self.epochs.tick():
            self._log("worker-replaced", worker=worker, reason=why)
            self._restart(worker)
            self.worker_died(worker, f"worker {worker} on node {self._node}", why)

    def _commit_again(self, purpose: _Committing, reason: str) -> None:
        """Repeat a commit copy from the start: the shares of other workers that still run write the same bytes."""
        member = self._members.get(purpose.member)
        if member is None:
            return
        if purpose.attempt < COMMIT_ATTEMPTS:
            self._copy_live(purpose.swap, member, purpose.attempt + 1)
        else:
            self._applied(purpose, f"{reason}; {COMMIT_ATTEMPTS} attempts failed")

    # --- output -------------------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        self._out(ToCoordinator(0, message))

    def _log(self, event: str, **fields: object) -> None:
        self._out(Log(event, fields))
