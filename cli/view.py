"""A cluster's status as lines and tables: in full, or on one screen with one line per replica, laggards first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from refitd.protocol.base import shown
from refitd.protocol.plan_reports import PathTraffic
from refitd.protocol.reports import (
    LinkStatus,
    ModelStatus,
    NodeStatus,
    SourceStatus,
    StatusReport,
    SwapReport,
    TargetStatus,
)
from refitd.states import LinkState, ServingState, SwapOutcome
from refitd.text import target_rank
from refitd_cli.output import Grid, age, console, duration, grid, rank_ranges, rate, say, size, version, versions

# the states in the order of their urgency
_ORDER = (
    ServingState.POISONED,
    ServingState.FENCED,
    ServingState.BEHIND,
    ServingState.WAITING,
    ServingState.EMPTY,
    ServingState.SUSPENDED,
    ServingState.SERVING,
)
_FRAME = 4  # lines of a model beside its replicas: its own two, and the table's head


@dataclass(frozen=True)
class Replica:
    """The ranks of one replica, as one."""

    name: str
    ranks: tuple[TargetStatus, ...]

    @property
    def missing(self) -> int:
        """The number of its ranks that have not registered."""
        return max(0, self.ranks[0].world_size - len(self.ranks))

    @property
    def state(self) -> ServingState:
        """The state of the ranks that need attention most."""
        return min((rank.state for rank in self.ranks), key=_ORDER.index)

    @property
    def urgency(self) -> tuple[int, int, str]:
        """A key that sorts laggards first."""
        lowest = min(-1 if rank.version is None else rank.version for rank in self.ranks)
        return (0 if self.missing else 1 + _ORDER.index(self.state), lowest, self.name)

    def row(self) -> tuple[str, ...]:
        """Return its cells."""
        state = str(self.state)
        those = [rank.rank for rank in self.ranks if rank.state == self.state]
        if self.missing:
            there = {rank.rank for rank in self.ranks}
            absent = [rank for rank in range(self.ranks[0].world_size) if rank not in there]
            state = f"not registered: rank {rank_ranges(absent)}"
        elif len(those) < len(self.ranks):
            state += f": rank {rank_ranges(those)}"
        if self.ranks[0].is_drained:
            state += ", drained"
        nodes = sorted({rank.node for rank in self.ranks})
        return (
            self.name,
            f"{len(self.ranks)}/{self.ranks[0].world_size}",
            "+".join(sorted({version(rank.version) for rank in self.ranks})),
            state,
            nodes[0] if len(nodes) == 1 else f"{nodes[0]} and {len(nodes) - 1} more",
        )


def replicas_of(model: ModelStatus) -> list[Replica]:
    """Return a model's replicas, laggards first."""
    found: dict[str, list[TargetStatus]] = {}
    for target in model.targets:
        found.setdefault(target.replica, []).append(target)
    return sorted((Replica(name, tuple(ranks)) for name, ranks in found.items()), key=lambda replica: replica.urgency)


def lost_replicas(model: ModelStatus, report: StatusReport) -> list[str]:
    """Return the replicas of a model that had ranks on lost nodes."""
    there = {target.replica for target in model.targets}
    found = dict.fromkeys(one.replica for lost in report.lost for one in lost.replicas if one.model == model.model)
    return [f"{name}, in part" if name in there else name for name in found]


def live_text(model: ModelStatus) -> str:
    """Return which version was decided last, and on how many ranks it is live; "" before the first decision."""
    if model.live is None:
        return ""
    there = len(model.targets)
    live = sum(t.version == model.live and t.run == model.live_run for t in model.targets)
    if not there:
        return f"decided: {model.live}, no engine is registered"
    if live == there:
        return f"live: {model.live} on {f'all {there} ranks' if there > 1 else '1 rank'}"
    others = (
        f"{count} {state}"
        for state in _ORDER
        if state is not ServingState.SERVING and (count := sum(t.state == state for t in model.targets))
    )
    return f"decided: {model.live}, live on {live} of {there} ranks ({', '.join(others)})"


