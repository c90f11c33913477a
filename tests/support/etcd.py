"""A real etcd of one or three members, which tests kill, freeze, cut off or fill; and journals in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from refitd.config import EtcdConfig, EtcdPlace
from refitd.coordinator.journals.etcd import EtcdJournal, Lead, boot_clock
from refitd.coordinator.journals.gateway import Gateway
from refitd.testing import eventually
from refitd.testing.daemon import free_port
from refitd.testing.processes import Process

MISSING = "" if shutil.which("etcd") else "no etcd here; Debian has it in etcd-server (and etcd-client)"


class Etcd:
    """Members on this machine, each a process; the block's end kills them.

    Attributes:
        clients: "HOST:PORT" of each member, for clients.
        members: the processes, in the same order.
    """

    def __init__(
        self,
        size: int = 1,
        *,
        addresses: Sequence[str] = (),
        prefixes: Sequence[Sequence[str]] = (),
        options: Sequence[str] = (),
        asks_from: Sequence[str] = (),
        tls: Sequence[str] = (),
    ) -> None:
        """`addresses` and command `prefixes` (network namespaces) are given for each member; by default loopback.

        `asks_from` is the prefix of etcdctl. `tls` are the files ca, cert and key of all ends, including clients.
        """
        self._asks_from = asks_from
        self._tls = tuple(tls)
        scheme = "https" if tls else "http"
        if tls:
            names = ("--trusted-ca-file", "--cert-file", "--key-file")
            options = (*options, "--client-cert-auth", *(x for pair in zip(names, tls, strict=True) for x in pair))
        memory = Path("/dev/shm")  # a slow disk must not delay elections
        self.folder = Path(tempfile.mkdtemp(prefix="rfe", dir=memory if memory.is_dir() else None))
        hosts = addresses or ["127.0.0.1"] * size
        self.clients = [f"{host}:{free_port()}" for host in hosts]
        peers = [f"http://{host}:{free_port()}" for host in hosts]
        cluster = ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))
        self.members = []
        for i, (client, peer) in enumerate(zip(self.clients, peers, strict=True)):
            command = [
                *(prefixes[i] if prefixes else ()),
                *("etcd", "--name", f"m{i}", "--data-dir", str(self.folder / f"m{i}"), "--logger", "zap"),
                *("--listen-client-urls", f"{scheme}://{client}", "--advertise-client-urls", f"{scheme}://{client}"),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", cluster, "--log-level", "warn", "--pre-vote", *options),
            ]
            environment = {"PATH": os.environ["PATH"], "GOMAXPROCS": "2"}
            log = self.folder / f"m{i}.log"
            self.members.append(Process(f"etcd m{i}", command, log, environment=environment))

    def __enter__(self) -> Etcd:
        try:
            for member in self.members:
                member.start()
            eventually(self._answers, "etcd has elected a leader")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            self.ctl("get", "x", "--command-timeout", "1s")
        except AssertionError:
            return False
        return True

    def url(self, prefix: str = "/refitd") -> str:
        """The `coordinator.journal` of a cluster."""
        return f"etcd://{','.join(self.clients)}{prefix}"

    def place(self, prefix: str = "/refitd") -> EtcdPlace:
        members = [client.rpartition(":") for client in self.clients]
        return EtcdPlace(tuple((host, int(port)) for host, _, port in members), prefix, bool(self._tls))

    def leader(self) -> int:
        """The index of the member that leads etcd."""
        found: list[int] = []
        eventually(
            lambda: bool(found.extend(i for i in range(len(self.members)) if self._leads(i)) or found), "a leader"
        )
        return found[0]

    def _leads(self, i: int) -> bool:
        with contextlib.suppress(AssertionError):
            status = self.ctl("endpoint", "status", "--command-timeout", "1s", endpoint=self.clients[i])
            return status.split(", ")[4] == "true"
        return False

    def revision(self) -> int:
        """The revision of the last write."""
        return int(json.loads(self.ctl("endpoint", "status", "-w", "json"))[0]["Status"]["header"]["revision"])

    def watched(self, key: str, until: str, since: int = 1) -> Iterator[str]:
        """Yield etcdctl's lines for the changes of a key since a revision, up to one with this text.

        If the asked member has lost etcd's leader, the last line contains `Canceled`.
        """
        command = [*self._asks_from, "etcdctl", "--endpoints", ",".join(self.clients)]
        command += ["watch", key, "--rev", str(since), "-w", "json"]
        environment = {"PATH": os.environ["PATH"], "ETCDCTL_API": "3"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
            late = threading.Timer(30, running.kill)
            late.start()
            assert running.stdout is not None
            try:
                for line in running.stdout:
                    yield line
                    if until in line or '"Canceled":true' in line:
                        return
                raise AssertionError(f"etcdctl has not shown {until} of {key} within 30 s")
            finally:
                late.cancel()
                running.kill()

    def ctl(self, *arguments: str, endpoint: str = "") -> str:
        """Run etcdctl; return its output."""
        names = ("--cacert", "--cert", "--key")
        tls = [x for pair in zip(names, self._tls, strict=False) for x in pair]
        command = [*self._asks_from, "etcdctl", *tls, "--endpoints", endpoint or ",".join(self.clients), *arguments]
        environment = {"PATH": os.environ["PATH"], "ETCDCTL_API": "3"}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environment)
        assert ran.returncode == 0, f"{' '.join(command)}: {ran.stderr}"
        return ran.stdout


@contextlib.contextmanager
def frozen(*processes: Process) -> Iterator[None]:
    """Freeze processes (SIGSTOP) during the block."""
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)


def lead(place: EtcdPlace, clock: Callable[[], float] = boot_clock, *, insecure: bool = True) -> Lead:
    """Return the lead, once this process has it."""
    found = Lead(Gateway(place, EtcdConfig(insecure=insecure)), place, "ipc:///test", clock)
    eventually(lambda: not found.attempt(), "the lead is free")
    return found


def journal(place: EtcdPlace, cluster: str = "") -> EtcdJournal:
    """Return the journal, once this process leads."""
    return EtcdJournal(lead(place), place, cluster)
