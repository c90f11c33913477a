"""One case: hold a swap at a phase, inject a fault, repair it, and check five things."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import refitd
from refitd.testing import RunningSwap, processes
from tests.faults.cases import ANY, FLIP_PHASES, LIVE, Case
from tests.faults.cluster import COMMIT_S, PAUSE_S, PLAN_S, STAGE_S, Cluster
from tests.faults.fault import DAY_S, ENGINES, Fault, victim_engine
from tests.support.breakable_member import MODEL

SWAP_S = 20.0
# All phases' deadlines together are 14 s, and a stopped coordinator answers only afterwards.
HANG_S = 45.0
RECOVERY_S = 120.0  # an engine that starts again imports torch: 2 s of CPU, most of a minute beside a dozen others
SILENCE_S = 20.0  # how long an engine that the fault does not touch may be silent
LEFT_S = 15.0  # until leftovers of a fault are gone
LASTS = {
    "idle": 4.0,
    "planned": PLAN_S + 1,
    "halting": PAUSE_S + 1,
    "staging": STAGE_S + 1,
    "paused": PAUSE_S + 1,
    **dict.fromkeys(("decided", *FLIP_PHASES), COMMIT_S + 1),
}
# the faults that last until the client of the swap has its answer
UNTIL_TOLD = ("slow", "crawl", "stutter", "unsynced", "remove", "replace", "close")
# the faults that lose journal entries of the coordinator
LOSES_JOURNAL = ("remove", "replace", "lose", "exchange")
# at which point the engine `flips` waits inside its exchange
POINTS = {"exchanging": "half", "exchanged": "exchanged"}


class Problem(Exception):
    """A case cannot go on."""


@dataclass(slots=True)
class Result:
    """The result of a case."""

    case: Case
    outcome: str = ""  # of the swap, by the journal
    told: str = ""  # the outcome that the client of the swap received
    recovery_s: float | None = None  # from the end of the fault to the end of the next swap that succeeded
    attempts: int = 0  # of that swap
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Runner:
    """Runs cases on one cluster. After a failed case, use a new cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._version = 0
        self.serves: dict[str, int | None] = {}
        self._served: set[tuple[str, int]] = set()
        self._nothing: set[str] = set()  # engines that served no version for a moment during this case
        self._torn: list[str] = []
        self._reads: dict[str, int] = {}
        self._counted: dict[str, int] = {}  # by each engine's present process, including reads without a version
        self._heard: dict[str, float] = {}
        self._silent: dict[str, float] = {}
        self._published: int | None = -1
        self._refused = ""
        self._obeyed: list[str] = []
        self._asked: set[tuple[str, int]] = set()
        self._holds: list[tuple[str, str]] = []  # engines that wait inside an exchange, and the point
        self._baseline: dict[str, int] = {}
        self._quiet(RECOVERY_S, live=None)
        for _ in range(2):
            self.cluster.copy_journal()  # so the copy is older than the live version
            self._next_swap(Result(Case("idle", "", "", frozenset())))
        self._baseline = self.cluster.held()
        daemons = self.cluster.daemons
        for node, daemon in daemons.items():
            # a worker has the daemon's socket, a listening one, and a connection that stays to each peer
            sockets = len(daemon.workers()) * (2 + len(daemons) - 1)
            self._baseline[f"socket descriptors of {node}'s workers"] = sockets

    # --- listening ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self.cluster.events.empty():
            at, name, event = self.cluster.events.get()
            match event["event"]:
                case "serves":
                    self.serves[name] = event["version"]
                    if event["version"] is None:
                        self._nothing.add(name)
                    else:
                        self._served.add((name, event["version"]))
                case "torn":
                    self._torn.append(f"{name} {event}")
                case "reads":
                    self._counted[name] = event["reads"] + event["nothing"]
                    self._reads[name] = self._reads.get(name, 0) + 1 if event["reads"] else self._reads.get(name, 0)
                    self._silent[name] = max(self._silent.get(name, 0.0), at - self._heard.get(name, at))
                    self._heard[name] = at
                case "published":
                    self._published = event["version"]
                case "unpublished":
                    self._refused = event["reason"]
                case "obeys":
                    self._obeyed.append(name)
                case "holds":
                    self._holds.append((name, event["point"]))
                case "asked":
                    self._asked.add((name, event["version"]))

    def _wait(self, claim: Callable[[], bool], what: str, timeout: float, every: float = 0.02) -> None:
        until = time.monotonic() + timeout
        while True:
            self._listen()
            if claim():
                return
            if time.monotonic() > until:
                raise Problem(f"not within {timeout:.0f} s: {what}")
            time.sleep(every)

    # --- steps --------------------------------------------------------------------------------------------

    def _publish(self, version: int, timeout: float = 15.0) -> None:
        """Have the trainer publish a version, or repeat its last publish."""
        self._published, self._refused = None, ""
        self.cluster.trainer.tell(version=version, timeout_s=timeout)
        self._wait(lambda: self._published == version or bool(self._refused), f"publish({version})", timeout + 15)
        if self._refused:
            raise Problem(f"version {version} could not be published: {self._refused}")

    def _tell(self, name: str, **command: bool) -> None:
        """Send an engine a command and wait until it confirms it."""
        self._obeyed.clear()
        self.cluster.engines[name].tell(**command)
        self._wait(lambda: name in self._obeyed, f"{name} hears {command}", 15)

    def _is_whole(self) -> bool:
        """Whether all processes are connected and no swap runs."""
        status = self.cluster.status()
        if status is None or len(status.nodes) != len(self.cluster.daemons):
            return False
        if not all(pid for n in status.nodes for pid in n.workers):
            return False
        if len(status.models) != 1:
            return False
        model = status.models[0]
        there = [source for source in model.sources if source.attached]
        return (
            len(there) == 1
            and len(model.targets) == len(self.cluster.engines)
            and model.swap is None
            and not model.queued
        )

    def _quiet(self, timeout: float, live: int | None) -> None:
        """Wait until all processes are connected and all replicas serve the version that is live by the journal."""
        if live is None:
            self.cluster.trainer.tell(version=None, timeout_s=timeout)
        self._wait(self._is_whole, "a coordinator, three nodes, a trainer, all replicas and no swap", timeout, 0.1)
        if live is not None:

            def all_serve() -> bool:
                return all(self.serves.get(name) == live for name in self.cluster.engines)

            try:
                self._wait(all_serve, "", timeout)
            except Problem:
                status = self.cluster.status()
                targets = status.models[0].targets if status is not None and status.models else ()
                says = [(t.replica, t.state, t.version, t.staged) for t in targets]
                raise Problem(f"version {live} is live and replicas serve {self.serves}; status: {says}") from None

    def _all_read(self) -> None:
        """Wait until every replica has read once more: none may stay paused for an ended swap."""
        self._listen()
        before = dict(self._counted)

        def stuck() -> list[str]:
            return [name for name in self.cluster.engines if self._counted.get(name) == before.get(name)]

        try:
            self._wait(lambda: not stuck(), "", SILENCE_S)
        except Problem:
            raise Problem(f"{stuck()} look at nothing for {SILENCE_S:.0f} s while no swap runs") from None

    def _next_swap(self, result: Result) -> None:
        """Publish and swap until a swap succeeds and all replicas serve the version."""
        self._version += 1
        version = self._version
        until = time.monotonic() + RECOVERY_S
        self._publish(version)
        while True:
            result.attempts += 1
            try:
                with self.cluster.daemons["n0"].connect("faults", 5) as client:
                    client.swap(MODEL, version, timeout=SWAP_S)
                break
            except refitd.RefitdError as exc:
                if time.monotonic() > until:
                    raise Problem(f"no swap has succeeded for {RECOVERY_S:.0f} s: {exc}") from exc
                time.sleep(0.2)
        self._quiet(RECOVERY_S, version)

    # --- a case -------------------------------------------------------------------------------------------

    def run(self, case: Case) -> Result:
        """Run and check a case; problems are in the result."""
        started = time.monotonic()
        result = Result(case)
        self._listen()
        self._nothing.clear()
        self._served.clear()
        self._reads.clear()
        self._silent.clear()
        before, logged = self.cluster.journalled(), self.cluster.logged()
        try:
            fault = Fault(self.cluster, case)
            swap = None if case.phase == "idle" else self._hold(case, fault)
            over = self._break(case, fault, swap)
            if swap is not None:
                self._ended(swap, result)
            live = self.cluster.live()
            # A restarted trainer has lost its versions and may not publish other values under their numbers. Replicas
            # that lack the live version then serve no version until the next swap.
            self._quiet(RECOVERY_S, None if fault.has_lost_versions else live)
            self._all_read()
            self._next_swap(result)
            result.recovery_s = time.monotonic() - over
            self._check(case, result, before)
            self._check_told(case, result, fault.names, logged)
        except (Problem, refitd.RefitdError, AssertionError, OSError) as exc:
            result.problems.append(f"{type(exc).__name__}: {exc}")
        finally:
            for clock in self.cluster.clocks.values():
                clock.move(0)
            result.problems += [f"torn: {torn}" for torn in self._torn]
            result.seconds = time.monotonic() - started
        return result

    def _hold(self, case: Case, fault: Fault) -> RunningSwap:
        """Begin a swap, and hold it at this phase."""
        if case.phase == "planned":
            live = self.cluster.live()
            self._tell("far", anew=True)  # forces a new plan
            self._wait(lambda: "far" in self._nothing, "far leaves", 15)
            self._quiet(RECOVERY_S, live)
            self._nothing.clear()
        self._version += 1
        version = self._version
        self._publish(version)
        match case.phase:
            case "planned":
                fault.hold((self.cluster.pid("n1"),))
            case "staging" if case.fault not in ("slow", "crawl", "stutter"):
                fault.hold(tuple(self.cluster.daemons["n1"].workers()))
            case "exchanging" | "exchanged":
                self._holds.clear()
                self._tell("flips", holds_at=POINTS[case.phase])
            case "halting" | "paused" | "decided" | "told":
                self._tell(ENGINES[case.phase], hold=True)
        if case.fault in ("slow", "crawl", "stutter"):
            fault.begin()
        swap = self.cluster.swap(version, SWAP_S)
        phases = {"planned": "plan", "halting": "pause", "staging": "stage", "paused": "pause"}
        swap.wait_phase(phases.get(case.phase, "commit"), 10)
        if case.phase in ("halting", "paused"):
            engine = ENGINES[case.phase]
            self._wait(lambda: (engine, version) in self._asked, f"{engine} is asked", 10)
        if case.phase == "decided":
            # the phase "commit" is also reported shortly before the decision
            self._wait(lambda: (version, "decided") in [row[:2] for row in self.cluster.journalled()], "a decision", 10)
            if case.fault in LOSES_JOURNAL:  # until a replica knows the decision, it would be lost with the journal
                self._wait(lambda: self.serves.get("near") == version, "a replica has been told", 10)
        if case.phase in POINTS:
            self._wait(lambda: ("flips", POINTS[case.phase]) in self._holds, "flips stands in its exchange", 10)
        if case.phase == "told":
            self._wait(lambda: ("flips", version) in self._asked, "flips is told to commit", 10)
            fault.hold((self.cluster.pid("n1"),))
            self.cluster.engines["flips"].tell(hold=False)
            self._wait(lambda: self.serves.get("flips") == version, "flips takes the version over", 10)
        return swap

    def _break(self, case: Case, fault: Fault, swap: RunningSwap | None) -> float:
        """Inject the fault, release the swap, repair the fault; return the time of the repair."""
        if case.fault not in ("slow", "crawl", "stutter"):
            fault.begin()
        began = time.monotonic()
        time.sleep(0.3)
        self._listen()
        if case.phase == "decided" and case.fault in ("stop", "cut", "clock", "full"):
            # keep the engine waiting while the fault lasts, which is longer than the commit deadline
            pass
        else:
            self._let_go(case, fault)
        in_time = case.phase != "decided"
        if case.fault in ("kill", "lose", "exchange"):
            time.sleep(0.7)
        elif swap is not None and (case.fault in UNTIL_TOLD or (in_time and case.fault in ("full", "clock"))):
            with contextlib.suppress(refitd.RefitdError):
                swap.result(HANG_S)
        elif case.fault == "clock":
            time.sleep(0.5)
        elif case.fault == "full":
            self._let_go(case, fault)
            assert swap is not None
            with contextlib.suppress(refitd.RefitdError):
                swap.result(HANG_S)
        else:
            time.sleep(max(0.0, LASTS[case.phase] - (time.monotonic() - began)))
        fault.end()
        over = time.monotonic()
        self._let_go(case, fault)
        return over

    def _let_go(self, case: Case, fault: Fault) -> None:
        fault.release()
        if case.phase in ENGINES:
            self.cluster.engines[ENGINES[case.phase]].tell(hold=False)

    def _ended(self, swap: RunningSwap, result: Result) -> None:
        """Wait until the client of the swap has its answer, and store it."""
        try:
            result.told = swap.result(HANG_S).outcome
        except refitd.SwapFailed as exc:
            result.told = exc.report.outcome
            if result.told == "aborted" and not exc.report.reason:
                result.problems.append("aborted without a reason")
        except refitd.RefitdError as exc:
            result.told = type(exc).__name__
        except AssertionError as exc:
            raise Problem(f"hang: whoever asked for the swap was told nothing within {HANG_S:.0f} s") from exc
        result.told += "" if swap.error is None else f": {swap.error}"

    def _check_told(self, case: Case, result: Result, names: tuple[str, ...], since: dict[str, int]) -> None:
        """Check that a warning or an error names the victim, if a process or the swap did not survive the fault."""
        loud = self.cluster.loud(since)
        if result.outcome == "committed" and case.fault not in ("kill", "lose", "exchange", "remove", "replace"):
            return
        if not any(name in line for line in loud for name in names):
            said = "\n".join(loud) or "none"
            result.problems.append(f"no warning or error names any of {', '.join(names)}; there are: {said}")

    def _check(self, case: Case, result: Result, before: list[tuple[int, str, float]]) -> None:
        cluster = self.cluster
        rows = cluster.journalled()
        was_live = next((version for version, state, _ in before if state != "aborted"), None)
        held = self._version - 1 if case.phase != "idle" else self._version
        states = {state for version, state, _ in rows if version == held}
        # Catching up is also journalled as a swap to the version. The held swap has the worst of these outcomes.
        result.outcome = next((s for s in ("decided", "incomplete", "committed") if s in states), "aborted")
        if result.outcome not in case.outcomes:
            expected = " or ".join(sorted(case.outcomes))
            result.problems.append(f"the swap was {result.outcome}, expected {expected}; told: {result.told}")
        said = result.told.partition(":")[0]
        expected_word = {result.outcome} | (LIVE if result.outcome == "decided" else set())
        if said in ANY and said not in expected_word:
            result.problems.append(f"the journal says {result.outcome}, whoever asked was told {result.told}")
        # every served version is in the journal
        decided = {version for version, state, _ in rows if state != "aborted"}
        for name, version in sorted(self._served):
            if version not in decided and version != was_live:
                result.problems.append(f"{name} served version {version}, which was never decided")
        if cluster.live() != self._version:
            result.problems.append(f"the journal says {cluster.live()} is live, after a swap to {self._version}")
        # engines that the fault does not touch were not disturbed
        victim = victim_engine(case)
        if case.victim in ("trainer", "engine", "flips", "worker") or case.fault in (
            "clock",
            "full",
            "slow",
            "stutter",
        ):
            # when a swap aborts, an in-place replica that was being written has elements of two versions
            poisoned = any(state == "aborted" for version, state, at in rows if (version, state, at) not in before)
            for name in sorted(self._nothing - {victim, "still" if poisoned else ""}):
                result.problems.append(f"{name} has served nothing for a while")
            if result.outcome == "aborted" and case.phase in ("staging", "paused") and "still" not in self._nothing:
                result.problems.append("the swap aborted while still was being written, and still went on serving")
        # No process hangs. Engines that were stopped, or that start again and import torch, are exempt.
        try:
            self._wait(lambda: all(self._reads.get(name) for name in cluster.engines), "all replicas read", SILENCE_S)
        except Problem as exc:
            result.problems.append(str(exc))
        for name in cluster.engines:
            if name != victim and self._silent.get(name, 0.0) > SILENCE_S:
                result.problems.append(f"hang: {name} did nothing for {self._silent[name]:.1f} s")
        jumped = any(version == held and abs(at - time.time()) > DAY_S / 2 for version, _, at in rows)
        if (case.victim, case.fault) == ("coordinator", "clock") and not jumped:
            result.problems.append("the coordinator's clock has not jumped")
        # no process leaks
        until = time.monotonic() + LEFT_S
        while (left := processes.more(self._baseline, cluster.held())) and time.monotonic() < until:
            time.sleep(0.2)
        result.problems += [f"leak: {what}" for what in left]
        for process in cluster.processes:
            if not process.is_running:
                result.problems.append(f"{process.name} has ended")
