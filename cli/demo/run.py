"""The launcher: starts a daemon, a trainer and two engines for real, swaps weights, and proves the result."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import msgspec

import refitd
from refitd.protocol.reports import SwapReport
from refitd.states import SwapOutcome
from refitd.text import printable
from refitd_cli.demo.layout import TransformerConfig
from refitd_cli.demo.processes import DemoFailed, DemoProcesses, Message
from refitd_cli.demo.proof import Party, Verdict, compare, logits_path, state_path, whole_model
from refitd_cli.demo.show import Progress, ShownChange, SwapRow, as_object, pauses, sample, tables
from refitd_cli.output import duration, print_json, rate, size, to_json

TRAINER = Party("trainer", tp=2, pp=1)
REPLICAS = {Party("engine-a", tp=4, pp=1): "private", Party("engine-b", tp=1, pp=2): "arena"}
REPLICAS_MXFP8 = {**REPLICAS, Party("engine-a", tp=4, pp=1): "mxfp8"}
MODEL = "policy"
SWAPS = 6
STEPS_PER_SWAP = 6
ROUNDS_END_S = 60.0  # a machine that would take longer takes fewer steps, at least one per round
ENGINE_NICENESS = 15  # the trainer goes first where cores are few
TRAINER_SEED, FIRST_ENGINE_SEED = 1, 100  # engines start from other weights
CHECKED_TEXT = {"size": 2, "length": 192}

START_S, TRAIN_S, SWAP_S, FLIP_S, SAMPLE_S, CHECK_S = 60.0, 60.0, 30.0, 30.0, 60.0, 60.0
SWAP_AND_FLIP_S = 1.0  # their usual duration
INTERRUPTED = 130
LONGEST_BASE = 40  # a socket's path holds 107 bytes

CONFIG = """\
[deadlines]
stage_s = 20.0
commit_s = 20.0
"""


class Demo:
    """The processes and their events so far."""

    def __init__(self, directory: Path, progress: Progress, replicas: Mapping[Party, str] = REPLICAS) -> None:
        self.directory, self.progress, self.replicas = directory, progress, replicas
        self.arriving: dict[str, int] = {}  # bytes of a swap, by replica
        self.runtime_dir = directory / "run"
        self.processes = DemoProcesses(directory, self._took, progress.waiting)
        self.rows: list[SwapRow] = []
        # (replica, version): the first text of that version
        self._samples: dict[tuple[str, int | None], str] = {}

    def start(self) -> None:
        """Start every process and return when the trainer can begin; engines may still be loading."""
        self.progress.say("starting the daemon: refitd serve --standalone")
        daemon = self.processes.start_daemon(CONFIG, self.runtime_dir, START_S)
        self.progress.say(f"refitd is ready (pid {daemon.pid})")
        # it offers what an engine in MXFP8 wants
        offers = "mxfp8" if "mxfp8" in self.replicas.values() else "private"
        self._start(TRAINER, "trainer", TRAINER_SEED, offers)
        for index, (replica, memory) in enumerate(self.replicas.items()):
            self._start(replica, "engine", FIRST_ENGINE_SEED + index, memory)
        self.processes.wait("ready", TRAINER.members, START_S)

    def round(self, version: int) -> None:
        """Train a little, publish, swap, and wait until every engine serves the new version."""
        trainers = list(TRAINER.members)
        seconds = (ROUNDS_END_S - self.progress.seconds) / (SWAPS - version + 1) - SWAP_AND_FLIP_S
        self.processes.send(trainers, "train", steps=STEPS_PER_SWAP, seconds=seconds)
        trained = self.processes.wait("trained", trainers, TRAIN_S)[trainers[0]]
        self.processes.send(trainers, "publish", version=version)
        published = self.processes.wait("published", trainers, SWAP_S)
        self.await_samples()
        # The last swap is the operator's; the others are a training loop's.
        by_operator = version == SWAPS
        report = self._swap_by_refitctl(version) if by_operator else self._swap(version)
        row = SwapRow(
            version=version,
            by="refitctl swap" if by_operator else "client.swap",
            step=trained["steps"],
            loss=trained["loss"],
            publish_s=max(message["seconds"] for message in published.values()),
            bytes=report.bytes,
            stage_s=report.stage_s,
            commit_s=report.commit_s,
            total_s=report.total_s,
            digests=report.digests,
        )
        self.progress.say(
            f"version {version} is live on {len(report.members)} ranks: {size(row.bytes)} in "
            f"{duration(row.total_s)}, staged at {rate(row.bytes, row.stage_s)}, "
            f"{row.digests} digests equal ({row.by})"
        )
        for replica in self.replicas:
            row.flips[replica.name] = flip = self._flip(replica, version)
            self.progress.say(
                f"{replica.name} paused {duration(flip.paused_s)} ({flip.way}) before token {flip.token}, "
                f"all {replica.tp * replica.pp} ranks at once; until then: {sample(flip.before)}"
            )
        self.rows.append(row)

    def await_samples(self) -> None:
        """Return when every engine has completed a text with its version; before the first swap, when it serves."""
        if not self.rows:
            self.processes.wait("ready", [member for replica in self.replicas for member in replica.members], START_S)
            return
        row = self.rows[-1]
        for name, flip in row.flips.items():
            self._await_sample(name, row.version)
            flip.after = self._samples[name, row.version]

    def check(self) -> list[Verdict]:
        """Have every process write its tensors, and compare them."""
        config = TransformerConfig()
        self.progress.say("engines finish; every process writes its tensors and its logits on held-out text")
        self.arriving = self._arriving()
        self.processes.send((replica.leader for replica in self.replicas), "settle")
        self.processes.wait("settled", [member for replica in self.replicas for member in replica.members], CHECK_S)
        for member in self.processes.members:
            paths = {
                "state": str(state_path(self.directory, member)),
                "logits": str(logits_path(self.directory, member)),
            }
            self.processes.send([member], "check", **paths, **CHECKED_TEXT)
        checked = self.processes.wait("checked", self.processes.members, CHECK_S)
        for name, message in checked.items():
            if not message.get("places_unchanged", True):
                raise DemoFailed(f"{name}: a tensor has moved")
            if message.get("version", SWAPS) != SWAPS:
                raise DemoFailed(f"{name} serves version {message['version']}, not {SWAPS}")
        whole = whole_model(self.directory, TRAINER, config)
        verdicts = []
        for replica, memory in self.replicas.items():
            self.progress.say(f"comparing {replica.name} ({replica}) with the trainer ({TRAINER})")
            is_mxfp8 = memory == "mxfp8"
            verdicts.append(compare(self.directory, whole, TRAINER, replica, config, is_mxfp8=is_mxfp8))
        return verdicts

    def _arriving(self) -> dict[str, int]:
        """Return the bytes that a swap brings each replica."""
        with refitd.connect(self.runtime_dir, name="demo", reconnect=False) as client:
            targets = client.status().models[0].targets
        return {r.name: sum(t.bytes for t in targets if t.replica == r.name) for r in self.replicas}

    def _start(self, party: Party, module: str, seed: int, memory: str) -> None:
        for member, layout in party.members.items():
            self.processes.start(
                member,
                f"refitd_cli.demo.{module}",
                *("--name", party.name),
                *("--runtime-dir", self.runtime_dir),
                *("--store", self.directory / f"{party.name}.store"),
                *("--rank", layout.rank),
                *("--tp", party.tp),
                *("--pp", party.pp),
                *("--seed", seed),
                *("--memory", memory),
                niceness=ENGINE_NICENESS if module == "engine" else 0,
            )

    def _swap(self, version: int) -> SwapReport:
        try:
            with refitd.connect(self.runtime_dir, name="demo", reconnect=False) as client:
                return client.swap(MODEL, version, timeout=SWAP_S)
        except refitd.RefitdError as exc:
            raise DemoFailed(f"swap to version {version}: {exc}") from exc

    def _swap_by_refitctl(self, version: int) -> SwapReport:
        command = [sys.executable, "-m", "refitd_cli.control", "swap", MODEL, "--version", str(version)]
        self.progress.say(f"refitctl swap {MODEL} --version {version} --json")
        address = ["--address", str(self.runtime_dir), "--timeout", str(SWAP_S), "--json"]
        printed = self.processes.run("refitctl", [*command, *address], SWAP_S)
        report = msgspec.json.decode(printed.splitlines()[-1], type=SwapReport)
        if report.outcome != SwapOutcome.COMMITTED or report.version != version:
            raise DemoFailed(f"refitctl exited 0 but printed {printed}")
        return report

    def _flip(self, replica: Party, version: int) -> ShownChange:
        flips = self.processes.wait("flip", replica.members, FLIP_S)
        tokens = {message["token"] for message in flips.values()}
        versions = {message["version"] for message in flips.values()}
        if versions != {version} or len(tokens) != 1:
            raise DemoFailed(f"{replica.name} did not flip as one: versions {versions}, tokens {tokens}")
        return ShownChange(
            way=flips[replica.leader]["way"],
            paused_s=max(message["paused_s"] for message in flips.values()),
            token=tokens.pop(),
            places_unchanged=all(message["places_unchanged"] for message in flips.values()),
            before=flips[replica.leader]["before"],
        )

    def _await_sample(self, name: str, version: int) -> None:
        def arrived() -> bool:
            return (name, version) in self._samples

        self.processes.wait_until(arrived, lambda: f"text of version {version} from {name}", SAMPLE_S)

    def _took(self, name: str, message: Message) -> None:
        match message["event"]:
            case "ready":
                self.progress.say(f"{name} is ready")
            case "step":
                self.progress.say(
                    f"step {message['step']}: loss {message['loss']:.3f} ({duration(message['seconds'])})"
                )
            case "sample":
                replica, version = name.rpartition("-")[0], message["version"]
                if (replica, version) not in self._samples:
                    self._samples[replica, version] = message["text"]
                    told = "no version yet" if version is None else f"version {version}"
                    self.progress.say(f"{replica} ({told}) writes: {sample(message['text'])}")


def main(json_output: bool, *, mxfp8: bool = False) -> int:
    """Run the demo; return 0 only if every engine ended with exactly the trainer's weights.

    With `mxfp8` one of the engines holds them in MXFP8: exactly what converting the trainer's whole tensors gives.
    """
    progress = Progress()
    replicas = REPLICAS_MXFP8 if mxfp8 else REPLICAS
    with _workplace() as directory:
        demo = Demo(directory, progress, replicas)
        try:
            demo.start()
            for version in range(1, SWAPS + 1):
                demo.round(version)
            demo.await_samples()
            verdicts = demo.check()
            progress.say("every process leaves")
            demo.processes.dismiss()
        except KeyboardInterrupt:
            progress.say("interrupted; ending every process")
            return INTERRUPTED
        except Exception as exc:
            for line in demo.processes.tails().split("\n"):
                print(printable(line), file=sys.stderr)
            progress.say(f"the demo failed: {exc}")
            if not isinstance(exc, DemoFailed):
                raise
            return 1
        finally:
            with _uninterrupted():
                demo.processes.stop()
    layouts = {party.name: str(party) for party in (TRAINER, *replicas)}
    tables(demo.rows, verdicts, layouts, demo.arriving, to_stderr=json_output)
    progress.say(pauses(demo.rows))
    good = all(verdict.holds for verdict in verdicts) and all(row.places_unchanged for row in demo.rows)
    progress.say("every engine holds the trainer's weights" if good else "the engines differ from the trainer")
    if json_output:
        print_json(to_json(as_object(demo.rows, verdicts, layouts, demo.arriving, progress.seconds)))
    return 0 if good else 1


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C while processes are being ended: a second one must leave none running."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _workplace() -> Iterator[Path]:
    """A private directory with a path short enough for sockets; SIGTERM inside is like Ctrl-C."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > LONGEST_BASE:
        base = "/tmp"
    directory = Path(tempfile.mkdtemp(prefix="refitd-demo-", dir=base))
    try:
        yield directory
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(directory, ignore_errors=True)
