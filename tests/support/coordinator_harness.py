"""The coordinator without sockets, driven by fake daemons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from refitd import ParameterMetadata
from refitd.config import Config, ModelConfig
from refitd.coordinator import actions as act
from refitd.coordinator.fleet import Ids
from refitd.coordinator.journals import Drained, KnownNode, LiveVersion, Recovered, SwapRecord
from refitd.coordinator.nodes import cables_for
from refitd.coordinator.plan_reports import completed
from refitd.coordinator.plans import make_plan
from refitd.coordinator.state import CoordinatorState
from refitd.errors import RefitdError
from refitd.protocol import cluster, local, shards
from refitd.protocol.base import PROTOCOL_VERSION, digest_of, pack
from refitd.protocol.reports import NodeStatus, SwapProgress, SwapReport
from refitd.states import Log, Tick
from tests.support.shares import Shares

NO_CATCH_UP = Config(models={"m": ModelConfig(catch_up=False)})


class Numbered(Ids):
    """Ids that tests can name: swap1, swap2, ... and run1, run2, ..."""

    def __init__(self) -> None:
        super().__init__(b"seed")
        self.swaps = self.runs = 0

    def swap(self) -> str:
        self.swaps += 1
        return f"swap{self.swaps}"

    def run(self) -> str:
        self.runs += 1
        return f"run{self.runs}"


class Past:
    """A fake journal that holds these decisions, in this order."""

    def __init__(self, records: dict[str, SwapRecord], journal: str = "j") -> None:
        self.records, self.id, self.recovered = records, journal, {}

    @property
    def is_new(self) -> bool:
        return not self.records

    def decided(self, swap: str) -> SwapRecord | None:
        return self.records.get(swap)

    def recent(self, model: str, limit: int) -> list[SwapRecord]:
        return [r for r in reversed(self.records.values()) if model in ("", r.model)][:limit]

    def _decided(self, model: str) -> list[LiveVersion]:
        found = [r for r in self.records.values() if r.model == model and r.is_decided]
        return [LiveVersion(r.version, r.run, n, r.swap) for n, r in enumerate(found, 1)]

    def live(self, model: str) -> LiveVersion | None:
        return self._decided(model)[-1] if self._decided(model) else None

    def highest(self, model: str) -> int:
        return max((live.version for live in self._decided(model)), default=-1)

    def tried(self, model: str) -> tuple[int, str]:
        return -1, ""

    def before(self, model: str, version: int) -> LiveVersion | None:
        return next((live for live in reversed(self._decided(model)) if live.version < version), None)

    def continues(self, journal: str) -> bool:
        return journal == self.id


class Harness:
    """Feeds a coordinator, performs its plans and journal writes immediately, collects the messages that it sends."""

    def __init__(
        self,
        config: Config | None = None,
        journal: dict[str, SwapRecord] | None = None,
        *,
        is_standalone: bool = True,
        drained: Drained | None = None,
        known: Iterable[KnownNode] = (),
    ) -> None:
        self.journal = {} if journal is None else journal
        self.drained = {} if drained is None else drained
        self.known = {each.node: each for each in known}
        self.decided: set[str] = set()  # swaps whose decision was written
        self.recovered: list[Recovered] = []
        self.journal_error: RefitdError | None = None
        self.state = CoordinatorState(
            config=config or Config(),
            boot="boot",
            pid=1,
            started=0.0,
            ids=Numbered(),
            past=Past(self.journal),
            is_standalone=is_standalone,
            drained=dict(self.drained),
            known=known,
            wall=1.0,
        )
        self.now = 0.0
        self.plans_made = 0
        self.sent: list[tuple[str, int, object]] = []
        self.shares = Shares()
        self.illegal: list[object] = []
        self.unbegun: list[object] = []  # reasons why catch-ups could not begin

    def feed(self, event: act.Event) -> None:
        pending = [event]
        while pending:
            for instruction in self.state.handle(pending.pop(0), self.now, wall=1.0):
                match instruction:
                    case act.Send(identity, request, message):
                        if isinstance(message, cluster.LoadPlan):
                            self.shares |= message.given
                        self.sent.append((identity.decode(), request, message))
                    case act.Answer(identity, request) as answer:
                        self.sent.append((identity.decode(), request, completed(answer)))
                    case act.MakePlan(ticket, rosters, _, last, speeds):
                        self.plans_made += 1
                        cables = cables_for(speeds, (roster.node for roster in rosters))
                        try:
                            pending.append(act.Planned(ticket, make_plan(rosters, last=last, cables=cables)))
                        except RefitdError as exc:
                            pending.append(act.Planned(ticket, None, exc))
                    case act.Decide(records):
                        pending.append(self.written(records))
                    case Log("illegal", fields):
                        self.illegal.append(fields["reason"])
                    case Log("catch-up-refused", fields):
                        self.unbegun.append(fields["reason"])
                    case act.WriteDrain(drain, waiter):
                        if self.journal_error is None:
                            if drain.replicas is None:
                                self.drained.pop(drain.node, None)
                            else:
                                self.drained[drain.node] = drain.replicas
                            pending.append(act.DrainWritten(drain, waiter))
                    case act.Remember(Recovered() as found):
                        self.recovered.append(found)
                    case act.Remember(KnownNode() as known):
                        self.known[known.node] = known
                    case act.Remember(record):
                        assert record.state != "aborted" or record.swap not in self.decided, record
                        self.journal.pop(record.swap, None)
                        self.journal[record.swap] = record

    def written(self, records: tuple[SwapRecord, ...]) -> act.JournalWritten:
        """Write a decision; return the journal's answer."""
        swaps = tuple(record.swap for record in records)
        if self.journal_error is not None:
            return act.JournalWritten(swaps, self.journal_error)
        self.journal |= {record.swap: record for record in records}
        self.decided |= set(swaps)
        decisions = [self.state.past.live(record.model) for record in records]
        return act.JournalWritten(swaps, None, tuple(0 if live is None else live.sequence for live in decisions))

    def say(self, node: str, message: cluster.NodeMessage, request: int = 0) -> list[object]:
        """Feed a daemon's message; return the messages sent in response."""
        self.sent.clear()
        self.feed(act.FromNode(node.encode(), request, message))
        return [message for _, _, message in self.sent]

    def join(
        self,
        node: str = "n0",
        pid: int = 10,
        workers: tuple[int, ...] = (),
        *,
        protocol: int = PROTOCOL_VERSION,
        services: tuple[str, ...] = (),
        **fields: object,
    ) -> Self:
        status = NodeStatus(
            node, "h", pid, workers=workers, clients=0, arenas=0, arena_bytes=0, services=services, **fields
        )
        hello = cluster.NodeHello(protocol=protocol, status=status)
        assert isinstance(self.say(node, hello)[-1], cluster.NodeWelcome)
        return self

    def add(self, member: str, node: str = "n0", **fields: object) -> list[object]:
        role = "source" if member.startswith("src") else "target"
        metadata = [ParameterMetadata("w", (4, 4), "bfloat16", 2, resolved_name="w")]
        added = {
            "member": member,
            "model": "m",
            "role": role,
            "replica": "" if role == "source" else member,
            "rank": 0,
            "world_size": 1,
            "pid": 5,
            "digest": digest_of(shards.shard_of(metadata)),
        } | fields
        shard = shards.shard_of(metadata)
        self.say(node, cluster.DescribeShard(digest=digest_of(shard), packed=pack(shard)))
        return self.say(node, cluster.AddShard(**added), request=3)

    def tick(self) -> list[object]:
        """Advance the time; return the messages sent in response."""
        self.sent.clear()
        self.feed(Tick())
        return [message for _, _, message in self.sent]

    def ready(self) -> Self:
        """One source with version 1, one target, on one node."""
        self.join()
        assert self.add("src") == [local.Done(run="run1", next_version=0)]
        assert self.add("a") == [local.Done()]
        self.say("n0", local.Publish(member="src", version=1), request=4)
        return self

    def until_staging(self, timeout_s: float = 0.0) -> str:
        """Begin the first swap of these members; a later one reuses the plan, so use `say` with StartSwap."""
        asked = self.say("n0", local.StartSwap("m", timeout_s=timeout_s), request=9)
        (load,) = [m for m in asked if isinstance(m, cluster.LoadPlan)]
        (stage,) = [m for m in self.say("n0", cluster.PlanLoaded(plan=load.plan)) if isinstance(m, cluster.Stage)]
        return stage.swap


def reports(sent: list[object]) -> list[SwapReport]:
    return [m for m in sent if isinstance(m, SwapReport)]


def kinds(sent: list[object]) -> list[str]:
    return [type(m).__name__ for m in sent if not isinstance(m, SwapProgress | cluster.LiveIs)]


def commit(h: Harness, swap: str, *members: str, node: str = "n0") -> list[object]:
    """Stage and commit on one node; return the messages sent in response to the last message."""
    h.say(node, cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    sent: list[object] = []
    for member in members:
        sent = h.say(node, local.CommitDone(swap=swap, member=member, paused_s=0.0))
    return sent


def stages(sent: list[object]) -> list[cluster.Stage]:
    return [m for m in sent if isinstance(m, cluster.Stage)]
