"""Run refitd inside a Ray job: a coordinator on the head node and a daemon on every node, in one call.

    with refitd.adapters.ray.start():   # in the driver, after ray.init()
        ...                             # in its tasks and actors: refitd.connect(refitd.adapters.ray.directory())

Each process belongs to a Ray actor that needs no CPU and ends with the job. If the process or the actor ends earlier,
Ray starts both again. Keys travel as arguments of actors. Logs and the coordinator's journal are in Ray's session
directory.
`python -m refitd.adapters.ray DIRECTORY COMMAND...` is the keeper of one process; only the actors here start it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import refitd

END_S = 10.0  # for a process to end after SIGTERM, then it is killed
START_S = 120.0  # generous, for a busy node
LOG_TAIL = 2000  # characters of a log in an error
PR_SET_PDEATHSIG = 1
HEAD = "node:__internal_head__"  # Ray's resource of the head node


class Service:
    """The coordinator and the daemons of a job. Keep it: Ray ends actors whose handles are gone."""

    def __init__(self, coordinator: Any, daemons: Mapping[str, Any]) -> None:
        """Keep the actors; `daemons` has one by Ray node id. For `start`."""
        self._coordinator, self._daemons = coordinator, daemons

    @property
    def nodes(self) -> tuple[str, ...]:
        """The ids of the Ray nodes with a daemon."""
        return tuple(self._daemons)

    def stop(self) -> None:
        """End all processes: the daemons, then the coordinator. Actors of lost nodes are skipped."""
        import ray

        for actors in (list(self._daemons.values()), [self._coordinator]):
            deadline = time.monotonic() + 2 * END_S
            for call in [actor.stop.remote() for actor in actors]:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(call, timeout=max(0.1, deadline - time.monotonic()))
            for actor in actors:
                ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start(config: str = "", *, timeout: float = START_S) -> Service:
    """Start what is missing of the job's coordinator and daemons; return once all daemons have joined.

    Call it again after nodes were added.

    Args:
        config: TOML, as for `refitd serve --config`. Endpoints, keys, directories, names and addresses are set here.
        timeout: seconds for all of it.

    Raises:
        RefusedError: a process does not start; the error has the end of its log.
        DeadlineExceeded: not all daemons have joined within `timeout`.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    job = ray.get_runtime_context().get_job_id()
    deadline = time.monotonic() + timeout

    def actor(kind: type, name: str, **where: Any) -> Any:
        return ray.remote(kind).options(
            name=f"refitd-{job}-{name}",
            namespace="refitd",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            **where,
        )

    def answers(calls: list[Any]) -> list[Any]:
        try:
            return list(ray.get(calls, timeout=max(0.1, deadline - time.monotonic())))
        except ray.exceptions.GetTimeoutError as exc:
            raise refitd.DeadlineExceeded(
                f"refitd did not start on all {len(calls)} Ray nodes within {timeout:g} s; `ray list actors` names "
                "those that wait, and logs/refitd-*.log in Ray's session directory give the reasons"
            ) from exc
        except ray.exceptions.RayActorError as exc:
            raise refitd.RefusedError(f"refitd did not start: {exc}") from exc

    coordinator = actor(Coordinator, "coordinator", resources={HEAD: 0.001}).remote(config)
    (invitation,) = answers([coordinator.invitation.remote()])
    daemons = {
        node["NodeID"]: actor(
            Daemon, node["NodeID"], scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(config, *invitation)
        for node in ray.nodes()
        if node["Alive"]
    }
    answers([daemon.joined.remote(timeout) for daemon in daemons.values()])
    return Service(coordinator, daemons)


def directory(part: str = "") -> Path:
    """Return the directory of this Ray node's daemon, for `refitd.connect`. `part` is for this module."""
    import ray

    context = ray.get_runtime_context()
    # short, because a socket's path holds at most 107 bytes
    return Path(tempfile.gettempdir()) / f"refitd-{context.get_job_id()}-{context.get_node_id()[:12]}{part}"


# --- the actors -------------------------------------------------------------------------------------------


class Process:
    """One refitd process, owned by an actor: it ends with the actor, and the actor with it."""

    def _start(
        self,
        command: str,
        config: str,
        environment: Mapping[str, str],
        files: Mapping[str, str],
        is_ready: Callable[[], bool],
    ) -> None:
        """Start `refitd COMMAND` with these files in its directory, and wait until it is ready."""
        deadline = time.monotonic() + START_S
        self._directory = directory("" if command == "serve" else "c")
        while self._directory.exists() and time.monotonic() < deadline - START_S + 2 * END_S:
            time.sleep(0.05)  # the keeper of this actor's predecessor removes it last
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for name, text in {**files, "refitd.toml": config}.items():
            (self._directory / name).touch(mode=0o600)
            (self._directory / name).write_text(text)
        log = session() / "logs" / f"{self._directory.name}.log"
        keeper = [sys.executable, "-m", "refitd.adapters.ray", str(self._directory)]
        program = [sys.executable, "-m", "refitd_cli.daemon", command]
        program += ["--config", str(self._directory / "refitd.toml"), "--runtime-dir", str(self._directory)]
        given = {**os.environ, **environment}
        if not given.get("CUDA_VISIBLE_DEVICES", "-"):
            del given["CUDA_VISIBLE_DEVICES"]  # Ray hides all GPUs from an actor that asks for none
        with log.open("a") as errors:
            self._keeper = subprocess.Popen(
                [*keeper, *program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=given,
                start_new_session=True,
            )
        self._ends, self._stops, self._is_ready = threading.Event(), False, False
        threading.Thread(target=self._watch, daemon=True).start()
        while not is_ready():
            if self._ends.wait(0.05) or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"refitd {command} is not ready; the end of {log}:\n{log.read_text()[-LOG_TAIL:]}")
        self._is_ready = True

    def _watch(self) -> None:
        """Wait until the process and its keeper have ended; Ray then starts a new actor, unless `stop` was called."""
        assert self._keeper.stdout is not None
        self._keeper.stdout.read()
        self._ends.set()
        if self._is_ready and not self._stops:
            os._exit(1)

    def stop(self) -> None:
        """End the process and remove its directory."""
        self._stops = True
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._ends.wait(2 * END_S)


class Coordinator(Process):
    """The actor of the coordinator, on the head node."""

    def __init__(self, config: str) -> None:
        """Start it, with the port, the keys and the journal of its predecessor, if it had one."""
        import ray

        context = ray.get_runtime_context()
        home = session() / "refitd" / context.get_job_id()
        if not (home / "port").exists():
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("head", "node"):
                keygen = [sys.executable, "-m", "refitd_cli.control", "keygen", name, "--replace"]
                subprocess.run([*keygen, "--directory", str(home)], check=True, stdout=subprocess.DEVNULL)
            with socket.socket() as free:
                free.bind(("", 0))
                (home / "port").write_text(str(free.getsockname()[1]))
        address = ray.util.get_node_ip_address()
        port = int((home / "port").read_text())
        self._endpoint = f"tcp://{f'[{address}]' if ':' in address else address}:{port}"
        self._files = {name: (home / name).read_text() for name in ("node.key", "head.pub")}
        environment = {
            "REFITD_COORDINATOR__ENDPOINT": self._endpoint,
            "REFITD_COORDINATOR__JOURNAL": str(home / "journal.sqlite"),
            "REFITD_SECURITY__KEY": str(home / "head.key"),
            "REFITD_SECURITY__ALLOWED": str(home / "node.pub"),
        }

        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection((address, port), 1.0):
                return True
            return False

        self._start("coordinator", config, environment, {}, listens)

    def invitation(self) -> tuple[str, dict[str, str]]:
        """Return its endpoint, and the files with a daemon's keys."""
        return self._endpoint, self._files


class Daemon(Process):
    """The actor of one node's daemon."""

    def __init__(self, config: str, endpoint: str, files: Mapping[str, str]) -> None:
        """Start it; `endpoint` and `files` are the coordinator's invitation."""
        import ray

        home, node = directory(), ray.get_runtime_context().get_node_id()
        self._name = f"{socket.gethostname()[:80]}-{node[:12]}"
        environment = {
            "REFITD_NODE__NAME": self._name,
            "REFITD_NODE__ADDRESS": ray.util.get_node_ip_address(),
            "REFITD_COORDINATOR__ENDPOINT": endpoint,
            "REFITD_SECURITY__KEY": str(home / "node.key"),
            "REFITD_SECURITY__SERVER_KEY": str(home / "head.pub"),
        }

        def admits() -> bool:
            with contextlib.suppress(refitd.TransportError), refitd.connect(home, name="ray", timeout=1.0) as client:
                return client.node == self._name
            return False

        self._start("serve", config, environment, files, admits)

    def joined(self, timeout: float) -> str:
        """Return the node's name once the coordinator knows the node."""
        deadline = time.monotonic() + timeout
        with refitd.connect(self._directory, name="ray") as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(refitd.TransportError):
                    if self._name in {node.node for node in client.status().nodes}:
                        return self._name
                time.sleep(0.1)
        raise refitd.DeadlineExceeded(f"node {self._name} has not joined the coordinator within {timeout:g} s")


def session() -> Path:
    """Return the session directory of this Ray node, which holds Ray's logs and is Ray's to remove."""
    import ray

    mine = ray.get_runtime_context().get_node_id()
    (found,) = (node["ObjectStoreSocketName"] for node in ray.nodes() if node["NodeID"] == mine)
    return Path(found).parents[1]


def keep(home: Path, command: list[str]) -> None:
    """Run a command until it ends or stdin does, which ends with the actor; then end the command and remove `home`.

    Ray kills an actor's children together with the actor, so this process leaves its parent first.
    """
    if os.fork():
        os._exit(0)
    libc = ctypes.CDLL(None)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509  one system call
    )
    select.select([sys.stdin, os.pidfd_open(child.pid)], [], [])
    child.terminate()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2:])
