"""A cluster on one screen: one line per replica, laggards first, as many as fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from refitd.protocol.reports import ModelStatus, StatusReport, TargetStatus
from refitd.states import LinkState, ServingState
from refitd_cli.output import rank_ranges, size, version, versions
from refitd_cli.tables import Grid, grid

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
    shown = [*_troubles(report)]
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
        yield _model(model)
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


def _model(model: ModelStatus) -> str:
    gone = sum(not source.attached for source in model.sources)
    parts = [
        live_text(model) or "nothing decided yet",
        f"sources: {len(model.sources)}/{model.source_world_size}{f', {gone} gone' if gone else ''}",
        f"complete: {versions(model.complete_versions)}",
    ]
    if model.queued:
        parts.insert(1, f"{model.queued} swaps queued")
    return f"  {'; '.join(parts)}"
