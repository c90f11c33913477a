"""Live weights are checked against the version's digest: every change is found and named."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import refitd
from refitd import MXFP8Buffer, MXFP8Offer
from refitd.client.client import Client
from refitd.protocol.reports import MemberProof, VerifyReport
from refitd.testing import Daemon, Engine, RunningSwap, eventually, stopped
from tests.support import shards
from tests.support.controls import controlled
from tests.support.fleet import go_live
from tests.support.names import named, policy
from tests.support.programs import Program, python, refitctl

NAME, DIM = "layers.0.fc1.weight", 48
BIG = (3, 1 << 20)  # bf16: several blocks


def whole() -> dict[str, torch.Tensor]:
    return {**shards.whole(1), "big": torch.randn(BIG, generator=torch.Generator().manual_seed(2)).bfloat16()}


class Fleet:
    """One trainer rank, one replica of one rank, version 1 live."""

    def __init__(self, daemon: Daemon, way: str = "private") -> None:
        self.daemon = daemon
        self.trainer, self.engine = daemon.connect("trainer"), daemon.connect("engine")
        self.tensors = whole()
        self.source = self.trainer.register_source(policy(), self.tensors)
        self.live = self.empty(way, self.engine)
        # by copy: the staging arena then still has the staged version, and verify finds the very elements that differ
        self.target = self.engine.register_target(policy(), self.live, replica="a", mode="copy")
        self.swap(1)

    def empty(self, way: str, client: Client) -> dict[str, torch.Tensor]:
        if way == "arena":
            return client.allocate({name: (t.shape, t.dtype) for name, t in self.tensors.items()})
        if way == "strided":  # columns of wider tensors
            wide = {
                name: torch.zeros(*t.shape[:-1], t.shape[-1] + 3, dtype=t.dtype) for name, t in self.tensors.items()
            }
            return {name: t[..., : self.tensors[name].shape[-1]] for name, t in wide.items()}
        return shards.zeros_like(self.tensors)

    def publish(self, version: int) -> None:
        for tensor in self.tensors.values():
            tensor.add_(version)
        self.source.publish(version)

    def swap(self, version: int) -> None:
        self.publish(version)
        with Engine(self.target):
            assert self.trainer.swap(policy(), version, timeout=30).digests > 0

    def verify(self, timeout: float = 30) -> VerifyReport:
        return self.trainer.verify(policy(), timeout=timeout)

    def only(self) -> MemberProof:
        (member,) = self.verify().members
        return member

    def close(self) -> None:
        self.trainer.close()
        self.engine.close()


def flip(tensor: torch.Tensor, *index: int) -> None:
    """Flip one bit of one element."""
    tensor.view(torch.int16)[index] ^= 1 << 3


@pytest.mark.parametrize("way", ["private", "arena", "strided"])
def test_what_is_served_is_proven_and_one_flipped_bit_is_named(daemon: Daemon, way: str) -> None:
    fleet = Fleet(daemon, way)
    report = fleet.verify()
    (member,) = report.members
    nbytes = sum(t.numel() * t.element_size() for t in fleet.tensors.values())
    assert (report.outcome, member.state, member.version, member.bytes) == ("proven", "proven", 1, nbytes), report
    assert len(member.digest) == 32 and member.differences == ()
    flip(fleet.live[NAME], 7, 5)
    flip(fleet.live["big"], 2, 1000)
    found = fleet.only()
    assert (found.state, found.version, found.blocks, found.rank, found.replica) == ("differs", 1, 2, 0, "a")
    places = {d.parameter: (d.slice, d.first, d.last, d.differing) for d in found.differences}
    at = 2 * BIG[1] + 1000
    assert places == {NAME: ("[7, 5]", 7 * DIM + 5, 7 * DIM + 5, 1), "big": ("[2, 1000]", at, at, 1)}
    flip(fleet.live[NAME], 7, 5)
    flip(fleet.live["big"], 2, 1000)
    assert fleet.verify().outcome == "proven"
    fleet.close()


def test_what_is_written_in_place_is_proven_and_compared_with_other_replicas(fleet: Fleet) -> None:
    with fleet.daemon.connect("in place") as client:
        live = fleet.empty("arena", client)
        still = controlled(client, policy(), live, replica="b", mode="in-place")
        eventually(lambda: still.version == 1, "it has caught up")
        fleet.swap(2)
        report = fleet.verify()
        assert report.outcome == "proven" and len({m.digest for m in report.members}) == 1, report
        flip(live[NAME], 7, 5)
        states = {m.replica: (m.state, [d.parameter for d in m.differences]) for m in fleet.verify().members}
        assert states == {"a": ("proven", []), "b": ("differs", [NAME])}
        fleet.swap(3)
        assert fleet.verify().outcome == "proven"


def test_refitctl_verify_exits_1_and_names_parameter_slice_and_rank(fleet: Fleet) -> None:
    good = refitctl(fleet.daemon, "verify", policy())
    assert good.returncode == 0 and f"{policy()}: proven: 1 of 1 ranks" in good.stdout, good
    flip(fleet.live[NAME], 7, 5)
    bad = refitctl(fleet.daemon, "verify", policy())
    assert bad.returncode == 1
    assert f"{NAME}[7, 5] (of 96x48) on rank 0 of replica a on node n0" in bad.stderr, bad
    as_json = refitctl(fleet.daemon, "verify", policy(), "--json")
    assert as_json.returncode == 1 and json.loads(as_json.stdout)["outcome"] == "differs"
    unknown = refitctl(fleet.daemon, "verify", "nobody")
    assert unknown.returncode != 0 and "no model 'nobody'" in unknown.stderr


@pytest.mark.parametrize("in_arena", [False, True])
def test_mxfp8_data_and_scales_are_checked(daemon: Daemon, in_arena: bool) -> None:
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        tensors = {"w": torch.randn(320, 128, generator=torch.Generator().manual_seed(3)).bfloat16()}
        source = trainer.register_source(named("m"), tensors, mxfp8=MXFP8Offer(("w",)))
        made = MXFP8Buffer.empty((320, 128), is_swizzled=False)
        data, scale = made.data, made.scale
        if in_arena:
            room = engine.allocate({"d": (data.shape, torch.uint8), "s": (scale.shape, torch.uint8)})
            data, scale = room["d"], room["s"]
        target = engine.register_target(named("m"), {"w": MXFP8Buffer(data, scale)}, replica="q", mode="copy")
        go_live(trainer, source, 1, target, model=named("m"))
        assert trainer.verify(named("m"), timeout=30).outcome == "proven"
        data.view(torch.uint8)[300, 3] ^= 1
        scale.view(torch.uint8)[300, 0] ^= 1
        (member,) = trainer.verify(named("m"), timeout=30).members
        places = sorted((d.parameter, d.slice, d.differing) for d in member.differences)
        assert places == [("w.data", "[300, 3]", 1), ("w.scale", "[300, 0]", 1)]


@pytest.mark.slow
def test_while_a_swap_waits_for_its_commit_point_the_old_version_is_checked(fleet: Fleet) -> None:
    assert fleet.only().state == "proven"  # its digest has been taken
    fleet.publish(2)
    running = RunningSwap(fleet.daemon.connect(), policy(), 2)
    running.wait_phase("commit")  # no target polls yet; the staging arena holds version 2
    found = fleet.only()
    assert (found.state, found.version) == ("proven", 1)
    flip(fleet.live[NAME], 7, 5)
    found = fleet.only()
    assert (found.state, found.version) == ("differs", 1)
    (difference,) = found.differences
    # the version to compare with has been overwritten: only the block is named
    assert (difference.parameter, difference.slice, difference.differing) == (NAME, "[0:96, :]", 0)
    with Engine(fleet.target):
        assert running.result().outcome == "committed"
    found = fleet.only()
    assert (found.state, found.version) == ("proven", 2)


@pytest.mark.slow
def test_engines_that_swap_all_the_time_are_proven_or_unknown_but_never_called_different(fleet: Fleet) -> None:
    states = set()
    with fleet.daemon.connect("operator") as operator, Engine(fleet.target):
        for version in range(2, 14):
            fleet.publish(version)
            running = RunningSwap(fleet.daemon.connect(), policy(), version)
            for _ in range(3):
                states.add(operator.verify(policy(), timeout=30).members[0].state)
            running.result()
    assert states <= {"proven", "unknown"} and "proven" in states
    assert fleet.verify().outcome == "proven"


def test_a_large_arena_that_flips_is_proven_or_unknown_but_never_called_different(daemon: Daemon) -> None:
    """Workers read 70 MB for longer than a flip takes: the read may cover two versions."""
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine, daemon.connect() as operator:
        given = {"w": torch.zeros(70 << 20, dtype=torch.uint8)}
        source = trainer.register_source(policy(), given)
        live = engine.allocate({"w": ((70 << 20,), torch.uint8)})
        target = engine.register_target(policy(), live, replica="a")
        stop, outcomes = threading.Event(), set[str]()

        def verify() -> None:
            while not stop.is_set():
                outcomes.add(operator.verify(policy(), timeout=30).outcome)

        with Engine(target), ThreadPoolExecutor(1) as checker:
            try:
                for version in range(1, 8):
                    given["w"].fill_(version)
                    source.publish(version)
                    assert trainer.swap(policy(), version, timeout=30).outcome == "committed"
                    if version == 1:
                        checked = checker.submit(verify)
                    if version % 3 == 0:
                        assert trainer.rollback(policy(), timeout=30).bytes == 0
                        assert live["w"][::4096].unique().tolist() == [version - 1]
            finally:
                stop.set()
            checked.result()
        assert target.flips and outcomes <= {"proven", "unknown"}
        assert trainer.verify(policy()).outcome == "proven" and live["w"].unique().tolist() == [7]


STANDING = """
from tests.support.names import policy
import sys, time, refitd
from tests.support import shards
client = refitd.connect(sys.argv[1], name="stands")
target = client.register_target(policy(), shards.zeros_like(shards.whole(1)), replica="b")
target.wait(1, timeout=30)
print("serves", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_stopped_engine_is_named_and_others_are_proven(daemon: Daemon) -> None:
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        tensors = shards.whole(1)
        source = trainer.register_source(policy(), tensors)
        target = engine.register_target(policy(), shards.zeros_like(tensors), replica="a")
        go_live(trainer, source, 1, target)
        with Program(python(daemon, STANDING)) as process:
            assert process.line() == "serves"
            # its report may still be queued in its sender thread
            eventually(
                lambda: {t.version for t in trainer.status().models[0].targets} == {1}, "both are known to serve"
            )
            with stopped((process.pid,)):
                report = trainer.verify(policy(), timeout=5)
                again = trainer.verify(policy(), timeout=5)
            for found in (report, again):
                states = {m.replica: (m.state, m.reason) for m in found.members}
                assert found.outcome == "unknown" and states["a"] == ("proven", "")
                assert states["b"][0] == "unknown" and f"pid {process.pid}" in states["b"][1]
            assert trainer.verify(policy(), timeout=30).outcome == "proven"
        eventually(lambda: len(trainer.status().models[0].targets) == 1, "its end is known")


def test_after_an_aborted_staging_the_digests_remain(fleet: Fleet) -> None:
    assert fleet.only().state == "proven"
    fleet.publish(2)
    with stopped(fleet.daemon.node_of("n0").workers):
        running = RunningSwap(fleet.daemon.connect(), policy(), 2)
        running.wait_phase("stage")
        found = fleet.only()  # the workers take no part in the check
        assert (found.state, found.version) == ("proven", 1)
        fleet.trainer.abort(policy(), "to see")
        with pytest.raises(refitd.RefitFailed):
            running.result()
    found = fleet.only()
    assert (found.state, found.version) == ("proven", 1)
    fleet.live["big"][1].zero_()
    found = fleet.only()
    assert (found.state, found.version) == ("differs", 1)
    assert {d.parameter for d in found.differences} == {"big"}
    assert fleet.target.version == 1


@pytest.mark.slow
def test_a_killed_worker_takes_no_digests_with_it(fleet: Fleet) -> None:
    assert fleet.only().state == "proven"
    workers = fleet.daemon.node_of("n0").workers
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    found = fleet.only()
    assert (found.state, found.version) == ("proven", 1)
    eventually(lambda: all(p and p not in workers for p in fleet.daemon.node().workers), "fresh workers")
    fleet.swap(2)
    for worker in fleet.daemon.node_of("n0").workers:  # while they take digests, or before or after
        os.kill(worker, signal.SIGKILL)
    found = fleet.only()
    assert (found.state, found.version) == ("proven", 2)


@pytest.mark.slow
def test_a_coordinator_that_starts_anew_verifies(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(standalone=False)
    coordinator = daemon.start_coordinator()
    fleet = Fleet(daemon)
    coordinator.kill()
    daemon.start_coordinator()
    with daemon.connect() as client:
        eventually(lambda: any(m.targets and m.sources for m in client.status().models), "it knows the model")
    assert fleet.verify().outcome == "proven"
    flip(fleet.live[NAME], 0, 0)
    assert fleet.verify().outcome == "differs"
    fleet.close()


@pytest.mark.slow
def test_an_engine_that_serves_nothing_is_no_proof(daemon: Daemon) -> None:
    with daemon.connect("engine") as engine:
        engine.register_target(policy(), shards.zeros_like(shards.whole(1)), replica="a")
        report = engine.verify(policy(), timeout=30)
        assert report.outcome == "unknown" and report.members[0].reason == "it serves nothing"


@pytest.mark.slow
def test_replaced_storage_is_no_proof(fleet: Fleet) -> None:
    fleet.live[NAME].set_(fleet.live[NAME].clone())
    found = fleet.only()
    assert found.state == "unknown" and NAME in found.reason and "storage" in found.reason


def test_replicas_that_were_given_different_bytes_of_a_version_are_a_mix(start_daemon: Callable[..., Daemon]) -> None:
    """Possible only where differing source ranks are not compared before the swap."""
    daemon = start_daemon("[models.m]\ncheck_replicas = false\n")
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        for rank in range(2):
            source = trainer.register_source(named("m"), {"w": torch.full((64,), rank + 1.0)}, rank=rank, world_size=2)
            source.publish(1)
        live = [{"w": torch.zeros(64)} for _ in range(2)]
        targets = [
            engine.register_target(named("m"), held, replica=name) for name, held in zip("ab", live, strict=True)
        ]
        with Engine(*targets):
            assert trainer.swap(named("m"), 1, timeout=30).outcome == "committed"
        assert {float(held["w"][0]) for held in live} == {1.0, 2.0}
        report = trainer.verify(named("m"), timeout=30)
        assert report.outcome == "differs" and len(report.mixed) == 1, report
        assert "'a' rank 0" in report.mixed[0] and "'b' rank 0" in report.mixed[0]
        assert [m.state for m in report.members] == ["proven", "proven"]  # each has the bytes that it received


def test_verify_can_be_switched_off_for_a_model(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[models.policy]\nverify = false\n")
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        tensors = shards.whole(1)
        for model in (policy(), "other"):
            source = trainer.register_source(model, tensors)
            target = engine.register_target(model, shards.zeros_like(tensors), replica="a")
            report = go_live(trainer, source, 1, target, model=model)
            assert report.copies > 0 and (report.digests > 0) == (model == "other")
        assert {m.model: m.verify for m in trainer.status().models} == {policy(): False, "other": True}
        (member,) = trainer.verify(policy(), timeout=30).members
        assert member.state == "unknown" and "[models.policy] verify" in member.reason
        assert trainer.verify("other", timeout=30).outcome == "proven"
        assert "live: 1 on 1 rank; not verified" in refitctl(daemon, "status").stdout
