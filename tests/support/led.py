"""A cluster whose coordinators share a journal in etcd: one leads, the others are standbys."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

import torch

import refitd
from refitd.protocol.reports import SwapReport
from refitd.testing import Cluster, Coordinator, Daemon, Engine, eventually
from refitd.testing.daemon import free_port
from refitd.testing.processes import Process
from tests.faults.clock import Clock

CONFIG = "[deadlines]\nplan_s = 20.0\nstage_s = 20.0\ncommit_s = 10.0\nlease_s = 20.0\n"


class Led(Cluster):
    """Some coordinators, with the same key, and a daemon for each node, which lists them all.

    Attributes:
            coordinators: the coordinators' processes. The first one to start is the first leader.
    """

    def __init__(
        self,
        journal: str,
        nodes: Sequence[str] = ("n0", "n1"),
        config: str = "",
        *,
        endpoints: Sequence[str] = (),
        prefixes: Mapping[str, Sequence[str]] | None = None,
        clocks: Mapping[str, Clock] | None = None,
    ) -> None:
        """`endpoints` are the coordinators' endpoints; by default two on loopback.

        `prefixes` are command prefixes, `clocks` the coordinators' clocks, by name.
        """
        self.endpoints = endpoints or [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        super().__init__(nodes, CONFIG + config, endpoint=self.endpoints[0])
        self._url, self._prefixes, self._clocks = journal, prefixes or {}, clocks or {}
        self.coordinators: list[Coordinator] = []

    def environment(self, name: str) -> Mapping[str, str]:
        if name in self._nodes:
            return {"REFITD_COORDINATOR__ENDPOINT": json.dumps(list(self.endpoints))}
        moved = self._clocks[name].environment if name in self._clocks else {}
        return {"REFITD_COORDINATOR__JOURNAL": self._url, "REFITD_ETCD__INSECURE": "true", **moved}

    def prefix(self, name: str) -> Sequence[str]:
        return self._prefixes.get(name, ())

    def start(self) -> Self:
        super().start()
        self.coordinators = [self.coordinator]
        for i, endpoint in enumerate(self.endpoints[1:], 1):
            self.coordinators.append(self.standby(f"standby{i}", endpoint))
        return self

    def standby(self, name: str, endpoint: str) -> Coordinator:
        """Start one more coordinator, and wait until it stands by."""
        options = self._options("coordinator")
        mine = {**self.environment(name), "REFITD_COORDINATOR__ENDPOINT": endpoint}
        options["environment"] = {**options["environment"], **mine}
        options["prefix"] = self.prefix(name)
        found = Coordinator(self._config, name=name, **options)
        Process.start(found)
        eventually(lambda: "event=standby" in found.log() or not found.is_running, f"{name} stands by")
        return found

    def parts(self) -> list[Process]:
        return [*self.coordinators, *self.daemons.values()] if self.coordinators else super().parts()

    def leader(self) -> Coordinator | None:
        """Return the leading coordinator, by the last log line of each; None if none leads."""
        return next((c for c in self.coordinators if c.is_running and self.leads(c)), None)

    @staticmethod
    def leads(coordinator: Coordinator) -> bool:
        log = coordinator.log()
        return log.rfind("event=ready") > max(log.rfind(f"event={end}") for end in ("standby", "lead-lost", "stopped"))


class Fleet:
    """A trainer on the first node, a replica on each; every element of version v is v."""

    def __init__(self, daemons: Mapping[str, Daemon]) -> None:
        nodes = list(daemons.values())
        self.trainer = nodes[0].connect("trainer", reconnect=True)
        self.clients = [node.connect("engine", reconnect=True) for node in nodes]
        self.tensors = {name: torch.full((64, 48), 0.0) for name in ("x", "y")}
        self.source = self.trainer.register_source("policy", self.tensors)
        self.live = [{name: torch.zeros(64, 48) for name in self.tensors} for _ in nodes]
        self.targets = [
            client.register_target("policy", live, replica=f"r{i}")
            for i, (client, live) in enumerate(zip(self.clients, self.live, strict=True))
        ]
        self.version = 0

    def publish(self) -> int:
        self.version += 1
        for tensor in self.tensors.values():
            tensor.fill_(self.version)
        self.source.publish(self.version)
        return self.version

    def swap(self, timeout: float = 60.0) -> SwapReport:
        """Publish and swap; the engines poll on their own threads (`polling`)."""
        return self.trainer.swap("policy", self.publish(), timeout=timeout)

    def insist(self, timeout: float = 60.0) -> float:
        """Publish the next version and swap, retrying until it is live; return the seconds that it took."""
        began = time.monotonic()
        version, published = self.version + 1, False
        while True:
            try:
                if not published:
                    for tensor in self.tensors.values():
                        tensor.fill_(version)
                    self.source.publish(version)
                    self.version, published = version, True
                if self.decided() != version:
                    self.trainer.swap("policy", version, timeout=timeout)
                return time.monotonic() - began
            except refitd.RefitdError as exc:
                if "was published before" in str(exc):  # the coordinator ended before it could answer
                    self.version, published = version, True
                assert time.monotonic() - began < timeout, f"version {version} is not live: {exc}"
                time.sleep(0.05)

    def polling(self) -> Engine:
        return Engine(*self.targets)

    def torn(self) -> list[int]:
        """Return the replicas whose tensors mix versions."""
        return [
            i for i, live in enumerate(self.live) if len({float(x) for t in live.values() for x in t.unique()}) != 1
        ]

    def held(self) -> list[float]:
        return [float(live["x"][0, 0]) for live in self.live]

    def decided(self) -> int | None:
        """Return the live version as the coordinator reports it, if any."""
        with suppress(refitd.RefitdError):
            return next((m.live for m in self.trainer.status().models if m.model == "policy"), None)
        return None

    def close(self) -> None:
        for client in (self.trainer, *self.clients):
            client.close()
