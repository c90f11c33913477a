"""Reports of the coordinator about itself: nodes, models, links, past swaps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from refitd.config import Config, ModelConfig
from refitd.coordinator.membership import Node
from refitd.coordinator.models import ModelState
from refitd.coordinator.records import Record
from refitd.coordinator.report import swap_progress, written_report
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.reports import ControllerStatus, HistoryEntry, HistoryReport, LinkStatus, ModelStatus, StatusReport
from refitd.states import LinkState, SwapOutcome


def status_report(
    pid: int,
    uptime_s: float,
    nodes: Mapping[str, Node],
    models: Mapping[str, ModelState],
    config: Config,
    drained: Collection[str] = (),
) -> StatusReport:
    """Return the current status of the cluster; `drained` are the drained nodes."""
    states = [state for _, state in sorted(models.items())]
    return StatusReport(
        coordinator_pid=pid,
        uptime_s=uptime_s,
        nodes=tuple(node.status for _, node in sorted(nodes.items())),
        models=tuple(_model_status(state, config) for state in states),
        links=tuple(link for state in states for link in _links(state, config.transport.service)),
        drained=tuple(sorted(drained)),
        protocol=PROTOCOL_VERSION,
        protocols={name: node.protocol for name, node in sorted(nodes.items())},
    )


def history_report(records: Sequence[Record]) -> HistoryReport:
    """Return journal records as a report, in the order given."""
    return HistoryReport(
        swaps=tuple(
            HistoryEntry(
                swap=r.swap,
                model=r.model,
                version=r.version,
                state=SwapOutcome(r.state),
                at=r.at,
                reason=r.reason,
                report=written_report(r),
                run=r.run,
            )
            for r in records
        )
    )


def _links(state: ModelState, service: str) -> list[LinkStatus]:
    plan = state.plan
    if plan is None:
        return []
    epoch = plan.epoch
    is_up = epoch is not None and plan.loaded_on.issuperset(epoch.nodes)
    return [
        LinkStatus(
            model=state.fleet.name,
            source=source,
            target=target,
            service=epoch.service if epoch is not None else service,
            lanes=epoch.lanes if epoch is not None else 0,
            bytes=nbytes,
            state=LinkState.UP if is_up else LinkState.DOWN,
            seconds=plan.crossing_s.get(target, 0.0),
        )
        for (source, target), nbytes in sorted(plan.routed.links.items())
    ]


def _model_status(state: ModelState, config: Config) -> ModelStatus:
    fleet = state.fleet
    return ModelStatus(
        model=fleet.name,
        source_world_size=fleet.source_world(),
        complete_versions=tuple(fleet.complete_versions()),
        auto_swap=fleet.auto_swap,
        sources=fleet.source_status(),
        live=None if state.live is None else state.live.version,
        live_run="" if state.live is None else state.live.run,
        next_version=state.highest + 1 if state.highest >= 0 else 1,
        queued=len(state.queue),
        targets=fleet.target_status(state.live),
        swap=swap_progress(state.running.swap) if state.running else None,
        swap_events=state.running.swap.history if state.running else (),
        last_swap=state.last,
        verify=config.models.get(fleet.name, ModelConfig()).verify,
        controllers=tuple(
            ControllerStatus(c.added.replica, c.node, c.host, c.added.pid, c.step.value, c.swap)
            for _, c in sorted(fleet.controllers.items())
        ),
    )
