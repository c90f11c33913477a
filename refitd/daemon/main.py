"""The I/O shell around `refitd.daemon.state`: sockets, processes, memory and the clock."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import zmq
from msgspec import structs

from refitd import service
from refitd.buffers import capacity
from refitd.buffers.permits import PAGE_ARENA, PermitPage
from refitd.config import Config
from refitd.copy_services.registry import installed, torch_cuda
from refitd.copy_services.wires import listen_at
from refitd.daemon import actions as act
from refitd.daemon.arena_files import ArenaFiles
from refitd.daemon.clients import ClientInbox
from refitd.daemon.coordinator import CoordinatorProcess, StartFailed, reachable_address
from refitd.daemon.router import handle
from refitd.daemon.state import DaemonState
from refitd.daemon.workers import SYSFS, Kit, Workers, cpus_of, lanes_of, variables, visible_gpus
from refitd.errors import ConfigError, ProtocolError
from refitd.logs import EventLog, Throttle, setup
from refitd.metrics import opened
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import LARGE_FRAME, BadMessage, Decoder, OrderedDecoder
from refitd.protocol.channel import CoordinatorSockets, hear_out, local_peer
from refitd.protocol.keys import ClientKeys
from refitd.security import daemon_keys, node_users
from refitd.states import Busy, Log, Tick

if TYPE_CHECKING:
    from refitd.daemon.metrics import DaemonMonitor

TICK_S = 1.0

# Seconds between ticks while this node seeks the leading coordinator among several.
SEEK_S = 0.25

# A loop turn that takes this much longer than expected is logged; peers do not count as silent during it.
SLOW_TURN_S = 0.5


class DaemonShell:
    """Feeds events to the state and performs its instructions."""

    def __init__(
        self,
        config: Config,
        keys: ClientKeys | None,
        context: zmq.Context[zmq.Socket[bytes]],
        log: EventLog,
        manager: service.ServiceManager,
    ) -> None:
        """Open every socket and start the workers.

        Raises:
            RefusedError: a socket is in use.
            ConfigError: the coordinator's endpoint is invalid.
        """
        self._log = log
        self._manager = manager
        self._uncoordinated = Throttle()
        self._started = time.monotonic()
        self._config = config
        # check these before binding: a refusal must not leave sockets behind
        services, address = _services(config.transport.service), reachable_address(config)
        gpus = visible_gpus()  # each has a worker, which its arenas share
        lanes = lanes_of(gpus, max(config.node.workers, len(gpus)), config.node.cards, SYSFS)
        doors = [listen_at(address, config.node.worker_port_range) for _ in lanes]
        ports = [door.getsockname()[1] for door in doors]
        lanes = [structs.replace(lane, port=port) for lane, port in zip(lanes, ports, strict=True)]
        self._monitor = opened(config.metrics.address, partial(_monitor, config), log)
        self._poller = zmq.Poller()
        self._users = node_users(config)
        self._noise = Throttle(period_s=5.0)
        self._state = DaemonState(
            config.node_name,
            socket.gethostname(),
            os.getpid(),
            len(lanes),
            config.node.max_arena_bytes,
            address,
            services,
            config.node.keep_targets_s,
            config.transport.service if config.uses_keys else "",
            lanes,
            has_kernels=bool(torch_cuda()) and importlib.util.find_spec("triton") is not None,
        )
        self._dealer = CoordinatorSockets(context, config.coordinator_endpoints, keys)
        self._trusted = ""  # the last address whose process was checked, see `_is_trusted`
        self._files = ArenaFiles(config, self._state, self._feed, self._told)
        self._permits = PermitPage(self._files.fds[PAGE_ARENA])
        self._inbox = ClientInbox(
            context,
            config.runtime_dir,
            self._users,
            self._state,
            self._files,
            self._feed,
            self._watch,
            self._told,
            self._noise,
            log,
        )
        self._clients = self._inbox.listener
        for sock in (self._inbox.router.socket, *self._dealer.sockets, *self._dealer.control_sockets):
            self._poller.register(sock, zmq.POLLIN)
        self._cluster: Decoder[cluster.CoordinatorMessage] = Decoder(cluster.CoordinatorMessage)
        self._made_r, self._made_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._watch(self._made_r, select.POLLIN)
        self._plans = OrderedDecoder[tuple[int, cluster.CoordinatorMessage]]("refitd-plans", self._told)
        self._problems: tuple[str, ...] = ()
        kits = [
            Kit(variables(lane, config.node.cards, os.environ, SYSFS), cpus_of(lane, SYSFS), door)
            for lane, door in zip(lanes, doors, strict=True)
        ]
        self._workers = Workers(kits, self._watch)

    def serve(self, stop: list[int], wakeup: int, coordinator: CoordinatorProcess | None, ready_fd: int | None) -> None:
        """Run until `stop` contains a signal number; write to `ready_fd` once clients can work."""
        self._watch(wakeup, select.POLLIN)
        told = False
        self._feed(Tick())
        self._publish()
        awake = time.monotonic()
        next_tick = awake + TICK_S
        while not stop:
            if not told and (coordinator is None or self._state.link.is_up):
                told = True
                if coordinator is not None:
                    coordinator.settle()
                self._tell_ready(ready_fd)
            due = min(next_tick, self._state.next_deadline or next_tick)
            wait_ms = max(0, int((due - time.monotonic()) * 1000) + 1)
            found = self._poller.poll(wait_ms)
            awake = self._excuse(awake, wait_ms / 1000)
            for ready, events in found:
                if ready == wakeup:
                    os.read(wakeup, 4096)  # signal numbers; `on_signal` has handled them
                else:
                    self._outlive(partial(self._serve_ready, ready, events))
            awake = self._excuse(awake, 0.0)  # before the tick, because the tick declares peers silent
            if time.monotonic() >= next_tick:
                self._outlive(self._tick)
                next_tick = time.monotonic() + (SEEK_S if self._dealer.is_seeking else TICK_S)
                self._outlive(lambda: self._look_after(coordinator))
            elif time.monotonic() >= due:
                self._feed(act.Due())

    def _excuse(self, since: float, expected_s: float) -> float:
        """Return the time now; report a turn much longer than expected: it must not count as silence of peers."""
        now = time.monotonic()
        if (lost_s := now - since - expected_s) > SLOW_TURN_S:
            self._feed(Busy(lost_s))
            self._log("slow-turn", seconds=lost_s)
        return now

    def _tick(self) -> None:
        self._manager.alive(time.monotonic())
        self._dealer.retry()
        self._tell_if_alone(time.monotonic())
        if late := self._clients.expire(time.monotonic()):
            self._log("turned-away", clients=late, reason="they connected and said no Hello")
        self._collect()
        self._feed(Tick())
        if not self._dealer.queues:
            self._follow()
        self._publish()

    def _follow(self) -> None:
        if endpoint := self._dealer.follow(self._state.link.is_up):  # one of several coordinators
            self._log("follows", endpoint=endpoint)

    def _publish(self) -> None:
        if self._monitor is not None:
            self._monitor.publish(self._state, {"frames": len(self._inbox), "plans": len(self._plans)})

    def _outlive(self, what: Callable[[], object]) -> None:
        """Call `what` and log its errors: if they ended this process, the arenas would be lost."""
        try:
            what()
        except StartFailed:
            raise
        except Exception:  # an internal error, or a resource limit of this process
            if self._noise.allows("internal", time.monotonic()):
                self._log.failed("internal-error")

    def _look_after(self, coordinator: CoordinatorProcess | None) -> None:
        """Restart workers and the coordinator if they ended, and report problems for status."""
        for worker in self._workers.start_due(time.monotonic()):
            self._feed(act.WorkerStarted(worker))
        problems = self._workers.problems()
        if coordinator is not None:
            if (happened := coordinator.watch(self._state.link.unheard_s)) is not None:
                self._log.write(happened.event, happened.fields)
            if problem := coordinator.problem:
                problems += (problem,)
            if problem and not self._state.link.is_up:
                self._feed(act.CoordinatorUnreachable(problem))
        if problems != self._problems:
            self._problems = problems
            self._feed(act.Problems(problems))

    def _tell_ready(self, ready_fd: int | None) -> None:
        self._log("ready", node=self._config.node_name, dir=str(self._config.runtime_dir), pid=os.getpid())
        self._manager.ready()
        if ready_fd is not None:
            os.write(ready_fd, b"ready\n")
            os.close(ready_fd)

    def _serve_ready(self, ready: object, events: int) -> None:
        if ready is self._inbox.router.socket:
            self._inbox.take()
        elif ready in self._dealer.sockets:
            while (frame := self._dealer.receive()) is not None:
                if self._dealer.peer == self._trusted or self._is_trusted():
                    self._from_coordinator(frame)
                    if not self._dealer.queues:
                        self._follow()
        elif ready in self._dealer.control_sockets:
            self._no_handshake()
        elif ready == self._clients.listener_fd:
            if (refusal := self._clients.accept()) and self._noise.allows(refusal, time.monotonic()):
                self._log("turned-away", reason=refusal)
        elif ready == self._made_r:
            self._collect()
        elif isinstance(ready, int) and ready in self._clients.fds:
            self._inbox.hear(ready)
        elif isinstance(ready, int) and (worker := self._workers.fds.get(ready)) is not None:
            self._from_worker(worker, events)

    def _is_trusted(self) -> bool:
        """Return whether a permitted user's coordinator sent the last message; over TCP the keys prove that."""
        peer = local_peer(self._dealer.peer)
        if peer is None or peer[0] in (0, *self._users.uids):
            self._trusted = self._dealer.peer
            return True
        reason = (
            f"{self._config.coordinator_endpoint}: who listens there (pid {peer[1]}) belongs to uid {peer[0]}; "
            f"expected uid {os.getuid()}, root or node.allowed_uids. Nothing it says is obeyed: end it, or choose a "
            "coordinator.endpoint in a directory that nobody else can write to"
        )
        self._feed(act.CoordinatorUnreachable(reason))
        if self._uncoordinated.allows(reason, time.monotonic()):
            self._log("stranger", reason=reason)
        return False

    def _no_handshake(self) -> None:
        if (reason := self._dealer.failure()) is None:
            return
        self._feed(act.CoordinatorUnreachable(reason))
        if self._uncoordinated.allows(reason, time.monotonic()):
            self._log("handshake-failed", reason=reason)

    def _tell_if_alone(self, now: float) -> None:
        waited_s = now - self._started
        if self._state.link.is_up or waited_s < self._config.deadlines.connect_s:
            return
        if self._uncoordinated.allows("alone", now):
            reason = "no coordinator answers; check that it runs, its endpoint, firewalls and keys"
            self._log("no-coordinator", endpoint=self._config.coordinator_endpoint, reason=reason)

    def _from_worker(self, worker: int, events: int) -> None:
        if events & select.POLLOUT:
            self._workers.flush(worker)
        if not events & ~select.POLLOUT:
            return
        said = self._workers.receive(worker)
        if isinstance(said, str) and self._workers.is_failing(worker):
            raise StartFailed(f"worker {worker} dies as soon as it starts: it {said}; see its output above")
        if isinstance(said, str):
            self._feed(act.WorkerDied(worker, said))
            return
        for message in said:
            self._feed(act.WorkerSaid(worker, message))

    def _from_coordinator(self, frame: bytes) -> None:
        if len(frame) > LARGE_FRAME:
            self._plans.read(lambda: self._cluster.decode(frame))
            return
        try:
            request, message = self._cluster.decode(frame)
        except ProtocolError as exc:
            self._not_read(exc)
            return
        # handle answers to heartbeats before a plan that is still being decoded
        if isinstance(message, cluster.HeartbeatAnswer) or not self._plans.holds((request, message)):
            self._coordinator_said(request, message)

    def _not_read(self, error: Exception) -> None:
        """Log a coordinator's message that cannot be decoded; fail the request that waits for it."""
        if self._noise.allows(f"coordinator {error}", time.monotonic()):
            self._log("bad-message", peer="coordinator", reason=str(error))
        if isinstance(error, BadMessage) and error.request_id:
            self._coordinator_said(error.request_id, local.Failure(code=error.code, message=str(error)))

    def _coordinator_said(self, request: int, message: cluster.CoordinatorMessage) -> None:
        if isinstance(message, cluster.Abort):
            # an abort replaces workers: first read their messages about the swap, which would be lost
            for worker in list(self._workers.fds.values()):
                self._from_worker(worker, select.POLLIN)
        self._feed(act.CoordinatorSaid(request, message))

    def _feed(self, event: act.Event) -> None:
        instructions: list[act.Instruction] = []
        try:
            instructions = handle(self._state, event, time.monotonic())
            for instruction in instructions:
                if not isinstance(instruction, Log):
                    self._perform(instruction)
        except Exception as exc:
            if not isinstance(event, act.ClientSaid | act.CoordinatorSaid):
                raise
            self._not_handled(event, exc)
        finally:
            for instruction in instructions:
                # last, because writing a line takes as long as sending a message
                if isinstance(instruction, Log):
                    event_name, fields = instruction.event, instruction.fields
                    subject = f"refused {fields.get('session')} {fields.get('message')}"
                    # a client can cause any number of equal refusals
                    if event_name != "refused" or self._noise.allows(subject, time.monotonic()):
                        self._log.write(event_name, fields)
        if self._monitor is not None:
            self._monitor.watch(event, instructions, self._state)

    def _not_handled(self, event: act.ClientSaid | act.CoordinatorSaid, error: Exception) -> None:
        """Log an internal error, and tell a client; without a reply the coordinator aborts a swap at its deadline."""
        kind = type(event.message).__name__
        who = event.session if isinstance(event, act.ClientSaid) else "coordinator"
        if self._noise.allows(f"internal {who} {kind}", time.monotonic()):
            self._log.failed("internal-error", peer=who, message=kind)
        if isinstance(event, act.ClientSaid) and event.session in self._clients.identities:
            text = f"the daemon made a mistake over {kind}: {error!r}; its log has the details"
            failure = local.Failure(code="internal", message=text)
            self._inbox.router.send(self._clients.identities[event.session], event.request, failure)

    def _perform(self, instruction: act.Instruction) -> None:
        match instruction:
            case act.ToClient(session, request, message):
                if (identity := self._clients.identities.get(session)) is not None:
                    self._inbox.router.send(identity, request, message)
            case act.ToCoordinator(request, message):
                try:
                    if not self._dealer.send(request, message) and request:
                        self._feed(act.Unsent(request, not self._dealer.queues))
                except ProtocolError as exc:
                    failure = local.Failure(code=exc.code, message=str(exc))
                    self._feed(act.CoordinatorSaid(request, failure))
            case act.ToWorker(worker, message) if worker in self._workers.down:
                # all other messages are sent again once the worker runs again
                if isinstance(message, sidecar.LoadJob | sidecar.JoinEpoch):
                    self._feed(act.NotSent(worker, message, self._workers.why_down(worker)))
            case act.ToWorker(worker, message, arena, block):
                fd = self._files.fds[arena] if arena is not None else None
                try:
                    self._workers.send(worker, message, fd, block)
                except OSError as exc:
                    reason = f"{exc.strerror}; raise `ulimit -Hn` or LimitNOFILE= of the daemon, or free memory"
                    self._feed(act.NotSent(worker, message, reason))
            case act.MakeArenas():
                self._files.make(instruction)
            case act.SetPermit(slot, token, until):
                self._permits.write(slot, token, until)
            case act.WriteArena(arena, data):
                os.pwrite(self._files.fds[arena], data, 0)
            case act.SwitchArenas(arena, other):
                fds = self._files.fds
                fds[arena], fds[other] = fds[other], fds[arena]
            case act.CloseArena(arena):
                os.close(self._files.fds.pop(arena))
            case act.RestartWorker(worker):
                self._workers.restart(worker)
            case act.Follow(event):
                self._feed(event)

    def _told(self) -> None:
        """Wake the loop; callable from any thread."""
        with contextlib.suppress(OSError):  # the pipe is full, so the loop wakes anyway; or the pipe is closed
            os.write(self._made_w, b".")

    def _collect(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._made_r, 4096)
        for said in self._plans.collect():
            if isinstance(said, Exception):
                self._not_read(said)
            else:
                self._coordinator_said(*said)
        self._inbox.collect()
        self._files.collect()

    def _watch(self, fd: int, events: int) -> None:
        if events:
            self._poller.register(fd, events)
        elif fd in self._poller:
            self._poller.unregister(fd)

    def close(self, *, goodbye: bool, is_standalone: bool) -> None:
        """End the workers, close every socket and free the memory.

        Args:
            goodbye: tell the coordinator that this node leaves, which frees its name.
            is_standalone: the coordinator ends with this daemon; do not wait until it has read the goodbye.
        """
        if self._monitor is not None:
            self._monitor.close()
        self._workers.close()
        if goodbye:
            self._dealer.send(0, local.Goodbye())
        self._clients.close()
        self._inbox.router.close()
        if goodbye and not is_standalone:
            hear_out(self._dealer.sockets, cluster.LAST_WORDS_S)
        self._dealer.close(sending_s=cluster.LAST_WORDS_S if goodbye else 0.0)
        self._files.close()


