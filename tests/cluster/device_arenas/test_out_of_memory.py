"""A GPU whose driver answers "out of memory" to one call after another: while a replica registers, a version is staged,
and arenas are exchanged. The version before survives, the next one is served, and no memory is lost.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import refitd
from refitd.buffers.cuda import release_dropped
from refitd.testing import Daemon, Engine, eventually
from tests.support import fake_cuda, shards
from tests.support.gpu_tensors import allocated, copy_into, private

pytestmark = pytest.mark.real_starts  # which call of the driver fails depends on all calls before it


class Device:
    """Rules of FAKE_CUDA_FAIL for all processes of a test."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path, self._failed, self._rules = path, path.with_name(f"{path.name}.failed"), 0
        self._write("")
        monkeypatch.setenv("FAKE_CUDA_FAIL", str(path))

    def _write(self, rule: str) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(rule)
        part.rename(self._path)

    @contextlib.contextmanager
    def failing(self, rule: str) -> Iterator[None]:
        """Fail the calls that the rule names."""
        self._failed.unlink(missing_ok=True)
        self._rules += 1
        self._write(f"{rule},{self._rules}")
        try:
            yield
        finally:
            self._write("")

    def failed(self) -> str:
        """Return the calls that have failed, with their processes."""
        return self._failed.read_text() if self._failed.exists() else ""


class Fleet:
    """A source on GPU 0, a replica on GPU 1 that flips."""

    def __init__(self, daemon: Daemon) -> None:
        self.client = daemon.connect("trainer")
        self.given = private(shards.whole(0), 0)
        self.source = self.client.register_source("policy", self.given)
        self.live = allocated(self.client, self.given, "cuda:1")
        self.target = self.client.register_target("policy", self.live, replica="old")
        assert self.target.flips
        self.version = 0

    def swap(self) -> None:
        """Publish the next version, and swap to it; the replica serves it, and before that a decided version."""
        eventually(
            lambda: self.target.poll() is None and self.target.pending is None, "a decided version is taken over"
        )
        self.serves()
        self.version += 1
        copy_into(self.given, shards.whole(self.version))
        self.source.publish(self.version)
        with Engine(self.target):
            try:
                self.client.swap("policy", self.version, timeout=60)
            except refitd.SwapFailed as exc:  # a worker whose call has failed before may end only now
                assert "got no memory" in str(exc)
                self.client.swap("policy", self.version, timeout=60)
        assert self.serves() == self.version

    def serves(self) -> int | None:
        """Return the version that the replica says that it serves, which its tensors have; None after a failed flip."""
        version = self.target.version
        assert version is None or shards.equal(self.live, shards.whole(version))
        return version

    def attempt(self) -> None:
        """Register a replica, publish a version, and swap to it; a refusal or an aborted swap is as good."""
        self.version += 1
        copy_into(self.given, shards.whole(self.version))
        with contextlib.suppress(refitd.RefitdError):
            room = allocated(self.client, self.given, "cuda:1")
            targets = [self.target]
            with contextlib.suppress(refitd.RefitdError):
                targets.append(self.client.register_target("policy", room, replica="new"))
            with contextlib.suppress(refitd.RefitdError):
                self.source.publish(self.version)
                with Engine(*targets):
                    self.client.swap("policy", self.version, timeout=60)
            for new in targets[1:]:
                new.close()
            self.client.free(room)

    def close(self) -> None:
        self.live.clear()
        self.given.clear()
        self.client.close()


OTHERS = ["cuMemGetInfo", "cuMemExport", "cuMemImport", "cuMemAddressReserve", "cuMemSetAccess"]


@pytest.mark.parametrize(
    "name", ["cuMemCreate", "cuMemMap", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_no_call_that_fails_costs_a_version_or_memory(
    name: str,
    gpus: fake_cuda.FakeGpus,
    start_daemon: Callable[..., Daemon],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(tmp_path / "rules", monkeypatch)
    daemon = start_daemon("[deadlines]\nplan_s = 60.0\nstage_s = 60.0\ncommit_s = 3.0\n")
    fleet = Fleet(daemon)
    fleet.swap()
    used = gpus.used()
    for number in itertools.count(1):
        with device.failing(f"{name}:{number}"):
            fleet.attempt()
        fleet.swap()
        gc.collect()
        release_dropped()
        eventually(lambda: gpus.used() == used, f"after {name} has failed, the memory is as it was")
        if not device.failed():
            break
    assert number > 1
    fleet.close()
