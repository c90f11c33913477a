"""The long run: swap continuously while processes are killed and stopped at random, and engines check every read.

No time is measured. It counts errors: torn reads, replicas that serve undecided versions, swaps that neither succeed
nor fail, clusters that do not recover, and state that is left at the end.
"""

from __future__ import annotations

import sqlite3
import statistics
import sys
import time
from collections import Counter
from typing import Any

import refitd
from benchmarks import machine
from benchmarks.chaos import Chaos
from refitd.protocol.reports import StatusReport
from refitd.testing import processes
from tests.support.breakable import BreakableCluster
from tests.support.breakable_member import MODEL

NODES = ("n0", "n1", "n2")
REPLICAS = {
    "a": ("n0", "polls"),
    "b": ("n1", "asked"),
    "c": ("n2", "copies"),
    "d": ("n1", "callback"),
    "e": ("n2", "leaves"),
    "f": ("n2", "flips"),
    "g": ("n1", "flips-asked"),
}
FLIPPING = [name for name, (_, way) in REPLICAS.items() if way.startswith("flips")]
FAMILIES = {"joint": "n0", "files": "n1"}  # and the node of each
RANKS = 2  # of the trainer and of every replica
DEADLINES = {"plan_s": 20.0, "stage_s": 8.0, "commit_s": 5.0, "pause_s": 5.0}
SWAP_S = 25.0
# A swap ends within SWAP_S, or 5 s after its decision, and its client learns it immediately.
HANG_S = 60.0
RECOVERY_S = 60.0
PUBLISH_S = 30.0


class Soak:
    """The driver: publishes, swaps, counts."""

    def __init__(self, cluster: BreakableCluster) -> None:
        self._cluster = cluster
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.recoveries: list[float] = []
        self._reads: dict[str, tuple[int, ...]] = {}  # of each member's present process
        self._totals = [0, 0, 0, 0]
        self.serves: dict[str, int | None] = {}
        self._served: set[tuple[str, int]] = set()
        self._published = -1
        self._closed: set[str] = set()
        self._live = (0.0, -1)  # (time at which the newest version was known to be committed everywhere, that version)
        self._decided: set[int] = set()  # versions, according to journals that were lost and rows that were pruned
        self._stale: set[tuple[str, int]] = set()
        self.families: dict[str, Counter[str]] = {name: Counter() for name in cluster.families}
        self._families_now: dict[str, dict[str, int]] = {}

    def listen(self) -> None:
        """Read the members' answers."""
        while not self._cluster.events.empty():
            _, name, event = self._cluster.events.get()
            match event["event"]:
                case "serves":
                    self.serves[name] = event["version"]
                    if event["version"] is not None:
                        self._served.add((name, event["version"]))
                case "torn":
                    self.problems.append(f"torn: {name} {event}")
                case "reads":
                    self._look_for_old(name, event)
                    now = (event["reads"], event["nothing"], event["torn"], event["exchanges"])
                    before = self._reads.get(name, (0, 0, 0, 0))
                    if now[0] + now[1] < before[0] + before[1]:
                        before = (0, 0, 0, 0)  # a new process with this name
                    self._totals = [t + n - b for t, n, b in zip(self._totals, now, before, strict=True)]
                    self._reads[name] = now
                case "published":
                    self._published = event["version"]
                case "family":
                    self._count_family(name, event["counts"])
                case "unwithdrawn":
                    self.problems.append(f"{name} could not withdraw its source: {event['reason']}")
                case "closed":
                    self._closed.add(name)

    def _count_family(self, name: str, counts: dict[str, int]) -> None:
        """Add a family's counts; each new process starts counting at zero."""
        before = self._families_now.get(name, {})
        if any(counts.get(what, 0) < count for what, count in before.items()):
            before = {}
        for what, count in counts.items():
            self.families[name][what] += count - before.get(what, 0)
        self._families_now[name] = counts

    def _look_for_old(self, name: str, event: dict[str, Any]) -> None:
        """Record replicas that serve an older version after a swap committed, even if they took no part in it."""
        since, live = self._live
        oldest = event["oldest"]
        if oldest is not None and oldest < live and event["looked"] > since and (name, oldest) not in self._stale:
            self._stale.add((name, oldest))
            self.counts["old versions served"] += 1
            self.problems.append(f"{name} served {oldest} {event['looked'] - since:.2f} s after {live} was committed")
            _note(f"  {self.problems[-1]} ({time.strftime('%H:%M:%S')}, {event})")

    def round(self, version: int) -> bool:
        """Publish a version and swap to it; return whether it is live everywhere."""
        self._cluster.trainer.tell(version=version, timeout_s=PUBLISH_S)
        until = time.monotonic() + PUBLISH_S + 10
        while self._published != version:
            self.listen()
            if not self._cluster.trainer.is_running or time.monotonic() > until:
                self.counts["versions that the trainer did not publish"] += 1
                time.sleep(0.2)
                return False
            time.sleep(0.005)
        started = time.monotonic()
        try:
            with self._cluster.daemons["n1"].connect("soak", 5) as client:
                report = client.swap(MODEL, version, timeout=SWAP_S, queue=True)
            outcome = str(report.outcome)
            self._live = (time.time(), version)
        except refitd.SwapFailed as exc:
            outcome = str(exc.report.outcome)
        except refitd.RefusedError:
            outcome = "refused"
        except refitd.RefitdError as exc:
            outcome = f"not answered ({type(exc).__name__})"
        took = time.monotonic() - started
        if took > HANG_S:
            self.problems.append(f"hang: the swap to {version} took {took:.0f} s")
        self.counts[outcome] += 1
        self.listen()
        if outcome != "committed":
            time.sleep(0.1)
        return outcome == "committed"

    def settle(self, version: int) -> None:
        """Wait until every replica serves a version."""
        until = time.monotonic() + RECOVERY_S
        while set(self.serves.values()) != {version}:
            self.listen()
            if time.monotonic() > until:
                self.problems.append(f"replicas serve {self.serves} long after version {version} was committed")
                return
            time.sleep(0.02)

    def close_members(self) -> None:
        """Have all members leave by closing their clients."""
        self._closed.clear()
        members = (*self._cluster.families.values(), *self._cluster.engines.values(), self._cluster.trainer)
        for member in members:
            member.tell(version=self._published + 1, timeout_s=PUBLISH_S, last=True)
        until = time.monotonic() + 60
        while len(self._closed) < len(members) and time.monotonic() < until:
            self.listen()
            time.sleep(0.05)
        if missing := {member.name for member in members} - self._closed:
            self.problems.append(f"members did not close within 60 s: {', '.join(sorted(missing))}")

    def keep_journal(self) -> None:
        """Store the decisions of a journal that is about to be lost, or whose old rows are about to be pruned."""
        self._decided |= {version for version, state in self._rows() if state != "aborted"}

    def _rows(self) -> list[tuple[int, str]]:
        try:
            with sqlite3.connect(self._cluster.journal) as journal:
                found = journal.execute("SELECT version, state FROM swaps WHERE model = ?", (MODEL,))
                rows: list[tuple[int, str]] = found.fetchall()
        except sqlite3.Error:  # the journal was just lost, and its coordinator was killed before it made a new one
            rows = []
        return rows

    def check_journal(self) -> None:
        """Check that every served version was decided."""
        rows = self._rows()
        decided = self._decided | {version for version, state in rows if state != "aborted"}
        self.counts["swaps in the journal"] = len(rows)
        for name, version in sorted(self._served):
            if version not in decided:
                self.problems.append(f"{name} served version {version}, which was never decided")
        for open_version in [version for version, state in rows if state == "decided"][:5]:
            self.counts["decided and never reported as ended"] += 1
            del open_version

    @property
    def totals(self) -> dict[str, int]:
        """Reads by result."""
        return dict(zip(("reads", "served nothing", "torn", "exchanges"), self._totals, strict=True))


