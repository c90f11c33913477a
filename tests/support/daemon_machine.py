"""One node's daemon, its clients, coordinator and workers, driven in any order by Hypothesis."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from refitd.buffers.layout import DIGEST_BYTES
from refitd.daemon import actions as act
from refitd.daemon.links import MAX_WAITING
from refitd.daemon.publishing import MAX_OPEN
from refitd.errors import RefusedError
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.states import Tick
from tests.support.daemon_harness import FC1, SOURCE, TARGET, Harness, regions

SESSIONS = (1, 2, 3)
SWAPS = ("s", "s1", "s2")
REGIONS = regions(FC1, (96, 48), [(0, 48), (48, 96)]).to_wire()


class DaemonMachine(RuleBasedStateMachine):
    """Two or three clients, a plan between members of the first, and random events."""

    def harness(self) -> Harness:
        return Harness()

    @initialize()
    def begin(self) -> None:
        self.h = self.harness()
        self.h.feed(act.SessionOpened(2, 200, "other"))
        self.open = {1, 2}
        self.boots = 1
        self.ids: list[str] = list(self.h.fleet())
        self.runs: list[tuple[int, int]] = []

    @rule(session=st.sampled_from(SESSIONS))
    def client_comes_or_goes(self, session: int) -> None:
        if session in self.open:
            self.open.discard(session)
            self.h.feed(act.SessionClosed(session, "gone"))
        else:
            self.open.add(session)
            self.h.feed(act.SessionOpened(session, 100 * session, "again"))

    @rule(session=st.sampled_from(SESSIONS), source=st.booleans(), refuses=st.booleans())
    def client_registers(self, session: int, source: bool, refuses: bool) -> None:
        self.h.refuse_with = local.Failure(code="refused", message="taken") if refuses else None
        answer = self.h.ask(SOURCE if source else TARGET, session)
        self.h.refuse_with = None
        if isinstance(answer, local.Registered):
            self.ids = [*self.ids[-8:], answer.member]

    @rule(
        session=st.sampled_from(SESSIONS), member=st.integers(0, 9), version=st.integers(0, 5), what=st.integers(0, 8)
    )
    def client_says(self, session: int, member: int, version: int, what: int) -> None:
        """Send any request about any registration, also another session's."""
        name = self.ids[member % len(self.ids)]
        message = (
            local.Deregister(member=name),
            local.BeginPublish(member=name, version=version, timeout_s=5.0),
            local.Publish(member=name, version=version, slot=version % 3),
            local.Publish(member=name, version=version),
            local.Withdraw(member=name, version=version),
            local.CommitDone(swap=SWAPS[version % 3], member=name, paused_s=0.0),
            local.CommitFailed(swap=SWAPS[version % 3], member=name, reason="no"),
            local.CreateArena(nbytes=4096),
            local.StartSwap(model="m"),
        )[what]
        before = self.h.daemon.members.get(name)
        owner = before.session if before is not None else None
        answer = self.h.ask(message, session)
        if session in self.open and what < 7 and owner != session:
            assert isinstance(answer, local.Failure) and answer.code == RefusedError.code

    @rule(swap=st.sampled_from(SWAPS), version=st.integers(0, 5), what=st.integers(0, 5))
    def coordinator_says(self, swap: str, version: int, what: int) -> None:
        if what == 0:
            self.runs = self.h.stage(swap, version)
            return
        message = (
            cluster.CommitStaged(swap=swap, version=version),
            cluster.Abort(swap=swap, reason="r"),
            cluster.EndSwap(swap=swap),
            cluster.DigestRegions(swap, version, self.run_of(0), tuple(self.ids[:1]), (0,), (0,), REGIONS, 5.0),
            local.Done(),
        )[what - 1]
        self.h.feed(act.CoordinatorSaid(0, message))

    def run_of(self, number: int) -> str:
        member = self.h.daemon.members.get(self.ids[number])
        return member.source.run if member is not None and member.source is not None else ""

    @rule()
    def coordinator_is_another(self) -> None:
        self.boots += 1
        self.h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot=f"b{self.boots}")))

    @precondition(lambda self: self.runs)
    @rule(works=st.booleans(), twice=st.booleans())
    def worker_ends_a_run(self, works: bool, twice: bool) -> None:
        worker, run = self.runs.pop()
        done = sidecar.RunDone(run=run, copies=1, bytes=1, seconds=0.1)
        for _ in range(1 + twice):
            self.h.feed(act.WorkerSaid(worker, done if works else sidecar.RunDone(run=run, reason="r", copy=0)))

    @rule(works=st.booleans(), wrong=st.booleans())
    def worker_has_digested(self, works: bool, wrong: bool) -> None:
        """Answer the last request for digests, once or again."""
        asked = [(worker, m) for worker, m in self.h.to_worker if isinstance(m, sidecar.ReadSpans)]
        for worker, m in asked[-1:]:
            digests = bytes(DIGEST_BYTES * len(m.spans) + wrong)
            taken = sidecar.SpansRead(m.run, digests) if works else sidecar.SpansRead(m.run, reason="r")
            self.h.feed(act.WorkerSaid(worker, taken))

    @rule(worker=st.integers(0, 1))
    def worker_dies(self, worker: int) -> None:
        self.h.feed(act.WorkerDied(worker, "was killed"))

    @rule(seconds=st.sampled_from([0.1, 6.0]), heard=st.booleans())
    def time_passes(self, seconds: float, heard: bool) -> None:
        self.h.now += seconds
        self.h.feed(*([act.CoordinatorSaid(0, local.Done())] if heard else []), Tick())

    @invariant()
    def everybody_has_their_own_and_nothing_is_without_bound(self) -> None:
        if not hasattr(self, "h"):
            return
        daemon = self.h.daemon
        for member in daemon.members.values():
            assert member.session is None or member.session in self.open, f"{member.id} belongs to nobody"
            assert member.session is not None or member.registration.is_source, "an engine's registration outlived it"
            assert set(member.arenas()) <= daemon.arenas.keys()
            if (source := member.source) is not None:
                assert len(source.waiting) <= MAX_OPEN and len(source.leases) <= MAX_OPEN
        for arena in daemon.arenas.values():
            assert arena.session is None or arena.session in self.open
            for session in self.open - {arena.session}:
                try:
                    daemon.may_fetch(session, arena.id, False)
                except RefusedError:
                    continue
                raise AssertionError(f"arena {arena.id} of session {arena.session} is handed to {session}")
        assert len(daemon.link) <= MAX_WAITING * len(SESSIONS) * 4
        assert not set(self.h.closed) & daemon.arenas.keys()

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        for session in sorted(self.open):
            self.h.feed(act.SessionClosed(session, "gone"))
        self.h.now += 6.0
        self.h.feed(Tick())
        assert self.h.daemon.regions.next_deadline is None, "somebody still waits for digests"
        held = {arena for member in self.h.daemon.members.values() for arena in member.arenas()}
        assert self.h.daemon.arenas.keys() <= held, "arenas that belong to nobody"
        assert all(member.registration.is_source and member.held() for member in self.h.daemon.members.values())
