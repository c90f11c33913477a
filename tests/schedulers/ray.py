"""scripts/try-ray: refitd.adapters.ray under a real Ray of three raylets, whose parts end in every way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

import refitd
from refitd.adapters import ray as refitd_ray
from refitd.testing import eventually, processes
from tests.schedulers.findings import Findings

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
CONFIG = '[node]\nworkers = 1\n[log]\nlevel = "debug"\n'
INTRO = (
    "Ray {ray} with three raylets on loopback, and no stand-in: a trainer on the head node and an engine on each other "
    "node are Ray actors that find their daemons with `refitd.adapters.ray.directory()`."
)
JOB = """
import sys, time, ray
from refitd.adapters import ray as refitd_ray
ray.init(sys.argv[1], log_to_driver=False)
with refitd_ray.start():
    print("started", flush=True)
    time.sleep(600)
"""


class Trainer:
    """An actor that publishes versions and swaps them."""

    def __init__(self) -> None:
        self._weights = {"w": torch.zeros(1 << 10, 256)}
        self._client = refitd.connect(refitd_ray.directory(), name="trainer")
        self._source = self._client.register_source("policy", self._weights)

    def swap(self, version: int) -> str:
        """Bring a version into the two engines, once both are registered; return the outcome."""

        def engines() -> int:
            with contextlib.suppress(refitd.TransportError):
                status = self._client.status()
                return sum(len(model.targets) for model in status.models)
            return 0

        self._weights["w"].fill_(version)
        self._source.publish(version)
        aborted: list[str] = []
        while True:
            eventually(lambda: engines() == 2, "both engines are registered", WAIT_S)
            try:
                report = self._client.swap("policy", version, wait=WAIT_S, timeout=WAIT_S)
                named = f"; aborted before: {aborted[0]}" if aborted else ""
                return f"{report.outcome} in {len(report.members)} engines{named}"
            except refitd.SwapFailed as error:  # a part that was killed is still named in it
                aborted.append(error.report.reason)
                if len(aborted) == 3 or error.report.outcome != "aborted":
                    raise

    def known(self) -> list[int]:
        """Return the versions of the last swaps."""
        return [swap.version or 0 for swap in self._client.history("policy").swaps]


class Engine:
    """An actor that serves versions."""

    def __init__(self, name: str) -> None:
        self._weights = {"w": torch.zeros(1 << 10, 256)}
        client = refitd.connect(refitd_ray.directory(), name=name)
        self._target = client.register_target("policy", self._weights, replica=name)

    def serves(self, version: int) -> bool:
        """Serve until the version is live; return whether its values are right."""
        deadline = time.monotonic() + 2 * WAIT_S
        while self._target.version != version and time.monotonic() < deadline:
            self._target.poll()
            time.sleep(0.01)
        return bool((self._weights["w"] == version).all())


class Trial:
    """A Ray cluster of three nodes, and the findings on its jobs."""

    def __init__(self, address: str, mark: str) -> None:
        self.found, self._address, self._mark = Findings(), address, mark
        self._version = 0

    def processes(self, *words: str) -> dict[int, str]:
        """Return {pid: command} of all processes of refitd whose command has these words."""
        running = processes.processes_of(self._mark)
        return {
            pid: said for pid, said in running.items() if "-m refitd" in said and all(word in said for word in words)
        }

    def saw_nothing_left(self, claim: str) -> None:
        """Check that processes and folders disappear within 20 s."""
        began = time.monotonic()

        def left() -> list[str]:
            folders = [
                f for node in ray.nodes() for f in Path(tempfile.gettempdir()).glob(f"refitd-*{node['NodeID'][:12]}*")
            ]
            return [*self.processes().values(), *map(str, folders)]

        with contextlib.suppress(AssertionError):
            eventually(lambda: not left(), "all is gone", 20.0)
        seen = "; ".join(left()) or f"no process, no folder after {time.monotonic() - began:.1f} s"
        self.found.saw(claim, seen, not left())

    def swaps(self, claim: str, trainer: Any, engines: list[Any]) -> None:
        """Check that the next version becomes live in both engines."""
        self._version += 1
        began = time.monotonic()
        served = [engine.serves.remote(self._version) for engine in engines]
        outcome = ray.get(trainer.swap.remote(self._version), timeout=3 * WAIT_S)
        # a swap may leave out an engine whose daemon is being replaced; the engine then catches up
        holds = outcome.startswith("committed") and all(ray.get(served, timeout=2 * WAIT_S))
        self.found.saw(claim, f"{time.monotonic() - began:.1f} s: {outcome}", holds)

    def service(self) -> None:
        """Start the service, and end its parts one by one."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        began = time.monotonic()
        with refitd_ray.start(CONFIG) as service:
            seen = f"{len(service.nodes)} daemons after {time.monotonic() - began:.1f} s"
            self.found.saw(
                "one call starts a daemon on each node",
                seen,
                len(self.processes("refitd.adapters.ray", " serve ")) == 3,
            )
            head = ray.get_runtime_context().get_node_id()
            trainer = ray.remote(Trainer).options(num_cpus=0, scheduling_strategy=On(head, soft=False)).remote()
            engines = [
                ray.remote(Engine)
                .options(num_cpus=0, scheduling_strategy=On(node, soft=False))
                .remote(f"engine-{node[:6]}")
                for node in service.nodes
                if node != head
            ]
            self.swaps("a swap from the head node into both other nodes", trainer, engines)
            near, far = [node[:12] for node in service.nodes if node != head]
            for node, part in ((near, "-m refitd_cli.daemon serve"), (far, "-m refitd.adapters.ray")):
                pid = max(
                    self.processes(part, node)
                )  # a keeper's command line contains its daemon's, which is the younger process
                os.kill(pid, signal.SIGKILL)
                said = f"the {'daemon' if node == near else 'keeper of a daemon'} is killed"
                self.swaps(f"{said}: Ray starts both again, and a swap commits", trainer, engines)
            ray.kill(service._coordinator, no_restart=False)
            self.swaps("the coordinator's actor is killed: its successor continues", trainer, engines)
            known = ray.get(trainer.known.remote())
            self.found.saw("the successor knows all versions", f"{known}", {1, 2, 3, 4} <= set(known))
            for actor in (trainer, *engines):
                ray.kill(actor)
        self.saw_nothing_left("`stop` leaves nothing")

    def ends(self) -> None:
        """Start jobs that fail, and jobs that are killed."""
        try:
            with refitd_ray.start("wrokers = 4\n"):
                said = "it has started"
        except refitd.RefusedError as error:
            said = str(error)
        self.found.saw("a wrong configuration is an error that names the key", said[-200:], "wrokers" in said)
        self.saw_nothing_left("it leaves nothing")
        for signum in (signal.SIGKILL, signal.SIGINT):
            with subprocess.Popen([sys.executable, "-c", JOB, self._address], stdout=subprocess.PIPE) as job:
                said = job.stdout.readline().decode() if job.stdout else ""
                job.send_signal(signum)
                job.wait(WAIT_S)
            self.saw_nothing_left(f"{signum.name} ends a job that {said.strip() or 'has not started'}: nothing is left")


@contextlib.contextmanager
def cluster() -> Iterator[tuple[str, str]]:
    """Start three raylets and connect to them; yield their address, and the mark of all processes that they start."""
    mark = f"TESTED_IN={uuid.uuid4().hex}/"
    os.environ["TESTED_IN"] = mark.partition("=")[2]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    few = {"num_cpus": 4, "object_store_memory": 80 << 20}
    found = Cluster(initialize_head=True, head_node_args={**few, "include_dashboard": False})
    try:
        for _ in range(2):
            found.add_node(**few)
        ray.init(address=found.address, log_to_driver=False)
        yield found.address, mark
    finally:
        ray.shutdown()
        found.shutdown()
        del os.environ["TESTED_IN"]


def tried() -> Findings:
    """Run everything; return the findings."""
    with cluster() as (address, mark):
        trial = Trial(address, mark)
        trial.service()
        trial.ends()
    return trial.found


if __name__ == "__main__":
    sys.exit(tried().keep("ray", "refitd under a real Ray", INTRO.format(ray=ray.__version__), "--json" in sys.argv))
