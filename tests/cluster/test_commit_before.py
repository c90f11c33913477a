"""A wheel of the previous commit in one cluster with this one: as daemon, client and coordinator in turns.

REFITD_BEFORE names another commit, such as a release's tag.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import pytest

import refitd
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.testing import Cluster, Coordinator, Daemon, eventually
from refitd.testing.daemon import joined
from tests.support.programs import ROOT, ended, run

WAIT_S = 60.0
NEW: dict[str, str] = {}

TRAINER = """
import sys, torch, refitd
weights = {"w": torch.zeros(300, 100), "b": torch.zeros(7, dtype=torch.bfloat16)}
source = refitd.connect(sys.argv[1]).register_source("policy", weights)
print("trains", refitd.__file__, flush=True)
for line in sys.stdin:
    for tensor in weights.values():
        tensor.fill_(int(line))
    source.publish(int(line))
    print("published", int(line), flush=True)
"""
ENGINE = """
import sys, time, torch, refitd
weights = {"w": torch.zeros(300, 100), "b": torch.zeros(7, dtype=torch.bfloat16)}
target = refitd.connect(sys.argv[1]).register_target("policy", weights, replica=sys.argv[2])
print("serves", refitd.__file__, flush=True)
while True:
    time.sleep(0.01)
    if (version := target.poll()) is not None:
        assert all(torch.equal(tensor, torch.full_like(tensor, version)) for tensor in weights.values()), version
        print("serves", version, flush=True)
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of a process of the previous commit; its wheel is built and installed into a folder."""
    folder = tmp_path_factory.mktemp("before")
    commit = os.environ.get("REFITD_BEFORE", "HEAD~1")
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    (folder / "tree.tar").write_bytes(packed)
    with tarfile.open(folder / "tree.tar") as tree:
        tree.extractall(folder / "tree", filter="data")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, folder / "tree"], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    # safe path: Python must not import this commit's refitd from the working directory
    return {"PYTHONPATH": str(folder / "site"), "PYTHONSAFEPATH": "1"}


class Fleet(Cluster):
    """Two nodes whose processes run either commit, with an engine on each and a trainer on the first."""

    def __init__(self, of: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__(("n0", "n1"))
        self.of = dict(of)
        self.version = 0

    def environment(self, name: str) -> Mapping[str, str]:
        return self.of[name]

    def replace(self, name: str, by: Mapping[str, str]) -> None:
        """End the coordinator or a daemon, and start the same process of the other commit."""
        self.of[name] = by
        if name == "coordinator":
            assert self.coordinator.stop() == []
            self.coordinator = Coordinator(self._config, **self._options(name))
            self.coordinator.start()
            with self.daemons["n0"].connect() as client:
                eventually(lambda: joined(client) == 2, "both nodes have joined it", WAIT_S)
            return
        assert self.daemons[name].stop() == []
        self.daemons[name] = Daemon(self._config, name=name, joins=self.endpoint, workers=1, **self._options(name))
        self.daemons[name].start()

    def program(self, name: str, code: str, daemon: str, of: Mapping[str, str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(self.daemons[daemon].directory), name]
        env = self.marked(name, of)
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert process.stdout is not None
        where = process.stdout.readline().split()[1]
        assert where.startswith(of.get("PYTHONPATH", str(ROOT))), f"{name} runs {where}"
        return process

    def swap(
        self, operator: Mapping[str, str], trainer: subprocess.Popen[str], *engines: subprocess.Popen[str]
    ) -> None:
        """Publish the next version, and swap to it as this commit's operator when all replicas have registered."""
        self.version += 1
        assert trainer.stdin is not None and trainer.stdout is not None
        trainer.stdin.write(f"{self.version}\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == f"published {self.version}\n"
        address = ("--address", str(self.daemons["n0"].directory))
        line = [sys.executable, "-m", "refitd_cli.control", "swap", "policy", "--json", "--timeout", "30", *address]

        def swapped() -> bool:
            done = run(line, env={**os.environ, **operator})
            print(done.stdout, done.stderr)
            return done.returncode == 0 and len(json.loads(done.stdout)["members"]) == len(engines)

        eventually(swapped, "all engines have been swapped", WAIT_S)
        for engine in engines:
            assert engine.stdout is not None
            heard = ""
            while heard != f"serves {self.version}\n":
                assert select.select([engine.stdout], [], [], WAIT_S)[0], f"its last word was {heard!r}"
                heard = engine.stdout.readline()
                assert heard, "it has ended"


def protocol(of: Mapping[str, str]) -> int:
    code = "from refitd.protocol.base import PROTOCOL_VERSION; print(PROTOCOL_VERSION)"
    return int(run([sys.executable, "-c", code], env={**os.environ, **of}).stdout)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "back"),
    [(("coordinator", "n0", "n1"), False), (("n1", "n0", "coordinator"), True)],
    ids=["upgraded, the coordinator first", "taken back, the coordinator last"],
)
def test_a_fleet_goes_from_one_commit_to_the_other_process_by_process(before, stack, order, back: bool) -> None:
    if protocol(before) // 1000 != PROTOCOL_VERSION // 1000:
        fleet = stack.enter_context(Fleet(dict.fromkeys(("coordinator", "n0", "n1"), before)))
        with pytest.raises(refitd.ProtocolError, match="speaks protocol"):
            fleet.daemons["n0"].connect()
        return
    old, new = (NEW, before) if back else (before, NEW)
    fleet = stack.enter_context(Fleet(dict.fromkeys(("coordinator", "n0", "n1"), old)))
    trainer = stack.enter_context(ended(fleet.program("trainer", TRAINER, "n0", old)))
    a = stack.enter_context(ended(fleet.program("a", ENGINE, "n0", old)))
    b = stack.enter_context(ended(fleet.program("b", ENGINE, "n1", new)))  # the new client of an old daemon
    fleet.swap(old, trainer, a, b)
    fleet.swap(new, trainer, a, b)
    for number, name in enumerate(order):
        fleet.replace(name, new)
        fleet.swap((old, new)[number % 2], trainer, a, b)
    # the old clients of new daemons, and then the new trainer
    trainer.kill(), trainer.wait()
    trainer = stack.enter_context(ended(fleet.program("trainer", TRAINER, "n0", new)))
    fleet.swap(new, trainer, a, b)
    with fleet.daemons["n1"].connect() as client:
        assert client.verify("policy").outcome == "proven"
