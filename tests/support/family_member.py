"""A process of a long run that publishes, swaps and serves on its own, and checks each version from its number.

    python -m tests.support.family_member joint --directory DIRECTORY
    python -m tests.support.family_member files --directory DIRECTORY

joint: a policy with a cast and its draft, swapped by joint decisions. files: versions published from a checkpoint
folder that is replaced during the read. Counts and errors are lines of JSON on stdout. A {"last": true} line on stdin
ends the process in order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import refitd
from tests.support.breakable_member import PATIENCE_S, RETRY_S, Tensors, commands, emit

READ_AGAIN_S = 0.005
BEAT_S = 0.5
SWAP_S = 15.0
WITHDRAW_S = 20.0
EXACT = 2.0**-9  # float32 holds v + EXACT for v < 2**14; bfloat16 does not for any v >= 1
FILE_TENSORS = 5


class Family(ABC):
    """Models that one process publishes and serves: a thread swaps, the main thread serves and checks."""

    models: tuple[str, ...] = ()

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.counts: Counter[str] = Counter()
        self.targets: dict[str, Any] = {}
        self.live: dict[str, Tensors] = {}
        self._client: refitd.Client | None = None
        self._ends = threading.Event()
        self._lock = threading.Lock()  # of the outcomes, which one thread writes and the other reads
        self._committed = 0.0, -1  # when the newest version was known to be committed, and its number
        self._aborted: set[int] = set()
        self._wrong: set[tuple[str, str, int]] = set()  # reported already

    @abstractmethod
    def tensors(self) -> dict[str, Tensors]:
        """Return new tensors of the engine, by model."""

    @abstractmethod
    def expected(self, model: str, version: int) -> Tensors:
        """Return the values of a version, made from its number; raise KeyError if it was never published."""

    @abstractmethod
    def publish(self) -> tuple[refitd.Client, int]:
        """Publish the next version; return a client and the version's number."""

    @abstractmethod
    def lose_source(self) -> None:
        """Drop the trainer's side; the next `publish` makes it again."""

    # --- the swaps ----------------------------------------------------------------------------------------

    def swap_on(self) -> None:
        """Publish and swap until the end."""
        while not self._ends.is_set():
            try:
                self._swap_once()
            except refitd.CheckpointError:
                self.counts["refused reads of a folder"] += 1
            except refitd.RefitdError as exc:
                self.counts[f"lost ({type(exc).__name__})"] += 1
                self.lose_source()
                self._ends.wait(RETRY_S)
        self.lose_source()
        self._withdraw()

    def _withdraw(self) -> None:
        """Register a source of each model and close it: published versions outlive a client that only closes."""
        until = time.monotonic() + WITHDRAW_S
        while True:
            try:
                with refitd.connect(self._directory, name="withdraws", timeout=PATIENCE_S, reconnect=False) as client:
                    for model, tensors in self.tensors().items():
                        client.register_source(model, tensors, timeout=PATIENCE_S).close()
                return
            except refitd.RefitdError as exc:
                if time.monotonic() > until:
                    emit("unwithdrawn", reason=f"{type(exc).__name__}: {exc}"[:300])
                    return
                time.sleep(RETRY_S)

    def _swap_once(self) -> None:
        client, version = self.publish()
        with self._lock:
            self._aborted.discard(version)  # after an aborted swap, a new source publishes the number again
        try:
            client.swap_together(dict.fromkeys(self.models, version), timeout=SWAP_S)
        except refitd.SwapFailed as exc:
            outcomes = {str(report.outcome) for report in exc.together or (exc.report,)}
            for outcome in outcomes:
                self.counts[outcome] += 1
            if outcomes == {"aborted"}:
                with self._lock:
                    self._aborted.add(version)
            elif "aborted" in outcomes:
                emit("torn", what="one decision, several outcomes", version=version, outcomes=sorted(outcomes))
            self._ends.wait(RETRY_S)
            return
        self.counts["committed"] += 1
        with self._lock:
            self._committed = time.monotonic(), version

    # --- the engine ---------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Poll and check until the end."""
        told = 0.0
        while not self._ends.is_set():
            try:
                self._step()
                time.sleep(READ_AGAIN_S)
            except refitd.RefitdError as exc:
                emit("lost", reason=f"{type(exc).__name__}: {exc}"[:300])
                self._lose()
                time.sleep(RETRY_S)
            if time.monotonic() - told > BEAT_S:
                told = time.monotonic()
                emit("family", counts=dict(self.counts))
        self._lose()

    def _step(self) -> None:
        if self._client is None:
            self._register()
        for target in self.targets.values():
            target.poll()
            if target.error is not None:
                raise refitd.TransportError(f"{type(target.error).__name__}: {target.error}")
        with self._lock:
            (since, committed), aborted = self._committed, set(self._aborted)
        looked = time.monotonic()
        for model, target in self.targets.items():
            version = target.version
            if version is None:
                continue
            self.counts["reads"] += 1
            if version in aborted:
                emit("torn", model=model, version=version, what="served, though its swap was reported aborted")
            if version < committed and looked > since:
                emit("torn", model=model, version=version, what=f"served after {committed} was committed")
            self._check(model, version)

    def _check(self, model: str, version: int) -> None:
        try:
            expected = self.expected(model, version)
        except KeyError:  # published by an earlier process of this name
            return
        for name, wanted in expected.items():
            held = self.live[model][name]
            is_equal = torch.equal(held.view(torch.uint8), wanted.view(torch.uint8))
            if not is_equal and (model, name, version) not in self._wrong:
                self._wrong.add((model, name, version))
                values = held.reshape(-1)[:2].tolist(), wanted.reshape(-1)[:2].tolist()
                emit("torn", model=model, tensor=name, version=version, what=f"values {values[0]}, not {values[1]}")

    def _register(self) -> None:
        client = refitd.connect(self._directory, name=self.models[0], timeout=PATIENCE_S, reconnect=False)
        self.live = self.tensors()
        try:
            self.targets = {
                model: client.register_target(model, live, replica="only", timeout=PATIENCE_S)
                for model, live in self.live.items()
            }
        except BaseException:
            client.close()
            raise
        self._client = client

    def _lose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self.targets = {}

    def run(self) -> None:
        """Serve on this thread and swap on another until the driver asks to end."""
        swaps = threading.Thread(target=self.swap_on)
        swaps.start()
        threading.Thread(target=self._obey, daemon=True).start()
        self.serve()
        swaps.join(2 * SWAP_S)
        emit("family", counts=dict(self.counts))
        emit("closed")

    def _obey(self) -> None:
        for command in commands():
            if command.get("last"):
                self._ends.set()
                return


