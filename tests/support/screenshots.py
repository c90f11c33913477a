"""Pictures of `refitctl dashboard` in a browser, of a fleet whose parts fail one after the other."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

import refitd
from refitd.testing import Cluster, Daemon, Engine, eventually
from tests.support.browser import chromium
from tests.support.controls import controlled
from tests.support.programs import ended

SIZES = {420: 3200, 1280: 1900, 1920: 1700}  # width in px -> height
NODES = ("n0", "n1", "n2")
SWAPS = 30


def shoot(place: Path, name: str, url: str) -> None:
    """Save the page in each size."""
    for width, height in SIZES.items():
        path = place / f"{name}-{width}.png"
        chromium(url, f"--screenshot={path}", f"--window-size={width},{height}")
        print(path, flush=True)


def dashboard(stack: ExitStack, directory: Path) -> str:
    """Start `refitctl dashboard` of a daemon's directory; return its address."""
    command = [sys.executable, "-m", "refitd_cli.control", "dashboard", "--port", "0", "--interval", "0.2"]
    process = subprocess.Popen([*command, "--address", str(directory)], stdout=subprocess.PIPE, text=True)
    stack.enter_context(ended(process))
    assert process.stdout is not None
    return process.stdout.readline().split()[0]


class Fleet:
    """A trainer and one engine on each node; the engine on n1 has a controller that refuses when it is told to."""

    def __init__(self, stack: ExitStack, daemons: dict[str, Daemon]) -> None:
        self.refuses = False
        clients = {name: stack.enter_context(daemon.connect(f"engine-{name}")) for name, daemon in daemons.items()}
        self.trainer = stack.enter_context(daemons["n0"].connect("trainer"))
        self.tensors = {f"layers.{n}.weight": torch.zeros(1 << 18) for n in range(8)}
        self.source = self.trainer.register_source("policy", self.tensors)
        engines = {name: {key: torch.zeros_like(one) for key, one in self.tensors.items()} for name in clients}
        controlled(clients["n1"], "policy", engines.pop("n1"), replica="engine-n1", pause=self._pause)
        self.polled = [
            clients[name].register_target("policy", live, replica=f"engine-{name}") for name, live in engines.items()
        ]
        draft = {"head.weight": torch.zeros(1 << 10)}
        self.draft = self.trainer.register_source("draft", draft)
        self.polled.append(clients["n0"].register_target("draft", {"head.weight": torch.zeros(1 << 10)}, replica="d"))

    def _pause(self, version: int) -> None:
        if self.refuses:
            raise RuntimeError("the engine cannot stop: a request runs")

    def swap(self, version: int, source: refitd.Source | None = None) -> None:
        """Publish a version and swap to it."""
        source = source or self.source
        for number, tensor in enumerate(self.tensors.values()):
            tensor[: version << (number % 4 + 10)] = version
        source.publish(version)
        with Engine(*self.polled):
            self.trainer.swap("draft" if source is self.draft else "policy", version, timeout=60)


def main(place: Path) -> None:
    """Save pictures of an outage at the start, a healthy fleet, one with failures, and one with a lost node."""
    place.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        cluster = Cluster(NODES, "[models.policy]\ncatch_up = false\n")
        stack.callback(cluster.remove)  # without looking at how its processes end: one is killed
        cluster.start()
        shoot(place, "outage", dashboard(stack, cluster.folder / "no-daemon"))
        fleet = Fleet(stack, cluster.daemons)
        url = dashboard(stack, cluster.daemons["n0"].directory)
        for version in range(1, SWAPS):
            fleet.swap(version)
        fleet.swap(1, fleet.draft)
        shoot(place, "healthy", url)
        fleet.refuses = True
        for version in (SWAPS, SWAPS + 1):
            try:
                fleet.swap(version)
            except refitd.SwapFailed as exc:
                print(exc)
        shoot(place, "failures", url)
        cluster.daemons["n2"].kill()
        eventually(lambda: bool(fleet.trainer.status().lost), "n2 is lost", timeout=60)
        shoot(place, "lost", url)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
