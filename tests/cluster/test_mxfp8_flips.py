"""MXFP8 targets that exchange their arenas: arriving tensors are converted into the arena that is not live."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import refitd
from refitd import MXFP8Buffer
from refitd.testing import Daemon, Engine, eventually
from tests.support.flips import kill_workers
from tests.support.mxfp8_replicas import OFFER, Replica, Trainer, expected, model

FORMS = [
    pytest.param(False, False, id="receiver, row-major"),
    pytest.param(False, True, id="receiver, swizzled", marks=pytest.mark.slow),
    pytest.param(True, False, id="sender, row-major", marks=pytest.mark.slow),
    pytest.param(True, True, id="sender, swizzled", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("convert_on_send", "swizzled"), FORMS)
def test_versions_flip_and_flip_back(
    start_daemon: Callable[..., Daemon], convert_on_send: bool, swizzled: bool
) -> None:
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n", workers=2)
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        sources = Trainer((trainer,), 2, mxfp8=OFFER if convert_on_send else None)
        options = {"swizzled": swizzled, "convert_on_send": convert_on_send}
        flips = Replica((engine,), "flips", 4, flips=True, mode="flip", **options)
        copies = Replica((engine,), "copies", 1, **options)
        assert all(target.flips for target in flips.targets)
        whole = trainer.status().nodes[0].arenas
        fulls = {}
        with Engine(*flips.targets, *copies.targets) as running:
            for version in range(1, 5):
                fulls[version] = sources.publish(version)
                if version == 3:  # their successors map the arenas as they are exchanged now
                    kill_workers(daemon)
                assert trainer.swap("m", version, timeout=30).outcome == "committed"
                for replica in (flips, copies):
                    replica.assert_holds(fulls[version])
            eventually(lambda: trainer.verify("m").outcome == "proven", "proven", 20)
            copies.targets[0].close()
            back = trainer.rollback("m", timeout=30)
            assert (back.version, back.bytes) == (3, 0)
            flips.assert_holds(fulls[3])
            assert trainer.verify("m").outcome == "proven"
        assert not running.errors
        for target in flips.targets:
            target.close()
        lands = not convert_on_send or swizzled
        gone = whole - trainer.status().nodes[0].arenas
        assert gone == 4 * (1 + lands) + 1, "staging and landing arenas"


@pytest.mark.slow
def test_a_replica_that_flips_and_an_abort_between_arrival_and_conversion(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(workers=1)
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        sources = Trainer((trainer,), 1)
        flips = Replica((engine,), "flips", 1, flips=True)
        with Engine(*flips.targets):
            for version in range(1, 12):
                full = sources.publish(version)
                if version % 2:
                    trainer.swap("m", version, timeout=30)
                    flips.assert_holds(full)
                    continue
                os.kill(daemon.workers()[0], signal.SIGSTOP)
                with pytest.raises(refitd.SwapFailed):
                    trainer.swap("m", version, timeout=0.2 + version / 20)
                flips.assert_holds(model(version - 1))
        assert trainer.verify("m").outcome == "proven"


def test_what_cannot_be_converted_into_is_copied_or_refused_by_name(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with daemon.connect() as engine:
        live = engine.allocate({"data": ((64, 64), torch.uint8), "scale": ((64, 2), torch.uint8)})
        with pytest.raises(refitd.RefusedError, match=r"client\.allocate"):
            engine.register_target("m", {"w": MXFP8Buffer.empty((64, 64))}, replica="r", mode="flip")
        beside = {"w": MXFP8Buffer(live["data"], MXFP8Buffer.empty((64, 64)).scale)}
        with pytest.raises(refitd.RefusedError, match="mode='flip' is impossible"):
            engine.register_target("m", beside, replica="r", mode="flip")
        target = engine.register_target("m", {"w": MXFP8Buffer(live["data"], live["scale"])}, replica="r", mode="flip")
        assert target.flips


# All of its ranks in one process; what it holds is written to the folder that it is given.
ENGINE = """
import sys, time, torch, refitd
from tests.support.flips import kill_workers
from tests.support.mxfp8_replicas import Replica
client = refitd.connect(sys.argv[1])
replica = Replica((client,), "flips", 2, flips=True, swizzled=True)
def tell(what):
    torch.save([replica.live(rank) for rank in range(2)], sys.argv[2])
    print(what, [target.version for target in replica.targets], flush=True)
tell("registered")
while True:
    if [version for target in replica.targets if (version := target.poll(lambda _: target.pending or -1))]:
        if len({target.version for target in replica.targets}) == 1:
            tell("committed")
    time.sleep(0.002)
"""


@pytest.mark.slow
def test_an_engine_that_crashes_has_its_quantized_weights_again(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n")
    command = [sys.executable, "-c", ENGINE, str(daemon.directory), str(tmp_path / "held")]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def said() -> str:
        assert engine.stdout is not None
        return engine.stdout.readline().strip()

    def holds(full: dict[str, torch.Tensor]) -> None:
        for rank, live in enumerate(torch.load(tmp_path / "held")):
            for name, tensor in expected(full, rank, 2, True).items():
                assert torch.equal(live[name].view(torch.uint8), tensor.view(torch.uint8)), (rank, name)

    with daemon.connect("trainer") as trainer:
        sources = Trainer((trainer,), 1)
        try:
            assert said() == "registered [None, None]"
            for version in (1, 2):
                full = sources.publish(version)
                trainer.swap("m", version, timeout=30)
                assert said() == f"committed [{version}, {version}]"
                holds(full)
            assert trainer.verify("m").outcome == "proven"
            arenas = trainer.status().nodes[0].arenas
            engine.kill()
            engine.wait()
            engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert said() == "registered [2, 2]"
            holds(full)
            assert trainer.status().nodes[0].arenas == arenas
            assert trainer.verify("m").outcome == "proven"
            full = sources.publish(3)
            trainer.swap("m", 3, timeout=30, queue=True)
            assert said() == "committed [3, 3]"
            holds(full)
        finally:
            engine.kill()
            engine.wait()
