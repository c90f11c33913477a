"""Requests of operators and trainers that concern the whole cluster: swaps, status, plans, verification."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from refitd.client.calls import MAX_SMALL, awaitable, check_process, flag, hook, seconds, text, whole
from refitd.errors import DeadlineExceeded, RefusedError
from refitd.protocol import local
from refitd.protocol.base import MAX_TEXT_BYTES
from refitd.protocol.plan_reports import ModelDescription, PlanReport
from refitd.protocol.reports import (
    DrainReport,
    EvictReport,
    ForgetReport,
    GetTrace,
    HistoryReport,
    ModelStatus,
    ReloadReport,
    StatusReport,
    SwapFailed,
    SwapProgress,
    SwapReport,
    SwapReports,
    TraceReport,
    VerifyReport,
)
from refitd.states import SwapOutcome
from refitd.text import target_rank

if TYPE_CHECKING:
    import torch

    from refitd.client.reconnect import Line
    from refitd.describe.metadata import Roster

REQUEST_S = 30.0
# The coordinator answers within the requested timeout; the client waits this much longer.
MARGIN_S = 1.0
# A swap without a timeout ends at the coordinator's deadlines; this wait is longer than any sensible deadline.
SWAP_S = 3600.0
SHORTEST_S = 0.001
POLL_S = 0.2  # interval between checks for missing ranks and versions
DRAIN_POLL_S = 0.5  # interval between checks of a drained node's swaps


class Operations:
    """The requests of a client that concern all nodes; the base class of `Client`."""

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
            timeout: seconds for the swap itself. If it passes before the decision, the swap is aborted. If it passes
                after the decision, the swap continues, and this call raises SwapFailed naming the late members.
            queue: if a swap of the model is running, wait for its end; False: refuse the call.
            wait: seconds to wait for missing source ranks, for the version to be published, and for missing targets.
                A large version is staged while it is published.
            on_progress: called with each progress message.

        Raises:
            RefusedError: the swap could not start; the error lists the missing things.
            SwapFailed: the version is not live everywhere, or the timeout passed after the decision (`report.outcome`
                is DECIDED); `report` and `causes` name the members and the reasons.
            DeadlineExceeded: an earlier swap did not end in time, or no answer came (see `history` for the decision).
        """
        return self._swap(model, version, timeout, on_progress, queue=flag("queue", queue), wait=wait)

    def swap_together(
        self,
        versions: Mapping[str, int | None],
        *,
        timeout: float | None = None,
        wait: float = 0.0,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> dict[str, SwapReport]:
        """Make versions of several models (a policy and its draft, say) live by one decision: all or none.

        Args:
            versions: the version of each model (None: its newest complete one). Engines that serve several of them
                call `poll` of each at the same commit point.
            timeout: as in `swap`.
            wait: as in `swap`, for all models together.
            on_progress: called with each progress message, which names its model.

        Raises:
            RefusedError, DeadlineExceeded: as in `swap`; no model's swap has begun.
            SwapFailed: some version is not live everywhere; `report` describes the first model that failed.
        """
        found = {model: _swapped(model, version, timeout, on_progress) for model, version in versions.items()}
        deadline = time.monotonic() + (seconds("wait", wait) if wait else 0.0)
        for model, version, _ in found.values() if wait else ():
            self._wait_for_all(model, version, max(0.0, deadline - time.monotonic()))
        within = next((timeout for _, _, timeout in found.values()), None)
        message = local.StartSwaps(
            swaps=tuple(local.ModelVersion(model, version) for model, version, _ in found.values()),
            timeout_s=within or 0.0,
            progress=on_progress is not None,
        )
        waits = SWAP_S if within is None else within + MARGIN_S
        reports = self._connection.request(message, SwapReports, waits, on_progress).reports
        for report in reports:
            if report.outcome != SwapOutcome.COMMITTED:
                raise _failed(report, reports)
        return {report.model: report for report in reports}

    def _wait_for_all(self, model: str, version: int | None, wait: float) -> None:
        """Wait until a swap could begin, at most `wait` seconds; later the swap's refusal lists what is missing."""
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            found = next((m for m in self.status().models if m.model == model), None)
            if found is not None and (found.complete_versions if version is None else _can_begin(found, version)):
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

        If every target rank flips and its other arena still holds that version, the ranks exchange their arenas again:
        no bytes move, and no source is needed. Otherwise every source rank must still hold the version.

        Raises:
            RefusedError, SwapFailed, DeadlineExceeded: as in `swap`.
        """
        return self._swap(model, version, timeout, on_progress, rollback=True)

    def _swap(
        self,
        model: str,
        version: int | None,
        timeout: float | None,
        on_progress: Callable[[SwapProgress], None] | None,
        *,
        queue: bool = False,
        wait: float = 0.0,
        rollback: bool = False,
    ) -> SwapReport:
        model, version, timeout = _swapped(model, version, timeout, on_progress)
        if wait:
            self._wait_for_all(model, version, seconds("wait", wait))
        is_watched = on_progress is not None
        message = local.StartSwap(model, version, timeout or 0.0, queue, rollback, progress=is_watched)
        waits = SWAP_S if timeout is None else timeout + MARGIN_S
        report = self._connection.request(message, SwapReport, waits, on_progress)
        if report.outcome != SwapOutcome.COMMITTED:
            raise _failed(report)
        return report

    swap_async = awaitable(swap)
    swap_together_async = awaitable(swap_together)
    rollback_async = awaitable(rollback)

    def status(self, *, timeout: float = REQUEST_S) -> StatusReport:
        """Return the coordinator's view of the cluster.

        Raises:
            DeadlineExceeded: no answer came within `timeout` seconds.
        """
        return self._connection.request(local.GetStatus(), StatusReport, seconds("timeout", timeout))

    def history(self, model: str = "", limit: int = 20) -> HistoryReport:
        """Return the last `limit` swaps of a model ("": of all models) from the coordinator's journal, newest first."""
        message = local.GetHistory(model=text("model", model, least=0), limit=whole("limit", limit, 0, MAX_SMALL))
        return self._connection.request(message, HistoryReport, REQUEST_S)

    def trace(self, model: str, swap: str = "") -> TraceReport:
        """Return the steps of a swap in every process, with times ("": the running swap, or else the last one).

        The coordinator and the daemons record the last 16 swaps since they started.

        Raises:
            RefusedError: the swap is not recorded.
        """
        message = GetTrace(text("model", model), text("swap", swap, least=0))
        return self._connection.request(message, TraceReport, REQUEST_S)

    def plan(self, model: str) -> PlanReport:
        """Return the transfers that a swap of `model` would make; raises PlanError listing every problem."""
        return self._connection.request(local.GetPlan(model=text("model", model)), PlanReport, 120.0)

    def describe(self, model: str) -> ModelDescription:
        """Return the shard of every registered rank of `model`."""
        return self._connection.request(local.GetDescription(model=text("model", model)), ModelDescription, REQUEST_S)

    def tensors(self, model: str, *, timeout: float = 30.0) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of every canonical tensor that the sources of `model` offer, by canonical name.

        Waits until every source rank has registered. If a source may round a tensor
        (`register_source(cast="bfloat16")`), its dtype is the one before rounding.

        Raises:
            DeadlineExceeded: source ranks have not registered in time; the error names them.
            PlanError: the ranks' descriptions contradict each other.
        """
        import torch

        from refitd.plan.read_rosters import offered_tensors

        offered = offered_tensors(self._sources(text("model", model), seconds("timeout", timeout))[0])
        return {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in offered.items()}

    def _sources(self, model: str, timeout: float) -> tuple[list[Roster], bool]:
        """Return every source rank's roster, and whether a source is partial; waits for all ranks."""
        from refitd.describe.metadata import Roster
        from refitd.protocol.shards import metadata_of

        check_process(self._connection.current.pid)  # or `describe` would be retried in vain in a forked child
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

        Call it at any time: it delays engines and swaps by a few milliseconds at most. The report's `outcome` is
        PROVEN, DIFFERS (with parameter, slice and rank) or UNKNOWN; none of these raises an error.

        Raises:
            RefusedError: there is no such model, or it has no target.
        """
        model, timeout = text("model", model), None if timeout is None else _within(timeout)
        wait = SWAP_S if timeout is None else timeout + MARGIN_S
        return self._connection.request(local.Verify(model=model, timeout_s=timeout or 0.0), VerifyReport, wait)

    verify_async = awaitable(verify)

    def abort(self, model: str, reason: str = "") -> None:
        """Abort the running swap of `model`, unless it is decided."""
        message = local.AbortSwap(
            model=text("model", model), reason=text("reason", reason, least=0, most=MAX_TEXT_BYTES)
        )
        self._connection.request(message, local.Done, REQUEST_S)

    def evict(self, model: str, replica: str, rank: int | None = None, reason: str = "") -> EvictReport:
        """Remove a replica of `model`, or one rank of it, to stop a hanging engine from blocking swaps.

        A running swap treats the evicted process as dead. When the evicted engine receives the eviction, it stops
        serving (`version` is None, `poll` raises RefusedError) until it registers again.

        Raises:
            RefusedError: there is no such model, replica or rank.
        """
        message = local.Evict(model=model, replica=replica, rank=rank, reason=reason)
        return self._connection.request(message, EvictReport, REQUEST_S)

    def forget(self, model: str) -> ForgetReport:
        """Free the memory of `model` that dead processes left: versions of ended trainers, arenas of ended engines.

        Connected processes lose no memory. If no source is left, joining replicas are not caught up until the next
        version is published.

        Raises:
            RefusedError: the model is unknown, or a swap of it is running.
        """
        return self._connection.request(local.Forget(model=text("model", model)), ForgetReport, REQUEST_S)

    def forget_node(self, node: str) -> ForgetReport:
        """Remove a lost node from reports, if it will not return; raises RefusedError if it is not lost."""
        return self._connection.request(local.Forget(node=text("node", node)), ForgetReport, REQUEST_S)

    def reload(self) -> ReloadReport:
        """Make the coordinator read its list of admitted keys (security.allowed) again.

        If a node's key was removed, the node is treated as dead, and its engines stop serving at the end of their
        lease. If the list cannot be used, the old list stays in effect.

        Raises:
            ConfigError: the list cannot be used.
        """
        return self._connection.request(local.Reload(), ReloadReport, REQUEST_S)

    def drain(
        self,
        node: str,
        *,
        timeout: float | None = None,
        wait: bool = True,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> DrainReport:
        """Exclude `node` from new swaps until `resume`, and wait for its running swaps to end.

        New swaps skip every replica with a rank, or its controller, on the node. A skipped replica serves its version
        until another version is decided; then it stops serving. Swaps cannot skip source ranks: while a source rank is
        on a drained node, swaps that would read from it are refused. The drain survives restarts of the daemon and the
        coordinator.

        Args:
            node: a connected node.
            timeout: seconds to wait for the node's running swaps. Default: until the swaps' own deadlines.
            wait: False: return without waiting; the report's `running` lists these swaps.
            on_progress: called with the progress of each of these swaps.

        Returns:
            The effect on the node's replicas and sources, as of the moment when the node was drained.

        Raises:
            RefusedError: no such node is connected, or the node was resumed during the wait.
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

    def resume(self, node: str) -> DrainReport:
        """Include a drained node in swaps again, and catch up its lagging replicas.

        Raises:
            RefusedError: the node is not drained, and no node of this name is connected.
            CommitError: the journal cannot be written; the node stays drained.
        """
        return self._connection.request(local.DrainNode(node=text("node", node), drained=False), DrainReport, REQUEST_S)


def _can_begin(model: ModelStatus, version: int) -> bool:
    """Return whether a swap of a version can begin: every source rank has published it, or publishes it."""
    return version in model.complete_versions or version == model.begun


def _failed(report: SwapReport, together: tuple[SwapReport, ...] = ()) -> SwapFailed:
    """Return the error for a swap that is not live everywhere, with the reports of the swaps `together` with it."""
    causes = {target_rank(m.replica, m.rank): m.reason for m in report.members if m.reason}
    is_late = report.outcome == SwapOutcome.DECIDED
    how = "not complete yet" if is_late else f"{report.outcome} in phase {report.phase}"
    what = f"swap of {report.model!r} to version {report.version} {how}"
    return SwapFailed(f"{what}: {report.reason}", causes, report, together)


def _swapped(
    model: str, version: int | None, timeout: float | None, on_progress: Callable[[SwapProgress], None] | None
) -> tuple[str, int | None, float | None]:
    """Return the checked arguments of a swap in plain types."""
    if on_progress is not None:
        hook("on_progress", on_progress)
    return (
        text("model", model),
        None if version is None else whole("version", version),
        None if timeout is None else _within(timeout),
    )


def _within(timeout: float) -> float:
    """Return a checked timeout in seconds. In messages 0 means no timeout, so 0 becomes SHORTEST_S."""
    return max(seconds("timeout", timeout), SHORTEST_S)