def screen_parts(report: StatusReport, nothing: str, lines: int) -> Iterator[str | Grid]:
    """Yield lines and tables of at most `lines` lines, if every model can have a few."""
    shown = [*lost_lines(report), *_troubles(report)]
    yield _nodes(report)
    yield from shown
    if not report.models:
        yield nothing
        return
    room = lines - 1 - len(shown) - _FRAME * len(report.models)
    found = {model.model: replicas_of(model) for model in report.models}
    shares: dict[str, int] = {}
    for rest, name in zip(range(len(found), 0, -1), sorted(found, key=lambda name: len(found[name])), strict=True):
        shares[name] = min(len(found[name]), max(2, room // rest))
        room -= shares[name]
    for model in sorted(report.models, key=_urgency):
        replicas, share = found[model.model], shares[model.model]
        some = replicas if len(replicas) <= share else replicas[: share - 1]
        yield f"model {model.model}"
        yield _model(model, report)
        if replicas:
            columns = ("replica", ">ranks", ">serves", "state", "node")
            yield grid("", columns, (replica.row() for replica in some), is_cut=True)
        if more := replicas[len(some) :]:
            states = {str(replica.state) for replica in more}
            yield f"and {len(more)} more: {', '.join(sorted(states))}"


def _urgency(model: ModelStatus) -> tuple[int, str]:
    return min((replica.urgency[0] for replica in replicas_of(model)), default=len(_ORDER) + 1), model.model


def _nodes(report: StatusReport) -> str:
    held = sum(node.arena_bytes for node in report.nodes)
    arenas = sum(node.arenas for node in report.nodes)
    nodes = f"{len(report.nodes)} node{'' if len(report.nodes) == 1 else 's'}"
    return f"{nodes}, {arenas} arenas of {size(held)}, coordinator pid {report.coordinator_pid}"


def problem_lines(report: StatusReport) -> Iterator[str]:
    """Yield a line for each problem of a node, and for each process there whose registration is refused."""
    yield from (f"node {node.node}: {problem}" for node in report.nodes for problem in node.problems)
    yield from (str(one) for node in report.nodes for one in node.refused)


def _troubles(report: StatusReport) -> Iterator[str]:
    if report.drained:
        more = len(report.drained) - 5
        yield f"drained nodes: {', '.join(report.drained[:5])}{f' and {more} more' if more > 0 else ''}"
    yield from problem_lines(report)
    down = [link for link in report.links if link.state == LinkState.DOWN]
    if down:
        named = ", ".join(f"{link.source} -> {link.target}" for link in down[:3])
        yield f"links down: {named}{f' and {len(down) - 3} more' if len(down) > 3 else ''}"


def _model(model: ModelStatus, report: StatusReport) -> str:
    gone = sum(not source.attached for source in model.sources)
    parts = [
        live_text(model) or "nothing decided yet",
        f"sources: {len(model.sources)}/{model.source_world_size}{f', {gone} gone' if gone else ''}",
        f"complete: {versions(model.complete_versions)}",
    ]
    if lost := lost_replicas(model, report):
        parts.insert(1, f"lost with their nodes: {', '.join(lost)}")
    if model.queued:
        parts.insert(1, f"{model.queued} swaps queued")
    return f"  {'; '.join(parts)}"


NO_MODELS = "no models: no trainer and no engine has registered yet"

NODE_COLUMNS = (
    *("node", "state", "host", "address", ">pid", "refitd", ">up", ">workers", ">clients"),
    *(">arenas", ">arena bytes", "services"),
)
GPU_COLUMNS = ("node", ">worker", "GPU", ">arenas", ">arena bytes", "NUMA node", "network card", "reaches")
PATH_COLUMNS = ("from", "to", "path", ">rows", ">bytes", ">share", "why")
LINK_COLUMNS = ("model", "link", "service", ">lanes", ">bytes per swap", "state", ">last swap")
SOURCE_COLUMNS = (">rank", "node/host", ">pid", ">tensors", ">bytes", "versions held", "given")
TARGET_COLUMNS = ("replica", ">rank", "node/host", ">pid", ">tensors", ">bytes", "mode", "state", ">serves", ">staged")


def status_parts(report: StatusReport, nothing: str = NO_MODELS, *, with_events: bool = False) -> Iterator[str | Grid]:
    """Yield a status report's lines and tables, top to bottom; `nothing` is the line without models."""
    where = f" on {report.host}" if report.host else ""
    yield f"coordinator: pid {report.coordinator_pid}{where}, up {age(report.uptime_s)}"
    yield from lost_lines(report)
    yield grid("nodes", NODE_COLUMNS, map(_node, report.nodes))
    if rows := [row for node in report.nodes for row in _gpus(node)]:
        yield grid("GPUs", GPU_COLUMNS, rows)
    yield from versions_lines(report)
    yield from drained_lines(report)
    yield from problem_lines(report)
    if report.links:
        yield grid("links", LINK_COLUMNS, map(_link, report.links))
    if not report.models:
        yield nothing
    for model in report.models:
        yield f"model {model.model}: complete versions {versions(model.complete_versions)}{_activity(model)}"
        if lost := lost_replicas(model, report):
            yield f"replicas lost with their nodes: {', '.join(lost)}"
        yield grid("sources", SOURCE_COLUMNS, map(_source, model.sources))
        yield grid("targets", TARGET_COLUMNS, map(_target, model.targets))
        if model.last_swap is not None and model.last_swap.paths:
            yield grid("paths of the last swap", PATH_COLUMNS, path_rows(model.last_swap.paths))
            if others := {*model.last_swap.gpu_paths} - {one.path for one in model.last_swap.paths}:
                yield f"workers took other paths: {', '.join(sorted(others))}"
        if with_events:
            yield from _events(model)


def versions_lines(report: StatusReport) -> Iterator[str]:
    """Yield a line if daemons and coordinator speak different versions of the protocol."""
    if {report.protocol} | {*report.protocols.values()} != {report.protocol}:
        there = ", ".join(f"{node} {shown(found)}" for node, found in report.protocols.items())
        yield f"protocol versions differ: coordinator {shown(report.protocol)}, {there}"


def lost_lines(report: StatusReport) -> Iterator[str]:
    """Yield a line for each lost node, with what it took along and the next step."""
    for lost in report.lost:
        took = [f"replica {one.replica} of {one.model}" for one in lost.replicas]
        took += [f"source ranks of {model}" for model in lost.sources]
        more = f" and {len(took) - 4} more" if len(took) > 4 else ""
        what = f", with {', '.join(took[:4])}{more}" if took else ""
        yield (
            f"node {lost.node}: lost {age(lost.silent_s)} ago ({lost.reason}){what}; check host {lost.host} and "
            f"its daemon (pid {lost.pid}); if it will not return: `refitctl forget --node {lost.node}`"
        )


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
        yield f"{target_rank(target.replica, target.rank)}: {target.step or 'nothing heard of it yet'}"
        yield from (f"  {event}" for event in target.events)


def print_parts(parts: Iterable[str | Grid]) -> None:
    """Print lines as they are, however long, and tables as wide as the terminal."""
    for part in parts:
        if isinstance(part, str):
            say(part)
        else:
            console().print(part)


def node_state(node: NodeStatus) -> tuple[str, str]:
    """Return a connected node's state in words, and its tone for the dashboard."""
    return (f"late: silent for {age(node.silent_s)}", "warn") if node.is_late else ("connected", "good")


def _node(node: NodeStatus) -> Sequence[str]:
    return (
        node.node,
        node_state(node)[0],
        node.host,
        node.address or "-",
        str(node.pid),
        node.refitd or "-",
        age(node.uptime_s),
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


def _gpus(node: NodeStatus) -> Iterator[Sequence[str]]:
    """Yield a row for each GPU."""
    arenas = {gpu.device: gpu for gpu in node.gpus}
    for worker, lane in enumerate(node.lanes):
        if lane.gpu:
            held = arenas.get(lane.gpu)
            yield (
                node.node,
                str(worker),
                lane.gpu,
                str(held.arenas if held else 0),
                size(held.arena_bytes if held else 0),
                "unknown" if lane.numa is None else str(lane.numa),
                lane.card or "-",
                ", ".join(node.lanes[peer].gpu for peer in lane.reaches if peer < len(node.lanes)) or "no other",
            )


def path_rows(paths: Sequence[PathTraffic]) -> Iterator[Sequence[str]]:
    """Yield a row for each path."""
    total = sum(one.bytes for one in paths) or 1
    for one in paths:
        share = f"{one.bytes / total:.0%}"
        yield one.source, one.target, one.path, str(one.rows), size(one.bytes), share, one.reason


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
