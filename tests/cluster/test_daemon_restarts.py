"""A daemon is killed or stopped and started again: trainers and engines come back with what they had, byte for byte."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import refitd
from refitd.buffers.arena import MappedArena
from refitd.client.callbacks import Commit
from refitd.client.target import Target
from refitd.testing import Cluster, Daemon, RunningSwap, eventually, stopped
from tests.support import shards

Start = Callable[..., Daemon]
Live = dict[str, torch.Tensor]
BACK_S = 60.0
MODEL: shards.Model = {**shards.MODEL, "large": ((512, 520), 0)}


def values(version: int) -> Live:
    """What every tensor holds in a version; 0: before the first one."""
    found = shards.whole(version)
    found["large"] = torch.full((512, 520), float(version))  # large enough for a window
    return found if version else shards.zeros_like(found)


class Serving:
    """An engine that polls between its tokens, and looks at every token whether it serves what it says, whole."""

    def __init__(
        self, target: Target, live: Live, *, polls: bool = True, expected: Callable[[int], Live] = values
    ) -> None:
        self.target, self.live, self.polls, self.expected = target, live, polls, expected
        self.errors: list[str] = []
        self.still = threading.Lock()  # held while it is asked to stand still
        self.versions: set[int | None] = set()
        self.longest_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.003):
            try:
                if self.polls:
                    began = time.monotonic()
                    if self.target.poll() is None:
                        self.longest_s = max(self.longest_s, time.monotonic() - began)
                with self.still:
                    self._look()
            except refitd.CommitError:  # the daemon ended while its workers wrote the tensors
                assert self.target.version is None
            except Exception as exc:
                self.errors.append(repr(exc))
                return

    def _look(self) -> None:
        before = self.target.version
        same = before is None or shards.equal(self.live, self.expected(before))
        if before == self.target.version:  # with a callback, another thread commits
            self.versions.add(before)
            assert same, f"it says that it serves version {before}, and holds something else"

    def end(self) -> None:
        self._end.set()
        self._thread.join(10)
        assert not self.errors, self.errors


class Fleet:
    """A trainer and engines of one node, or of two, of which the first's daemon is restarted."""

    def __init__(self, daemon: Daemon, elsewhere: Daemon | None = None) -> None:
        self.daemon = daemon
        self.clients = [
            of.connect(name, reconnect=True)
            for of, name in ((daemon, "trainer"), (daemon, "engines"), (elsewhere or daemon, "other"))
        ]
        self.trainer, self.engines, self.other = self.clients
        self.weights = values(1)
        self.source = self.trainer.register_source("policy", self.weights)
        self.version = 0
        self.serving: list[Serving] = []

    def add(self, replica: str, way: str = "copy", client: refitd.Client | None = None) -> Serving:
        """Register an engine that takes versions over in this way, and let it serve."""
        client, options = client or self.engines, {}
        live = values(0)
        if way == "windows":
            module = torch.nn.Module()
            for name, tensor in live.items():
                module.register_buffer(name.replace(".", "_"), tensor)
            client.adopt(module, keep_addresses=True)
            live = dict(zip(live, module.buffers(), strict=True))
        elif way != "copy" and way != "callback":
            live = client.allocate({name: (tensor.shape, tensor.dtype) for name, tensor in live.items()})
            for tensor in live.values():
                tensor.zero_()
        if way == "in-place":
            options = {
                "mode": "in-place",
                "on_pause": lambda version: found.still.acquire(),
                "on_resume": lambda version: found.still.release() if found.still.locked() else None,
            }
        elif way == "worker":
            options = {"mode": "copy"}
        elif way == "callback":
            options = {"on_commit": Commit.apply}
        target = client.register_target("policy", live, replica=replica, **options)  # type: ignore[arg-type]
        assert target.flips == (way in ("flip", "windows"))
        found = Serving(target, live, polls=way not in ("callback", "in-place"))
        self.serving.append(found)
        return found

    def add_ranks(self, replica: str, world: int = 2) -> None:
        """Register the ranks of an engine that take each version over in the same poll, each with a client."""
        for rank in range(world):
            client = self.daemon.connect(f"{replica}{rank}", reconnect=True)
            self.clients.append(client)

            def expected(version: int, rank: int = rank) -> Live:
                return shards.cut(values(version), rank, world, MODEL)

            live = expected(0)
            metadata = shards.describe(live, rank, world, MODEL)
            target = client.register_target(
                "policy", live, replica=replica, rank=rank, world_size=world, metadata=metadata
            )
            self.serving.append(Serving(target, live, expected=expected))

    def publish(self) -> None:
        self.version += 1
        for name, tensor in values(self.version).items():
            self.weights[name].copy_(tensor)
        self.source.publish(self.version, timeout=BACK_S)

    def swap(self) -> None:
        self.publish()
        eventually(self._swapped, f"version {self.version} goes live", BACK_S)
        self.check(self.version)

    def _swapped(self) -> bool:
        try:
            return self.trainer.swap("policy", self.version, timeout=BACK_S).outcome == "committed"
        except refitd.RefitdError as exc:
            # it was decided when the daemon ended, and the engines were brought to it afterwards
            return "already" in str(exc) and all(one.target.version == self.version for one in self.serving)

    def check(self, version: int) -> None:
        eventually(lambda: all(s.target.version == version for s in self.serving), f"all serve {version}", BACK_S)
        for one in self.serving:
            assert shards.equal(one.live, one.expected(version))
            assert not one.errors, one.errors

    def restart(self, how: str) -> None:
        if how == "kill":
            self.daemon.kill()
        else:
            os.kill(self.daemon.pid, signal.SIGTERM)
            eventually(lambda: not self.daemon.is_running, "the daemon has ended", 20)
        self.daemon.start()

    def back(self) -> None:
        """Wait until everybody is known to the coordinator again."""
        wanted = len(self.serving)

        def known() -> bool:
            models = self.trainer.status().models
            return bool(models) and bool(models[0].sources) and len(models[0].targets) == wanted

        eventually(known, "all have registered again", BACK_S)

    def close(self) -> None:
        for one in self.serving:
            one.end()
        for client in self.clients:
            client.close()


