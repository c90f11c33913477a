"""A cluster's status as lines and tables: `status` prints them once, `watch` again and again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from refitd.protocol.reports import (
    LinkStatus,
    ModelStatus,
    NodeStatus,
    SourceStatus,
    StatusReport,
    SwapReport,
    TargetStatus,
)
from refitd.protocol.versions import shown
from refitd.states import SwapOutcome
from refitd_cli.output import console, duration, rate, say, size, version, versions
from refitd_cli.rollup import live_text, problem_lines
from refitd_cli.tables import Grid, grid

NO_MODELS = "no models: no trainer and no engine has registered yet"

NODE_COLUMNS = ("node", "host", "address", ">pid", ">workers", ">clients", ">arenas", ">arena bytes", "services")
LINK_COLUMNS = ("model", "link", "service", ">lanes", ">bytes per swap", "state", ">last swap")
SOURCE_COLUMNS = (">rank", "node/host", ">pid", ">tensors", ">bytes", "versions held", "given")
TARGET_COLUMNS = ("replica", ">rank", "node/host", ">pid", ">tensors", ">bytes", "mode", "state", ">serves", ">staged")


def status_parts(report: StatusReport, nothing: str = NO_MODELS, *, with_events: bool = False) -> Iterator[str | Grid]:
    """Yield a status report's lines and tables, top to bottom; `nothing` is the line without models."""
    yield f"coordinator: pid {report.coordinator_pid}, up {duration(report.uptime_s)}"
    yield grid("nodes", NODE_COLUMNS, map(_node, report.nodes))
    yield from versions_lines(report)
    yield from drained_lines(report)
    yield from problem_lines(report)
    if report.links:
        yield grid("links", LINK_COLUMNS, map(_link, report.links))
    if not report.models:
        yield nothing
    for model in report.models:
        yield f"model {model.model}: complete versions {versions(model.complete_versions)}{_activity(model)}"
        yield grid("sources", SOURCE_COLUMNS, map(_source, model.sources))
        yield grid("targets", TARGET_COLUMNS, map(_target, model.targets))
        if with_events:
            yield from _events(model)


def versions_lines(report: StatusReport) -> Iterator[str]:
    """Yield a line if daemons and coordinator speak different versions of the protocol."""
    if {report.protocol} | {*report.protocols.values()} != {report.protocol}:
        there = ", ".join(f"{node} {shown(found)}" for node, found in report.protocols.items())
        yield f"protocol versions differ: coordinator {shown(report.protocol)}, {there}"


def drained_lines(report: StatusReport) -> Iterator[str]:
    """Yield a line for each drained node."""
    connected = {node.node for node in report.nodes}
    for node in report.drained:
        where = "" if node in connected else ", not connected"
        yield f"node {node}: drained{where}; swaps leave its replicas out until refitctl resume {node}"


def _events(model: ModelStatus) -> Iterator[str]:
    if last := model.last_swap:
        yield f"swap {last.swap} to version {version(last.version)}, {last.outcome}:"
        yield from (f"  {event}" for event in last.events)
    if running := model.swap:
        yield f"swap {running.swap} to version {running.version}, running:"
        yield from (f"  {event}" for event in model.swap_events)
    for target in model.targets:
        yield f"{target.replica} rank {target.rank}: {target.step or 'nothing heard of it yet'}"
        yield from (f"  {event}" for event in target.events)


def print_parts(parts: Iterable[str | Grid]) -> None:
    """Print lines as they are, however long, and tables as wide as the terminal."""
    for part in parts:
        if isinstance(part, str):
            say(part)
        else:
            console().print(part)


def _node(node: NodeStatus) -> Sequence[str]:
    return (
        node.node,
        node.host,
        node.address or "-",
        str(node.pid),
        str(len(node.workers)),
        str(node.clients),
        str(node.arenas),
        _arena_bytes(node),
        ", ".join(node.services) or "-",
    )


def _arena_bytes(node: NodeStatus) -> str:
    there = sum(gpu.arena_bytes for gpu in node.gpus)
    where = "a GPU" if len(node.gpus) == 1 else f"{len(node.gpus)} GPUs"
    return f"{size(node.arena_bytes)}, {size(there)} of it on {where}" if node.gpus else size(node.arena_bytes)


def _link(link: LinkStatus) -> Sequence[str]:
    return (
        link.model,
        f"{link.source} -> {link.target}",
        link.service,
        str(link.lanes),
        size(link.bytes),
        link.state,
        rate(link.bytes, link.seconds),
    )


def _source(source: SourceStatus) -> Sequence[str]:
    return (
        str(source.rank),
        f"{source.node}/{source.host}",
        str(source.pid) if source.attached else "gone",
        str(source.tensors),
        size(source.bytes),
        versions(source.versions),
        source.mode or "-",
    )


def _target(target: TargetStatus) -> Sequence[str]:
    return (
        target.replica,
        f"{target.rank}/{target.world_size}",
        f"{target.node}/{target.host}",
        str(target.pid),
        str(target.tensors),
        size(target.bytes)
        + (f", held as {size(target.held_bytes)}" if target.held_bytes != target.bytes else "")
        + (f", keeps {size(target.kept_bytes)} of its own" if target.kept_tensors else ""),
        target.mode,
        f"{target.state}, drained" if target.is_drained else target.state,
        version(target.version),
        version(target.staged),
    )


def kind(report: SwapReport) -> str:
    """Return the kind of a swap, with the seeds of a catch-up."""
    return f"{report.kind} from {', '.join(report.seeds)}" if report.seeds else report.kind


def _activity(model: ModelStatus) -> str:
    text = f"; {live_text(model)}" if model.live is not None else ""
    text += "; swaps when a version is complete" if model.auto_swap else ""
    text += "" if model.verify else "; not verified"
    text += "; the sources offer a part" if any(source.is_partial for source in model.sources) else ""
    if running := model.swap:
        text += (
            f"; swapping to {running.version}: {running.phase}, "
            f"{size(running.bytes_done)} of {size(running.bytes_total)}"
        )
    if model.queued:
        text += f"; {model.queued} waiting"
    if last := model.last_swap:
        seeded = f" ({kind(last)})" if last.seeds else ""
        text += f"; last swap: version {version(last.version)} {last.outcome}{seeded}"
        if last.outcome == SwapOutcome.COMMITTED:
            text += f" in {duration(last.total_s)}, staged at {rate(last.bytes, last.stage_s)}"
        elif last.phase:
            text += f" in phase {last.phase}: {last.reason}"
    return text
