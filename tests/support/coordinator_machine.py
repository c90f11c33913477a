"""A coordinator with its journal and two daemons, driven in any order by Hypothesis."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from refitd.config import Config
from refitd.coordinator import actions as act
from refitd.coordinator.descriptions import MAX_UNUSED_SHARDS
from refitd.coordinator.journals import KnownNode, Recovered
from refitd.coordinator.journals.file import FileJournal
from refitd.coordinator.plan_reports import completed
from refitd.coordinator.plans import make_plan
from refitd.coordinator.state import NODE_SILENCE_S, CoordinatorState
from refitd.coordinator.swap_queue import MAX_QUEUED
from refitd.errors import CommitError, RefitdError
from refitd.protocol import cluster, local
from refitd.states import Log, Tick
from tests.support.coordinator_harness import Numbered
from tests.support.coordinator_sims import Sim

NODES = ("n0", "n1")
MEMBERS = {"src": "n0", "a": "n0", "b": "n1", "c": "n1"}  # c reports that it is paused before any decision
EVENTS_QUEUED = 200


class Disk(FileJournal):
    """A journal on a disk that can be full."""

    full = False

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with super()._transaction():
            yield
            if self.full:
                raise sqlite3.OperationalError("database or disk is full")


class CoordinatorMachine(RuleBasedStateMachine):
    """Feeds a coordinator, performs its instructions, and checks invariants over its whole history."""

    coordinator = CoordinatorState

    @initialize(honest=st.booleans())
    def begin(self, honest: bool) -> None:
        self.honest = honest  # daemons report only what they do, and only once
        # on a disk this would be a few thousand fsyncs a minute, and no test here depends on them
        memory = Path("/dev/shm")
        self.directory = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        self.now = 0.0
        self.ids = Numbered()
        self.lives = 0
        self.before_drain: set[str] = set()  # swaps that ran when a node was drained last
        self.dies_deciding = False
        self.has_lost_its_journal = False
        self.journalled: set[str] = set()  # decided, and in the present journal
        self.identities: set[tuple[int, str]] = set()  # of all that was ever decided
        self.forgotten: set[tuple[int, str]] = set()  # decisions that no process still knows
        self.decided: dict[str, tuple[int, str]] = {}  # journalled, whether the coordinator heard of it or not
        self.aborted: set[str] = set()
        self.said_staged: set[tuple[str, str]] = set()  # (swap, node), heard by the coordinator
        self.sims = {name: Sim(name) for name in NODES}
        self.version = 0
        self.journal = Disk(self.directory / "journal")
        self.state = self.fresh()
        for sim in self.sims.values():
            sim.hello()
        for member, node in MEMBERS.items():
            if member != "b":
                self.sims[node].members[member] = None
        for _ in range(6):
            self.everything_arrives()

    def fresh(self) -> CoordinatorState:
        self.lives += 1
        return self.coordinator(
            config=Config(),
            boot=f"boot{self.lives}",
            pid=self.lives,
            started=self.now,
            ids=self.ids,
            past=self.journal,
            is_standalone=True,
            drained=self.journal.drained(),
        )

    # --- what the shell does ------------------------------------------------------------------------------

    def feed(self, event: act.Event) -> None:
        pending = [event]
        while pending:
            assert len(pending) < EVENTS_QUEUED
            for instruction in self.state.handle(pending.pop(0), self.now, self.now):
                match instruction:
                    case act.Send(identity, _, message):
                        self.sent(identity, message)
                    case Log("illegal", fields):
                        assert not self.honest, f"words that were only late or repeated were refused: {fields}"
                    case act.Answer(identity) as answer:
                        self.sent(identity, completed(answer))
                    case act.MakePlan(ticket, rosters):
                        try:
                            pending.append(act.Planned(ticket, make_plan(rosters)))
                        except RefitdError as exc:
                            pending.append(act.Planned(ticket, None, exc))
                    case act.Decide((record,)):
                        self.decide(record.swap)
                        try:
                            sequences = tuple(self.journal.write(record))
                        except CommitError as exc:
                            pending.append(act.JournalWritten((record.swap,), exc))
                        else:
                            assert not self.journal.full
                            self.decided[record.swap] = record.version, record.run
                            self.journalled.add(record.swap)
                            self.identities.add((record.version, record.run))
                            if self.dies_deciding:
                                self.dies_deciding = False
                                self.coordinator_is_killed_and_started_again()
                                return
                            pending.append(act.JournalWritten((record.swap,), None, sequences))
                    case act.WriteDrain(drain, waiter):
                        with contextlib.suppress(CommitError):
                            self.journal.set_drain(drain, self.now)
                            pending.append(act.DrainWritten(drain, waiter))
                    case act.Remember(Recovered() | KnownNode() as found):
                        with contextlib.suppress(CommitError):
                            self.journal.note(found)
                    case act.Remember(record):
                        assert (record.state != "aborted") == (record.swap in self.decided), record
                        with contextlib.suppress(CommitError):
                            self.journal.note(record)

    def decide(self, swap: str) -> None:
        """Check that every node with a target of the swap has staged it."""
        (running,) = [s.running for s in self.state.models.values() if s.running and s.running.swap.swap == swap]
        for node in running.swap.nodes | set(running.swap.members.values()):
            assert (swap, node) in self.said_staged, f"{swap} was decided, and {node} has not staged it"

    def sent(self, identity: bytes, message: object) -> None:
        if isinstance(message, cluster.CommitStaged):
            known = message.swap in (self.decided if self.has_lost_its_journal else self.journalled)
            # after the journal is lost, a decision may be learned from a daemon, in any swap
            learned = self.has_lost_its_journal and (message.version, message.run) in self.identities
            assert known or learned, f"{message.swap} is committed and not in the journal"
            assert message.swap not in self.aborted
            assert self.decided.get(message.swap) in (None, (message.version, message.run))
        if isinstance(message, cluster.Abort):
            assert message.swap not in self.journalled, f"{message.swap} is decided and is aborted"
            self.aborted.add(message.swap)
        for sim in self.sims.values():
            if sim.identity == identity:
                sim.inbox.append(message)

    def say(self, sim: Sim, message: cluster.NodeMessage, request: int = 0) -> None:
        if isinstance(message, cluster.StageDone):
            self.said_staged.add((message.swap, sim.name))
        self.feed(act.FromNode(sim.identity, request, message))

    def everything_arrives(self) -> None:
        for sim in self.sims.values():
            while sim.outbox:
                self.say(sim, sim.outbox.pop(0))
            while sim.inbox:
                sim.take(sim.inbox.pop(0), works=True)

    # --- what may happen ----------------------------------------------------------------------------------

    @rule(node=st.sampled_from(NODES), works=st.sampled_from([True, True, True, False]), count=st.integers(1, 5))
    def node_hears(self, node: str, works: bool, count: int) -> None:
        sim = self.sims[node]
        for _ in range(min(count, len(sim.inbox))):
            sim.take(sim.inbox.pop(0), works)

    @rule(node=st.sampled_from(NODES), times=st.sampled_from([1, 1, 1, 2]), count=st.integers(1, 5))
    def coordinator_hears(self, node: str, times: int, count: int) -> None:
        sim = self.sims[node]
        for _ in range(min(count, len(sim.outbox))):
            message = sim.outbox.pop(0)
            for _ in range(1 if self.honest else times):
                self.say(sim, message)  # type: ignore[arg-type]

    @rule()
    def all_is_delivered(self) -> None:
        for _ in range(4):
            self.everything_arrives()

    @rule(steps=st.integers(0, 12), full=st.sampled_from([False, False, False, True]), abort=st.booleans())
    def swap_gets_so_far(self, steps: int, full: bool, abort: bool) -> None:
        """Run a swap for some steps, to let the next rule act in the middle of it. Phases take two or three steps."""
        self.trainer_publishes()
        self.all_is_delivered()
        self.journal.full = full
        self.say(self.sims["n0"], local.StartSwap(model="m"), request=9)
        for _ in range(steps):
            for sim in self.sims.values():
                while sim.inbox and not sim.outbox:
                    sim.take(sim.inbox.pop(0), works=True)
            for sim in self.sims.values():
                if sim.outbox:
                    self.say(sim, sim.outbox.pop(0))
        if abort:
            self.abort_is_asked_for("n0")

    @rule()
    def coordinator_is_killed_as_soon_as_it_has_decided(self) -> None:
        self.dies_deciding = True
        self.swap_gets_so_far(12, full=False, abort=False)
        self.dies_deciding = False

    @rule()
    def trainer_publishes(self) -> None:
        self.version += 1
        self.sims["n0"].versions.add(self.version)
        self.sims["n0"].outbox.append(local.Publish(member="src", version=self.version))

    @precondition(lambda self: self.sims["n0"].versions)
    @rule(data=st.data())
    def trainer_withdraws(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.sims["n0"].versions)))
        self.sims["n0"].versions.discard(version)
        self.sims["n0"].outbox.append(local.Withdraw(member="src", version=version))

    @rule(node=st.sampled_from(NODES), queue=st.booleans(), rollback=st.sampled_from([False, False, True]))
    def swap_is_asked_for(self, node: str, queue: bool, rollback: bool) -> None:
        self.say(self.sims[node], local.StartSwap(model="m", queue=queue, rollback=rollback), request=9)

    @rule(node=st.sampled_from(NODES))
    def abort_is_asked_for(self, node: str) -> None:
        self.say(self.sims[node], local.AbortSwap(model="m", reason="enough"), request=9)

    @rule(node=st.sampled_from(NODES), via=st.sampled_from(NODES), resumes=st.booleans())
    def node_is_drained_or_resumed(self, node: str, via: str, resumes: bool) -> None:
        if node not in self.state.drained:
            self.before_drain = {s.running.swap.swap for s in self.state.models.values() if s.running}
        self.say(self.sims[via], local.DrainNode(node=node, drained=not resumes), request=9)

    @rule(member=st.sampled_from(sorted(MEMBERS)))
    def member_joins_or_leaves(self, member: str) -> None:
        sim = self.sims[MEMBERS[member]]
        if member in sim.members:
            del sim.members[member]
            sim.staged.pop(member, None)
            sim.fenced.discard(member)
            if member == "src":
                sim.versions.clear()
                sim.run = ""
            sim.outbox.append(local.Deregister(member=member, reason="left"))
        else:
            sim.members[member] = None
            sim.introduce(member)

    @rule(node=st.sampled_from(NODES), dies=st.booleans())
    def node_loses_its_connection(self, node: str, dies: bool) -> None:
        sim = self.sims[node]
        sim.lives += 1
        sim.inbox.clear()
        sim.outbox.clear()
        if dies:
            sim.pid, sim.boot = sim.pid + 1, ""
            sim.members = {member: None for member in sim.members}
            sim.staged.clear()
            sim.fenced.clear()
            sim.live.clear()
            if node == "n0":
                sim.versions.clear()
                sim.run = ""
        sim.boot = ""
        sim.hello()

    @rule()
    def coordinator_is_killed_and_started_again(self) -> None:
        self.journal.close()
        self.journal = Disk(self.directory / "journal")
        for swap in self.journalled:
            assert self.journal.decided(swap) is not None, f"{swap} was decided and the journal has lost it"
        self.state = self.fresh()
        for sim in self.sims.values():
            sim.inbox.clear()

    @precondition(lambda self: not self.has_lost_its_journal)
    @rule(older=st.booleans())
    def coordinator_loses_its_journal(self, older: bool) -> None:
        """Replace the journal by an empty one or an earlier copy: only daemons may know what was decided."""
        self.has_lost_its_journal = True  # only once: no daemon might know a decision that is lost a second time
        self.journal.close()
        for name in ("journal", "journal-wal", "journal-shm"):
            (self.directory / name).unlink(missing_ok=True)
        if older and (self.directory / "copy").exists():
            shutil.copy(self.directory / "copy", self.directory / "journal")
        self.journal = Disk(self.directory / "journal")
        told = {claim.swap for sim in self.sims.values() for claim in sim.live.values()}
        kept = {swap for swap in self.decided if self.journal.decided(swap) is not None}
        self.forgotten |= {at for swap, at in self.decided.items() if swap not in told | kept}
        self.decided = {swap: at for swap, at in self.decided.items() if swap in told | kept}
        self.journalled &= kept
        self.aborted.clear()
        self.state = self.fresh()
        for sim in self.sims.values():
            sim.inbox.clear()
            sim.outbox.clear()
            sim.hello()
        for _ in range(4):
            self.everything_arrives()
        serving = {
            (version, sim.runs[member])
            for sim in self.sims.values()
            for member, version in sim.members.items()
            if version is not None and member not in sim.fenced and member not in sim.staged
        }
        assert len(serving) <= 1, serving

    @rule()
    def journal_is_copied(self) -> None:
        with contextlib.suppress(CommitError):  # the disk is full
            self.journal.flush()
        shutil.copy(self.directory / "journal", self.directory / "copy")

    @rule(seconds=st.sampled_from([0.5, 4.0, NODE_SILENCE_S + 1, 40.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @rule(full=st.booleans())
    def disk_fills_or_empties(self, full: bool) -> None:
        self.journal.full = full

    @precondition(lambda self: not self.honest)
    @rule(
        node=st.sampled_from(NODES),
        number=st.integers(1, 6),
        member=st.sampled_from([*MEMBERS, "stranger"]),
        what=st.integers(0, 7),
    )
    def somebody_talks_nonsense(self, node: str, number: int, member: str, what: int) -> None:
        """Send messages about swaps that have ended, have not begun, or belong to other nodes; never StageDone."""
        swap = f"s{number}"
        message = (
            cluster.StageProgress(swap=swap, bytes_done=7),
            cluster.StageDone(swap=swap, where="w", reason="r"),
            local.CommitDone(swap=swap, member=member, paused_s=0.0),
            local.CommitFailed(swap=swap, member=member, reason="r"),
            cluster.PlanLoaded(plan="p", epoch="e"),
            cluster.PlanLoaded(plan="p", epoch="e", where="w", reason="r"),
            local.Publish(member=member, version=3),
            local.Deregister(member=member, reason="r", detached=True),
        )[what]
        with contextlib.suppress(KeyError):
            self.say(self.sims[node], message)

    # --- what must hold -----------------------------------------------------------------------------------

    @invariant()
    def everything_is_bounded(self) -> None:
        if not hasattr(self, "state"):
            return
        s = self.state
        assert len(s.nodes) <= len(NODES) and len(s.members) <= len(MEMBERS)
        assert len(s.descriptions._known) <= MAX_UNUSED_SHARDS + len(MEMBERS)
        assert not s.plan_requests
        assert all(len(m.queue) <= MAX_QUEUED for m in s.models.values())

    @invariant()
    def no_swap_begins_with_a_drained_node(self) -> None:
        if not hasattr(self, "state"):
            return
        for found in self.state.models.values():
            if found.running is not None and found.running.swap.swap not in self.before_drain:
                assert not {m.node for m in found.running.members.values()} & {*self.state.drained}

    @invariant()
    def no_version_is_served_that_was_not_decided(self) -> None:
        if not hasattr(self, "state"):
            return
        decided = set(self.decided.values()) | self.forgotten
        for sim in self.sims.values():
            assert {(v, sim.runs[m]) for m, v in sim.members.items() if v is not None} <= decided
        numbers = [version for version, _ in decided]
        assert len(set(numbers)) == len(numbers), f"two contents share a number: {decided}"

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        # once all processes listen again: decided swaps finish, undecided ones are discarded, and no swap hangs
        self.journal.full = False
        self.journal.flush()
        for round_ in range(12):
            self.now += (0.1, 1000.0)[round_ == 6]
            for sim in self.sims.values():
                self.say(sim, local.GetStatus())
            self.everything_arrives()
            self.feed(Tick())
        for sim in self.sims.values():
            for member, (swap, _, _) in sim.staged.items():
                assert any(s.running and s.running.swap.swap == swap for s in self.state.models.values()), (
                    f"{member} waits for {swap}, which nobody is working on"
                )
        # and the journal has the end of the last swap
        past = [record for record in self.journal.recent("m", 100) if record.is_decided]
        busy = any(s.running for s in self.state.models.values())
        assert busy or not past or past[0].state in ("committed", "incomplete"), past[0]
        self.journal.close()
        shutil.rmtree(self.directory)