@pytest.fixture
def fleet(daemon: Daemon) -> Iterator[Fleet]:
    found = Fleet(daemon)
    yield found
    found.close()


def arenas(daemon: Daemon) -> int:
    return daemon.node().arena_bytes


def test_a_trainer_and_two_engines_go_on_after_their_daemon_was_killed(fleet: Fleet) -> None:
    """One copies and one flips. What was published stays, no engine serves anything else, and no memory is new."""
    copies, flips = fleet.add("a"), fleet.add("b", "flip")
    fleet.swap()
    address, before = flips.live["layers.0.fc1.weight"].data_ptr(), arenas(fleet.daemon)
    fleet.publish()
    fleet.restart("kill")
    fleet.back()
    fleet.check(1)
    assert fleet.trainer.status().models[0].complete_versions == (1, 2) and arenas(fleet.daemon) == before
    assert fleet.trainer.swap("policy", 2, timeout=BACK_S).outcome == "committed"
    fleet.check(2)
    fleet.swap()
    assert address == flips.live["layers.0.fc1.weight"].data_ptr() and arenas(fleet.daemon) == before
    assert fleet.trainer.verify("policy", timeout=BACK_S).outcome == "proven"
    for one in (copies, flips):
        assert one.longest_s < 2.0, "a poll must not wait for a daemon that is away"


WAYS = ("copy", "flip", "windows", "worker", "callback", "in-place")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_engine_comes_back_again_and_again(fleet: Fleet, way: str, how: str) -> None:
    fleet.add("a", way)
    fleet.add("b", "copy")
    fleet.swap()
    before = arenas(fleet.daemon)
    for _ in range(3):
        fleet.restart(how)
        fleet.back()
        fleet.check(fleet.version)
        assert arenas(fleet.daemon) == before
        fleet.swap()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("way", WAYS)
