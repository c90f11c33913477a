"""Requests about the whole cluster by operators and trainers: swaps, status, plans, verification."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from refitd.client.aio import awaitable
from refitd.client.arguments import MAX_SMALL, flag, hook, seconds, text, whole
from refitd.client.reentrant_lock import check_process
from refitd.errors import DeadlineExceeded, RefusedError
from refitd.protocol import local
from refitd.protocol.base import MAX_TEXT_BYTES
from refitd.protocol.cable_reports import CablesMeasured
from refitd.protocol.reports import (
    DrainReport,
    EvictReport,
    ForgetReport,
    HistoryReport,
    ModelDescription,
    PlanReport,
    ReloadReport,
    ResumeReport,
    StatusReport,
    SwapFailed,
    SwapProgress,
    SwapReport,
    SwapReports,
    VerifyReport,
)
from refitd.protocol.traces import GetTrace, TraceReport
from refitd.states import SwapOutcome

if TYPE_CHECKING:
    import torch

    from refitd.client.reconnect import Line
    from refitd.describe.roster import Roster

REQUEST_S = 30.0
MEASURE_S = 60.0  # for workers to load what they need and to meet, at their first measurement
# The coordinator answers within the requested timeout; the client gives up this much later.
MARGIN_S = 1.0
# A swap without a timeout ends at the coordinator's deadlines; this is longer than any sensible deadline.
SWAP_S = 3600.0
SHORTEST_S = 0.001
POLL_S = 0.2  # interval between looks at who has registered
DRAIN_POLL_S = 0.5  # interval between looks at the swaps of a node that is drained


class Operations:
    """The requests of a client that concern all nodes: the base of `Client`."""

    _connection: Line

    def swap(
        self,
        model: str,
        version: int | None = None,
        *,
        timeout: float | None = None,
        queue: bool = False,
        wait: float = 0.0,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> SwapReport:
        """Make a version (None: the newest complete one) live in every replica, or in none.

        Args:
            model: the model's name.
            version: the version's number.
            timeout: seconds for the swap itself. A swap that is undecided by then is aborted; a decided one goes on,
                and this call raises SwapFailed naming the late members.
            queue: wait for a running swap of the model to end; without it, the call is refused meanwhile.
            wait: seconds to wait for missing source ranks, for the version to be published, and for missing targets.
            on_progress: called with each progress message.

        Raises:
            RefusedError: the swap could not start; the reason says what is missing.
            SwapFailed: the version is not live everywhere, or the timeout passed after the decision (`report.outcome`
                is DECIDED); `report` and `causes` say who and why.
            DeadlineExceeded: the swap's turn did not come in time, or nobody answers (see `history` for the decision).
        """
        model, version, timeout = _swapped(model, version, timeout, on_progress)
        queue, within = flag("queue", queue), _on_the_wire(timeout)
        if wait:
            self._wait_for_all(model, version, seconds("wait", wait))
        message = local.StartSwap(model, version, within, queue, progress=on_progress is not None)
        return self._swap(message, timeout, on_progress)

    def swap_together(
        self,
        versions: Mapping[str, int | None],
        *,
        timeout: float | None = None,
        wait: float = 0.0,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> dict[str, SwapReport]:
        """Make versions of several models (a policy and its draft, say) live by one decision: all of them, or none.

        Args:
            versions: the version of each model (None: its newest complete one). Engines that serve several of them
                call `poll` of each at the same commit point.
            timeout: as in `swap`.
            wait: as in `swap`, for all models together.
            on_progress: called with each progress message, which names its model.

        Raises:
            RefusedError, DeadlineExceeded: as in `swap`; none of them has begun.
            SwapFailed: not every version is live everywhere; `report` is that of the first model at fault.
        """
        found = {model: _swapped(model, version, timeout, on_progress) for model, version in versions.items()}
        deadline = time.monotonic() + (seconds("wait", wait) if wait else 0.0)
        for model, version, _ in found.values() if wait else ():
            self._wait_for_all(model, version, max(0.0, deadline - time.monotonic()))
        within = next((timeout for _, _, timeout in found.values()), None)
        message = local.StartSwaps(
            swaps=tuple(local.ModelVersion(model, version) for model, version, _ in found.values()),
            timeout_s=_on_the_wire(within),
            progress=on_progress is not None,
        )
        waits = SWAP_S if within is None else within + MARGIN_S
        reports = self._connection.request(message, SwapReports, waits, on_progress).reports
        for report in reports:
            _check_committed(report, reports)
        return {report.model: report for report in reports}

    def _wait_for_all(self, model: str, version: int | None, wait: float) -> None:
        """Return when a swap could begin, or after `wait` seconds: the swap's refusal then says what is missing."""
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            found = next((m for m in self.status().models if m.model == model), None)
            if found is not None and found.complete_versions and version in (None, *found.complete_versions):
                worlds = {target.replica: target.world_size for target in found.targets}
                there = collections.Counter(target.replica for target in found.targets)
                if worlds and all(there[replica] == size for replica, size in worlds.items()):
                    return
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))

    def rollback(
        self,
        model: str,
        version: int | None = None,
        *,
        timeout: float | None = None,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> SwapReport:
        """Make an older version (None: the one before the live one) live again.

        Where every target rank flips and its other arena still holds that version, the arenas are exchanged again: no
        byte moves and no source is needed. Otherwise every source rank must still hold it.

        Raises:
            RefusedError, SwapFailed, DeadlineExceeded: as in `swap`.
        """
        model, version, timeout = _swapped(model, version, timeout, on_progress)
        within, is_watched = _on_the_wire(timeout), on_progress is not None
        message = local.StartSwap(model, version, within, rollback=True, progress=is_watched)
        return self._swap(message, timeout, on_progress)

    def _swap(
        self, message: local.StartSwap, timeout: float | None, on_progress: Callable[[SwapProgress], None] | None
    ) -> SwapReport:
        wait = SWAP_S if timeout is None else timeout + MARGIN_S
        report = self._connection.request(message, SwapReport, wait, on_progress)
        _check_committed(report)
        return report

    swap_async = awaitable(swap)
    swap_together_async = awaitable(swap_together)
    rollback_async = awaitable(rollback)

    def status(self, *, timeout: float = REQUEST_S) -> StatusReport:
        """Return the cluster as the coordinator sees it.

        Raises:
            DeadlineExceeded: no answer came within `timeout` seconds.
        """
        return self._connection.request(local.GetStatus(), StatusReport, seconds("timeout", timeout))

    def history(self, model: str = "", limit: int = 20) -> HistoryReport:
        """Return the last `limit` swaps of a model ("": of all models) from the coordinator's journal, newest first."""
        message = local.GetHistory(model=text("model", model, least=0), limit=whole("limit", limit, 0, MAX_SMALL))
        return self._connection.request(message, HistoryReport, REQUEST_S)

    def trace(self, model: str, swap: str = "") -> TraceReport:
        """Return what every process did in a swap ("": the last one, or the one that runs), and when.

        The coordinator and the daemons keep the last 16 swaps since they started.

        Raises:
            RefusedError: the swap is not kept.
        """
        message = GetTrace(text("model", model), text("swap", swap, least=0))
        return self._connection.request(message, TraceReport, REQUEST_S)

    def plan(self, model: str) -> PlanReport:
        """Return what a swap of `model` would move; raises PlanError listing every problem."""
        return self._connection.request(local.GetPlan(model=text("model", model)), PlanReport, 120.0)

    def describe(self, model: str) -> ModelDescription:
        """Return what every registered rank of `model` holds."""
        return self._connection.request(local.GetDescription(model=text("model", model)), ModelDescription, REQUEST_S)

    def tensors(self, model: str, *, timeout: float = 30.0) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of every canonical tensor that the sources of `model` offer, by canonical name.

        Waits until every source rank has registered. The dtype of a tensor that its source may round
        (`register_source(cast="bfloat16")`) is the one before rounding.

        Raises:
            DeadlineExceeded: source ranks have not registered in time; the error names them.
            PlanError: the ranks' descriptions contradict each other.
        """
        import torch

        from refitd.plan.offered import offered_tensors

        offered = offered_tensors(self._sources(text("model", model), seconds("timeout", timeout))[0])
        return {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in offered.items()}

    def _sources(self, model: str, timeout: float) -> tuple[list[Roster], bool]:
        """Return what every source rank offers, and whether that is a part of the model; waits for all ranks."""
        from refitd.describe.roster import Roster
        from refitd.protocol.shards import metadata_of

        check_process(self._connection.current.pid)  # a RefusedError of a fork must not be waited for
        deadline = time.monotonic() + timeout
        while True:
            try:
                found = self.describe(model)
            except RefusedError as exc:
                missing = str(exc)
            else:
                sources = [member for member in found.members if member.role == "source"]
                ranks = {*range(sources[0].world_size)} - {m.rank for m in sources} if sources else {0}
                if not ranks:
                    break
                missing = f"source ranks {sorted(ranks)[:8]} have not registered"
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"model {model!r}: no tensors are offered after {timeout:.1f} s: {missing}")
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
        rosters = [Roster(m.rank, source=metadata_of(found.shards[m.shard], m.rank)) for m in sources]
        return rosters, any(found.shards[m.shard].is_partial for m in sources)

    def verify(self, model: str, *, timeout: float | None = None) -> VerifyReport:
        """Check every replica's live weights of `model` against the digests of the version that it serves.

        It may be called at any time, and delays engines and swaps by some milliseconds at most. The report's `outcome`
        is PROVEN, DIFFERS (with parameter, slice and rank) or UNKNOWN; none of these raises.

        Raises:
            RefusedError: there is no such model, or it has no target.
        """
        model, timeout = text("model", model), None if timeout is None else seconds("timeout", timeout)
        wait = SWAP_S if timeout is None else timeout + MARGIN_S
        return self._connection.request(local.Verify(model=model, timeout_s=_on_the_wire(timeout)), VerifyReport, wait)

    verify_async = awaitable(verify)

    def abort(self, model: str, reason: str = "") -> None:
        """Abort the running swap of `model` unless it is decided."""
        message = local.AbortSwap(
            model=text("model", model), reason=text("reason", reason, least=0, most=MAX_TEXT_BYTES)
        )
        self._connection.request(message, local.Done, REQUEST_S)

    def evict(self, model: str, replica: str, rank: int | None = None, reason: str = "") -> EvictReport:
        """Remove a replica of `model`, or one rank of it, so that a hanging engine no longer blocks swaps.

        A running swap treats the evicted process as dead. Once the evicted engine hears of it, it serves nothing
        (`version` is None, `poll` raises RefusedError) until it registers again.

        Raises:
            RefusedError: there is no such model, replica or rank.
        """
        message = local.Evict(model=model, replica=replica, rank=rank, reason=reason)
        return self._connection.request(message, EvictReport, REQUEST_S)

    def forget(self, model: str) -> ForgetReport:
        """Free what dead processes left of `model`: versions of trainers that have ended, arenas kept of dead engines.

        Who is connected keeps what it has. If no source is left, replicas that join are not caught up until the next
        version is published.

        Raises:
            RefusedError: nobody knows such a model, or a swap of it is running.
        """
        return self._connection.request(local.Forget(model=text("model", model)), ForgetReport, REQUEST_S)

    def reload(self) -> ReloadReport:
        """Have the coordinator read its list of admitted keys (security.allowed) again.

        A node whose key was taken off is removed as if it had died, and its engines stop serving at the end of their
        lease. An unusable list changes nothing.

        Raises:
            ConfigError: the list cannot be used.
        """
        return self._connection.request(local.Reload(), ReloadReport, REQUEST_S)

    def measure_cables(self, pairs: Iterable[tuple[str, str]], *, duration: float = 2.0) -> CablesMeasured:
        """Measure how fast nodes send to each other, over the copy service that moves weights between them.

        All pairs send at once. A swap that begins meanwhile ends it.

        Args:
            pairs: (node that sends, node that receives); each node is in one pair.
            duration: how long to send, from 0.1 to 10 seconds.

        Returns:
            What each receiving node got per second.

        Raises:
            ValueError: there is no pair, or the duration is out of bounds.
            RefusedError: a node is not connected or is in several pairs, or a swap or another measurement is running.
            TransportError: the nodes' workers cannot reach each other or do not answer, or a swap began.
        """
        asked = tuple(local.CablePair(text("node", source), text("node", target)) for source, target in pairs)
        duration = seconds("duration", duration)
        if not 0 < len(asked) <= 1024 or not 0.1 <= duration <= 10:
            raise ValueError(
                f"{len(asked)} pairs of nodes for {duration:g} s; measure 1 to 1024 pairs for 0.1 to 10 seconds"
            )
        message = local.MeasureCables(pairs=asked, seconds=duration)
        return self._connection.request(message, CablesMeasured, MEASURE_S + duration)

    def drain(
        self,
        node: str,
        *,
        timeout: float | None = None,
        wait: bool = True,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> DrainReport:
        """Leave `node` out of all swaps that have not begun, until `resume`; wait for the running ones to end.

        New swaps leave out every replica with a rank, or its controller, on the node; such a replica serves what it
        has until another version is decided, then nothing. Source ranks cannot be left out: while one is on a drained
        node, swaps that would read it are refused. The drain outlives restarts of the daemon and the coordinator.

        Args:
            node: a connected node.
            timeout: seconds to wait for swaps in which the node takes part. Default: until their own deadlines.
            wait: False returns at once; the report's `running` lists these swaps.
            on_progress: called with the progress of each of these swaps.

        Returns:
            What the drain means for the node's replicas and sources, as it was when the node was drained.

        Raises:
            RefusedError: no such node is connected, or the node was resumed meanwhile.
            DeadlineExceeded: a swap still runs; the node is drained.
            CommitError: the journal cannot be written; the node is not drained.
        """
        message = local.DrainNode(node=text("node", node))
        timeout = SWAP_S if timeout is None else seconds("timeout", timeout)
        deadline = time.monotonic() + timeout
        report = self._connection.request(message, DrainReport, REQUEST_S)
        left = {swap.swap for swap in report.running} if flag("wait", wait) else set()
        while left:
            status = self.status(timeout=max(MARGIN_S, min(REQUEST_S, deadline - time.monotonic())))
            if node not in status.drained:
                raise RefusedError(f"node {node!r} was resumed while its swaps were waited for; drain it again")
            running = [model.swap for model in status.models if model.swap is not None and model.swap.swap in left]
            left = {swap.swap for swap in running}
            for swap in running:
                if on_progress is not None:
                    on_progress(swap)
            if left and time.monotonic() >= deadline:
                late = ", ".join(f"{s.swap} of {s.model!r} (phase {s.phase})" for s in running)
                raise DeadlineExceeded(
                    f"node {node!r} is drained, but still takes part in swap {late} after {timeout:.1f} s; wait for "
                    "its end, or abort it (refitctl abort)"
                )
            if left:
                time.sleep(min(DRAIN_POLL_S, max(0.0, deadline - time.monotonic())))
        return report

    def resume(self, node: str) -> ResumeReport:
        """Let a drained node take part in swaps again; replicas that lag are caught up.

        Raises:
            RefusedError: the node is not drained, and none of this name is connected.
            CommitError: the journal cannot be written; the node stays drained.
        """
        return self._connection.request(local.ResumeNode(node=text("node", node)), ResumeReport, REQUEST_S)


def _check_committed(report: SwapReport, together: tuple[SwapReport, ...] = ()) -> None:
    """Raise SwapFailed unless every rank of every replica serves the version; `together` goes into the error."""
    if report.outcome != SwapOutcome.COMMITTED:
        causes = {f"{m.replica} rank {m.rank}": m.reason for m in report.members if m.reason}
        is_late = report.outcome == SwapOutcome.DECIDED
        how = "not complete yet" if is_late else f"{report.outcome} in phase {report.phase}"
        what = f"swap of {report.model!r} to version {report.version} {how}"
        raise SwapFailed(f"{what}: {report.reason}", causes, report, together)


def _swapped(
    model: str, version: int | None, timeout: float | None, on_progress: Callable[[SwapProgress], None] | None
) -> tuple[str, int | None, float | None]:
    """Return the checked arguments of a swap in plain types."""
    hook("on_progress", on_progress)
    return (
        text("model", model),
        None if version is None else whole("version", version),
        None if timeout is None else seconds("timeout", timeout),
    )


def _on_the_wire(timeout: float | None) -> float:
    """Return a timeout as messages encode it: 0 means none, so a caller's 0 becomes SHORTEST_S."""
    return 0.0 if timeout is None else max(timeout, SHORTEST_S)
