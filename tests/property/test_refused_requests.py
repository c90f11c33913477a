"""A refused request changes no state of the daemon or the coordinator, in any state and from any client."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import TypeVar, get_args

import hypothesis.strategies as st
import msgspec
from hypothesis.stateful import initialize, precondition, rule
from msgspec import inspect, structs

from refitd.coordinator import actions as coordinator_act
from refitd.coordinator.state import CoordinatorState
from refitd.daemon import actions as act
from refitd.errors import ArenaError
from refitd.protocol import cluster, local
from refitd.protocol.reports import NodeStatus
from refitd.protocol.shards import Place
from tests.fuzz.values import value_of
from tests.support.coordinator_machine import MEMBERS, NODES, CoordinatorMachine
from tests.support.coordinator_sims import DIGEST, Sim
from tests.support.daemon_harness import SOURCE, TARGET, Harness
from tests.support.daemon_machine import SESSIONS, SWAPS, DaemonMachine
from tests.support.machines import case_of
from tests.support.snapshots import changes, snapshot

M = TypeVar("M", bound=msgspec.Struct)


def some(kind: type[M], seed: int, **known: object) -> M | None:
    """Return a message of `kind`, or None if its values are refused on the wire; most of its `known` fields are set."""
    rng = random.Random(seed)
    with contextlib.suppress(msgspec.ValidationError):
        message = msgspec.convert(value_of(inspect.type_info(kind), rng), kind)
        fields = {name: value for name, value in known.items() if name in kind.__struct_fields__ and rng.random() < 0.8}
        return structs.replace(message, **fields)
    return None


registered = Harness().ask(TARGET)
assert isinstance(registered, local.Registered)
SHARD_BYTES = registered.nbytes

# State that a request refused by the daemon may change, with the reason.
OF_DAEMON = {
    "DaemonState.refused": "status shows registrations that were refused",
    "CoordinatorLink.now": "time passes",
    "CoordinatorLink._heard": "a coordinator that refuses is alive",
    "CoordinatorLink._numbers": "it numbers requests and registrations; one that is used up is missed by nobody",
    "LocalArenas._tickets": "likewise",
    "Permits._tokens": "likewise: a registration that the coordinator refuses had a permit, of which nobody was told",
    "DaemonState.untold": "the coordinator was told where targets stand, and knows it though it refuses the request",
    "LocalRegistrations._described": "the coordinator was told of the tensors, though it refuses the rank",
}
# A refused publish frees its slot for waiting members. The slot is not written afterwards.
OF_PUBLISH = {"Slot.writing", "SourceSide.waiting", "SourceSide.may_drop", "SourceSide.lagging"}


class WatchedHarness(Harness):
    """Compares the daemon before and after every request that it refuses, by itself or for the coordinator."""

    def ask(self, message: local.ClientRequest, session: int = 1) -> object:
        if isinstance(message, local.Restored) and self.refuse_with is not None:
            # a returning rank that the coordinator refuses leaves, and its arenas are retained again
            return super().ask(message, session)
        leave_out = {*OF_DAEMON, *(OF_PUBLISH if isinstance(message, local.Publish) else ())}
        before = snapshot(self.daemon, leave_out)
        answer = super().ask(message, session)
        if isinstance(answer, local.Failure):
            assert not changes(before, snapshot(self.daemon, leave_out)), (message, answer)
        return answer


class RefusingDaemon(DaemonMachine):
    """A daemon with little room, which retains the arenas of dead engines."""

    def harness(self) -> Harness:
        h = WatchedHarness(max_arena_bytes=6 * SHARD_BYTES, keep_targets_s=60.0)
        del h.daemon.permits._free[:-2]
        return h

    @initialize()
    def begin(self) -> None:
        super().begin()
        h = self.h
        h.done(h.stage("s0"))
        h.commit(self.ids[1], "s0")
        h.feed(act.SessionClosed(1, "died"), act.SessionOpened(1, 100, "again"))
        assert h.daemon.retained.arenas() and not h.closed

    @rule(session=st.sampled_from(SESSIONS), what=st.integers(0, 11), refuses=st.booleans())
    def client_asks_for_what_may_be_refused(self, session: int, what: int, refuses: bool) -> None:
        place = Place(99, 0, (1,))
        message = (
            TARGET,
            SOURCE,
            structs.replace(TARGET, replica="other"),
            structs.replace(TARGET, rank=5),
            structs.replace(TARGET, live=(place,)),
            structs.replace(SOURCE, slots=9),
            local.CreateArena(nbytes=2 * SHARD_BYTES),
            local.CreateArena(nbytes=9 * SHARD_BYTES),
            local.FreeArena(arena=1),
            local.GetStatus(),
            local.Evict(model="m", replica="r"),
            structs.replace(SOURCE, model="a\nb"),
        )[what]
        self.h.refuse_with = local.Failure(code="refused", message="no") if refuses else None
        self.h.ask(message, session)
        self.h.refuse_with = None

    @rule(
        session=st.sampled_from(SESSIONS),
        short=st.sampled_from([0, SHARD_BYTES, 8 * SHARD_BYTES]),
        message=st.sampled_from([local.CreateArena(nbytes=SHARD_BYTES), structs.replace(TARGET, replica="other")]),
        refuses=st.booleans(),
    )
    def memory_is_lacking(self, session: int, short: int, message: local.ClientRequest, refuses: bool) -> None:
        self.h.no_memory = ArenaError("there is no memory", short=short)
        self.h.refuse_with = local.Failure(code="refused", message="no") if refuses else None
        self.h.ask(message, session)
        self.h.no_memory = self.h.refuse_with = None

    @rule(session=st.sampled_from(SESSIONS), member=st.integers(0, 9), version=st.integers(2, 5), refuses=st.booleans())
    def client_publishes(self, session: int, member: int, version: int, refuses: bool) -> None:
        name = self.ids[member % len(self.ids)]
        granted = self.h.ask(local.BeginPublish(member=name, version=version, timeout_s=5.0), session)
        slot = granted.slot if isinstance(granted, local.SlotGranted) else 0
        self.h.refuse_with = local.Failure(code="refused", message="no") if refuses else None
        self.h.ask(local.Publish(member=name, version=version, slot=slot, is_anew=True), session)
        self.h.ask(local.Publish(member=name, version=version, slot=slot), session)
        self.h.ask(local.Publish(member=name, version=version), session)
        self.h.refuse_with = None

    @rule(
        session=st.sampled_from(SESSIONS),
        kind=st.sampled_from(get_args(local.ClientRequest)),
        member=st.integers(0, 9),
        swap=st.sampled_from(SWAPS),
        seed=st.integers(0, 2**32),
        refuses=st.booleans(),
    )
    def client_asks_for_anything(
        self, session: int, kind: type[msgspec.Struct], member: int, swap: str, seed: int, refuses: bool
    ) -> None:
        name = self.ids[member % len(self.ids)]
        message = some(kind, seed, member=name, swap=swap, model="m", replica="r", rank=0, world_size=1, version=1)
        if message is None:
            return
        self.h.refuse_with = local.Failure(code="refused", message="no") if refuses else None
        self.h.ask(message, session)
        self.h.refuse_with = None

    def teardown(self) -> None:
        pass  # the base class checks for leftovers; this machine keeps some


TestDaemon = case_of(RefusingDaemon, examples=40, steps=30)


# State that a request refused by the coordinator may change, with the reason.
OF_COORDINATOR = {
    "Node.last_heard": "a daemon that is refused something is alive",
    "WatchedCoordinator.numbers": "it numbers checks and plans; one that is used up is missed by nobody",
    "WatchedCoordinator.plans": "remembers what was planned, and is asked before it is planned again",
    "Descriptions.reader": "likewise of descriptions",
    "Membership.compared": "likewise of comparisons of sources",
    "WatchedCoordinator.past": "the journal, which no request changes but by Decide and Remember",
    "LiveVersions.past": "likewise",
    "WatchedCoordinator.config": "never changes",
}


class WatchedCoordinator(CoordinatorState):
    """Compares itself before and after every request that it refuses."""

    def handle(self, event: coordinator_act.Event, now: float, wall: float = 0.0) -> list[coordinator_act.Instruction]:
        if not isinstance(event, coordinator_act.FromNode):
            return super().handle(event, now, wall)
        before = snapshot(self, OF_COORDINATOR)
        done = super().handle(event, now, wall)
        for one in done:
            if (
                isinstance(one, coordinator_act.Send)
                and (one.identity, one.request) == (event.identity, event.request)
                and isinstance(one.message, local.Failure)
            ):
                assert not changes(before, snapshot(self, OF_COORDINATOR)), (event.message, one.message)
                assert all(isinstance(other, coordinator_act.Log) for other in done if other is not one), done
        return done


# Messages that the machine's own daemons send only if they are true; the machine's invariants rely on that.
ONLY_IF_TRUE = {
    cluster.NodeHello,
    cluster.AddShard,
    local.Deregister,
    local.Withdraw,
    cluster.StageDone,
}


class RefusingCoordinator(CoordinatorMachine):
    """The same cluster, with daemons that also send invalid requests."""

    coordinator = WatchedCoordinator

    def say(self, sim: Sim, message: cluster.NodeMessage, request: int = 0) -> None:
        if not hasattr(self, "requests"):
            self.requests = itertools.count(100)
        super().say(sim, message, next(self.requests))  # a separate number for each

    @rule(node=st.sampled_from(NODES), number=st.integers(0, 3), what=st.integers(0, 15))
    def somebody_asks_for_what_cannot_be(self, node: str, number: int, what: int) -> None:
        status = NodeStatus(node="n9", host="h", pid=9, workers=(), clients=0, arenas=0, arena_bytes=0)
        source = cluster.AddShard(
            member=f"more{number}", model="m", role="source", replica="", rank=0, world_size=1, pid=5, digest=DIGEST
        )
        other = f"new{number}"
        message = (
            structs.replace(source, rank=7),
            structs.replace(source, rank=2, world_size=2),
            structs.replace(source, rank=3, world_size=2),
            structs.replace(source, model=other, digest="nobody has described it"),
            structs.replace(source, model=other, role="target", replica="r", digest="nobody has described it"),
            local.Publish(member="src", version=self.version + 1 + number, is_anew=True),
            local.Publish(member=other, version=1),
            local.BeginPublish(member=other, version=1, slots=2),
            cluster.NodeUpdate(status=status),
            cluster.DescribeShard(digest="another", packed=b"damaged"),
            local.StartSwap(model="m", version=99 + number),
            local.StartSwap(model=other),
            local.Evict(model="m", replica="nobody's"),
            local.Verify(model=other, timeout_s=1.0),
            local.GetPlan(model=other),
            local.GetDescription(model=other),
        )[what]
        self.say(self.sims[node], message)

    @rule(
        node=st.sampled_from(NODES),
        kind=st.sampled_from(get_args(cluster.NodeMessage)).filter(lambda kind: kind not in ONLY_IF_TRUE),
        member=st.sampled_from([*MEMBERS, "stranger"]),
        number=st.integers(1, 6),
        seed=st.integers(0, 2**32),
    )
    @precondition(lambda self: not self.honest)
    def node_asks_for_anything(
        self, node: str, kind: type[msgspec.Struct], member: str, number: int, seed: int
    ) -> None:
        message = some(kind, seed, member=member, model="m", node=node, swap=f"s{number}", rank=0, world_size=1)
        if message is not None:
            self.say(self.sims[node], message)


TestCoordinator = case_of(RefusingCoordinator, examples=20, steps=30)