class Joint(Family):
    """A policy that the trainer may cast, and its draft."""

    models = ("joint-policy", "joint-draft")

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._trainer: refitd.Client | None = None
        self._given = {model: self._values(model, 0, torch.float32) for model in self.models}
        self._sources: dict[str, Any] = {}

    def _values(self, model: str, version: int, dtype: torch.dtype) -> Tensors:
        made = {"gate": torch.full((64, 16), version + EXACT)}
        if model == self.models[0]:
            made["w"] = torch.full((128, 64), version + EXACT).to(dtype)
        return made

    def tensors(self) -> dict[str, Tensors]:
        return {model: self._values(model, -1, torch.bfloat16) for model in self.models}

    def expected(self, model: str, version: int) -> Tensors:
        return self._values(model, version, torch.bfloat16)

    def publish(self) -> tuple[refitd.Client, int]:
        if self._trainer is None:
            client = refitd.connect(self._directory, name="joint-trainer", timeout=PATIENCE_S, reconnect=False)
            self._trainer = client
            self._sources = {
                model: client.register_source(model, given, cast="bfloat16", timeout=PATIENCE_S)
                for model, given in self._given.items()
            }
        version = max(source.next_version for source in self._sources.values())
        for model, source in self._sources.items():
            for name, tensor in self._values(model, version, torch.float32).items():
                self._given[model][name].copy_(tensor)
            source.publish(version, timeout=PATIENCE_S)
        return self._trainer, version

    def lose_source(self) -> None:
        client, self._trainer = self._trainer, None
        if client is not None:
            client.close()