def test_a_daemon_that_ends_while_a_version_is_staged(fleet: Fleet, way: str, how: str) -> None:
    """The old version serves on, and the next attempt succeeds; what was written in place serves nothing meanwhile."""
    one, two = fleet.add("a", way), fleet.add("b", "copy")
    fleet.swap()
    fleet.publish()
    with stopped(tuple(fleet.daemon.workers())):
        swap = RunningSwap(fleet.daemon.connect("operator"), "policy")
        swap.wait_phase("stage")
        fleet.daemon.kill() if how == "kill" else os.kill(fleet.daemon.pid, signal.SIGTERM)
        eventually(lambda: not fleet.daemon.is_running, "it has ended", 20)
    with pytest.raises(refitd.RefitdError):
        swap.result()
    fleet.daemon.start()
    fleet.back()
    eventually(lambda: two.target.version in (1, 2), "the other engine serves", BACK_S)
    fleet.swap()
    assert {*one.versions, *two.versions} <= {None, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("way", ["copy", "flip", "windows", "worker"])
def test_a_daemon_that_ends_when_one_of_two_engines_has_committed(fleet: Fleet, way: str, how: str) -> None:
    """The version was decided: the engine that has not taken it over is brought to it when the daemon is back."""
    one, two = fleet.add("a", way), fleet.add("b", way)
    fleet.swap()
    two.polls = False
    fleet.publish()
    swap = RunningSwap(fleet.daemon.connect("operator"), "policy")
    eventually(lambda: one.target.version == 2 and two.target.pending == 2, "one has committed", 20)
    if how == "kill":
        fleet.daemon.kill()
    else:
        os.kill(fleet.daemon.pid, signal.SIGTERM)
        eventually(lambda: not fleet.daemon.is_running, "it has ended", 20)
    with pytest.raises(refitd.RefitdError):
        swap.result()
    eventually(lambda: two.target.pending is None, "what cannot be reported is not taken over")
    two.polls = True
    assert two.target.version in (1, None) and shards.equal(two.live, values(1))
    fleet.daemon.start()
    fleet.check(2)
    fleet.swap()


@pytest.mark.slow
def test_a_trainer_publishes_and_swaps_on_while_its_daemon_is_restarted_again_and_again(fleet: Fleet) -> None:
    for replica, way in {"a": "copy", "b": "flip", "c": "worker"}.items():
        fleet.add(replica, way)
    fleet.swap()
    ended = threading.Event()

    def restarts() -> None:
        for how in ("kill", "stop", "kill", "kill", "stop"):
            time.sleep(0.7)
            fleet.restart(how)
        ended.set()

    thread = threading.Thread(target=restarts)
    thread.start()
    while not ended.is_set():
        fleet.swap()
    thread.join()
    fleet.swap()
    assert fleet.version > 3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_one_node_of_two_is_restarted_while_the_coordinator_and_the_other_node_stay(how: str) -> None:
    with Cluster() as cluster:
        fleet = Fleet(cluster.daemons["n1"], cluster.daemons["n0"])
        fleet.add("near", "flip")
        fleet.add("far", "copy", fleet.other)
        fleet.swap()
        for _ in range(2):
            fleet.restart(how)
            fleet.back()
            fleet.swap()
        said = cluster.coordinator.log()
        assert said.count("event=node-left node=n1") == (2 if how == "stop" else 0), "one that is stopped says goodbye"
        assert how == "kill" or ("is in use by the daemon" not in said and "event=node-lost" not in said)
        fleet.close()


@pytest.mark.slow
def test_what_a_client_says_of_a_daemon_that_stays_away(daemon: Daemon) -> None:
    with daemon.connect(reconnect=True) as client:
        tensors = values(1)
        source = client.register_source("policy", tensors)
        target = client.register_target("policy", values(0), replica="r")
        daemon.kill()
        assert target.poll() is None
        with pytest.raises(refitd.DeadlineExceeded, match=r"has ended"):
            target.wait(1, timeout=0.1)
        for ask in (
            lambda: source.publish(1, timeout=0.2),
            lambda: source.lend(1, timeout=0.2),
            lambda: client.status(timeout=0.2),
            lambda: target.suspend(timeout=0.2),
            lambda: client.register_target("policy", values(0), replica="s", timeout=0.2),
        ):
            with pytest.raises(refitd.PeerLost, match=r"ended [\d.]+ s ago and is not back: .*start it"):
                ask()
        source.close()
        target.close()


@pytest.mark.slow
def test_a_permit_ends_while_the_daemon_is_away_and_the_coordinator_confirms_the_version(
    start_daemon: Start,
) -> None:
    daemon = start_daemon("[deadlines]\nlease_s = 2.0\n")
    fleet = Fleet(daemon)
    one = fleet.add("a", "flip")
    fleet.swap()
    daemon.kill()
    assert one.target.version == 1
    eventually(lambda: one.target.version is None, "its permit has ended", 10)
    assert "permit" in one.target.fenced and "has ended" in one.target.fenced
    daemon.start()
    fleet.check(1)
    assert not one.target.fenced
    fleet.close()


@pytest.mark.slow
def test_a_suspended_engine_comes_back_suspended(fleet: Fleet) -> None:
    one, two = fleet.add("a"), fleet.add("b", "flip")
    fleet.swap()
    one.target.suspend()
    fleet.restart("kill")
    fleet.back()
    assert one.target.version is None and "suspended" in one.target.fenced
    fleet.publish()
    assert fleet.trainer.swap("policy", 2, timeout=BACK_S).outcome == "committed"
    eventually(lambda: two.target.version == 2, "the other engine is swapped without it")
    one.target.resume()
    fleet.check(2)


@pytest.mark.slow
def test_a_version_that_was_lent_is_gone_with_the_daemon(daemon: Daemon) -> None:
    with daemon.connect(reconnect=True) as client:
        tensors = values(1)
        source = client.register_source("policy", tensors, pull=True)
        live = values(0)
        target = client.register_target("policy", live, replica="r")
        serving = Serving(target, live)
        lease = source.lend(1)
        daemon.kill()
        with pytest.raises(refitd.PeerLost, match="has ended"):
            lease.wait(10)
        daemon.start()
        eventually(lambda: bool(client.status().models), "it is back", BACK_S)
        with pytest.raises(refitd.RefusedError, match=r"not newer|next_version"):
            source.lend(1)
        assert source.next_version == 2
        for name, tensor in values(2).items():
            tensors[name].copy_(tensor)
        with source.lend(2):
            client.swap("policy", 2, timeout=BACK_S)
        assert target.version == 2
        serving.end()


@pytest.mark.slow
def test_a_streamed_source_keeps_its_versions(fleet: Fleet) -> None:
    source = fleet.trainer.declare_source(
        "other", {name: (tensor.shape, tensor.dtype) for name, tensor in values(1).items()}
    )
    source.publish_from(1, values(1).items())
    fleet.restart("kill")
    source.publish_from(2, values(2).items())
    eventually(
        lambda: any(m.model == "other" and m.complete_versions == (1, 2) for m in fleet.trainer.status().models),
        "both versions are known",
        BACK_S,
    )


@pytest.mark.slow
def test_a_client_that_is_closed_while_its_daemon_is_away_leaves_nothing(daemon: Daemon, tmp_path: Path) -> None:
    client = daemon.connect(reconnect=True)
    client.register_source("policy", values(1)).publish(1)
    daemon.kill()
    client.close()
    daemon.start()
    time.sleep(1.5)
    assert not daemon.status().models and daemon.node().arenas == 0
    with pytest.raises(refitd.PeerLost):
        client.status()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["idle", "decided"])