def run(
    json_output: bool, quick: bool = False, minutes: float | None = None, seed: int | None = None
) -> dict[str, Any]:
    """Run for `minutes` (default 10, or 0.5 if `quick`); store the results unless `quick`."""
    minutes = (0.5 if quick else 10.0) if minutes is None else minutes
    seed = int(time.time()) if seed is None else seed
    started = time.monotonic()
    cluster = BreakableCluster(NODES, REPLICAS, deadlines=DEADLINES, ranks=RANKS, families=FAMILIES)
    left: list[str] = []
    cluster.start()
    soak = Soak(cluster)
    try:
        chaos = _break(cluster, soak, started + 60 * minutes, seed)
        before = {name: processes.descriptors(daemon.pid).total() for name, daemon in cluster.daemons.items()}
        for name in FAMILIES:
            if not soak.families[name]["committed"]:
                soak.problems.append(f"the {name} family has committed nothing; see its log in {cluster.folder}")
        soak.close_members()
        left = _leaks(cluster, before)
        left += cluster.stop()
        soak.check_journal()
    finally:
        if soak.problems or left or sys.exc_info()[0] is not None:
            _note(f"logs are in {cluster.folder}")
            cluster.kill()
        else:
            cluster.remove()
    found = {
        "minutes": (time.monotonic() - started) / 60,
        "seed": seed,
        "swaps": dict(soak.counts),
        "faults": dict(chaos.faults),
        "reads": soak.totals,
        "families": {name: dict(counts) for name, counts in soak.families.items()},
        "recoveries": len(soak.recoveries),
        "recovery_s": {
            "median": statistics.median(soak.recoveries) if soak.recoveries else 0.0,
            "longest": max(soak.recoveries, default=0.0),
        },
        "problems": soak.problems,
        "leaks": left,
        "machine": machine.describe(),
    }
    machine.record("soak", found, _markdown)
    if not json_output:
        print(_markdown(found))
    if soak.problems or left:
        raise RuntimeError(f"{len(soak.problems)} problems, {len(left)} leaks: {(soak.problems + left)[:5]}")
    return found