class Files(Family):
    """A checkpoint folder that a thread replaces while this process publishes it."""

    models = ("from-files",)

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._temporary = Path(tempfile.gettempdir()) / "files-family"  # of this cluster; a killed process leaves it
        self._folder = self._temporary / "checkpoint"
        self._numbers = itertools.count(1)
        self._client_of_swaps: refitd.Client | None = None
        self._replace(next(self._numbers))

    def tensors(self) -> dict[str, Tensors]:
        return {self.models[0]: {f"w{i}": torch.zeros(64, 64) for i in range(FILE_TENSORS)}}

    def expected(self, model: str, version: int) -> Tensors:
        """Return the tensors of the checkpoint that has w0; all must be from it, each under its own name."""
        number = int(self.live[model]["w0"].reshape(-1)[0]) // FILE_TENSORS
        return self._values(number)

    @staticmethod
    def _values(number: int) -> Tensors:
        return {f"w{i}": torch.full((64, 64), float(number * FILE_TENSORS + i)) for i in range(FILE_TENSORS)}

    def _replace(self, number: int) -> None:
        """Put another checkpoint in the folder's place by one rename.

        Files are not replaced one by one: this process may be stopped between two of them, and a reader cannot see
        that such a folder is of two checkpoints (docs/use.md). tests/unit/test_opened_folders.py does that.
        """
        made, old = self._temporary / "made", self._temporary / "old"
        for left in (made, old):
            shutil.rmtree(left, ignore_errors=True)
        made.mkdir(parents=True)
        # the length of the first tensor moves all others: an old header does not fit new bytes
        tensors = {"a": torch.zeros(number % 7 + 1), **self._values(number)}
        names = sorted(tensors)
        for part, chosen in enumerate((names[:3], names[3:]), 1):
            save_file({name: tensors[name] for name in chosen}, made / f"model-0000{part}-of-00002.safetensors")
        index = {name: f"model-0000{1 if name in names[:3] else 2}-of-00002.safetensors" for name in names}
        (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        if self._folder.exists():
            self._folder.rename(old)
        made.rename(self._folder)

    def replace_on(self) -> None:
        """Replace the folder until the end, every 0 to 0.8 s: some reads are refused, and many are published."""
        for number in self._numbers:
            if self._ends.wait(0.02 * (number % 40)):
                return
            self._replace(number)
            self.counts["folders replaced"] += 1

    def publish(self) -> tuple[refitd.Client, int]:
        with refitd.connect(self._directory, name="files-trainer", timeout=PATIENCE_S, reconnect=False) as client:
            found = refitd.publish_checkpoint(client, self.models[0], self._folder, timeout=PATIENCE_S)
        self.counts["folders published"] += 1
        if self._client_of_swaps is None:
            self._client_of_swaps = refitd.connect(
                self._directory, name="files-swaps", timeout=PATIENCE_S, reconnect=False
            )
        return self._client_of_swaps, found.version

    def lose_source(self) -> None:
        client, self._client_of_swaps = self._client_of_swaps, None
        if client is not None:
            client.close()

    def run(self) -> None:
        replaces = threading.Thread(target=self.replace_on)
        replaces.start()
        try:
            super().run()
        finally:
            self._ends.set()
            replaces.join()
            shutil.rmtree(self._temporary, ignore_errors=True)


FAMILIES: dict[str, type[Family]] = {"joint": Joint, "files": Files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("--directory", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    FAMILIES[options.family](options.directory).run()


if __name__ == "__main__":
    main()
