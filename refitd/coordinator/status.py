"""Reports of the coordinator about itself: nodes, models, links, past swaps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from refitd.config import Config, ModelConfig
from refitd.coordinator.members import Member, Node, serving_state
from refitd.coordinator.membership import Membership
from refitd.coordinator.models import ModelState
from refitd.coordinator.partial import kept_names
from refitd.coordinator.records import LiveVersion, SwapRecord
from refitd.coordinator.report import swap_progress, written_report
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.reports import (
    ControllerStatus,
    DescribedMember,
    HistoryEntry,
    HistoryReport,
    LinkStatus,
    ModelDescription,
    ModelStatus,
    RefusedRegistration,
    SourceStatus,
    StatusReport,
    TargetStatus,
)
from refitd.states import CommitMode, LinkState, SwapOutcome


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


def history_report(records: Sequence[SwapRecord]) -> HistoryReport:
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


def model_description(model: Membership) -> ModelDescription:
    """Return what every member holds; equal descriptions appear once."""
    digests = {m.added.digest: m.shard for m in model.members()}
    index = {digest: i for i, digest in enumerate(digests)}
    return ModelDescription(
        model=model.name,
        shards=tuple(digests.values()),
        members=tuple(
            DescribedMember(
                role=m.added.role,
                replica=m.added.replica,
                rank=m.added.rank,
                world_size=m.added.world_size,
                node=m.node,
                host=m.host,
                shard=index[m.added.digest],
            )
            for m in model.members()
        ),
    )


def _links(state: ModelState, service: str) -> list[LinkStatus]:
    plan = state.plan
    if plan is None:
        return []
    epoch = plan.epoch
    is_up = epoch is not None and plan.loaded_on.issuperset(epoch.nodes)
    return [
        LinkStatus(
            model=state.membership.name,
            source=source,
            target=target,
            service=epoch.service if epoch is not None else service,
            lanes=epoch.lanes if epoch is not None else 0,
            bytes=nbytes,
            state=LinkState.UP if is_up else LinkState.DOWN,
            seconds=plan.crossing_s.get(target, 0.0),
        )
        for (source, target), nbytes in plan.routed.links.by_nodes().items()
    ]


def _model_status(state: ModelState, config: Config) -> ModelStatus:
    membership = state.membership
    return ModelStatus(
        model=membership.name,
        source_world_size=membership.source_world(),
        complete_versions=tuple(membership.complete_versions()),
        auto_swap=membership.auto_swap,
        sources=_source_rows(membership),
        live=None if state.live is None else state.live.version,
        live_run="" if state.live is None else state.live.run,
        next_version=state.highest + 1 if state.highest >= 0 else 1,
        queued=len(state.queue),
        targets=_target_rows(membership, state.live),
        swap=swap_progress(state.running.swap) if state.running else None,
        swap_events=state.running.swap.history if state.running else (),
        last_swap=state.last,
        verify=config.models.get(membership.name, ModelConfig()).verify,
        controllers=tuple(
            ControllerStatus(c.added.replica, c.node, c.host, c.added.pid, c.step.value, c.swap)
            for _, c in sorted(membership.controllers.items())
        ),
    )


def _source_rows(model: Membership) -> tuple[SourceStatus, ...]:
    """Return the report rows of the sources."""
    return tuple(
        SourceStatus(
            rank=rank,
            node=m.node,
            host=m.host,
            pid=m.added.pid,
            attached=m.attached,
            tensors=len(m.shard.tensors),
            bytes=m.bytes,
            versions=tuple(sorted(m.versions)),
            mode=m.mode,
            mode_reason=m.mode_reason,
            run=m.run,
            is_partial=m.shard.is_partial,
        )
        for rank, m in sorted(model.sources.items())
    )


def _target_rows(model: Membership, live: LiveVersion | None) -> tuple[TargetStatus, ...]:
    """Return the report rows of the targets; `live` is the version decided last."""
    drained = {*model.drained()}
    return tuple(
        TargetStatus(
            replica=replica,
            rank=rank,
            world_size=m.added.world_size,
            node=m.node,
            host=m.host,
            pid=m.added.pid,
            tensors=len(m.shard.tensors),
            bytes=m.bytes,
            state=serving_state(m, live),
            version=m.version,
            staged=m.staged_version if m.staged is not None else None,
            held_bytes=m.added.held_bytes,
            staging_bytes=m.added.staging_bytes,
            run=m.run if m.version is not None else "",
            step=m.step,
            events=m.events,
            mode=_mode(m),
            kept_tensors=len(m.shard.kept),
            kept_bytes=sum(tensor.nbytes for tensor in m.shard.kept),
            kept=kept_names(m.shard.kept),
            is_drained=replica in drained,
        )
        for (replica, rank), m in sorted(model.targets.items())
    )


def _mode(member: Member) -> CommitMode:
    if member.added.in_place:
        return CommitMode.IN_PLACE
    return CommitMode.FLIP if member.added.flips else CommitMode.COPY


def refused_of(nodes: Mapping[str, Node], model: str) -> tuple[RefusedRegistration, ...]:
    """Return the processes whose registration for a model is refused, in the order of their nodes."""
    return tuple(one for _, node in sorted(nodes.items()) for one in node.status.refused if one.model == model)