def _break(cluster: BreakableCluster, soak: Soak, until: float, seed: int) -> Chaos:
    """Swap and inject faults until the time is over, then repair all and have all replicas serve one version."""
    version, live, told = 0, -1, time.monotonic()
    broken_at = 0.0
    with Chaos(cluster, seed, FLIPPING, soak.keep_journal) as chaos:
        while time.monotonic() < until:
            if chaos.failure is not None:
                raise RuntimeError("the soak itself has failed") from chaos.failure
            version += 1
            before = chaos.last
            if soak.round(version):
                live = version
                chaos.commits += 1
                if broken_at:
                    soak.recoveries.append(time.monotonic() - broken_at)
                    broken_at = 0.0
            elif not broken_at:
                broken_at = time.monotonic()
            if broken_at and time.monotonic() - max(broken_at, before) > RECOVERY_S:
                soak.problems.append(f"no swap has succeeded for {RECOVERY_S:.0f} s after the last fault")
                break
            if time.monotonic() - told > 10:
                told = time.monotonic()
                soak.keep_journal()
                faults = sum(chaos.faults.values())
                _note(f"  {max(0, until - told):.0f} s left: {dict(soak.counts)}, {faults} faults, {soak.totals}")
    end = time.monotonic() + RECOVERY_S
    while time.monotonic() < end:
        version += 1
        if soak.round(version):
            live = version
            break
    else:
        soak.problems.append(f"no swap has succeeded within {RECOVERY_S:.0f} s of quiet")
    soak.settle(live)
    return chaos


def _leaks(cluster: BreakableCluster, before: dict[str, int]) -> list[str]:
    """Return the state that daemons still hold after all clients have left."""
    found: list[str] = []
    until = time.monotonic() + 20
    while time.monotonic() < until:
        found = []
        with cluster.daemons["n1"].connect("soak", 5) as client:
            status = client.status()
            for node in status.nodes:
                if node.arenas:
                    found.append(f"{node.node}: {node.arenas} arenas, {node.arena_bytes} bytes; {_registered(status)}")
        for name, daemon in cluster.daemons.items():
            if (now := processes.descriptors(daemon.pid).total()) > before[name]:
                found.append(f"{name}: {now} descriptors, with members there were {before[name]}")
        if not found:
            break
        time.sleep(0.5)
    return found


def _registered(status: StatusReport) -> str:
    """Name the ranks that are still registered."""
    found = [
        f"{model.model} {getattr(rank, 'replica', 'source')}:{rank.rank} on {rank.node}, pid {rank.pid}"
        for model in status.models
        for rank in (*model.sources, *model.targets)
    ]
    return f"still registered: {', '.join(found) or 'no rank'}"


def _markdown(found: dict[str, Any]) -> str:
    about = found["machine"]
    lines = [
        "# The long run: random faults during continuous swaps",
        "",
        f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python {about['python']}. A coordinator,",
        "three daemons, a trainer of two ranks and seven replicas of two ranks (private tensors; arenas that it",
        "copies to; asked to pause; with a callback that tries old commits again; one that leaves right after a commit",
        "and comes back; two that exchange their arenas, polling and asked to pause), and two families: a policy and",
        "its draft, swapped by joint decisions, with float32 and bfloat16 tensors of one cast source; versions",
        "published from a checkpoint folder that is replaced during the read. All run on one machine, bytes between",
        "nodes go over gloo. The values of a version follow from its number (those of files from the folder's):",
        f"engines check every element all the time. {found['minutes']:.1f} minutes, seed {found['seed']}. Written by",
        "`scripts/bench soak --minutes N`.",
        "",
        "| what | count |",
        "| --- | --- |",
        *(f"| swaps, {name} | {count} |" for name, count in sorted(found["swaps"].items()) if "old" not in name),
        *(f"| {name} | {count} |" for name, count in sorted(found["faults"].items())),
        *(
            f"| {name} family, {what} | {count} |"
            for name, counts in found["families"].items()
            for what, count in sorted(counts.items())
        ),
        f"| faults in all | {sum(found['faults'].values())} |",
        f"| recoveries | {found['recoveries']} |",
        f"| exchanges of two arenas, by ranks | {found['reads']['exchanges']} |",
        f"| whole reads of a replica | {found['reads']['reads']} |",
        f"| looks at a replica that served nothing | {found['reads']['served nothing']} |",
        f"| torn reads, and old commits that were applied | {found['reads']['torn']} |",
        f"| old versions served after a newer one was committed | {found['swaps'].get('old versions served', 0)} |",
        f"| other problems (hangs, undecided versions, no recovery) | {len(found['problems'])} |",
        f"| leaks | {len(found['leaks'])} |",
        "",
        f"From the first swap that failed to the next that succeeded: median {found['recovery_s']['median']:.1f} s, "
        f"longest {found['recovery_s']['longest']:.1f} s.",
        *(f"- {problem}" for problem in found["problems"] + found["leaks"]),
    ]
    return "\n".join(lines) + "\n"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
