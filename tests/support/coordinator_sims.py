"""Simulated daemons of a cluster: their state, and their messages to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

from refitd import ParameterMetadata
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION, digest_of, pack
from refitd.protocol.reports import NodeStatus
from refitd.protocol.shards import shard_of
from tests.support.shares import Shares

SHARD = shard_of([ParameterMetadata("w", (4, 4), "bfloat16", 2, resolved_name="w")])
DIGEST = digest_of(SHARD)


@dataclass
class Sim:
    """A daemon as the coordinator sees it: its members, their versions, and messages in flight."""

    name: str
    pid: int = 1
    lives: int = 0
    boot: str = ""
    members: dict[str, int | None] = field(default_factory=dict)  # target -> the version it serves
    runs: dict[str, str] = field(default_factory=dict)  # target -> the run of that version
    fenced: set[str] = field(default_factory=set)
    versions: set[int] = field(default_factory=set)  # of the source, if it is here
    run: str = ""  # of the source
    live: dict[str, cluster.LiveClaim] = field(default_factory=dict)
    staged: dict[str, tuple[str, int, str]] = field(default_factory=dict)  # target -> swap, version, run
    plans: dict[str, tuple[str, ...]] = field(default_factory=dict)  # the members of each
    shares: Shares = field(default_factory=Shares)
    inbox: list[object] = field(default_factory=list)
    outbox: list[object] = field(default_factory=list)

    @property
    def identity(self) -> bytes:
        return f"{self.name}.{self.pid}.{self.lives}".encode()

    def hello(self) -> None:
        status = NodeStatus(node=self.name, host="h", pid=self.pid, workers=(), clients=0, arenas=0, arena_bytes=0)
        self.outbox.append(cluster.NodeHello(protocol=PROTOCOL_VERSION, status=status, live=tuple(self.live.values())))

    def introduce(self, member: str) -> None:
        source = member == "src"
        staged = self.staged.get(member)
        self.outbox.append(cluster.DescribeShard(digest=DIGEST, packed=pack(SHARD)))
        self.outbox.append(
            cluster.AddShard(
                member=member,
                model="m",
                role="source" if source else "target",
                replica="" if source else member,
                rank=0,
                world_size=1,
                pid=5,
                digest=DIGEST,
                versions=tuple(sorted(self.versions)) if source else (),
                version=None if source else self.members[member],
                staged=staged[0] if staged else None,
                run=self.run if source else self.runs.get(member, ""),
                staged_version=staged[1] if staged else None,
                staged_run=staged[2] if staged else "",
            )
        )

    def take(self, message: object, works: bool) -> None:
        """React to a coordinator's message like a daemon whose workers succeed (`works`) or fail."""
        match message:
            case cluster.NodeWelcome(_, boot):
                if boot != self.boot:
                    self.boot = boot
                    for member in self.members:
                        self.introduce(member)
            case local.Done(run) if run:
                self.run = run
            case cluster.LiveIs(live):
                self.live[live.model] = live
            case local.Fence(member):
                self.fenced.add(member)
            case local.Failure(code) if code == "unknown-node":
                self.boot = ""
                self.hello()
            case cluster.LoadPlan(plan, epoch=epoch) as load:
                self.plans[plan] = self.shares.open(load).members
                name = epoch.id if epoch else ""
                loaded = cluster.PlanLoaded(plan=plan, epoch=name)
                broken = cluster.PlanLoaded(plan=plan, epoch=name, where="w", reason="r")
                self.outbox.append(loaded if works else broken)
            case cluster.Stage(plan=""):
                pass  # a rollback by exchange
            case cluster.Stage(swap, plan, version, run=run):
                if not works:
                    self.outbox.append(cluster.StageDone(swap=swap, where="w", reason="r"))
                    return
                self.staged |= {
                    member: (swap, version, run)
                    for member in self.plans[plan]
                    if member in self.members and member != "src"
                }
                self.outbox.append(cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
            case cluster.CommitStaged(swap):
                for member, (staged, version, run) in list(self.staged.items()):
                    if staged != swap:
                        continue
                    del self.staged[member]
                    self.members[member] = version if works else None
                    self.runs[member] = run
                    self.fenced.discard(member)
                    done = local.CommitDone(swap=swap, member=member, paused_s=0.0)
                    failed = local.CommitFailed(swap=swap, member=member, reason="no")
                    self.outbox.append(done if works else failed)
            case cluster.Abort(swap):
                for member in [m for m, (staged, _, _) in self.staged.items() if staged == swap]:
                    del self.staged[member]
