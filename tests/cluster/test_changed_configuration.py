"""A daemon is started again with another configuration while its trainer and engines wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, ProcessFailed, eventually

pytestmark = pytest.mark.slow

BACK_S = 60.0
MIB = 1 << 20


class Fleet:
    """A trainer and an engine of 4 MiB that serves version 1; each has its own client."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.weights = {"w": torch.zeros(MIB)}
        self.register()
        self.swap(1)

    def register(self) -> None:
        self.trainer, self.engine = (self.daemon.connect(name, reconnect=True) for name in ("trainer", "engine"))
        self.source = self.trainer.register_source("policy", self.weights)
        self.target = self.engine.register_target("policy", {"w": torch.zeros(MIB)}, replica="a")

    def is_back(self) -> bool:
        models = self.trainer.status().models
        return bool(models and models[0].sources and models[0].targets)

    def swap(self, version: int) -> None:
        self.weights["w"].fill_(float(version))
        self.source.publish(version, timeout=BACK_S)
        with Engine(self.target):
            eventually(lambda: self._swapped(version), f"version {version} goes live", BACK_S)
        assert self.target.version == version

    def _swapped(self, version: int) -> bool:
        try:
            return self.trainer.swap("policy", version, timeout=BACK_S).outcome == "committed"
        except refitd.RefitdError:
            return False

    def restart(self, config: str) -> None:
        self.daemon.kill()
        (self.daemon.folder / f"{self.daemon.name}.toml").write_text(config)
        self.daemon.start()

    def close(self) -> None:
        self.target.close()
        self.source.close()
        self.engine.close()
        self.trainer.close()


@pytest.fixture
def fleet(start_daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[Fleet]:
    found = Fleet(start_daemon(folder=tmp_path))
    yield found
    found.close()


def test_settings_that_refuse_nothing_hold_from_the_restart_on(fleet: Fleet) -> None:
    before = fleet.daemon.node().arena_bytes
    fleet.restart(
        "[deadlines]\nlease_s = 20.0\npause_s = 5.0\n[transport]\nstaging_bytes = 1_048_576\n"
        "[log]\nformat = 'json'\n[models.policy]\nauto_swap = true\n"
    )
    eventually(fleet.is_back, "both have registered again", BACK_S)
    assert fleet.daemon.node().arena_bytes == before and fleet.target.version in (1, None)
    fleet.weights["w"].fill_(2.0)
    with Engine(fleet.target):
        fleet.source.publish(2, timeout=BACK_S)
        eventually(lambda: fleet.target.version == 2, "it is swapped by itself now", BACK_S)
    assert '"event":"swap"' in fleet.daemon.log().replace(" ", ""), "lines are JSON now"


def test_what_the_new_settings_refuse_is_said_to_those_it_concerns(fleet: Fleet) -> None:
    fleet.restart(f"[node]\nmax_arena_bytes = {3 * MIB}\n")  # less than the engine's staging arena, or a slot
    with pytest.raises(refitd.ArenaError, match="max_arena_bytes"):
        fleet.source.publish(2, timeout=BACK_S)
    eventually(lambda: "max_arena_bytes" in raised(fleet.target.poll), "the engine is told, too", BACK_S)
    assert fleet.target.version is None, "nobody vouches for its version any more"
    fleet.restart("")
    fleet.close()
    fleet.register()
    fleet.swap(fleet.source.next_version)


def test_a_file_that_became_wrong_starts_nothing_and_clients_wait_for_the_right_one(fleet: Fleet) -> None:
    with pytest.raises(ProcessFailed, match="wrokers"):
        fleet.restart("[node]\nwrokers = 2\n")
    assert fleet.target.poll() is None and fleet.target.version in (1, None)
    with pytest.raises(refitd.PeerLost, match="start it"):
        fleet.source.publish(2, timeout=0.2)
    fleet.restart("[node]\nworkers = 2\n")
    fleet.swap(2)


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except refitd.RefitdError as exc:
        return str(exc)
    return ""