def test_ranks_in_lockstep_still_commit_together(fleet: Fleet, when: str) -> None:
    fleet.add_ranks("a")
    fleet.add("b", "flip")
    fleet.swap()
    for _ in range(2):
        if when == "decided":
            slow = fleet.serving[0]
            slow.polls = False
            fleet.publish()
            swap = RunningSwap(fleet.daemon.connect("operator"), "policy")
            eventually(lambda slow=slow: slow.target.pending is not None, "it is decided", 20)  # type: ignore[misc]
            fleet.restart("kill")
            with pytest.raises(refitd.RefitdError):
                swap.result()
            slow.polls = True
            fleet.check(fleet.version)
        else:
            fleet.restart("kill")
        fleet.back()
        fleet.swap()


@pytest.mark.slow
def test_a_controller_comes_back_with_its_replica(fleet: Fleet) -> None:
    live, calls = values(0), list[tuple[str, int | None]]()
    target = fleet.engines.register_target("policy", live, replica="a", controlled=True)

    def commit(version: int) -> None:
        calls.append(("commit", version))
        assert target.poll() == version

    fleet.other.control_replica("policy", "a", commit=commit, resume=lambda version: calls.append(("resume", version)))
    fleet.serving.append(Serving(target, live, polls=False))
    fleet.swap()
    for _ in range(2):
        fleet.restart("kill")
        fleet.back()
        fleet.swap()
    assert ("commit", 3) in calls


@pytest.mark.slow
def test_an_arena_is_taken_back_once_and_from_whom_it_was(daemon: Daemon) -> None:
    """A forked child or a stranger that has a descriptor cannot have a second owner made of it."""
    with daemon.connect(reconnect=True) as one, daemon.connect() as other:
        tensors = one.allocate({"w": ((256, 256), torch.float32)})
        (number,) = one._arenas
        arena = one._arenas[number]
        assert isinstance(arena, MappedArena)
        fd = one._connection.files.shown_at(arena.address)
        assert fd is not None
        before = daemon.node().arena_bytes
        for client in (one, other):
            with pytest.raises(refitd.RefusedError, match="has it already"):
                client._connection.current.give_arena(fd, arena.nbytes)
        page = os.memfd_create("refitd:evil", os.MFD_ALLOW_SEALING)
        os.ftruncate(page, 4096)
        for wrong, nbytes in ((page, 4096), (fd, arena.nbytes + 1), (os.open(os.devnull, os.O_RDWR), 4096)):
            with pytest.raises(refitd.ArenaError, match="not taken back"):
                other._connection.current.give_arena(wrong, nbytes)
            if wrong != fd:
                os.close(wrong)
        assert daemon.node().arena_bytes == before
        assert tensors["w"].data_ptr() == arena.address