def _monitor(config: Config, address: tuple[str, int]) -> DaemonMonitor:
    from refitd.daemon.metrics import DaemonMonitor

    return DaemonMonitor(config, address)


def _services(needed: str) -> tuple[str, ...]:
    """Return the copy services that can run here.

    Raises:
        ConfigError: `needed` cannot cross nodes, or cannot run here; names what is missing, and the services that can.
    """
    registry = installed()
    able = tuple(backend.name for backend in registry if not backend.missing())
    between = ", ".join(backend.name for backend in registry if backend.join is not None and backend.name in able)
    here = f"services between nodes that can run here: {between or 'none'}; set transport.service to one of them"
    try:
        backend = registry.find(needed)
    except ConfigError as exc:
        raise ConfigError(f"transport.service {needed!r}: {exc}; {here}") from None
    if backend.join is None:
        raise ConfigError(f"transport.service {needed!r} does not cross nodes; {here}")
    return able


def run(config: Config, coordinator: CoordinatorProcess | None, ready_fd: int | None) -> int:
    """Run the daemon until SIGTERM or SIGINT.

    Args:
        config: the configuration.
        coordinator: the coordinator child of a standalone daemon, or None.
        ready_fd: receives "ready" once clients can connect and, if standalone, the coordinator answers.

    Raises:
        RefitdError: a socket is in use, the directory is unsafe, or a worker or the coordinator keeps ending.
    """
    setup(config.log.level, config.log.format)
    log = EventLog("daemon")
    manager = service.ServiceManager()
    was, now = capacity.raise_descriptor_limit()
    if was != now:
        log("descriptor-limit-raised", was=was, now=now)
    keys = daemon_keys(config)
    stop: list[int] = []
    wakeup_r, wakeup_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def on_signal(number: int, _: FrameType | None) -> None:
        if number != signal.SIGHUP:
            stop.append(number)
        elif coordinator is not None:
            coordinator.reload()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    if service.may_reload():
        signal.signal(signal.SIGHUP, on_signal)
    signal.set_wakeup_fd(wakeup_w, warn_on_full_buffer=False)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        shell = DaemonShell(config, keys, context, log, manager)
        try:
            shell.serve(stop, wakeup_r, coordinator, ready_fd)
        finally:
            manager.stopping()
            shell.close(goodbye=bool(stop), is_standalone=coordinator is not None)
    finally:
        context.destroy(linger=0)
    log("stopped", signal=stop[0])
    return 0
